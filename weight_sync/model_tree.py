"""The parameters of a trainer's model under their Hugging Face names, whatever it is wrapped in. Reads the model; moves nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .gather import Flat, flat_parameters, is_zero3, loaded, zero3_objection
from .lora import Lora, UnsupportedModel, lora_of, saved_module

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""children under which torch.compile, activation checkpointing and FSDP1 keep what they wrap"""
_TOWERS = ("visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector", "embed_vision", "embed_audio")
"""what stands beside `language_model` in a multimodal model: no part of the text model that an engine serves"""
_TEXT = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}


@dataclass(eq=False, slots=True)
class Slot:
    """One parameter: where it is found when it is read, and what it will be once it is whole."""

    name: str
    owner: nn.Module
    key: str
    shape: tuple[int, ...]
    """of the whole tensor"""
    dtype: torch.dtype
    flat: Flat | None = None
    """where it is, if FSDP1 flattens it"""
    lora: Lora[Slot] | None = None
    """what is to be added to it"""

    @property
    def parameter(self) -> Any:
        """As it is held at this moment; a flat one has nothing of that kind."""
        return None if self.flat is not None else getattr(self.owner, self.key)


@dataclass(slots=True)
class Tree:
    """What stands in a model."""

    slots: list[Slot] = field(default_factory=list)
    """in the order of `named_parameters`, tied ones once, adapters merged in"""
    shards: list[Any] = field(default_factory=list)
    """FSDP2 modules"""


def tree_of(model: nn.Module) -> Tree:
    """Walk a model.

    Raises:
        UnsupportedModel: it holds something that cannot be sent as the model's weights; names all of it.
    """
    walk = _Walk(model)
    walk.visit(model, "")
    walk.check()
    return walk.tree


class _Walk:
    def __init__(self, model: nn.Module) -> None:
        fsdp1, fsdp2 = (loaded("torch.distributed.fsdp", name) for name in ("FullyShardedDataParallel", "FSDPModule"))
        self.tree = Tree(shards=[m for m in model.modules() if isinstance(m, fsdp2)] if fsdp2 else [])
        self._seen: dict[Any, Slot] = {}
        self._problems: list[str] = []
        units = [flat_parameters(unit) for unit in model.modules() if isinstance(unit, fsdp1)] if fsdp1 else []
        self._flat: dict[int, dict[str, Flat]] = {}
        for (owner, key), flat in (item for unit in units for item in unit.items()):
            self._flat.setdefault(owner, {})[key] = flat
        self._flat_parameter = loaded("torch.distributed.fsdp._flat_param", "FlatParameter")
        parallel = [("torch.nn.parallel", "DistributedDataParallel"), ("deepspeed.runtime.engine", "DeepSpeedEngine")]
        self._parallel: tuple[type, ...] = (nn.DataParallel, *(kind for place in parallel for kind in loaded(*place)))
        self._peft = (*loaded("peft.peft_model", "PeftModel"), *loaded("peft.tuners.tuners_utils", "BaseTuner"))

    def visit(self, module: nn.Module, path: str, lora: Lora[Slot] | None = None) -> None:
        """Note a module's parameters and its children's. `lora` belongs to its weight."""
        try:
            if (saved := saved_module(module)) is not None:
                return self.visit(saved, path)
            found = lora_of(module)
        except UnsupportedModel as error:
            self._problems.append(f"{path}: {error}")
            return None
        if found is not None:
            base, factors, options = found
            a, b = (self._slot(_inner(owner), key, "") for owner, key in factors) if factors else (None, None)
            return self.visit(base, path, Lora(a, b, **options) if a is not None and b is not None else None)
        self._own(module, path, lora)
        for name, child in module._modules.items():
            if child is None or (name in _TOWERS and "language_model" in module._modules):
                continue
            if self._is_wrapper(module, name):
                self.visit(child, path, lora)
            else:
                self.visit(child, f"{path}.{name}" if path else name)
        return None

    def _is_wrapper(self, module: nn.Module, name: str) -> bool:
        """Whether a module keeps under this name what it wraps, so that it is no part of the wrapped one's names."""
        if name == "module":
            return isinstance(module, self._parallel) or (len(module._modules) == 1 and not module._parameters)
        if name in ("base_model", "model"):
            return isinstance(module, self._peft)
        return name in _WRAPPERS

    def _own(self, module: nn.Module, path: str, lora: Lora[Slot] | None) -> None:
        """The parameters that stand in this module itself."""
        held = [key for key, p in module._parameters.items() if p is not None and not isinstance(p, self._flat_parameter)]
        for key in dict.fromkeys([*held, *self._flat.get(id(module), ())]):
            slot = self._slot(module, key, hf_name(f"{path}.{key}" if path else key))
            slot.lora = lora if key == "weight" else None
            if (objection := self._objection(slot)) is not None:
                self._problems.append(f"{slot.name} {objection}")
                continue
            first = self._seen.setdefault(id(slot.parameter) if slot.flat is None else slot.flat.first, slot)
            if first is slot:
                self.tree.slots.append(slot)
            elif first.lora is not None or slot.lora is not None:
                self._problems.append(f"{slot.name} is tied to {first.name}, and LoRA on tied weights cannot be merged")

    def _objection(self, slot: Slot) -> str | None:
        if not slot.dtype.is_floating_point:
            return f"is {slot.dtype} ({type(slot.parameter).__name__}): weights that are quantised (4-bit, 8-bit) cannot be sent"
        return zero3_objection(slot.parameter) if is_zero3(slot.parameter) else None

    def _slot(self, owner: nn.Module, key: str, name: str) -> Slot:
        if (flat := self._flat.get(id(owner), {}).get(key)) is not None:
            return Slot(name, owner, key, flat.shape, flat.dtype, flat)
        parameter: Any = owner._parameters[key]
        shape = parameter.ds_shape if is_zero3(parameter) else parameter.shape
        return Slot(name, owner, key, tuple(shape), parameter.dtype)

    def check(self) -> None:
        names: dict[str, int] = {}
        for slot in self.tree.slots:
            names[slot.name] = names.get(slot.name, 0) + 1
        self._problems += [f"{count} parameters would be named {name}" for name, count in names.items() if count > 1]
        if self._problems:
            more = f"; and {len(self._problems) - 5} more" if len(self._problems) > 5 else ""
            raise UnsupportedModel(f"the weights of this model cannot be sent: {'; '.join(self._problems[:5])}{more}")


def _inner(module: nn.Module) -> nn.Module:
    """What its wrappers keep."""
    while found := [child for name, child in module._modules.items() if name in _WRAPPERS and child is not None]:
        module = found[0]
    return module


def hf_name(path: str) -> str:
    """The text model's name of what stands in a multimodal model at `path`. Others stay as they are: the engine refuses what it lacks."""
    for prefix, instead in _TEXT.items():
        if path.startswith(prefix):
            return instead + path.removeprefix(prefix)
    return path

