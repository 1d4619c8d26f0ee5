"""LoRA adapters of the peft package: found in a model's layers, and merged into copies of the base weights. The model is never written."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from .boxes import Box

_BLOCK = 1 << 24
"""elements merged at once: bounds what lies between, and is one block for most layers"""
S = TypeVar("S")


class UnsupportedModel(ValueError):
    """A model whose weights cannot be sent as it is; the message names what and why."""


@dataclass(frozen=True, slots=True)
class Lora(Generic[S]):
    """What one adapter adds to a weight: `scaling * B @ A`, or its transpose if `swapped`."""

    a: S
    b: S
    scaling: float
    swapped: bool


Factors = tuple[tuple[nn.Module, str], tuple[nn.Module, str]]


def lora_of(module: nn.Module) -> tuple[nn.Module, Factors | None, dict[str, Any]] | None:
    """(base layer, where A and B stand, options of `Lora`) of an adapted layer; None for any other module.

    Raises:
        UnsupportedModel: an adapter that is not one plain LoRA, switched on and not merged.
    """
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return None
    if isinstance(module, sys.modules["peft.peft_model"].PeftModel):
        _check_kind(module)
    if not isinstance(module, tuners.BaseTunerLayer):
        return None
    layers: Any = sys.modules["peft.tuners.lora.layer"]
    layer: Any = module
    kind = f"{type(layer).__module__.removeprefix('peft.tuners.')}.{type(layer).__name__}"
    if type(layer) not in (layers.Linear, layers.Embedding):
        raise UnsupportedModel(f"adapters of the kind {kind} cannot be merged here, only LoRA on Linear and Embedding layers")
    if layer.merged:
        raise UnsupportedModel("its adapter is merged into the base weights already: unmerge_adapter() first")
    embedding = type(layer) is layers.Embedding
    holders = (layer.lora_embedding_A, layer.lora_embedding_B) if embedding else (layer.lora_A, layer.lora_B)
    active = [name for name in layer.active_adapters if name in holders[0]]
    if layer.disable_adapters and len(holders[0]):
        raise UnsupportedModel("its adapters are disabled, so that the base model would be sent")
    if len(active) > 1:
        raise UnsupportedModel(f"several adapters are active ({', '.join(active)}): activate one")
    base = layer.base_layer
    if not active:
        return base, None, {}
    name = active[0]
    if name in layer.lora_variant or layer.use_dora.get(name):
        variant = type(layer.lora_variant[name]).__name__ if name in layer.lora_variant else "DoRA"
        raise UnsupportedModel(f"adapter {name} is {'DoRA' if 'Dora' in variant else variant}, only plain LoRA can be merged here")
    if layer.lora_bias.get(name):
        raise UnsupportedModel(f"adapter {name} has lora_bias, which cannot be merged here")
    if embedding:
        factors: Factors = ((holders[0], name), (holders[1], name))
    else:
        factors = ((holders[0][name], "weight"), (holders[1][name], "weight"))
    return base, factors, {"scaling": float(layer.scaling[name]), "swapped": embedding or bool(layer.fan_in_fan_out)}


def _check_kind(model: Any) -> None:
    kinds = {str(getattr(c.peft_type, "value", c.peft_type)) for name, c in model.peft_config.items() if name in model.active_adapters}
    if kinds - {"LORA"}:
        raise UnsupportedModel(f"adapters of the kind {', '.join(sorted(kinds))} cannot be merged here, only LORA")


def saved_module(module: nn.Module) -> nn.Module | None:
    """The trained copy that stands for a module of `modules_to_save`, or the original if its adapter is not active; None for others.

    Raises:
        UnsupportedModel: a wrapper of another kind, or one whose copy is switched off.
    """
    other: Any = sys.modules.get("peft.utils.other")
    if other is None or not isinstance(module, getattr(other, "AuxiliaryTrainingWrapper", other.ModulesToSaveWrapper)):
        return None
    wrapper: Any = module
    if not isinstance(module, other.ModulesToSaveWrapper):
        raise UnsupportedModel(f"{type(module).__name__} of peft cannot be merged here, only LoRA and modules_to_save")
    if wrapper.disable_adapters:
        raise UnsupportedModel("its trained copy is disabled, so that the base model would be sent")
    active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
    if len(active) > 1:
        raise UnsupportedModel(f"several adapters are active ({', '.join(active)}): activate one")
    found: nn.Module = wrapper.modules_to_save[active[0]] if active else wrapper.original_module
    return found


def merged(weights: Tensor, box: Box, a: Tensor, b: Tensor, lora: Lora[Any], dtype: torch.dtype) -> Tensor:
    """A new tensor: the weights with the adapter added, then cast. As peft's own merge computes it, a block of rows at a time.

    Args:
        weights: [rows, columns] of `box`, any float dtype.
        box: which part of the whole weight they are.
        a: [r, in]; b: [out, r]: whole, of one dtype, which the product is rounded to before it is added.
    """
    left, right = (a.t(), b.t()) if lora.swapped else (b, a)
    (row, column), (rows, columns) = box.offset, box.length
    kept = left.dtype
    left, right = left[row : row + rows].float(), right[:, column : column + columns].float()
    out = torch.empty(weights.shape, dtype=dtype, device=weights.device)
    step = max(1, _BLOCK // max(columns, 1))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        delta = ((left[part] @ right) * lora.scaling).to(weights.device, kept)
        out[part].copy_((weights[part] + delta).to(weights.dtype))
    return out
