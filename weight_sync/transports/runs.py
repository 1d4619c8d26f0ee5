"""Many buckets by one call: a call takes as many as the sender has ready one after another, and is followed by another while any are left.

So nothing but the bytes goes back and forth for a bucket. A call ends soon after its sender has nothing ready: no end waits in it for
longer than in a call for a single bucket.
"""

from __future__ import annotations

import abc
import concurrent.futures
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from ..control import UpdateControl, UpdateError
from ..manifest import Bucket

POLL_S = 0.0003
"""between two looks at what is under way"""
PATIENCE_S = 0.2
"""how long an engine waits within a call for what is not ready"""
BUCKET_BYTES = 8 << 20
"""without a call for each they can be small: the less, the sooner the engine begins, and the more of it is still in the caches"""
NEEDS = ("weights.chunks.count",)
"""what a server can that takes such calls"""
CALL_S = 1.0
"""after so long it answers, though more may be ready: callers' deadlines are those of single calls"""


class TakingRun(Protocol):
    """The engine's end of one call."""

    def next(self, bucket: Bucket, patience_s: float) -> Mapping[str, Any] | None:
        """What a call for this bucket alone would say of its place, once it is ready; None if it is not in time."""

    def taken(self, bucket: Bucket) -> None:
        """Tell the sender that it is taken in."""

    def close(self) -> None: ...


class OneByOne:
    """A link of the engine's that needs a call for each chunk."""

    def run(self, sender: int, where: Mapping[str, Any]) -> TakingRun:
        raise ValueError("this transport needs a call for each chunk: leave count out")


class SendingRun(abc.ABC):
    """The sending end: one rank's buckets for one engine, handed over and waited for by one thread.

    Args:
        submit: runs a call beside, in order with others to that engine.
        count: how many buckets there are, from 0 on.
    """

    def __init__(
        self, control: UpdateControl, submit: Callable[..., Future[Any]], update_id: str, sender: int, count: int, **where: Any
    ) -> None:
        self._submit, self._count = submit, count
        self._ask = lambda first: control.chunk(update_id, sender, first, count=count - first, **where)
        self._call: Future[Any] | None = None
        self._answered = self._handed = 0
        """buckets that calls which are over have taken; that were handed over"""

    def hand_over(self, bucket: Bucket, index: int) -> None:
        """Buffer `index` holds this bucket, the next."""
        self._tell(bucket, index)
        self._handed = bucket.sequence + 1
        self._go_on()

    def wait(self, bucket: Bucket) -> None:
        """Until its buffer is free. Raises what ended the call, if that was an error."""
        while not self._is_free(bucket):
            self._go_on()
            time.sleep(POLL_S)
        while bucket.sequence + 1 == self._count > self._answered:  # the last one: the engine is to say so itself
            self._go_on()
            if self._call is not None:
                concurrent.futures.wait([self._call])

    def close(self) -> None:
        """All were taken, or it is given up."""
        return

    def _go_on(self) -> None:
        """Have a call under way for what was handed over. Raises what ended the last one, if that was an error."""
        if self._call is not None:
            if not self._call.done():
                return
            taken = self._call.result()["chunks"]  # an error is the end: it stays the last call
            if taken < 1:
                raise UpdateError(f"the engine took no chunk from {self._answered} on, and did not say why")
            self._call = None
            self._answered += taken
        if self._answered < self._handed:
            self._call = self._submit(self._ask, self._answered)

    @abc.abstractmethod
    def _tell(self, bucket: Bucket, index: int) -> None:
        """Have the engine know where it is, or have it on its way."""

    @abc.abstractmethod
    def _is_free(self, bucket: Bucket) -> bool:
        """Whether its buffer is not needed any more."""
