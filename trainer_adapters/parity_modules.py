"""What stands in for the forward of each kind of module of a stock model, and which modules those are.

The classes here hold the module they stand in for, so that a copied model gets copies that compute with its own weights.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import trainer
from ..kernels.trainer_ops import TrainerOps
from .errors import ParityError

ATTENTION = "rollsync"
"""our name among transformers' attention functions"""
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
FAMILIES = {
    "LlamaForCausalLM": ("llama", "Llama", "LlamaModel"),
    "MistralForCausalLM": ("mistral", "Mistral", "MistralModel"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2", "Qwen2Model"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3", "Qwen3Model"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma2", "Gemma2Model"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3", "Gemma3TextModel"),
}
"""architecture: folder in transformers, prefix of its class names, class of its backbone"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the bits depend on, and the ops that compute them: two objects of one build are the same."""

    ops: TrainerOps = field(compare=False)
    build: str
    k_shards: int
    head_dtype: str | None


def soft_cap(config: Any) -> float:
    """That of the logits; 0 is none."""
    return float(getattr(config, "final_logit_softcapping", None) or 0.0)


class Patch(NamedTuple):
    """One attribute of one module, as it is under parity."""

    module: nn.Module
    attribute: str
    value: Any


def stock_class(module: nn.Module) -> type:
    """A module's class; that beneath FSDP2's where fully_shard has put its own on top."""
    cls = type(module)
    mixed = [base.__name__ for base in cls.__bases__]
    return cls.__bases__[1] if mixed[:1] == ["FSDPModule"] and len(mixed) == 2 else cls


def device_of(ops: TrainerOps) -> str:
    """Type of the device that the ops compute on."""
    return "cuda" if ops.build == "triton" else "cpu"


def compute_dtype(name: str, weight: Tensor, device: str) -> torch.dtype:
    """The dtype a module computes in: autocast's where it is on, else that of its weight."""
    if type(weight) not in (Tensor, nn.Parameter):
        raise ParityError(f"{name}.weight is a {type(weight).__name__}: run the model's own forward, in which its weights are whole")
    if weight.device.type != device:
        raise ParityError(f"{name} lies on {weight.device}, and parity was set up for {device}: move the model first")
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    if dtype not in (torch.bfloat16, torch.float32):
        raise ParityError(f"{name} would compute in {dtype}: the engine's dtypes are bfloat16 and float32")
    return dtype


def meet(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in the dtype its module computes in."""
    if x.dtype == dtype:
        return x
    if torch.is_autocast_enabled(x.device.type):
        return x.to(dtype)
    raise ParityError(f"{name} has {dtype} weights and got {x.dtype}: the engine has one dtype throughout")


class Linear:
    """nn.Linear, in `shards` partial sums where it is row-parallel."""

    def __init__(self, name: str, module: nn.Module, ops: TrainerOps, shards: int) -> None:
        self.name, self.module, self.ops, self.shards = name, module, ops, shards

    def __call__(self, input: Tensor) -> Tensor:
        module: Any = self.module
        dtype = compute_dtype(self.name, module.weight, device_of(self.ops))
        bias = None if module.bias is None else module.bias.to(dtype)
        return trainer.linear(self.ops, meet(self.name, input, dtype), module.weight.to(dtype), bias, shards=self.shards)


TakeLogits = Callable[[Tensor, Callable[[Tensor], Tensor]], None]
"""takes hidden states [..., D], and what makes logits [..., V] of any of them"""


class Head:
    """The language model's head; with its soft cap, which the model's forward then leaves out."""

    def __init__(self, name: str, module: nn.Module, ops: TrainerOps, wide: bool, cap: float) -> None:
        self.name, self.module, self.ops, self.wide, self.cap = name, module, ops, wide, cap
        self.in_model = False
        """whether the call comes from its model's forward, from which the cap has been taken"""
        self.take: TakeLogits | None = None
        """gets what the logits would be made of; the model then has none"""

    def __call__(self, input: Tensor) -> Tensor:
        module: Any = self.module
        if self.cap and not self.in_model:
            raise ParityError(f"{self.name} was called outside its model's forward, which would cap the logits a second time")
        hidden, weight = self.operands(input)
        bias = None if module.bias is None else module.bias.to(weight.dtype)

        def logits_of(hidden: Tensor) -> Tensor:
            logits = trainer.linear(self.ops, hidden, weight, bias, wide=self.wide)
            return trainer.softcap(self.ops, logits, self.cap) if self.cap else logits

        if self.take is None:
            return logits_of(hidden)
        self.take(hidden, logits_of)
        return hidden.new_empty(*hidden.shape[:-1], 0)

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [..., D] and the head's weight [V, D] in the dtype it computes in."""
        module: Any = self.module
        dtype = compute_dtype(self.name, module.weight, device_of(self.ops))
        return meet(self.name, hidden, dtype), module.weight.to(dtype)


class Norm:
    """RMSNorm over the last dimension."""

    def __init__(self, name: str, module: nn.Module, ops: TrainerOps, one_plus: bool) -> None:
        self.name, self.module, self.ops, self.one_plus = name, module, ops, one_plus
        self.eps_name = "eps" if one_plus else "variance_epsilon"

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight: Any = self.module.weight
        dtype = compute_dtype(self.name, weight, device_of(self.ops))
        x = meet(self.name, hidden_states, dtype)
        return trainer.rmsnorm(self.ops, x, weight.to(dtype), float(getattr(self.module, self.eps_name)), self.one_plus)


class Activation:
    """SiLU, or GELU in its tanh form."""

    def __init__(self, name: str, module: nn.Module, ops: TrainerOps, kind: str) -> None:
        self.name, self.module, self.ops, self.kind = name, module, ops, kind

    def __call__(self, input: Tensor) -> Tensor:
        return trainer.activation(self.ops, input, self.kind)


class Embedding:
    """Rows of the embedding in the dtype the model computes in, times the scale where there is one."""

    def __init__(self, name: str, module: nn.Module, ops: TrainerOps, scaled: bool) -> None:
        self.name, self.module, self.ops, self.scaled = name, module, ops, scaled

    def __call__(self, input_ids: Tensor) -> Tensor:
        module: Any = self.module
        dtype = compute_dtype(self.name, module.weight, device_of(self.ops))
        rows = F.embedding(input_ids, module.weight, module.padding_idx).to(dtype)
        return rows * module.embed_scale.to(dtype) if self.scaled else rows


def patches(model: nn.Module, settings: Settings) -> Iterator[Patch]:
    """One per module of `model` that computes.

    Raises:
        ParityError: an architecture, a module or a setting that the engine's bits are not known for.
    """
    family = FAMILIES.get(stock_class(model).__name__)
    if family is None or stock_class(model).__module__ != f"transformers.models.{family[0]}.modeling_{family[0]}":
        known = ", ".join(FAMILIES)
        raise ParityError(f"no parity for {type(model).__module__}.{type(model).__name__}; transformers' own classes are known: {known}")
    for name, module in model.named_modules():
        _refuse_changed(name, module)
        yield from _patch(name, module, model, family, settings)


def _refuse_changed(name: str, module: nn.Module) -> None:
    what = f"{name or 'the model'} ({type(module).__name__})"
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise ParityError(f"{what} is compiled: torch.compile changes bits; run it eagerly on the trainer's side")
    if name and "forward" in vars(module):
        raise ParityError(f"{what} has a forward of its own, put there by {getattr(vars(module)['forward'], '__module__', 'somebody')}")
    source = inspect.unwrap(type(module).forward).__module__
    if not source.startswith(("transformers.", "torch.")):
        raise ParityError(f"{what} runs a forward of {source}, not transformers' own")


def _patch(name: str, module: nn.Module, model: Any, family: tuple[str, str, str], settings: Settings) -> Iterator[Patch]:
    folder, prefix, backbone = family
    cls, last, ops = stock_class(module), name.rpartition(".")[2], settings.ops
    own = cls.__module__ == f"transformers.models.{folder}.modeling_{folder}"
    one_plus = prefix.startswith("Gemma")
    if own and cls.__name__ in (f"{prefix}ForCausalLM", backbone, f"{prefix}DecoderLayer", f"{prefix}MLP"):
        return
    if cls is nn.ModuleList or cls.__name__ == "CheckpointWrapper":
        return
    if own and cls.__name__ == f"{prefix}Attention":
        yield _attention(name, module)
    elif own and cls.__name__ == f"{prefix}RMSNorm":
        yield Patch(module, "forward", Norm(name, module, ops, one_plus))
    elif own and cls.__name__ == f"{prefix}RotaryEmbedding":
        check_rotary(name, module)
    elif cls is nn.Linear and last in COLUMN:
        yield Patch(module, "forward", Linear(name, module, ops, 1))
    elif cls is nn.Linear and last in ROW:
        yield Patch(module, "forward", Linear(name, module, ops, settings.k_shards))
    elif cls is nn.Linear and module is model.get_output_embeddings():
        yield Patch(module, "forward", Head(name, module, ops, settings.head_dtype is not None, soft_cap(model.config)))
    elif isinstance(module, nn.Embedding) and module is model.get_input_embeddings():
        yield Patch(module, "forward", _embedding(name, module, ops, own, cls, prefix))
    elif cls.__name__ in ("SiLUActivation", "SiLU") and not one_plus:
        yield Patch(module, "forward", Activation(name, module, ops, "silu"))
    elif cls.__name__ == "GELUTanh" and one_plus:
        yield Patch(module, "forward", Activation(name, module, ops, "gelu_tanh"))
    else:
        raise ParityError(f"{name} is a {cls.__module__}.{cls.__qualname__}, which is no part of a stock {prefix}ForCausalLM")


def _attention(name: str, module: Any) -> Patch:
    if not getattr(module, "is_causal", True):
        raise ParityError(f"{name} attends to later tokens (is_causal is false), which the engine does not")
    config = copy.copy(module.config)
    config._attn_implementation_internal = ATTENTION
    return Patch(module, "config", config)


def _embedding(name: str, module: Any, ops: TrainerOps, own: bool, cls: type, prefix: str) -> Embedding:
    scaled = own and cls.__name__ == f"{prefix}TextScaledWordEmbedding"
    if not scaled and cls is not nn.Embedding:
        raise ParityError(f"{name} is a {cls.__module__}.{cls.__qualname__}, which is no part of a stock {prefix}ForCausalLM")
    if module.max_norm is not None:
        raise ParityError(f"{name}.max_norm is {module.max_norm}: it changes rows as they are read")
    return Embedding(name, module, ops, scaled)


def check_rotary(name: str, module: nn.Module) -> None:
    """Raises ParityError where the angles were rounded."""
    for buffer_name, buffer in module.named_buffers():
        if buffer_name.endswith("inv_freq") and buffer.dtype != torch.float32:
            raise ParityError(
                f"{name}.{buffer_name} is {buffer.dtype}: a cast of the whole model rounded its angles; load the model with "
                f"dtype={buffer.dtype}, which leaves them in float32"
            )
