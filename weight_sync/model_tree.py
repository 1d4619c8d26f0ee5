"""The parameters of a trainer's model under their Hugging Face names, whatever it is wrapped in. Reads the model; moves nothing."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
    unit: Any = None
    """the FSDP1 module that flattens it, if one does"""
    lora: Lora[Slot] | None = None
    """what is to be added to it"""

    def read(self) -> Any:
        """The tensor as it is held at this moment."""
        return getattr(self.owner, self.key).detach()


@dataclass(slots=True)
class _Flat:
    """One parameter of an FSDP1 unit."""

    unit: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: tuple[int, str]
    """(id of the module, name) of the one that it is; others are tied to it"""


@dataclass(slots=True)
class Tree:
    """What stands in a model."""

    slots: list[Slot] = field(default_factory=list)
    """in the order of `named_parameters`, tied ones once, adapters merged in"""
    roots: list[Any] = field(default_factory=list)
    """FSDP1 modules that no other one contains"""
    shards: list[Any] = field(default_factory=list)
    """FSDP2 modules"""


def loaded(module: str, name: str) -> Any:
    """A class out of a module, if that is imported already; else (), of which nothing is an instance."""
    return getattr(sys.modules.get(module), name, ())


def is_zero3(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id") and hasattr(parameter, "ds_shape")


def tree_of(model: nn.Module) -> Tree:
    """Walk a model.

    Raises:
        UnsupportedModel: it holds something that cannot be sent as the model's weights; names all of it.
    """
    walk = _Walk()
    walk.flatten(model)
    walk.visit(model, "", None)
    walk.check()
    return walk.tree


class _Walk:
    def __init__(self) -> None:
        self.tree = Tree()
        self._flat: dict[tuple[int, str], _Flat] = {}
        self._seen: dict[Any, Slot] = {}
        self._problems: list[str] = []
        self._fsdp1 = loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
        self._fsdp2 = loaded("torch.distributed.fsdp", "FSDPModule")
        self._flat_parameter = loaded("torch.distributed.fsdp", "FlatParameter") or loaded(
            "torch.distributed.fsdp._flat_param", "FlatParameter"
        )
        self._parallel = (nn.DataParallel, *_some(loaded("torch.nn.parallel", "DistributedDataParallel")),
                          *_some(loaded("deepspeed.runtime.engine", "DeepSpeedEngine")))  # fmt: skip
        self._peft = (*_some(loaded("peft.peft_model", "PeftModel")), *_some(loaded("peft.tuners.tuners_utils", "BaseTuner")))

    def flatten(self, model: nn.Module) -> None:
        """Note which parameters FSDP1 keeps in flat ones. What these hold is told nowhere else without a gather."""
        for unit in model.modules() if self._fsdp1 else ():
            if not isinstance(unit, self._fsdp1) or (handle := unit._handle) is None:
                continue
            flat = handle.flat_param
            for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
                key = (id(info.module), info.param_name)
                self._flat[key] = _Flat(unit, tuple(shape), handle._orig_param_dtype, key)
            for info in flat._shared_param_infos:
                self._flat[id(info.module), info.param_name] = self._flat[id(info.prim_module), info.prim_param_name]

    def visit(self, module: nn.Module, path: str, root: Any) -> None:
        if self._fsdp2 and isinstance(module, self._fsdp2):
            self.tree.shards.append(module)
        if self._fsdp1 and isinstance(module, self._fsdp1) and root is None:
            self.tree.roots.append(module)
            root = module
        try:
            if (saved := saved_module(module)) is not None:
                return self.visit(saved, path, root)
            found = lora_of(module)
        except UnsupportedModel as error:
            self._problems.append(f"{path}: {error}")
            return None
        if found is not None:
            base, factors, options = found
            a, b = (self._slot(owner, key, "") for owner, key in factors) if factors else (None, None)
            lora = Lora(a, b, **options) if a is not None and b is not None else None
            self._own(base, path, lora)
            return self._below(base, path, root)
        self._own(module, path, None)
        return self._below(module, path, root)

    def _below(self, module: nn.Module, path: str, root: Any) -> None:
        for name, child in module._modules.items():
            if child is not None and not (name in _TOWERS and "language_model" in module._modules):
                self.visit(child, path if self._is_wrapper(module, name) else f"{path}.{name}" if path else name, root)

    def _is_wrapper(self, module: nn.Module, name: str) -> bool:
        """Whether a module keeps under this name what it wraps, so that it is no part of the wrapped one's names."""
        if name == "module":
            return isinstance(module, self._parallel)
        if name in ("base_model", "model") and self._peft:
            return isinstance(module, self._peft)
        return name in _WRAPPERS

    def _own(self, module: nn.Module, path: str, lora: Lora[Slot] | None) -> None:
        """The parameters that stand in this module itself. `lora` belongs to its weight."""
        flat = [key for owner, key in self._flat if owner == id(module)] if self._flat else []
        held = [key for key, p in module._parameters.items() if p is not None and not isinstance(p, self._flat_parameter or ())]
        for key in dict.fromkeys([*held, *flat]):
            slot = self._slot(module, key, hf_name(f"{path}.{key}" if path else key))
            slot.lora = lora if key == "weight" else None
            if not slot.dtype.is_floating_point:
                kind = type(module._parameters.get(key)).__name__
                self._problems.append(f"{slot.name} is {slot.dtype} ({kind}): weights that are quantised (4-bit, 8-bit) cannot be sent")
                continue
            entry = self._flat.get((id(module), key))
            first = self._seen.setdefault(entry.first if entry is not None else id(module._parameters[key]), slot)
            if first is slot:
                self.tree.slots.append(slot)
            elif first.lora is not None or slot.lora is not None:
                self._problems.append(f"{slot.name} is tied to {first.name}, and LoRA on tied weights cannot be merged")

    def _slot(self, owner: nn.Module, key: str, name: str) -> Slot:
        if (entry := self._flat.get((id(owner), key))) is not None:
            return Slot(name, owner, key, entry.shape, entry.dtype, entry.unit)
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


def _some(kind: Any) -> tuple[Any, ...]:
    return () if kind == () else (kind,)


def hf_name(path: str) -> str:
    """The text model's name of what stands in a multimodal model at `path`. Others stay as they are: the engine refuses what it lacks."""
    for prefix, instead in _TEXT.items():
        if path.startswith(prefix):
            return instead + path.removeprefix(prefix)
    return path


def parameter_of(slot: Slot) -> Tensor:
    """The parameter object itself."""
    found: Tensor = getattr(slot.owner, slot.key)
    return found
