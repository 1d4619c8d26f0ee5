"""Groups of processes that move weights to each other: gloo on the CPU, NCCL on CUDA, behind one class.

A group joins one sender (rank 0) and the ranks of one engine, so that an engine that dies never hangs another. It stands beside
torch.distributed's default group, which trainer and engine keep for themselves. Every wait has a deadline; after any failure a group
is of no use any more and is formed anew, which costs some ten milliseconds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from ..names import BACKENDS, DEFAULT_TIMEOUT_S, LAYOUTS, GroupError
from .rendezvous import Store, meet, words

CUT_TAG = 0x7FFFFF


class Work(Protocol):
    """An operation under way. It holds on to its tensor until it is over."""

    def wait(self, timeout_s: float) -> None:
        """Raises RuntimeError if it failed or is not over in time; the channel is then to be cut."""

    @property
    def is_over(self) -> bool:
        """Whether `wait` would not wait."""


class Channel(Protocol):
    """What a backend provides. Operations are started in one order on all ranks."""

    device: torch.device

    def broadcast(self, tensor: Tensor, root: int) -> Work: ...

    def send(self, tensor: Tensor, peer: int) -> Work: ...

    def recv(self, tensor: Tensor, peer: int) -> Work: ...

    def cut(self) -> None:
        """End it: operations under way fail on both sides, here at once. From any thread."""


@dataclass(frozen=True, slots=True)
class _GlooWork:
    work: Any

    def wait(self, timeout_s: float) -> None:
        self.work.wait(timedelta(seconds=max(timeout_s, 0.001)))

    @property
    def is_over(self) -> bool:
        return bool(self.work.is_completed())


class GlooChannel:
    """torch's gloo process group, without torch.distributed's registry."""

    device = torch.device("cpu")

    def __init__(self, store: Store, keys: Any, rank: int, size: int, timeout_s: float) -> None:
        from torch._C import _distributed_c10d

        gloo: Any = _distributed_c10d.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 2
        options._devices = [gloo.create_device(hostname=store.local_host)]
        self._group = gloo(keys, rank, size, options)
        self._rank, self._size = rank, size

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        return _GlooWork(self._group.broadcast(tensor, root))

    def send(self, tensor: Tensor, peer: int) -> Work:
        return _GlooWork(self._group.send([tensor], peer, 0))

    def recv(self, tensor: Tensor, peer: int) -> Work:
        return _GlooWork(self._group.recv([tensor], peer, 0))

    def cut(self) -> None:
        # gloo has no abort, but any wait that times out closes every pair of its context, and so ends all that is under way.
        group = self._group
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], (self._rank + 1) % self._size, CUT_TAG).wait(timedelta(milliseconds=1))


class Operation:
    """A broadcast, send or receive of a group that was started."""

    def __init__(self, group: Group, work: Work, peer: str, what: str) -> None:
        self._group, self._work, self._peer, self._what = group, work, peer, what
        self._began = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether `wait` would not wait: it is done, has failed, or has taken too long."""
        return time.monotonic() - self._began >= self._group.timeout_s or bool(self._group.closed_because) or self._work.is_over

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it is over; by default as long as the group allows, counted from its start.

        Raises:
            GroupError: it failed or took too long. The group is closed then.
        """
        group = self._group
        limit = group.timeout_s if timeout_s is None else timeout_s
        try:
            self._work.wait(self._began + limit - time.monotonic())
        except RuntimeError as error:
            elapsed = time.monotonic() - self._began
            cause = f"nothing came through within {limit:g} s" if elapsed >= limit * 0.99 else words(error)
            if group.closed_because:
                cause = f"the group was closed: {group.closed_because}"
            group.close(cause)
            raise group.error("transfer", cause, peer=self._peer, what=self._what, elapsed_s=elapsed) from None


class Group:
    """One rank of a group that is formed; see `form`. Operations are started by one thread, in the same order on every rank.

    Attributes:
        name, host, port: what it is called, where its ranks met.
        rank, size: of this process, 0 the sender; of all.
        backend: gloo or nccl.
        closed_because: why it can no longer be used; empty while it can.
    """

    def __init__(self, channel: Channel, store: Store, rank: int, size: int, backend: str, timeout_s: float) -> None:
        self.name, self.host, self.port = store.name, store.host, store.port
        self.rank, self.size, self.backend, self.timeout_s = rank, size, backend, timeout_s
        self.closed_because = ""
        self._channel: Channel | None = channel
        self._store: Store | None = store
        self._lock = threading.Lock()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self._channel is None else self._channel.device

    def error(self, phase: str, cause: str, **facts: Any) -> GroupError:
        return GroupError(phase, self.name, self.host, self.port, cause, **facts)

    def _start(self, begin: Callable[[Channel], Work], peer: str, what: str) -> Operation:
        channel = self._channel
        if channel is None:
            raise self.error("transfer", f"the group was closed: {self.closed_because}", peer=peer, what=what)
        try:
            return Operation(self, begin(channel), peer, what)
        except RuntimeError as error:
            self.close(words(error))
            raise self.error("transfer", words(error), peer=peer, what=what) from None

    def broadcast(self, buffer: Tensor, root: int = 0, what: str = "") -> Operation:
        """Start copying `buffer` of rank `root` into that of every other rank.

        Args:
            buffer: contiguous, of the same number of bytes everywhere, on the group's device; not to be touched until it is over.
            what: named in errors, e.g. "bucket 3".
        """
        peer = "rank 0" if self.rank != root else "the engine" if self.size == 2 else f"{self.size - 1} ranks"
        return self._start(lambda channel: channel.broadcast(buffer, root), peer, what)

    def send(self, buffer: Tensor, peer: int, what: str = "") -> Operation:
        """Start sending to one rank; it receives in the order in which this one sends."""
        return self._start(lambda channel: channel.send(buffer, peer), f"rank {peer}", what)

    def recv(self, buffer: Tensor, peer: int, what: str = "") -> Operation:
        """Start receiving from one rank."""
        return self._start(lambda channel: channel.recv(buffer, peer), f"rank {peer}", what)

    def close(self, reason: str = "closed") -> None:
        """Tear it down. From any thread, any number of times; waits for nobody, and what others wait for fails soon."""
        with self._lock:
            channel, store = self._channel, self._store
            self._channel = self._store = None
            self.closed_because = self.closed_because or reason
        if channel is not None:
            _dispose(channel, store)


def _dispose(channel: Channel | None, store: Store | None) -> None:
    """Free sockets and threads. On a thread of its own: destructors of a group whose peer froze may take until its timeout."""

    def dispose(held: list[Any]) -> None:
        channel = held.pop()
        if channel is not None:
            channel.cut()
        del channel
        held.clear()

    held = [store, channel]
    thread = threading.Thread(target=dispose, args=(held,), name="rollsync-group-close", daemon=True)
    del channel, store
    thread.start()
    thread.join(1.0)


def form(
    store: Store,
    rank: int,
    size: int,
    *,
    backend: str = "gloo",
    device: torch.device | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    layout: str | None = None,
    gone: Callable[[], bool] = lambda: False,
) -> Group:
    """Join the group that meets at `store`; returns once every rank has. Takes the store over, also if it fails.

    Args:
        backend: gloo or nccl.
        device: nccl: this rank's GPU.
        timeout_s: for joining, and later for every operation.
        layout: how the ranks meet; None finds out. See `rendezvous`.
        gone: true once nobody wants it any more; looked at while waiting.

    Raises:
        GroupError: naming host, port, who is missing, and the backend's words.
    """
    began = time.monotonic()
    channel: Channel | None = None
    try:
        if backend not in BACKENDS:
            raise GroupError("joining", store.name, store.host, store.port, f"backend must be gloo or nccl, got {backend!r}")
        if layout is not None and layout not in LAYOUTS:
            raise GroupError("joining", store.name, store.host, store.port, f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        if not 0 <= rank < size:
            raise GroupError("joining", store.name, store.host, store.port, f"rank must be in [0, {size}), got {rank}")
        layout = meet(store, rank, size, backend, began + timeout_s, layout, gone)
        keys = store.prefixed(layout, backend)
        left = max(began + timeout_s - time.monotonic(), 0.5)
        if backend == "nccl":
            from .nccl import NcclChannel

            channel = NcclChannel(store, keys, layout, rank, size, device or torch.device("cuda"), left)
        else:
            channel = GlooChannel(store, keys, rank, size, left)
            channel._group.set_timeout(timedelta(seconds=timeout_s))
        return Group(channel, store, rank, size, backend, timeout_s)
    except BaseException as error:
        _dispose(channel, store)
        if isinstance(error, RuntimeError):
            cause, elapsed = words(error), time.monotonic() - began
            raise GroupError("joining", store.name, store.host, store.port, cause, elapsed_s=elapsed) from None
        raise
