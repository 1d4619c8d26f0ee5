"""Makes a stock transformers model compute the engine's bits: forward passes are ours, gradients are ordinary.

Nothing of torch or transformers is replaced: the instances of one model's modules get forwards of their own, for as long as a context
lasts or for good. Residual additions, RoPE and the rotary tables stay the model's own code, whose steps the specification repeats.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import trainer
from ..kernels.fingerprint import failed_probes
from ..kernels.segments import Segments
from ..kernels.trainer_ops import TrainerOps, trainer_ops
from .errors import ParityError
from .parity_check import ParityReport, check_under
from .parity_inputs import by_name, read_sequences, refuse_past, refuse_stretched
from .parity_modules import ATTENTION, Head, Patch, Settings, TakeLogits, patches, stock_class

__all__ = ["Parity", "ParityError", "ParityReport", "check", "make_parity", "rollsync_parity"]

_MARK = "_rollsync_parity"
"""attribute of a model that is under parity, and the keyword by which a batch's sequences reach its attention"""
_ABSENT = object()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of an attention function: query [B, N, T, H], key and value [B, K, T, H]; returns [B, T, N, H]."""
    batch: _Batch | None = kwargs.get(_MARK)
    if batch is None:
        raise ParityError(f"{type(module).__name__} was called without its backbone, which knows the sequences of the batch")
    if dropout:
        raise ParityError(f"{type(module).__name__}: attention_dropout is {dropout} in training mode; parity needs 0")
    if key.shape[2] != query.shape[2]:
        raise ParityError(f"{key.shape[2]} keys for {query.shape[2]} queries: parity computes whole sequences, without a cache")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return trainer.attention(batch.ops, q, k, v, batch.segments, scaling, sliding_window or 0, softcap or 0.0), None


class _Batch:
    """Goes with a forward pass from the backbone to every attention, through checkpointing too."""

    def __init__(self, ops: TrainerOps, segments: Segments) -> None:
        self.ops, self.segments = ops, segments


class _Reenter:
    """A checkpointing function whose recomputation runs under parity, whenever the backward pass comes."""

    def __init__(self, parity: Parity, checkpoint: Callable[..., Any]) -> None:
        self.parity, self.checkpoint = parity, checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def run(*inputs: Any, **options: Any) -> Any:
            with self.parity.active():
                return function(*inputs, **options)

        return self.checkpoint(run, *args, **kwargs)


class Parity:
    """The engine's numerics on one model. `install` and `remove` are counted, so that one may lie inside another."""

    CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
    """where transformers' layers and torch's CheckpointWrapper keep the function they checkpoint by"""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.patches = list(patches(model, settings))
        prefix: Any = model.base_model_prefix
        self.backbone: nn.Module = model.get_submodule(prefix)
        self.heads = [p.value for p in self.patches if isinstance(p.value, Head)]
        self._depth = 0
        self._saved: list[Any] = []
        self._hooks: list[Any] = []
        self._capped_config: Any = None

    @contextmanager
    def active(self) -> Iterator[None]:
        self.install()
        try:
            yield
        finally:
            self.remove()

    @contextmanager
    def taking_logits(self, take: TakeLogits) -> Iterator[None]:
        """While it lasts, forward passes give `take` the hidden states and a maker of logits, and return none. For losses that need
        no [T, V] of logits at once."""
        for head in self.heads:
            head.take = take
        try:
            yield
        finally:
            for head in self.heads:
                head.take = None

    def install(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        _register_attention()
        todo = [*self.patches, Patch(self.model, _MARK, self)]
        self._saved = [vars(p.module).get(p.attribute, _ABSENT) for p in todo]
        for patch in todo:
            vars(patch.module)[patch.attribute] = patch.value
        self._hooks = [self.backbone.register_forward_pre_hook(self._before_backbone, with_kwargs=True)]
        if any(head.cap for head in self.heads):
            self._hooks.append(self.model.register_forward_pre_hook(self._before_model))
            self._hooks.append(self.model.register_forward_hook(self._after_model, always_call=True))

    def remove(self) -> None:
        """Undo one `install`; after the last the model is as it was.

        Raises:
            ParityError: there is none left to undo.
        """
        if not self._depth:
            raise ParityError("the model is not under parity: there is nothing to undo")
        self._depth -= 1
        if self._depth:
            return
        for hook in self._hooks:
            hook.remove()
        for patch, saved in zip([*self.patches, Patch(self.model, _MARK, self)], self._saved, strict=True):
            if saved is _ABSENT:
                del vars(patch.module)[patch.attribute]
            else:
                vars(patch.module)[patch.attribute] = saved
        for module, name, function in self._checkpoints():
            if isinstance(function, _Reenter):
                vars(module)[name] = function.checkpoint

    def _checkpoints(self) -> Iterator[tuple[nn.Module, str, Any]]:
        for module in self.model.modules():
            for name in self.CHECKPOINTS:
                if name in vars(module):
                    yield module, name, vars(module)[name]

    def _before_backbone(self, backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        if _in_compiled_code():
            raise ParityError("the model runs in compiled code: torch.compile changes bits; call it eagerly")
        inputs = by_name(backbone.forward, args, kwargs)
        if inputs.get("output_attentions", getattr(backbone.config, "output_attentions", False)):
            raise ParityError("output_attentions: the kernels keep no attention weights")
        refuse_past(inputs)
        segments, positions = read_sequences(inputs)
        refuse_stretched(backbone.config, segments)
        for module, name, function in self._checkpoints():
            if not isinstance(function, _Reenter):
                vars(module)[name] = _Reenter(self, function)
        inputs |= {"position_ids": positions, "attention_mask": _no_mask(backbone), _MARK: _Batch(self.settings.ops, segments)}
        return (), inputs

    def _before_model(self, model: Any, args: Any) -> None:
        # Its forward reads the cap from its config. A copy serves for the time of the call, so that what is saved meanwhile is whole.
        self._set_in_model(True)
        self._capped_config = model.config
        config = copy.copy(model.config)
        config.final_logit_softcapping = None
        vars(model)["config"] = config

    def _after_model(self, model: Any, args: Any, output: Any) -> None:
        self._set_in_model(False)
        vars(model)["config"] = self._capped_config

    def _set_in_model(self, value: bool) -> None:
        for head in self.heads:
            head.in_model = value


def _in_compiled_code() -> bool:
    # Tracing swallows what is raised while it traces, and runs the frame as it is; there its callback gives it away.
    if torch.compiler.is_compiling():
        return True
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return callback is not None and callback() is not None


_MASKS_BY_LAYER = ("Qwen2Model", "Qwen3Model", "Gemma2Model", "Gemma3TextModel")
"""backbones that take finished masks as a dict, by kind of layer"""


def _no_mask(backbone: Any) -> Any:
    """What makes a backbone build no mask of its own: it takes a finished one as it is, and our attention looks at none."""
    if stock_class(backbone).__name__ in _MASKS_BY_LAYER:
        return dict.fromkeys(backbone.config.layer_types)
    return torch.empty(0, 0, 0, 0)


def _register_attention() -> None:
    from transformers import AttentionInterface

    interface: Any = AttentionInterface
    if ATTENTION not in interface():
        interface.register(ATTENTION, _attention)


def unwrapped(model: Any) -> nn.Module:
    """The model inside DistributedDataParallel.

    Raises:
        ParityError: it is wrapped by something else.
    """
    from torch.nn.parallel import DistributedDataParallel

    while isinstance(model, DistributedDataParallel):
        model = model.module
    if hasattr(model, "_orig_mod"):
        raise ParityError("the model is compiled (OptimizedModule): torch.compile changes bits; pass the model it was made from")
    if not isinstance(model, nn.Module):
        raise ParityError(f"parity needs a model, got {type(model).__name__}")
    return model


def _ops(model: nn.Module, kernels: str | None) -> TrainerOps:
    """The ops for the device the model is on."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    if device == "cuda" and kernels in (None, "triton"):
        return _gpu_ops()
    if device != "cpu" or kernels == "triton":
        raise ParityError(f"the model lies on {device}: there are no {kernels or 'kernels'} for it")
    ops = trainer_ops(kernels)
    if wrong := failed_probes(getattr(ops, "library", None)):
        raise ParityError(f"the {ops.build} kernels give other bits than the specification in {', '.join(wrong)}: rebuild them")
    return ops


@lru_cache
def _gpu_ops() -> TrainerOps:
    from ..kernels.gpu.trainer import GpuTrainerOps

    return GpuTrainerOps()


def _parity(model: Any, k_shards: int, head_dtype: Any, kernels: str | None) -> Parity:
    model = unwrapped(model)
    if head_dtype not in (None, "float32", torch.float32):
        raise ParityError(f"head_dtype must be float32 or left out, as of the engine, got {head_dtype!r}")
    if k_shards not in (1, 2, 4, 8, 16):
        raise ParityError(f"k_shards must be 1, 2, 4, 8 or 16, as of the engine, got {k_shards!r}")
    settings = Settings(ops=_ops(model, kernels), k_shards=k_shards, head_dtype=None if head_dtype is None else "float32")
    found: Parity | None = vars(model).get(_MARK)
    if found is None:
        return Parity(model, settings)
    if found.settings != settings:
        raise ParityError(f"the model is under parity with {_words(found.settings)} already; {_words(settings)} was asked for")
    return found


def _words(settings: Settings) -> str:
    return f"k_shards={settings.k_shards}, head_dtype={settings.head_dtype}, kernels={settings.ops.build}"


@contextmanager
def rollsync_parity(
    model: Any, *, k_shards: int = 4, head_dtype: str | torch.dtype | None = None, kernels: str | None = None
) -> Iterator[Parity]:
    """While it lasts, a stock transformers model computes the engine's bits: logits, and with `kernels.logprobs` logprobs, are those of
    an engine with the same weights and settings. Gradients are ordinary, and nothing of torch or transformers is replaced for others.

    Right- and left-padded batches and packed rows have the same bits: a sequence's places count from its own first token. Compute is
    float32 or bfloat16: that of the weights, of FSDP2's `param_dtype`, or of autocast, which then is that of the residual stream, norms and
    embedding too, as the engine's. Layers that are recomputed (gradient checkpointing) are recomputed under parity, wherever the backward
    pass runs.

    Args:
        model: an AutoModelForCausalLM (Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 text), before or after DistributedDataParallel,
            `fully_shard` or `accelerator.prepare`. Contexts on one model may lie inside each other.
        k_shards, head_dtype: the engine's `numerics.k_shards` and `numerics.head_dtype`.
        kernels: amx, avx512, avx2 or reference; by default the best here. No bit depends on it.

    Raises:
        ParityError: at once, for a module or setting that the engine's bits are not known for; when the model is called, for a batch
            or mode (a mask with holes, a cache, dropout, compiled code, ...). It names what stands in the way.
        OSError: the kernels asked for do not run here.
    """
    parity = _parity(model, k_shards, head_dtype, kernels)
    with parity.active():
        yield parity


def make_parity(model: Any, *, k_shards: int = 4, head_dtype: str | torch.dtype | None = None, kernels: str | None = None) -> Parity:
    """`rollsync_parity` for good; `.remove()` of what is returned undoes it. A copy of the model is under parity as well."""
    parity = _parity(model, k_shards, head_dtype, kernels)
    parity.install()
    return parity


def check(
    model: Any,
    rollouts: Any,
    *,
    params: Any = None,
    padding: str = "right",
    batch_tokens: int = 2048,
    vocab_limit: int | None = None,
    fingerprint: str | None = None,
    dtype: str | None = None,
    library_version: str | None = None,
    weight_version: int | None = None,
    k_shards: int = 4,
    head_dtype: str | torch.dtype | None = None,
    kernels: str | None = None,
) -> ParityReport:
    """Compute rollouts again under parity, and compare every value in every bit.

    Compared are those of model_logprobs, temperature_logprobs, entropy and logprobs that the rollouts hold. `logprobs` of which the
    engine changed the logits (penalties, logit_bias), or of ids it was told to leave out without a sampling_mask that says which, are left
    out, and counted so.

    Args:
        model: as for `rollsync_parity`; may be under it already. It is run under no_grad, in the mode it is in.
        rollouts: a client's RolloutResult, or a list: of its prompts' results, of an engine's RolloutOutput, or of records of a trace.
        params: SamplingParams, or one for each prompt, where the rollouts do not hold theirs; without any, only model_logprobs are
            compared.
        padding: how sequences are laid out: "right", "left" or "packed".
        batch_tokens: of one forward pass, padding counted; a longer sequence has one to itself.
        vocab_limit: ids from here on are padding of the vocabulary, which the engine never draws (`Engine.info.vocab_size`).
        fingerprint, dtype, library_version: what the engine says of itself, where the rollouts do not.
        weight_version: of the trainer's weights.
        k_shards, head_dtype, kernels: as for `rollsync_parity`.

    Raises:
        ParityError: as `rollsync_parity`; or the two sides differ in what bits depend on, or there is nothing to compare.
    """
    return check_under(
        _parity(model, k_shards, head_dtype, kernels), rollouts, params=params, fingerprint=fingerprint, dtype=dtype,
        library_version=library_version, weight_version=weight_version, vocab_limit=vocab_limit, batch_tokens=batch_tokens, padding=padding,
    )  # fmt: skip
