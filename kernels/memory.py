"""Anonymous memory on huge pages where the system grants them, backed when touched or populated."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

_HUGE = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; the mmap module does not name it
_DONTNEED = 4  # MADV_DONTNEED
_LIBC = ctypes.CDLL(None)


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
            with contextlib.suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE)

    def populate(self, offset: int, size: int) -> bool:
        """Have the system back [offset, offset + size) now instead of at first use; False where it cannot."""
        return bool(_LIBC.madvise(ctypes.c_void_p(self.address + offset), ctypes.c_size_t(size), _POPULATE_WRITE) == 0)

    def release(self, offset: int = 0, size: int | None = None) -> None:
        """Give what backs the region, or whole pages of it, to the system. It reads as zeros afterwards, at the same address."""
        pages = -(-(self.size if size is None else size) // mmap.PAGESIZE) * mmap.PAGESIZE
        if _LIBC.madvise(ctypes.c_void_p(self.address + offset), ctypes.c_size_t(pages), _DONTNEED) != 0:
            raise OSError("the system does not take memory back (madvise)")

    def view(self, offset: int, size: int) -> ctypes.Array[ctypes.c_char]:
        """A part of the region that keeps all of it alive, even after `close`."""
        assert self._map is not None, "the region is closed"
        return (ctypes.c_char * size).from_buffer(self._map, self._offset + offset)

    def close(self) -> None:
        """Give the memory back. Views of it must be gone; if some are not, it goes with the last of them."""
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None


def trim() -> None:
    """Have malloc give back to the system what torch has freed: it keeps what lies between things that live. glibc only."""
    give_back = getattr(_LIBC, "malloc_trim", None)
    if give_back is not None:
        give_back(ctypes.c_size_t(0))
