"""The verbs that take a weight update's bytes in: a chunk a call, or many by one as their sender has them ready. On lanes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...weight_sync.manifest import ChunkError
from ...weight_sync.transports.runs import CALL_S, PATIENCE_S
from ..errors import IllegalState, UnknownUpdate
from .live_reads import LiveReads
from .runner_info import ChunkRun
from .update_record import Update


class ChunkVerbs(LiveReads):
    """`take_chunk`. `Control` opens and commits."""

    def _still_open(self, update_id: str) -> Update:
        update = self.find_update(update_id)
        if update.state != "open":
            raise IllegalState(f"update {update_id} is {update.state} ({update.reason}): nothing more is taken in")
        return update

    def find_update(self, update_id: str) -> Update:
        """Raises UnknownUpdate for an id that is unknown or forgotten."""
        if update_id not in self.updates:
            raise UnknownUpdate(f"there is no weight update {update_id!r}")
        return self.updates[update_id]

    def take_chunk(
        self, update_id: str, sender: int, sequence: int, where: Mapping[str, Any], count: int | None = None
    ) -> dict[str, Any]:
        """Receive one chunk and take it in; from any thread but the engine's. The reply says what is left.

        Args:
            count: take up to so many from this one on, as the sender has them ready (ipc, collective); "chunks" says how many it were.

        Raises:
            UnknownUpdate, IllegalState: there is no such update, or it is over. ChunkError, ValueError: the chunk did not come or fit.
        """
        self._engine.check_alive()
        if self._still_open(update_id).reads_folder:
            raise IllegalState(f"update {update_id} reads its folder by itself: it takes no chunks")
        if count is None:
            return self.receive_chunk(update_id, sender, sequence, where)
        coming = self._engine.runner.updates.run(update_id, sender, where)
        receive = lambda number, place: self.receive_chunk(update_id, sender, number, place)  # noqa: E731
        try:
            return _take_run(receive, coming, range(sequence, sequence + count))
        finally:
            self._still_open(update_id)  # should it have ended meanwhile, then that is the news

    def receive_chunk(self, update_id: str, sender: int, sequence: int, where: Mapping[str, Any]) -> dict[str, Any]:
        """`take_chunk`, also for whoever reads a folder."""
        self._engine.check_alive()
        self._still_open(update_id)
        fresh = self._engine.runner.updates.chunk(update_id, sender, sequence, where)
        return {"changed": fresh, **self._engine.runner.updates.progress()}


def _take_run(
    receive: Callable[[int, Mapping[str, Any]], dict[str, Any]], coming: ChunkRun, sequences: Sequence[int]
) -> dict[str, Any]:
    """Take chunks until one is not ready, or the call has lasted long enough. The last one's reply, and in "chunks" how many it were.

    Args:
        receive: takes in one, by its place.

    Raises:
        ChunkError, or what `receive` does: those before it stay taken in.
    """
    reply: dict[str, Any] = {}
    taken, changed, until = 0, False, time.monotonic() + CALL_S
    with contextlib.closing(coming):
        for sequence in sequences:
            place = coming.next(sequence, PATIENCE_S)
            if place is None:
                break
            reply = receive(sequence, place)
            coming.taken(sequence)
            taken, changed = taken + 1, changed or reply["changed"]
            if time.monotonic() >= until:
                break
    if not taken:
        raise ChunkError(f"chunk {sequences[0]} is not ready: its sender is to say where it lies before it calls")
    return {**reply, "changed": changed, "chunks": taken}
