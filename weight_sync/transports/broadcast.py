"""The sending end of transports over groups, and of `collective`: packed buckets, broadcast to each engine over a group of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from ..control import UpdateControl, UpdateError
from ..manifest import Bucket
from ..names import DEFAULT_TIMEOUT_S, GroupError
from .base import Transport
from .collective import Group, Operation, form
from .rendezvous import Store
from .runs import BUCKET_BYTES, NEEDS, SendingRun


class GroupTransport(Transport):
    """What transports over groups share: one group per engine, formed at the first sync and kept.

    After a failure, or if an engine has lost its end (it was restarted, another trainer took the name), the next sync forms them anew.

    Args:
        group: their name; a trainer that comes back under the same name takes over what its predecessor left behind.
        port: where the engine is to host their meeting place; 0 lets it choose.
        timeout_s: for forming a group, and for each bucket.
        device: where buckets are packed; cuda sends by NCCL.
    """

    num_buffers = 2

    def __init__(
        self, group: str, *, port: int = 0, timeout_s: float = DEFAULT_TIMEOUT_S, device: torch.device | str = "cpu"
    ) -> None:
        self._name, self._port, self._timeout_s, self._device = group, port, timeout_s, torch.device(device)
        self._gpu = self._device if self._device.type == "cuda" else None
        self._groups: dict[str, Group] = {}
        """by the engine's address"""
        self._buffers: list[Tensor] = []
        self._under_way: dict[tuple[str, int], list[Operation] | GroupError] = {}
        """by the engine's address and the sequence"""

    def prepare(self, buffer_bytes: int) -> None:
        if not self._buffers or self._buffers[0].numel() < buffer_bytes:
            self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, device=self._device) for _ in range(self.num_buffers)]

    def buffer(self, index: int) -> Tensor:
        return self._buffers[index]

    def offer(self) -> dict[str, Any]:
        return {"group": self._name}

    def is_up(self, control: UpdateControl) -> bool:
        """Whether this end of an engine's group can be used."""
        group = self._groups.get(control.address)
        return group is not None and not group.closed_because

    def is_up_there(self, control: UpdateControl) -> bool:
        """Whether the engine still holds the other end of it."""
        theirs = control.groups().get(self._name, {})
        return bool(theirs.get("state") == "formed" and theirs.get("port") == self._groups[control.address].port)

    def send(self, control: UpdateControl, update_id: str, bucket: Bucket, index: int) -> None:
        operations = self._under_way.pop((control.address, bucket.sequence))
        try:
            # The engine's reply first: if anything is wrong there, it says so while a transfer would only run into its deadline.
            control.chunk(update_id, bucket.sender, bucket.sequence)
            if isinstance(operations, GroupError):
                raise operations
            for operation in operations:
                operation.wait()
        except (UpdateError, GroupError) as error:
            self._groups[control.address].close(f"bucket {bucket.sequence} failed: {error}")
            raise

    def reset(self, control: UpdateControl) -> None:
        self._under_way = {key: operation for key, operation in self._under_way.items() if key[0] != control.address}
        if (group := self._groups.pop(control.address, None)) is not None:
            group.close("an update failed")

    def close(self) -> None:
        for group in self._groups.values():
            group.close("the sender ended")
        self._groups.clear()
        self._buffers.clear()


class Broadcast(GroupTransport):
    """Buckets by broadcast, double-buffered: one is packed while another is on its way. Each trainer rank has groups of its own."""

    name = "collective"
    bucket_bytes = BUCKET_BYTES
    needs = NEEDS

    def __init__(self, group: str = "default", **options: Any) -> None:
        super().__init__(group, **options)
        self._base = group

    def connect(self, control: UpdateControl, rank: int) -> None:
        self._name = f"{self._base}.{rank}" if rank else self._base
        if self.is_up(control) and self.is_up_there(control):
            return
        if (old := self._groups.get(control.address)) is not None:
            old.close("it is formed anew")
        self._groups[control.address] = meet_engine(control, self._name, port=self._port, timeout_s=self._timeout_s, device=self._gpu)

    def run(
        self, control: UpdateControl, submit: Callable[..., Future[Any]], update_id: str, sender: int, count: int
    ) -> SendingRun:
        return _BroadcastRun(self._groups[control.address], self._buffers, control, submit, update_id, sender, count)


class _BroadcastRun(SendingRun):
    """Its broadcasts are the notes: each is one that the engine waits for, and frees the buffer at its end."""

    def __init__(self, group: Group, buffers: Sequence[Tensor], *run: Any) -> None:
        super().__init__(*run)
        self._group, self._buffers = group, buffers
        self._under_way: dict[int, Operation] = {}
        """by sequence"""

    def _tell(self, bucket: Bucket, index: int) -> None:
        data = self._buffers[index][: bucket.nbytes]
        self._under_way[bucket.sequence] = self._group.broadcast(data, 0, what=f"bucket {bucket.sequence}")

    def _is_free(self, bucket: Bucket) -> bool:
        if not self._under_way[bucket.sequence].is_over:
            return False
        self._under_way.pop(bucket.sequence).wait()
        return True

    def wait(self, bucket: Bucket) -> None:
        try:
            super().wait(bucket)
        except GroupError:
            if self._call is not None:
                self._call.result()  # what the engine says of it, if it says anything
            raise

    def close(self) -> None:
        if self._under_way:
            self._group.close("not all of an update came over it")


def meet_engine(
    control: UpdateControl,
    name: str,
    *,
    rank: int = 0,
    senders: int = 1,
    port: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: torch.device | None = None,
    place: Mapping[str, Any] | None = None,
) -> Group:
    """Form a group with one engine, as its rank `rank`: the engine chooses the place, then both sides join at once.

    Args:
        senders: ranks below the engine's. The first of them has the engine join.
        place: the engine's answer to `bind_group`, if it was asked before.

    Raises:
        UpdateError: with the engine's own words, and those of this end.
    """
    where = place or control.bind_group({"name": name, "port": port, "senders": senders})
    gone = threading.Event()
    outcome: list[Group | GroupError] = []

    def join_here() -> None:
        try:
            size, backend = where["world_size"], where["backend"]
            store = Store.connect(name, where["host"], where["port"], size, timeout_s, gone.is_set)
            facts: dict[str, Any] = {"backend": backend, "device": device, "timeout_s": timeout_s, "layout": "native"}
            outcome.append(form(store, rank, size, **facts, gone=gone.is_set))
        except GroupError as error:
            outcome.append(error)

    here = threading.Thread(target=join_here, name="rollsync-group-join", daemon=True)
    here.start()
    told: Exception | None = None
    if rank == 0:
        try:
            control.join_group(name, {"rank": senders, "world_size": where["world_size"], "timeout_s": timeout_s})
        except UpdateError as error:
            told = error
            gone.set()
    here.join(timeout_s + 5.0)
    gone.set()  # should it still be at it
    found = outcome[0] if outcome else GroupError("joining", name, where["host"], where["port"], "it did not end in time")
    if told is None and isinstance(found, Group):
        return found
    if isinstance(found, Group):
        found.close("the engine did not join")
    raise UpdateError("; this end: ".join(str(e) for e in (told, found) if isinstance(e, Exception)))
