"""A weight update of one replica, as its server sees it: one transaction, which the leader fills and all ranks end together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...rollout.engine.async_engine import AsyncEngine
from ...rollout.errors import RollsyncError, describe

Outcome = dict[str, Any]
"""{"ok": True, "report": the engine's words on its commit} or {"ok": False, "error": what went wrong}"""


@dataclass(slots=True)
class _Meeting:
    """Ranks that have taken their part of an update, and what became of it."""

    outcome: asyncio.Future[Outcome]
    told: dict[int, str | None] = field(default_factory=dict)
    """by rank: what failed there"""
    all_there: asyncio.Event = field(default_factory=asyncio.Event)


class ReplicaUpdates:
    """Updates of one replica, one at a time.

    Args:
        ranks: how many processes take part in each (verl's workers of the replica); rank 0 leads.
        timeout_s: for an update from its beginning, and for a rank that waits for the others.
    """

    def __init__(self, engine: AsyncEngine, ranks: int, timeout_s: float) -> None:
        self._engine, self._ranks, self._timeout_s = engine, ranks, timeout_s
        self._open: str | None = None
        self._meetings: dict[int, _Meeting] = {}
        """by the number of the update, which every rank counts for itself"""
        self._unattended: dict[int, Outcome] = {}
        """by number: updates that ended while a rank had not come, for when it does"""

    async def begin(self, version: int | None) -> dict[str, Any]:
        """Open a transaction; what a leader left open before is dropped. "id", and the "version" it will be.

        Raises:
            RollsyncError: the engine takes none now, and why.
        """
        await self._drop("its leader began another")
        args = {"version": version, "mode": "full", "owner": "verl", "deadline_s": self._timeout_s}
        opened: dict[str, Any] = await self._engine.command("open_update", **args)
        self._open = opened["id"]
        return opened

    async def take(self, update_id: str, tensors: Sequence[Mapping[str, Any]], data: memoryview) -> None:
        """Take in whole tensors whose bytes lie one behind the other in `data`."""
        lane = f"update {update_id}"
        layout = {"kind": "concatenated"}
        named = await self._engine.aside(lane, "extend", update_id=update_id, tensors=list(tensors), layout=layout)
        ((sender, sequence),) = named["chunks"]
        await self._engine.aside(lane, "chunk", update_id=update_id, sender=sender, sequence=sequence, where={"data": data})

    async def end(self, number: int, rank: int, error: str | None, update_id: str | None, digests: Mapping[str, int] | None) -> Outcome:
        """Called by every rank once it has drained its weights. The same outcome for all: committed, or what went wrong on any of them.

        Args:
            number: of the update, counted by each rank.
            error: why it cannot be, on this rank.
            update_id, digests: the leader's: what `begin` gave, and the digest of every tensor as it was sent.
        """
        if rank and number in self._unattended:
            return self._unattended[number]
        meeting = self._meetings.setdefault(number, _Meeting(asyncio.get_running_loop().create_future()))
        meeting.told[rank] = error
        if len(meeting.told) == self._ranks:
            meeting.all_there.set()
        if rank:
            return await self._other(number, meeting)
        outcome: Outcome = {"ok": False, "error": "the leader of the replica gave up"}  # unless it gets further
        try:
            outcome = await self._lead(meeting, update_id, digests)
        except Exception as error:  # the other ranks wait for an outcome, whatever goes wrong
            outcome = {"ok": False, "error": describe(error)}
        finally:
            self._meetings.pop(number, None)
            meeting.outcome.set_result(outcome)
            if not meeting.all_there.is_set():
                self._unattended = {number: outcome}
        return outcome

    async def _lead(self, meeting: _Meeting, update_id: str | None, digests: Mapping[str, int] | None) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout_s):
                await meeting.all_there.wait()
        except TimeoutError:
            missing = sorted(set(range(self._ranks)) - meeting.told.keys())
            meeting.told[0] = f"rank {', '.join(map(str, missing))} of the replica did not end its part within {self._timeout_s:g} s"
        errors = {rank: words for rank, words in sorted(meeting.told.items()) if words is not None}
        if not errors and update_id is not None:
            try:
                report = await self._engine.command("commit_update", update_id=update_id, digests=dict(digests or {}))
                self._open = None
                return {"ok": True, "report": report}
            except RollsyncError as error:
                errors[0] = str(error)
        words = "; ".join(f"rank {rank}: {text}" if self._ranks > 1 else text for rank, text in errors.items()) or "nothing was sent"
        await self._drop(words)
        return {"ok": False, "error": words}

    async def _other(self, number: int, meeting: _Meeting) -> Outcome:
        try:
            async with asyncio.timeout(2 * self._timeout_s):  # the leader waits as long for the last rank
                return await asyncio.shield(meeting.outcome)
        except TimeoutError:
            self._meetings.pop(number, None)
            return {"ok": False, "error": f"the leader of the replica did not end its part within {2 * self._timeout_s:g} s"}

    async def _drop(self, reason: str) -> None:
        """Abort what is open: nothing of it is served."""
        update_id, self._open = self._open, None
        if update_id is None:
            return
        try:
            await self._engine.command("abort_update", update_id=update_id, reason=reason[:1000])
        except RollsyncError:
            return  # its deadline ended it, it is committed, or the engine is dead
