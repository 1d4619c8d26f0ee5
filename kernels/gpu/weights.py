"""Weights on a device: plain row-major tensors in one piece of memory, at addresses that stand while they are resident."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..native_lib import NativeLibrary, available_builds, load_build
from ..weights import WeightSpec, _check_slice
from .queue import Queue

_ALIGN = 256


class GpuWeights:
    """All parameters of one rank. A commit copies the shadow into the live side, so that captured graphs keep reading the right place.

    Args:
        queue: where steps run. Everything else runs on the caller's stream and is done when the call returns.
        on_release: called before memory is given back (captured graphs hold its addresses).
    """

    def __init__(self, specs: Mapping[str, WeightSpec], dtype: torch.dtype, queue: Queue, on_release: Callable[[], None]) -> None:
        self.specs, self.dtype = specs, dtype
        self._queue, self._on_release = queue, on_release
        self.library = _cpu_kernels()
        """digests what comes in from the host"""
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, spec in specs.items():
            size = spec.n * (1 if spec.layout in ("vector", "bias") else spec.k) * dtype.itemsize
            self._places[name] = (end, size)
            end += -(-size // _ALIGN) * _ALIGN
        self.nbytes = end
        self.tensors: dict[str, Tensor] = {}
        """live, by name: [n, k], or [n]"""
        self._shadow: dict[str, Tensor] = {}
        self._memory: Tensor | None = None
        self._shadow_memory: Tensor | None = None
        self.resume()

    def _take(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Zeroed memory of one copy, and the parameters in it. MemoryError: there is no room."""
        memory, tensors = take(self._queue.device, self.nbytes, dtype=torch.uint8), {}
        for name, (start, size) in self._places.items():
            spec, flat = self.specs[name], memory[start : start + size].view(self.dtype)
            tensors[name] = flat if spec.layout in ("vector", "bias") else flat.view(spec.n, spec.k)
        return memory, tensors

    def write(self, param: str, dst_row: int, dst_col: int, tensor: Tensor, *, shadow: bool = False) -> None:
        rows, cols = _check_slice(param, self.specs[param], dst_row, dst_col, tensor, self.dtype)
        target = (self._shadow if shadow else self.tensors)[param]
        if target.ndim == 1:
            target[dst_row : dst_row + rows].copy_(tensor.view(rows))
        else:
            target[dst_row : dst_row + rows, dst_col : dst_col + cols].copy_(tensor.view(rows, cols))
        _settle(self._queue.device)  # the sender's buffer is free again, and a commit finds the values there

    def lend(self, param: str) -> Tensor | None:
        return None  # one allocation holds all, and is given back whole

    def read(self, param: str, *, shadow: bool = False) -> Tensor:
        return (self._shadow if shadow else self.tensors)[param].clone()

    def map_shadow(self) -> None:
        return None  # the KV pool is sized around a second copy; memory is taken by the first update

    def reserve_shadow(self) -> None:
        if not self._shadow:
            self._shadow_memory, self._shadow = self._take()

    def seed_shadow(self, param: str) -> None:
        self._shadow[param].copy_(self.tensors[param])
        _settle(self._queue.device)

    def flip(self, params: Iterable[str]) -> None:
        with self._queue.scope():
            for name in params:
                self.tensors[name].copy_(self._shadow[name])
            self._queue.record()
        self._queue.wait()  # the next update may write to the shadow at once, on another stream

    def live_bytes(self) -> Iterator[memoryview]:
        """Copies of what lies on the device, piece by piece."""
        for start in range(0, self.nbytes, 256 << 20):
            assert self._memory is not None
            piece: Any = self._memory[start : start + (256 << 20)].cpu().numpy()
            yield memoryview(piece)

    def copy_to_host(self) -> Tensor:
        """All live bytes."""
        assert self._memory is not None
        return self._memory.cpu()

    def copy_from_host(self, data: Tensor) -> None:
        """What `copy_to_host` gave."""
        assert self._memory is not None
        self._memory.copy_(data)
        _settle(self._queue.device)

    def release(self) -> None:
        self._on_release()
        self.tensors.clear()
        self._shadow.clear()
        self._memory = self._shadow_memory = None
        give_back(self._queue.device)

    def resume(self) -> None:
        if not self.tensors:
            self._memory, live = self._take()
            self.tensors.update(live)

    def close(self) -> None:
        self.release()


def _cpu_kernels() -> NativeLibrary | None:
    for build in available_builds():
        with contextlib.suppress(OSError):
            return load_build(build)
    return None


def _settle(device: torch.device) -> None:
    """Until this thread's stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def give_back(device: torch.device) -> None:
    """Memory that no tensor holds any more, from torch's allocator to the system."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """A device that has no room: MemoryError, in one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error).partition("\n")[0]) from error


def take(device: torch.device, *shape: int, dtype: torch.dtype) -> Tensor:
    """A zeroed tensor. MemoryError where there is no room."""
    with memory_errors():
        tensor = torch.zeros(shape, dtype=dtype, device=device)
    _settle(device)
    return tensor


