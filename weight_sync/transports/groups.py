"""The groups that one engine rank is in, by name, and the receiving end of the `collective` transport."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..manifest import Bucket, ChunkError
from ..names import DEFAULT_TIMEOUT_S, GroupError
from .collective import Group, Operation, form
from .rendezvous import Store
from .runs import POLL_S, OneByOne, TakingRun

MAX_GROUPS = 64
GUARD_BYTES = 16
SPARE_BYTES = 64 << 20
"""room for messages longer than announced, which end the process in a thread of gloo's if they do not fit; never touched otherwise"""


@dataclass(slots=True)
class _Entry:
    """A group under its name: bound, being joined, or formed."""

    host: str
    port: int
    store: Store | None = None
    group: Group | None = None
    gone: bool = False


class Groups:
    """Groups of one rank. From any thread; `join` blocks, nothing else does.

    Args:
        device: where received bytes lie; its kind chooses the backend.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.num_ranks = 1
        self.device = device or torch.device("cpu")
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    def _replace(self, name: str, entry: _Entry | None, port: int | None = None) -> bool:
        """Put `entry` in a name's place; what was there is torn down. True if there was something (`port`: that meets there)."""
        with self._lock:
            if port is not None and name in self._entries and self._entries[name].port != port:
                return False
            old = self._entries.pop(name, None)
            if entry is not None:
                if len(self._entries) >= MAX_GROUPS:
                    raise GroupError("binding", name, "", 0, f"there are {MAX_GROUPS} groups already: leave one")
                self._entries[name] = entry
        if old is not None:
            old.gone = True
            if old.group is not None:
                old.group.close("it was formed anew" if entry is not None else "this side left it")
        return old is not None

    def bind(self, name: str, host: str, port: int = 0) -> tuple[str, int]:
        """Host the place where a group will meet; where that is. A group of that name is torn down first.

        Raises:
            GroupError: the port is taken.
        """
        self._replace(name, None)
        store = Store.bind(name, host, port)
        self._replace(name, _Entry(host, store.port, store))
        return host, store.port

    def join(
        self,
        name: str,
        *,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        backend: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        layout: str | None = None,
    ) -> Group:
        """Join a group that meets at host and port; blocks until it is formed. One that this rank is in under that name is torn down.

        Raises:
            GroupError: it was not formed in time, or somebody formed or left one of that name meanwhile.
        """
        with self._lock:
            entry, store = self._entries.get(name), None
            if entry is not None and entry.store is not None and entry.store.port == port:
                store, entry.store = entry.store, None
        if entry is None or store is None:
            entry = _Entry(host, port)
            self._replace(name, entry)
        gone: Callable[[], bool] = lambda: entry.gone  # noqa: E731
        try:
            if store is None:
                store = Store.connect(name, host, port, world_size, timeout_s, gone)
                layout = layout or (None if rank else "native")
            else:
                layout = "native"
            device = self.device if self.device.type == "cuda" else None
            group = form(
                store, rank, world_size, backend=backend or self.backend, device=device, timeout_s=timeout_s, layout=layout, gone=gone
            )
        except BaseException:
            with self._lock:
                if self._entries.get(name) is entry:
                    del self._entries[name]
            raise
        with self._lock:
            if not entry.gone:
                entry.group = group
                return group
        group.close("another took its name")
        raise group.error("joining", "somebody left it or formed another of that name meanwhile")

    def leave(self, name: str, port: int | None = None) -> bool:
        """Tear a group down; what waits on it fails soon. False if there is none of that name (`port`: that meets there)."""
        return self._replace(name, None, port)

    def get(self, name: str) -> Group:
        """Raises GroupError if there is none of that name that can be used."""
        with self._lock:
            entry = self._entries.get(name)
            known = ", ".join(self._entries) or "none"
        if entry is None or entry.group is None:
            raise GroupError("opening", name, "", 0, f"no such group is formed (known: {known})")
        if entry.group.closed_because:
            raise entry.group.error("opening", f"{entry.group.closed_because}: form it anew")
        return entry.group

    def status(self) -> dict[str, dict[str, Any]]:
        """Facts by name."""
        with self._lock:
            entries = dict(self._entries)
        found: dict[str, dict[str, Any]] = {}
        for name, entry in entries.items():
            group = entry.group
            if group is None:
                found[name] = {"state": "forming", "host": entry.host, "port": entry.port}
            else:
                facts = {key: getattr(group, key) for key in ("host", "port", "rank", "size", "backend")}
                reason = group.closed_because
                found[name] = {"state": "closed" if reason else "formed", **facts, **({"reason": reason} if reason else {})}
        return found

    def close(self) -> None:
        for name in list(self._entries):
            self._replace(name, None)


Bucketing = Callable[[int, int], Bucket]
"""(sender, sequence) -> what is known of that chunk; raises ChunkError for one that is not (`Receiver.bucket`)"""
Begin = Callable[[Tensor, Bucket], Operation]
"""starts the reception of a bucket into a buffer"""


class GroupLink:
    """Receives an update's buckets from senders, from each in the order in which it sends."""

    def __init__(self, lines: list[_Line]) -> None:
        self._lines = lines

    def view(self, bucket: Bucket, where: Mapping[str, Any]) -> memoryview:
        if not bucket.nbytes:
            return memoryview(b"")
        data: Any = self._of(bucket.sender).take(bucket).cpu().numpy()
        return memoryview(data)

    def _of(self, sender: int) -> _Line:
        if not 0 <= sender < len(self._lines):
            raise ChunkError(f"sender {sender} has no group in this update; it has {len(self._lines)}")
        return self._lines[sender]

    def lost(self) -> str | None:
        """Why no more can come; None while it can."""
        return next((line.group.closed_because for line in self._lines if line.group.closed_because), None)

    def close(self) -> None:
        for line in self._lines:
            line.close()


class CollectiveLink(GroupLink):
    """By broadcast, each sender over a group of its own.

    Args:
        groups: by sender.
        first: the sequence number of the first bucket that is broadcast.
    """

    def __init__(self, groups: list[Group], bucket: Bucketing, first: int = 0) -> None:
        def begin(group: Group) -> Begin:
            return lambda data, b: group.broadcast(data, 0, what=f"bucket {b.sequence}")

        lines = [_Line(group, sender, bucket, begin(group), first, guarded=_receives_only(group)) for sender, group in enumerate(groups)]
        super().__init__(lines)

    def run(self, sender: int, where: Mapping[str, Any]) -> TakingRun:
        return _Arrivals(self._of(sender))


class _Arrivals:
    """Several buckets of one sender, as they come in."""

    def __init__(self, line: _Line) -> None:
        self._line = line
        self._begun = False

    def next(self, bucket: Bucket, patience_s: float) -> Mapping[str, Any] | None:
        """The first is waited for as in a call for it alone: whoever sends it is sending it."""
        until = time.monotonic() + patience_s
        while self._begun and bucket.nbytes and not self._line.has_come:
            if time.monotonic() >= until:
                return None
            time.sleep(POLL_S)
        self._begun = True
        return {}

    def taken(self, bucket: Bucket) -> None:
        return

    def close(self) -> None:
        return


def _receives_only(group: Group) -> bool:
    """Whether this rank passes no broadcast on: then its buffer may be longer than the message. (Of 4 ranks one does.)"""
    return group.device.type == "cpu" and group.size <= 3


class ReshardLink(GroupLink, OneByOne):
    """Point to point, from every sender of one group: the ranks below the engine's."""

    def __init__(self, group: Group, bucket: Bucketing) -> None:
        def begin(data: Tensor, b: Bucket) -> Operation:
            return group.recv(data, b.sender, what=f"bucket {b.sequence}")

        super().__init__([_Line(group, sender, bucket, begin) for sender in range(group.rank)])


def _guarded(data: Tensor, bucket: Bucket) -> list[Tensor]:
    """The bytes after a message of the length announced, which it must leave alone, and its last ones, which it must overwrite."""
    end = bucket.nbytes
    return [data[at : at + GUARD_BYTES] for at in (end, end - GUARD_BYTES) if at >= 0]


class _Line:
    """What comes from one sender. Of two buffers one is being read while the next bucket is received into the other."""

    def __init__(self, group: Group, sender: int, bucket: Bucketing, start: Begin, first: int = 0, guarded: bool = False) -> None:
        self.group, self._sender, self._bucket, self._start = group, sender, bucket, start
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8, device=group.device)] * 2
        self._turn, self._next = 0, first
        self._ahead: tuple[Tensor, Operation] | None = None
        """bucket `_next`, if its reception has begun"""
        self._receiving = False
        """within `take`: what it waits for, or will, is not in `_ahead`"""
        self._over = False
        self._guard = torch.frombuffer(bytearray(secrets.token_bytes(GUARD_BYTES)), dtype=torch.uint8) if guarded else None

    @property
    def has_come(self) -> bool:
        """Whether `take` would not wait for the next bucket, or has an error of its transfer to tell."""
        ahead = self._ahead
        return not self._over and ahead is not None and ahead[1].is_over

    def take(self, bucket: Bucket) -> Tensor:
        """The bytes of the sender's next bucket, valid until the next call."""
        self._receiving = True  # first, and then a look at `_over`; `close` does it the other way round, so one sees the other
        try:
            if self._over:
                raise ChunkError("the update is over")
            due = self._due()
            if due is None or due.sequence != bucket.sequence:
                raise ChunkError(f"chunk {bucket.sequence} of sender {self._sender} is not next in what it sends: {self._next} is")
            data, operation = self._ahead or self._begin(bucket)
            self._ahead = None
            operation.wait()
            self._check_length(data, bucket)
            self._next += 1
            if (due := self._due()) is not None:
                self._ahead = self._begin(due)
            return data[: bucket.nbytes]
        finally:
            self._receiving = False

    def _due(self) -> Bucket | None:
        """The next bucket that holds anything, if it is known."""
        while True:
            try:
                bucket = self._bucket(self._sender, self._next)
            except ChunkError:
                return None
            if bucket.nbytes:
                return bucket
            self._next += 1

    def _begin(self, bucket: Bucket) -> tuple[Tensor, Operation]:
        self._turn = 1 - self._turn
        room = bucket.nbytes if self._guard is None else bucket.nbytes + max(bucket.nbytes, SPARE_BYTES)
        if self._buffers[self._turn].numel() < room:
            self._buffers[self._turn] = torch.empty(room, dtype=torch.uint8, device=self.group.device)
        data = self._buffers[self._turn][:room]
        if self._guard is not None:
            for end in _guarded(data, bucket):
                end.copy_(self._guard)
        return data, self._start(data, bucket)

    def _check_length(self, data: Tensor, bucket: Bucket) -> None:
        """GroupError if the sender's message was not as long as it announced; what it has under way is then of no use either."""
        if self._guard is None:
            return
        after, *last = (torch.equal(end, self._guard) for end in _guarded(data, bucket))
        if after and not any(last):
            return
        cause = f"the message is {'shorter' if after else 'longer'} than the {bucket.nbytes} bytes that were announced"
        self.group.close(cause)
        raise self.group.error("transfer", cause, peer=f"sender {self._sender}", what=f"bucket {bucket.sequence}")

    def close(self) -> None:
        """Nothing is received any more. What was begun would swallow the next update's first bucket, so then the group ends."""
        self._over = True
        if self._receiving or self._ahead is not None:
            self.group.close("an update ended while a bucket was on its way")
