"""Trainer and engine on one host: one pool of buckets in memory that both map. Only places travel.

On the CPU that memory is an anonymous file (memfd), which the engine opens through /proc/PID/fd: unlike a segment of shm_open it never
has a name, so nothing is left behind whoever dies, and the kernel frees it with the last process that maps it. It is sealed: a sender
cannot cut off what an engine reads. On a GPU it is a pool of that device (cuda_ipc.py). Either way an offer is a handle by the label of
its device, and an engine takes the one of its own device or none.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..control import UpdateControl
from ..manifest import Bucket
from .base import Transport
from .cuda_ipc import CudaRuntime, DeviceMapping, DevicePool, IpcError
from .notes import Notes, ReadNotes
from .runs import BUCKET_BYTES, NEEDS, SendingRun, TakingRun

_ALIGN_BYTES = 1 << 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def host_label() -> str:
    """What tells this host's memory from another's: the kernel's boot id."""
    return f"cpu-{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def _start_time(pid: int) -> str:
    """When a process began: with its pid, what names it for good."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


class HostPool:
    """The sending end in host memory."""

    def __init__(self, nbytes: int) -> None:
        self.label, self.nbytes = host_label(), nbytes
        self._fd = os.memfd_create("rollsync-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, nbytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self._fd, nbytes)

    def offer(self) -> dict[str, Any]:
        pid = os.getpid()
        return {"pid": pid, "started": _start_time(pid), "fd": self._fd, "bytes": self.nbytes}

    def buffer(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self._map)[offset : offset + nbytes]

    def settle(self) -> None:
        return

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view is alive: the memory goes with the last one
            self._map.close()
        os.close(self._fd)


class HostMapping:
    """The receiving end in host memory, mapped read-only."""

    def __init__(self, handle: dict[str, Any]) -> None:
        self.pid, fd, self.nbytes = int(handle["pid"]), int(handle["fd"]), int(handle["bytes"])
        pid = self.pid
        if _start_time(pid) != handle["started"]:
            raise IpcError(f"process {pid} is not the one that offered the memory")
        where = f"/proc/{pid}/fd/{fd}"
        if not os.readlink(where).startswith("/memfd:rollsync-weights"):
            raise IpcError(f"{where} is not memory that a rollsync sender offers")
        opened = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(opened).st_size
            if not 0 < self.nbytes <= found or fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise IpcError(f"the offered memory must be sealed at its size, with {self.nbytes} bytes or more; it has {found}")
            self._map = mmap.mmap(opened, self.nbytes, prot=mmap.PROT_READ)
        finally:
            os.close(opened)

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self._map)[offset : offset + nbytes]

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self._map.close()


class SharedBuffers(Transport):
    """The sending end: one pool that holds all buffers.

    Args:
        device: cpu, or the GPU on which trainer and engine both run.
        runtime: makes what calls CUDA, if need be.
    """

    name = "ipc"
    num_buffers = 2
    bucket_bytes = BUCKET_BYTES
    needs = NEEDS

    def __init__(self, device: torch.device | str = "cpu", *, runtime: Callable[[], CudaRuntime] = CudaRuntime) -> None:
        self._device = torch.device(device)
        self._runtime = runtime() if self._device.type == "cuda" else None
        self._pool: HostPool | DevicePool | None = None

    def prepare(self, buffer_bytes: int) -> None:
        nbytes = self.num_buffers * -(-max(buffer_bytes, 1) // _ALIGN_BYTES) * _ALIGN_BYTES
        if self._pool is not None and self._pool.nbytes >= nbytes:
            return
        self.close()
        self._pool = HostPool(nbytes) if self._runtime is None else DevicePool(nbytes, self._device, self._runtime)

    def _opened(self) -> HostPool | DevicePool:
        assert self._pool is not None, "prepare comes first"
        return self._pool

    def _offset(self, index: int) -> int:
        return index * (self._opened().nbytes // self.num_buffers)

    def buffer(self, index: int) -> memoryview | Tensor:
        pool = self._opened()
        return pool.buffer(self._offset(index), pool.nbytes // self.num_buffers)

    def offer(self) -> dict[str, Any]:
        pool = self._opened()
        return {"handles": {pool.label: pool.offer()}}

    def start(self, control: UpdateControl, bucket: Bucket, index: int) -> None:
        self._opened().settle()

    def run(
        self, control: UpdateControl, submit: Callable[..., Future[Any]], update_id: str, sender: int, count: int
    ) -> SendingRun:
        return _NotedRun(self._offset, Notes(), control, submit, update_id, sender, count)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class _NotedRun(SendingRun):
    """The engine is told by notes where each bucket lies, and tells by notes that it is done with it."""

    def __init__(self, offset: Callable[[int], int], notes: Notes, *run: Any) -> None:
        super().__init__(*run, notes=notes.offer())
        self._offset, self._notes = offset, notes
        self._taken = 0
        """buckets whose memory is free again"""

    def _tell(self, bucket: Bucket, index: int) -> None:
        self._notes.ready(bucket.sequence, self._offset(index))

    def _is_free(self, bucket: Bucket) -> bool:
        while (sequence := self._notes.taken()) is not None:
            self._taken = max(self._taken, sequence + 1)
        return bucket.sequence < max(self._taken, self._answered)

    def close(self) -> None:
        self._notes.close()


class MappedBuffers:
    """The receiving end: a sender's pool.

    Args:
        offer: what the sender said; `handles` by the label of their device.
        device: that of this engine rank.

    Raises:
        IpcError: nothing was offered for this device, or the sender's memory cannot be mapped.
    """

    def __init__(
        self, offer: Any, device: torch.device | str = "cpu", *, runtime: Callable[[], CudaRuntime] = CudaRuntime
    ) -> None:
        handles = offer.get("handles") if isinstance(offer, dict) else None
        if not isinstance(handles, dict) or not handles:
            raise IpcError("ipc needs handles by device")
        device = torch.device(device)
        cuda = runtime() if device.type == "cuda" else None
        label = host_label() if cuda is None else cuda.labels[device.index or 0]
        if label not in handles:
            raise IpcError(f"nothing was offered for this engine's device {label}; offered: {', '.join(map(str, handles))}")
        told = handles[label]
        try:
            if cuda is None:
                self._mapping: HostMapping | DeviceMapping = HostMapping(told)
            else:
                self._mapping = DeviceMapping(label, told["handle"], int(told["bytes"]), int(told["pid"]), cuda)
        except IpcError:
            raise
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise IpcError(f"the offered memory cannot be opened: {type(error).__name__}: {error}") from None

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Valid until the next call. Raises IpcError if that is not all inside."""
        if not 0 <= offset <= self._mapping.nbytes - nbytes:
            raise IpcError(f"bytes [{offset}, {offset + nbytes}) are not inside the offered {self._mapping.nbytes}")
        return self._mapping.view(offset, nbytes)

    def run(self, notes: Mapping[str, Any]) -> TakingRun:
        """Several buckets, one after another, as the sender's notes say where they lie."""
        return _NotedTaking(ReadNotes(self._mapping.pid, notes))

    def close(self) -> None:
        self._mapping.close()


class _NotedTaking:
    """The engine's end of a `_NotedRun`."""

    def __init__(self, notes: ReadNotes) -> None:
        self._notes = notes

    def next(self, bucket: Bucket, patience_s: float) -> Mapping[str, Any] | None:
        offset = self._notes.next(bucket.sequence, patience_s)
        return None if offset is None else {"offset": offset}

    def taken(self, bucket: Bucket) -> None:
        self._notes.taken(bucket.sequence)

    def close(self) -> None:
        self._notes.close()
