"""Page-aligned anonymous memory on huge pages where the system grants them. Untouched pages cost nothing."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

_HUGE = 2 << 20


class Region:
    """`size` bytes of zeroed memory at `address`, 2 MiB aligned, given back by `close` (or with the object)."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Private: shared mappings, mmap's default, get no huge pages.
        self._map: mmap.mmap | None = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._offset = -start % _HUGE
        self.address = start + self._offset
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def array(self, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[np.generic]:
        """A view of `count` elements at `offset` bytes; the region must outlive it."""
        if self._map is None:
            raise ValueError("the region is closed")
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=self._offset + offset)

    def close(self) -> None:
        """Give the memory back. Views of it must be gone; if some are not, it goes with the last of them."""
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:
                pass
            self._map = None
