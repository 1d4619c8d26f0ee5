"""A stand-in for CUDA graphs on CPU tensors: records what is launched, and at each replay runs the work again and compares.

A CUDA graph repeats launches with the arguments it recorded. So at a replay every kernel, grid, address, shape, stride and number must be
those of the recording, and in between nothing may allocate, copy or look at a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rollsync.kernels.gpu import attention, kv, linear, rows, sampler
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

MODULES = (attention, kv, linear, rows, sampler)
"""that launch kernels"""
VIEWS = {"view", "slice", "select", "as_strided", "unsqueeze", "expand", "transpose", "unbind", "detach", "alias", "_unsafe_view", "t"}
"""operations of torch that only make another view of memory that is there"""


class NotReplayable(AssertionError):
    """A graph would repeat something else than what the step needs."""


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.data_ptr(), tuple(value.shape), value.stride(), str(value.dtype))
    return value


class _OnlyViews(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            raise NotReplayable(f"torch.{name} in captured work: its result, or the value it looks at, would be that of the recording")
        return func(*args, **(kwargs or {}))


class Recorder:
    """What was launched while it recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._launched: list[Any] | None = None
        self.graphs: list[RecordedGraph] = []
        for module in MODULES:
            monkeypatch.setattr(module, "launch", self._launch_by(module.launch))

    def _launch_by(self, launch: Callable[..., None]) -> Callable[..., None]:
        def recorded(variant: Any, grid: tuple[int, ...], *args: Any) -> None:
            if self._launched is None:
                launch(variant, grid, *args)
                return
            self._launched.append((variant.name, grid, dict(variant.constants), [*map(_described, args)]))
            with _disable_current_modes():  # the interpreter works with tensors of its own
                launch(variant, grid, *args)

        return recorded

    def record(self, work: Callable[[], None]) -> list[Any]:
        self._launched = []
        try:
            with _OnlyViews():
                work()
            return self._launched
        finally:
            self._launched = None

    def capture(self, work: Callable[[], None]) -> RecordedGraph:
        self.graphs.append(RecordedGraph(self, work))
        return self.graphs[-1]


class RecordedGraph:
    """One captured piece of work."""

    def __init__(self, recorder: Recorder, work: Callable[[], None]) -> None:
        self._recorder, self.work = recorder, work
        self.launched = recorder.record(work)
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        again = self._recorder.record(self.work)
        if len(again) != len(self.launched):
            raise NotReplayable(f"{len(again)} launches, {len(self.launched)} when it was recorded")
        for number, (before, now) in enumerate(zip(self.launched, again, strict=True)):
            if before != now:
                raise NotReplayable(f"launch {number} was {before} when it was recorded and is {now}")
