"""What weight updates cost and how they ended: plain numbers in the engine's stats. What they are called outside stands in metrics.py."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

PHASES = ("transfer", "prepare", "commit", "total")
"""of an update that committed, in seconds: from open to the commit call, its checks, its switch, all of it"""
CAUSES = ("request", "deadline", "connection", "group", "failure")
"""why an update was aborted: somebody asked, its deadline passed, the connection that held it dropped, the group it came by was lost,
its switch failed"""


class UpdateStats:
    """Sums since the start, and the last update's. Owned by the engine's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.commits = self.bytes = self.leases_expired = 0
        self.aborts: Counter[str] = Counter()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.last_seconds: dict[str, float] = {}
        self.stall_s = self.last_stall_s = 0.0
        """for how long no step could run because of updates"""
        self._paused_s = 0.0
        self._paused_since: float | None = None
        self._weights_since = time.time()

    def committed(self, *, opened_at: float, asked_at: float, checked_at: float, num_bytes: int, in_place: bool) -> None:
        """An update has just become current; times by the clock."""
        now = self._clock()
        self.last_seconds = dict(
            zip(PHASES, (asked_at - opened_at, checked_at - asked_at, now - checked_at, now - opened_at), strict=True)
        )
        for phase, seconds in self.last_seconds.items():
            self.seconds[phase] += seconds
        self.last_stall_s = now - (opened_at if in_place else asked_at)
        self.stall_s += self.last_stall_s
        self.commits += 1
        self.bytes += num_bytes
        self._weights_since = time.time()

    def note_pause(self, paused: bool) -> None:
        """Called whenever leases may have changed."""
        now = self._clock()
        if paused and self._paused_since is None:
            self._paused_since = now
        elif not paused and self._paused_since is not None:
            self._paused_s += now - self._paused_since
            self._paused_since = None

    def to_stats(self) -> dict[str, Any]:
        running = 0.0 if self._paused_since is None else self._clock() - self._paused_since
        return {
            "commits": self.commits,
            "aborts": {cause: self.aborts[cause] for cause in CAUSES},
            "bytes": self.bytes,
            "seconds": dict(self.seconds),
            "last_seconds": dict(self.last_seconds),
            "stall_s": self.stall_s,
            "last_stall_s": self.last_stall_s,
            "paused_s": self._paused_s + running,
            "leases_expired": self.leases_expired,
            "weights_since": self._weights_since,
        }
