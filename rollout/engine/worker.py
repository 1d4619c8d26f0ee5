"""Ranks 1 and up of a tensor parallel engine, each a child process: `python -m rollsync.rollout.engine.worker ...`.

A rank reads msgpack frames from a socket it inherits: steps, which it runs without an answer (the ranks meet in the gathers), and
calls, which it answers. What receives weights runs on a thread beside. It ends with its parent, whatever happens to that.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgpack  # type: ignore[import-untyped]

from ...kernels.priority import give_way
from .lanes import NICE
from .lifeline import killed_with_parent

if TYPE_CHECKING:
    from .model_runner import ModelRunner

BESIDE = frozenset({"extend", "chunk", "digests", "values", "join_group", "leave_group"})
"""calls that may wait for somebody else, and so get a thread of their own"""


class Channel:
    """Frames to and from the other side; `send` from any thread."""

    def __init__(self, fd: int) -> None:
        self.connection = Connection(fd)
        self._lock = threading.Lock()

    def send(self, *message: Any) -> None:
        """Raises OSError if the other side is gone."""
        frame = msgpack.packb(message)
        with self._lock:
            self.connection.send_bytes(frame)

    def receive(self) -> list[Any]:
        """Raises EOFError or OSError once the other side is gone."""
        message: list[Any] = msgpack.unpackb(self.connection.recv_bytes(), strict_map_key=False)
        return message


class SharedBytes:
    """The bytes that rank 0 hands to all others: one file in memory, mapped by each."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None

    def view(self, nbytes: int) -> memoryview:
        """The first `nbytes`; the file grows if it is smaller."""
        if self._map is None or len(self._map) < nbytes:
            if os.fstat(self._fd).st_size < nbytes:
                os.ftruncate(self._fd, nbytes)
            self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size)  # an older map goes with its last view
        return memoryview(self._map)[:nbytes]

    def release(self) -> None:
        """Give the memory back."""
        self._map = None
        os.ftruncate(self._fd, 0)


class Worker:
    """One rank: what rank 0 asks of it, done in order."""

    def __init__(self, channel: Channel, runner: ModelRunner, shared: SharedBytes, rank: int) -> None:
        self._channel, self._runner, self._shared, self._rank = channel, runner, shared, rank
        updates = runner.updates
        self._calls: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "extend": self._extend,
            "chunk": self._chunk,
            "prepare": lambda digests, refuse_nonfinite: updates.prepare(digests, refuse_nonfinite=refuse_nonfinite),
            "unseal": updates.unseal,
            "commit": updates.commit,
            "abort": updates.abort,
            "digests": updates.digests,
            "values": updates.values,
            "shares": updates.shares,
            "join_group": self._join_group,
            "leave_group": updates.groups.leave,
            "sleep": runner.sleep,
            "wake": runner.wake,
        }

    def serve(self) -> None:
        """Until rank 0 says so. Raises what a step raises; EOFError if rank 0 is gone."""
        from .rank_wire import plan_from_wire

        while True:
            kind, *message = self._channel.receive()
            if kind == "step":
                self._runner.forward(plan_from_wire(message[0]))
            elif kind == "close":
                return
            elif message[1] in BESIDE:
                threading.Thread(target=self._answer_beside, args=message, name=f"rollsync-{message[1]}", daemon=True).start()
            else:
                self._answer(*message)

    def _answer_beside(self, number: int, name: str, args: list[Any]) -> None:
        give_way(NICE)
        self._answer(number, name, args)

    def _answer(self, number: int, name: str, args: list[Any]) -> None:
        from .rank_wire import fault_to_wire

        try:
            reply = ["reply", number, self._calls[name](*args)]
        except Exception as error:  # the caller's: this rank goes on
            reply = ["fault", number, fault_to_wire(error)]
        self._channel.send(*reply)

    def _open(self, update_id: str, manifest: Any, mode: str | None, staged: bool, transport: Any) -> list[str]:
        from ...weight_sync.manifest import Manifest

        read = None if manifest is None else Manifest.from_wire(manifest)
        return self._runner.updates.open(update_id, read, mode=mode, staged=staged, transport=transport)

    def _extend(self, update_id: str, tensors: Any, layout: Mapping[str, Any]) -> list[tuple[int, int]]:
        from ...weight_sync.manifest import read_tensors

        return self._runner.updates.extend(update_id, read_tensors(tensors), layout)

    def _chunk(self, update_id: str, sender: int, sequence: int, where: dict[str, Any], nbytes: int | None) -> bool:
        """`nbytes`: so many bytes of it lie in the shared memory."""
        if nbytes is not None:
            where = {**where, "data": self._shared.view(nbytes)}
        return self._runner.updates.chunk(update_id, sender, sequence, where)

    def _join_group(self, name: str, first_rank: int, timeout_s: float, facts: dict[str, Any]) -> None:
        self._runner.updates.groups.join(name, rank=first_rank + self._rank, timeout_s=timeout_s, **facts)


def main(argv: list[str]) -> int:
    rank, size, parent_pid, talk_fd, store_fd, bytes_fd = map(int, argv)
    killed_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started rank 0 decides what Ctrl-C means
    channel = Channel(talk_fd)
    try:
        import torch

        from .config import EngineConfig
        from .devices import open_device
        from .model_runner import ModelRunner
        from .tensor_parallel import TPGroup

        channel.send("hello")
        config = EngineConfig.from_flat(channel.receive()[0])
        torch.set_num_threads(config.numerics.threads or 1)
        device = open_device(config, rank)
        runner = ModelRunner(config, group=TPGroup(rank, size, store_fd, device=device.name), device=device)
        channel.send("ready", {"weight_bytes": runner.info.weight_bytes, "kv_bytes": runner.info.kv_bytes})
        Worker(channel, runner, SharedBytes(bytes_fd), rank).serve()
    except BaseException as error:  # process edge: rank 0 hears of it
        return _report(channel, error)
    return 0


def _report(channel: Channel, error: BaseException) -> int:
    from .rank_wire import fault_to_wire

    if isinstance(error, EOFError | ConnectionError):  # rank 0 is gone
        return 1
    try:
        channel.send("failed", fault_to_wire(error))
    except OSError:
        sys.excepthook(type(error), error, error.__traceback__)
    return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads that wait for a sender must not hold the exit
