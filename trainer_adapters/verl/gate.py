"""Who may begin a request: verl closes the gate while it moves weights, and says what becomes of those who come meanwhile."""

from __future__ import annotations

import asyncio

from ...rollout.errors import IllegalState


class Gate:
    """Open at first. Closed, it parks requests until it opens, or turns them away. Used by one event loop.

    Args:
        timeout_s: how long a request is parked at most.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = asyncio.Event()
        self.is_open, self.rejects = True, False

    def close(self, *, reject: bool) -> None:
        """Let nobody pass. Those already parked stay so, or are turned away as well (`reject`)."""
        self._set(is_open=False, rejects=reject)

    def open(self) -> None:
        self._set(is_open=True, rejects=False)

    def _set(self, *, is_open: bool, rejects: bool) -> None:
        self.is_open, self.rejects = is_open, rejects
        self._changed.set()
        self._changed = asyncio.Event()

    async def admits(self) -> bool:
        """True once the request may begin: it begins before its caller next awaits anything, so a gate that closes finds it inside.

        False: it is turned away.

        Raises:
            IllegalState: it was parked for too long.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                while not self.is_open:
                    if self.rejects:
                        return False
                    await self._changed.wait()
        except TimeoutError:
            words = f"a request waited {self._timeout_s:g} s for resume_generation: the update that closed the gate did not end"
            raise IllegalState(words) from None
        return True
