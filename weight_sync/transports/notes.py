"""How a sender and an engine on one host tell each other of buckets without a call for each: two pipes of the sender's.

The engine opens them through /proc/PID/fd, like the memory that the notes are about: they have no name, and end with the sender. A note
comes whole, and what was written to the memory before it is there for whoever has read it, as either takes a call of the system.

Both ends look for notes every POLL_S. To wait in a read would be quicker, but the kernel then lets the reader go on where the writer runs,
on the same core (a pipe's wake-up promises that the writer is about to sleep), and a sync takes half again as long.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import time
from collections.abc import Mapping
from typing import Any

from .cuda_ipc import IpcError
from .runs import POLL_S

_READY = struct.Struct("<qq")
"""sequence, and where in the memory offered"""
_TAKEN = struct.Struct("<q")
"""sequence"""


class Notes:
    """The sending end, for one engine."""

    def __init__(self) -> None:
        self._ready, self._taken = os.pipe(), os.pipe()
        os.set_blocking(self._taken[0], False)

    def offer(self) -> dict[str, Any]:
        """What the engine finds them by; the inode tells them from others that took their numbers."""
        return {name: [fd, os.fstat(fd).st_ino] for name, fd in (("ready", self._ready[0]), ("taken", self._taken[1]))}

    def ready(self, sequence: int, offset: int) -> None:
        """That bucket is packed, and lies there."""
        os.write(self._ready[1], _READY.pack(sequence, offset))

    def taken(self) -> int | None:
        """The sequence of a bucket that the engine says it has taken in; None if there is no note."""
        raw = _read(self._taken[0], _TAKEN.size)
        return None if raw is None else int(_TAKEN.unpack(raw)[0])

    def close(self) -> None:
        """An engine that looks for a note sees that there will be none."""
        for fd in (*self._ready, *self._taken):
            os.close(fd)


class ReadNotes:
    """The engine's end.

    Args:
        pid: the process whose memory was offered.
        told: its `Notes.offer`.

    Raises:
        IpcError: these are not pipes of that process.
    """

    def __init__(self, pid: int, told: Mapping[str, Any]) -> None:
        self._ready = _open(pid, told.get("ready"), os.O_RDONLY)
        try:
            self._taken = _open(pid, told.get("taken"), os.O_WRONLY)
        except BaseException:
            os.close(self._ready)
            raise

    def next(self, sequence: int, patience_s: float) -> int | None:
        """Where that bucket lies; None if the sender does not say so in time. Notes of earlier ones are passed over.

        Raises:
            IpcError: the sender has gone on without it, or is gone.
        """
        until = time.monotonic() + patience_s
        while (raw := _read(self._ready, _READY.size)) is not None or time.monotonic() < until:
            if raw is None:
                time.sleep(POLL_S)
                continue
            if len(raw) < _READY.size:
                raise IpcError(f"the sender ended before chunk {sequence}")
            number, offset = _READY.unpack(raw)
            if number > sequence:
                raise IpcError(f"the sender has chunk {number} ready, but {sequence} has not come")
            if number == sequence:
                return int(offset)
        return None

    def taken(self, sequence: int) -> None:
        """The bucket's memory may be used again."""
        try:
            os.write(self._taken, _TAKEN.pack(sequence))
        except OSError as error:  # gone, or it does not listen
            raise IpcError(f"the sender does not take notes any more: {error}") from None

    def close(self) -> None:
        os.close(self._ready)
        os.close(self._taken)


def _read(fd: int, nbytes: int) -> bytes | None:
    """A note; None if there is none, and b"" if nobody is left who could write one."""
    try:
        return os.read(fd, nbytes)
    except BlockingIOError:
        return None


def _open(pid: int, told: Any, how: int) -> int:
    """A pipe's end of another process: `told` is its descriptor there and its inode."""
    if not isinstance(told, list) or len(told) != 2 or not all(isinstance(number, int) for number in told):
        raise IpcError(f"notes must name ready and taken, each by descriptor and inode, got {told!r}")
    where, inode = f"/proc/{pid}/fd/{told[0]}", told[1]
    with contextlib.suppress(OSError):
        if os.readlink(where) == f"pipe:[{inode}]":
            opened = os.open(where, how | os.O_NONBLOCK | os.O_CLOEXEC)
            found = os.fstat(opened)
            if stat.S_ISFIFO(found.st_mode) and found.st_ino == inode:
                return opened
            os.close(opened)
    raise IpcError(f"{where} is not the pipe of this sender's notes, or it has ended")
