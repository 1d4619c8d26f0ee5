"""The KV pool: blocks of `block_tokens` tokens, each holding K and V of every layer and KV head."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from .memory import Region, trim
from .priority import give_way


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLayout:
    """Sizes of the pool. Head size is padded to 32 in the native layout (native/kv.h)."""

    num_blocks: int
    block_tokens: int
    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return 2 * self.block_tokens * self.kv_heads * (-(-self.head_dim // 32) * 32) * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.layer_bytes * self.num_layers

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.num_blocks


class NativeKv:
    """Zeroed pages for the native kernels.

    A thread of its own asks the system for the memory behind them, from the first block on: left to first use, that costs a
    prefill a tenth of its time on a virtual machine.
    """

    _CHUNK = 16 << 20

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self._region = Region(layout.nbytes)
        self.address = self._region.address
        self._start_populating()

    def _start_populating(self) -> None:
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._populate, name="rollsync-kv", daemon=True)
        self._thread.start()

    def _stop_populating(self) -> None:
        self._closing.set()
        self._thread.join()  # at most one chunk away

    def release(self) -> None:
        """Give the pages' memory to the system; what they held is lost. `address` stays."""
        self._stop_populating()
        self._region.release()

    def resume(self) -> None:
        """Have memory behind the pages again."""
        self._start_populating()

    def _populate(self) -> None:
        give_way(19)
        for offset in range(0, self.layout.nbytes, self._CHUNK):
            if self._closing.is_set() or not self._region.populate(offset, min(self._CHUNK, self.layout.nbytes - offset)):
                return

    def close(self) -> None:
        self._stop_populating()
        self._region.close()


class ReferenceKv:
    """Plain rows: k and v [blocks, layers, block_tokens, kv_heads, head_dim]."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self.resume()

    def resume(self) -> None:
        layout = self.layout
        shape = (layout.num_blocks, layout.num_layers, layout.block_tokens, layout.kv_heads, layout.head_dim)
        self.k: Tensor = torch.zeros(shape, dtype=layout.dtype)
        self.v: Tensor = torch.zeros(shape, dtype=layout.dtype)

    def release(self) -> None:
        self.k = self.v = torch.empty(0)
        trim()

    def close(self) -> None:
        self.k = self.v = torch.empty(0)
