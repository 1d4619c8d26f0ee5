"""Whether a model under parity still is so in every module. Others go on changing models: adapters, new heads, compiled layers, casts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from torch import nn

from .errors import ParityError
from .parity_modules import Patch, check_rotary, soft_cap, stock_class

HOOKS_OF = ("torch.", "transformers.", "accelerate.", "peft.", "wandb.", __name__.split("trainer_adapters")[0])
"""whose forward hooks on layers shard weights, watch, or ask for gradients, and change no value"""
HOW_TO = "undo parity, then change the model, then put it under parity again"


class _Seen(NamedTuple):
    """One module as it was when the model came under parity."""

    name: str
    module: nn.Module
    kind: type
    """its stock class: fully_shard may come later"""
    children: tuple[nn.Module | None, ...]
    forward: Any
    """ours, or None where it computes by its class"""


def _what(name: str, module: nn.Module | None) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _unwrapped(module: nn.Module | None) -> nn.Module | None:
    """The module whose layers torch's checkpoint_wrapper recomputes; wrapping may come after parity."""
    while type(module).__name__ == "CheckpointWrapper":
        module = cast(Any, module)._checkpoint_wrapped_module
    return module


class Whole:
    """The modules of a model and what parity has put there. A copied model gets a copy that knows its own modules."""

    def __init__(self, model: nn.Module, patches: Sequence[Patch]) -> None:
        forwards = {id(p.module): p.value for p in patches if p.attribute == "forward"}
        self.others = [p for p in patches if p.attribute != "forward"]
        self.seen = [
            _Seen(name, module, stock_class(module), tuple(module._modules.values()), forwards.get(id(module)))
            for name, module in model.named_modules()
            if type(module).__name__ != "CheckpointWrapper"
        ]
        self.rotary = [(s.name, s.module) for s in self.seen if s.kind.__name__.endswith("RotaryEmbedding")]
        self.cap = soft_cap(model.config)

    def check(self, config: Any) -> None:
        """`config`: the model's, as it is outside of calls. Runs at every forward pass: a few tenths of a microsecond for a module.

        Raises:
            ParityError: what has changed since; names it.
        """
        for name, module, kind, children, forward in self.seen:
            own = vars(module)
            if tuple(own["_modules"].values()) != children:
                _refuse_children(name, module, children)
            if type(module) is not kind and stock_class(module) is not kind:
                raise ParityError(f"{_what(name, module)} was a {kind.__name__} when the model came under parity: {HOW_TO}")
            if name and (own["_forward_hooks"] or own["_forward_pre_hooks"]):
                _refuse_hooks(name, module)
            if own.get("_compiled_call_impl") is not None:
                raise ParityError(f"{_what(name, module)} was compiled under parity: torch.compile changes bits; run it eagerly")
            if own.get("forward") is not forward and name:  # the model's own may be wrapped, as accelerate does
                raise ParityError(f"{_what(name, module)} was given another forward under parity: {HOW_TO}")
        for patch in self.others:
            if vars(patch.module).get(patch.attribute) is not patch.value:
                raise ParityError(f"the {patch.attribute} of a {type(patch.module).__name__} was replaced under parity: {HOW_TO}")
        for name, module in self.rotary:
            check_rotary(name, module)
        if (cap := soft_cap(config)) != self.cap:
            raise ParityError(f"final_logit_softcapping was {self.cap} when the model came under parity, and is {cap}: {HOW_TO}")


def _refuse_hooks(name: str, module: nn.Module) -> None:
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        function: Any = getattr(hook, "func", hook)  # of a functools.partial
        source = getattr(function, "__module__", None) or type(function).__module__
        words = f"{source}.{getattr(function, '__qualname__', type(function).__qualname__)}"
        if "neftune" in words.lower():
            if module.training:
                what = f"{_what(name, module)} adds NEFTune noise ({words})"
                raise ParityError(f"{what}, which the engine does not: switch it off, or eval()")
        elif not source.startswith(HOOKS_OF):
            raise ParityError(f"{_what(name, module)} has a forward hook, {words}, which may change bits: remove it under parity")


def _refuse_children(name: str, module: nn.Module, before: tuple[nn.Module | None, ...]) -> None:
    names = list(module._modules)
    now = [_unwrapped(child) for child in module._modules.values()]
    was = [_unwrapped(child) for child in before]
    for i, child in enumerate(now):
        if i >= len(was) or child is not was[i]:
            path = f"{name}.{names[i]}".lstrip(".")
            raise ParityError(f"{_what(path, child)} was put there under parity, and would compute by itself: {HOW_TO}")
    if len(was) > len(now):
        raise ParityError(f"{_what(name, module)} lost a {type(was[len(now)]).__name__} under parity: {HOW_TO}")
