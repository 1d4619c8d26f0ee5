"""One model under parity: what is put on it, what goes with its calls, and how it comes off again."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import trainer
from ..kernels.segments import Segments
from ..kernels.trainer_ops import TrainerOps
from .errors import ParityError
from .parity_inputs import by_name, read_sequences, refuse_past, refuse_stretched
from .parity_modules import ATTENTION, Head, Patch, Settings, TakeLogits, patches, stock_class
from .parity_whole import HOW_TO, Whole

LOCK = threading.RLock()
"""held while a model comes under parity or leaves it, and while its config changes hands"""
MARK = "_rollsync_parity"
"""attribute of a model that is under parity, and the keyword by which a batch's sequences reach its attention"""


class _Absent:
    """Stands for an attribute that was not there; as a class it stays itself in a copied or saved model."""


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
    batch: _Batch | None = kwargs.get(MARK)
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
        self._whole = Whole(model, self.patches)
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
        with LOCK:
            self._install()

    def _install(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        _register_attention()
        todo = [*self.patches, Patch(self.model, MARK, self)]
        self._saved = [vars(p.module).get(p.attribute, _Absent) for p in todo]
        for patch in todo:
            vars(patch.module)[patch.attribute] = patch.value
        self._hooks = [
            self.backbone.register_forward_pre_hook(self._before_backbone, with_kwargs=True),
            self.model.register_forward_pre_hook(self._before_model, prepend=True),
            self.model.register_forward_hook(self._after_model, always_call=True),
        ]

    def __getstate__(self) -> dict[str, Any]:
        # A copy that is taken inside several contexts leaves none of them: one `remove` undoes it.
        return {**vars(self), "_depth": min(self._depth, 1)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _register_attention()

    def check_whole(self) -> None:
        """Raises ParityError, naming it, if something of the model was replaced or changed since it came under parity."""
        self._check_backbone(self.model)
        self._whole.check(self._config)

    @property
    def _config(self) -> Any:
        return self.model.config if self._capped_config is None else self._capped_config

    def _check_backbone(self, model: Any) -> None:
        if getattr(model, model.base_model_prefix, None) is not self.backbone:
            raise ParityError(f"{model.base_model_prefix} was replaced after the model came under parity: {HOW_TO}")

    def remove(self) -> None:
        """Undo one `install`; after the last the model is as it was.

        Raises:
            ParityError: there is none left to undo.
        """
        with LOCK:
            self._remove()

    def _remove(self) -> None:
        if not self._depth:
            raise ParityError("the model is not under parity: there is nothing to undo")
        self._depth -= 1
        if self._depth:
            return
        for hook in self._hooks:
            hook.remove()
        self._restore_config()
        for patch, saved in zip([*self.patches, Patch(self.model, MARK, self)], self._saved, strict=True):
            if saved is _Absent:
                vars(patch.module).pop(patch.attribute, None)
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
        self._whole.check(self._config)
        inputs = by_name(backbone.forward, args, kwargs)
        if inputs.get("output_attentions", getattr(backbone.config, "output_attentions", False)):
            raise ParityError("output_attentions: the kernels keep no attention weights")
        refuse_past(inputs)
        segments, positions = read_sequences(inputs)
        embeds = inputs.get("inputs_embeds")
        if embeds is not None and torch.is_autocast_enabled(embeds.device.type):  # the residual stream begins here
            inputs["inputs_embeds"] = embeds.to(torch.get_autocast_dtype(embeds.device.type))
        refuse_stretched(backbone.config, segments)
        for module, name, function in self._checkpoints():
            if not isinstance(function, _Reenter):
                vars(module)[name] = _Reenter(self, function)
        inputs |= {"position_ids": positions, "attention_mask": _no_mask(backbone), MARK: _Batch(self.settings.ops, segments)}
        return (), inputs

    def _before_model(self, model: Any, args: Any) -> None:
        self._check_backbone(model)
        with LOCK:  # of two threads, none may take the other's copy for the config
            self._take_cap(model)

    def _take_cap(self, model: Any) -> None:
        if self._capped_config is not None or not any(head.cap for head in self.heads):
            return
        # Its forward reads the cap from its config. A copy serves for the time of the call, so that what is saved meanwhile is whole.
        self._capped_config = model.config
        config = copy.copy(model.config)
        config.final_logit_softcapping = None
        vars(model)["config"] = config
        for head in self.heads:
            head.in_model = True

    def _after_model(self, model: Any, args: Any, output: Any) -> None:
        self._restore_config()

    def _restore_config(self) -> None:
        """Also where the call failed before, or was interrupted."""
        with LOCK:
            if self._capped_config is not None:
                vars(self.model)["config"], self._capped_config = self._capped_config, None
            for head in self.heads:
                head.in_model = False


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
