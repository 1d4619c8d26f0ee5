"""Tiny models in every wrapping: a kind is like "peft+fsdp2", parts of WRAPPINGS that are applied in order."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

V, D, LAYERS = 67, 16, 2
LR = 0.5
UNLIKE = {"mixed"}
"""parts of a kind whose training is not that of the plain model"""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj, self.o_proj = nn.Linear(D, D), nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(torch.tanh(self.q_proj(x)) * self.v_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.self_attn(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(D, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Tiny(nn.Module):
    """Named like a Hugging Face model, in a few lines."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.model, self.lm_head = Decoder(), nn.Linear(D, V, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        return self.lm_head(self.model(input_ids))


def tiny(tied: bool) -> nn.Module:
    torch.manual_seed(5)
    return Tiny(tied)


def llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 24, "num_hidden_layers": LAYERS, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, **sizes))


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ in ("Layer", "LlamaDecoderLayer")]


def peft(model: nn.Module, **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    found = get_peft_model(model, LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"], **options}))
    for name, parameter in found.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            parameter.data.normal_(0, 0.3)
    return found


def peft_rows(model: nn.Module) -> nn.Module:
    """Over layers that keep their weight as [in, out]."""
    from transformers.pytorch_utils import Conv1D

    for layer in layers_of(model):
        torch.manual_seed(7)
        layer.self_attn.v_proj = Conv1D(D, D)  # type: ignore[union-attr, assignment]
    return peft(model, target_modules=["v_proj"], fan_in_fan_out=True)


def spread(model: nn.Module, replicas: int = 0, **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    sizes = (replicas, size // replicas) if replicas else (size,)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def partly(model: nn.Module) -> nn.Module:
    """FSDP2 that ignores some parameters, which stay plain tensors."""
    return spread(model, ignored_params={p for name, p in model.named_parameters() if "v_proj" in name or "model.norm" in name})


def fsdp2_mixed(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return spread(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layer) for layer in layers_of(model)})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, **{"auto_wrap_policy": policy, "use_orig_params": True, "device_id": device, **options})


def by_columns(model: nn.Module) -> nn.Module:
    from torch.distributed.tensor import Shard

    return spread(model, shard_placement_fn=lambda p: Shard(1 if p.dim() == 2 and p.shape[1] % 2 == 0 else 0))


def fsdp1_mixed(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

    strategy = ShardingStrategy.SHARD_GRAD_OP
    return fsdp1(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16), sharding_strategy=strategy)


def fsdp1_apart(model: nn.Module) -> nn.Module:
    """Every adapter in a unit of its own, and the base layers in others."""
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear) and m.weight.requires_grad)
    return fsdp1(model, auto_wrap_policy=policy)


def spread_apart(model: nn.Module) -> nn.Module:
    """FSDP2 with every adapter in a group of its own."""
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad:
            fully_shard(module)
    return spread(model)


def checkpointed(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    kinds = tuple({type(layer) for layer in layers_of(model)})
    wrapper.apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, kinds))
    return model


def regional(model: nn.Module) -> nn.Module:
    """torch.compile of every layer by itself: its segment stands in the middle of names."""
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for i, layer in enumerate(module):
                module[i] = torch.compile(layer, backend="eager")
    return model


WRAPPINGS: dict[str, Any] = {
    "compile": lambda m: torch.compile(m, backend="eager"),
    "regional": regional,
    "ac": checkpointed,
    "ddp": lambda m: nn.parallel.DistributedDataParallel(m),
    "fsdp1": fsdp1,
    "fsdp2": spread,
    "fsdp2mixed": fsdp2_mixed,
    "partly": partly,
    "fsdp2columns": by_columns,
    "hsdp": lambda m: spread(m, replicas=2),
    "hsdp1": lambda m: spread(m, replicas=1),
    "fsdp2apart": spread_apart,
    "fsdp1mixed": fsdp1_mixed,
    "fsdp1apart": fsdp1_apart,
    "fsdp1flat": lambda m: fsdp1(m, use_orig_params=False),
    "peft": peft,
    "peftsave": lambda m: peft(m, modules_to_save=["lm_head"]),
    "peftembed": lambda m: peft(m, target_modules=["embed_tokens", "q_proj"]),
    "peftrows": peft_rows,
}


def make(kind: str) -> tuple[nn.Module, nn.Module]:
    """A wrapped model, and the same without wrappers."""
    parts = kind.split("+")

    def built(parts: list[str]) -> nn.Module:
        model = (llama if "llama" in kind else tiny)("tied" in kind)
        for part in parts:
            model = WRAPPINGS[part](model) if part in WRAPPINGS else model
        return model

    return built(parts), built([part for part in parts if part.startswith("peft")])
