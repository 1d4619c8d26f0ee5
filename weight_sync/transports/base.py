"""What a sender needs of a transport: buffers to pack into, and a way to hand a packed one to every engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor

from ..control import UpdateControl
from ..manifest import DEFAULT_BUCKET_BYTES, Bucket
from .runs import SendingRun


class Transport(Protocol):
    """The sending end on one trainer rank."""

    name: str
    num_buffers: int
    """buffers that may be in flight at once"""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """that suit it"""
    needs: tuple[str, ...] = ()
    """capabilities that an engine's server must have, beside that of the transport's name"""

    def prepare(self, buffer_bytes: int) -> None:
        """Have `num_buffers` buffers of that size. Called before each update; keeps what fits."""

    def connect(self, control: UpdateControl, rank: int) -> None:
        """Reach one engine, before each update; `rank` of this trainer process. What is still connected is kept."""
        return

    def buffer(self, index: int) -> memoryview | Tensor:
        """Where to pack: bytes in memory, or a uint8 tensor."""

    def offer(self) -> dict[str, Any]:
        """What the open call says of this transport, beside its name."""

    def start(self, control: UpdateControl, bucket: Bucket, index: int) -> None:
        """Buffer `index` is packed. Called for every bucket in its order, before `send`, on the thread that packs."""
        return

    def send(self, control: UpdateControl, update_id: str, bucket: Bucket, index: int) -> None:
        """Hand buffer `index` over to one engine; returns once the engine has taken it in. Only where there is no `run`."""
        return

    def run(
        self, control: UpdateControl, submit: Callable[..., Future[Any]], update_id: str, sender: int, count: int
    ) -> SendingRun | None:
        """What hands over an update's `count` buckets of this rank, many by a call; None if each needs its own."""
        return None

    def reset(self, control: UpdateControl) -> None:
        """An update of that engine failed, or it is removed: forget what is under way to it."""
        return

    def close(self) -> None: ...


class HttpTransport(Transport):
    """Buckets as request bodies: for small models and through firewalls."""

    name = "http"
    num_buffers = 2

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []

    def prepare(self, buffer_bytes: int) -> None:
        if not self._buffers or len(self._buffers[0]) < buffer_bytes:
            self._buffers = [bytearray(buffer_bytes) for _ in range(self.num_buffers)]

    def buffer(self, index: int) -> memoryview:
        return memoryview(self._buffers[index])

    def offer(self) -> dict[str, Any]:
        return {}

    def send(self, control: UpdateControl, update_id: str, bucket: Bucket, index: int) -> None:
        control.chunk(update_id, bucket.sender, bucket.sequence, self.buffer(index)[: bucket.nbytes])

    def close(self) -> None:
        self._buffers.clear()
