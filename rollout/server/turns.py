"""Turns: long work on the event loop, in pieces between which others get theirs."""

from __future__ import annotations

import asyncio

PIECE = 32
"""items of a reply, each some 10 to 50 us"""


class Turns:
    """Counts work, and lets others have a turn after `piece` of it. A coroutine that never waits is never seen to be cancelled either."""

    def __init__(self, piece: int = PIECE) -> None:
        self._piece, self._done = piece, 0

    async def after(self, work: int = 1) -> None:
        """So much has been done."""
        self._done += work
        if self._done >= self._piece:
            self._done = 0
            await asyncio.sleep(0)
