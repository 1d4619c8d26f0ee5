"""Trainer and engine on one host: buckets in memory that both map. Only their places travel.

On the CPU that memory is an anonymous file (memfd), which the engine opens through /proc/PID/fd: it never has a name, so nothing is
left behind whoever dies, and the kernel frees it with the last process that maps it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Any

from ..control import UpdateControl
from ..manifest import Bucket
from .base import Transport


class IpcError(ValueError):
    """Memory that cannot be shared or mapped; says on which device and why."""


def host_device() -> str:
    """What tells this host's memory from another's: the kernel's boot id."""
    return f"cpu-{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def _start_time(pid: int) -> str:
    """When a process began: with its pid, what names it for good."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


class SharedBuffers(Transport):
    """The sending end: one memfd that holds all buffers, mapped once on either side."""

    name = "ipc"
    num_buffers = 2

    def __init__(self) -> None:
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._buffer_bytes = 0

    def prepare(self, buffer_bytes: int) -> None:
        wanted = -(-max(buffer_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._fd >= 0 and self._buffer_bytes >= wanted:
            return
        self.close()
        self._fd = os.memfd_create("rollsync-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, wanted * self.num_buffers)
        self._map = mmap.mmap(self._fd, wanted * self.num_buffers)
        self._buffer_bytes = wanted

    def buffer(self, index: int) -> memoryview:
        assert self._map is not None
        return memoryview(self._map)[index * self._buffer_bytes : (index + 1) * self._buffer_bytes]

    def offer(self) -> dict[str, Any]:
        pid = os.getpid()
        handle = {"pid": pid, "started": _start_time(pid), "fd": self._fd, "bytes": self._buffer_bytes * self.num_buffers}
        return {"handles": {host_device(): handle}}

    def send(self, control: UpdateControl, update_id: str, bucket: Bucket, index: int) -> None:
        control.chunk(update_id, bucket.sender, bucket.sequence, offset=index * self._buffer_bytes)

    def close(self) -> None:
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a view is alive: the memory goes with the last one
                self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MappedBuffers:
    """The receiving end: the sender's memory, mapped read-only.

    Args:
        offer: what the sender said; `handles` by device.
        device: the one whose memory this engine reads.

    Raises:
        IpcError: nothing was offered for this device, or the sender's memory cannot be mapped.
    """

    def __init__(self, offer: Any, device: str) -> None:
        handles = offer.get("handles") if isinstance(offer, dict) else None
        if not isinstance(handles, dict) or not handles:
            raise IpcError("ipc needs handles by device")
        if device not in handles:
            raise IpcError(f"nothing was offered for this engine's device {device}; offered: {', '.join(map(str, handles))}")
        handle = handles[device]
        try:
            pid, fd, size = int(handle["pid"]), int(handle["fd"]), int(handle["bytes"])
            if _start_time(pid) != handle["started"]:
                raise IpcError(f"process {pid} is not the one that offered the memory")
            where = f"/proc/{pid}/fd/{fd}"
            if not os.readlink(where).startswith("/memfd:rollsync-weights"):
                raise IpcError(f"{where} is not memory that a rollsync sender offers")
            opened = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise error if isinstance(error, IpcError) else IpcError(f"the offered memory cannot be opened: {error}") from None
        try:
            if os.fstat(opened).st_size < size:
                raise IpcError(f"the offered memory has {os.fstat(opened).st_size} bytes, not {size}")
            self._map = mmap.mmap(opened, size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise error if isinstance(error, IpcError) else IpcError(f"the offered memory cannot be mapped: {error}") from None
        finally:
            os.close(opened)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Raises IpcError if that is not all inside."""
        if not 0 <= offset <= len(self._map) - nbytes:
            raise IpcError(f"bytes [{offset}, {offset + nbytes}) are not inside the offered {len(self._map)}")
        return memoryview(self._map)[offset : offset + nbytes]

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self._map.close()
