"""The KV pool on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..kv import KvLayout
from .kv import GpuKvLayout
from .queue import Queue
from .weights import give_back, take


class GpuKv:
    """Zeroed pages at one address while they are resident.

    Args:
        on_release: called before memory is given back (captured graphs hold its address).

    Raises:
        ValueError: the layout is not one the kernels take. MemoryError: there is no room.
    """

    def __init__(self, layout: KvLayout, queue: Queue, on_release: Callable[[], None]) -> None:
        self.layout, self._queue, self._on_release = layout, queue, on_release
        self._shape = GpuKvLayout(
            num_blocks=layout.num_blocks,
            block_tokens=layout.block_tokens,
            num_layers=layout.num_layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            dtype=layout.dtype,
        ).shape
        self._pages: Tensor | None = None
        self.resume()

    @property
    def pages(self) -> Tensor:
        """[blocks, layers, 2, KV heads, block tokens, head size]"""
        assert self._pages is not None, "the pool sleeps"
        return self._pages

    def release(self) -> None:
        self._on_release()
        self._pages = None
        give_back(self._queue.device)

    def resume(self) -> None:
        if self._pages is None:
            self._pages = take(self._queue.device, *self._shape, dtype=self.layout.dtype)

    def close(self) -> None:
        self.release()
