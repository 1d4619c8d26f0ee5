"""What the engine told of itself last: status, health and metrics are made of it, so they never wait for a step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

BEAT_LATE_S = 5.0
"""no heartbeat for this long: not live"""
STEP_STUCK_S = 120.0
"""one step (or command) lasts this long: not live"""


@dataclass(slots=True)
class Snapshot:
    """The last the engine told of itself."""

    phase: str = "starting"
    phase_age_s: float = 0.0
    beat_at: float = field(default_factory=time.monotonic)
    steps: int = 0
    progress: tuple[str, float] = ("starting", 0.0)
    info: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    stats_at: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    update: dict[str, Any] | None = None
    """the open weight update, told with every beat: also while a command or a step takes long"""

    def state(self, now: float) -> dict[str, Any] | None:
        """The facts of the engine's state (Control.status) as it published them last, times brought up to `now`. None: not yet."""
        published = self.stats.get("state")
        if published is None:
            return None
        age = now - self.stats_at
        leases = [_aged(lease, age) for lease in published["scheduling"]["leases"]]
        found = {**published, "scheduling": {**published["scheduling"], "leases": leases}}
        if found["update"] is not None:
            is_newer = self.update is not None and self.update["id"] == found["update"]["id"] and self.beat_at > self.stats_at
            found["update"] = _aged(self.update, now - self.beat_at) if is_newer else _aged(found["update"], age)
        return found


def _aged(shown: Any, seconds: float) -> dict[str, Any]:
    """Its times, so much later."""
    past = {name: shown[name] + seconds for name in ("elapsed_s",) if name in shown}
    left = {name: max(0.0, shown[name] - seconds) for name in ("expires_in_s", "deadline_in_s") if shown.get(name) is not None}
    return {**shown, **past, **left}


def liveness(snapshot: Snapshot, dead: str | None, now: float) -> str | None:
    """None if the engine's loop moves or idles, else why not."""
    if dead is not None:
        return dead
    late = now - snapshot.beat_at
    if late > BEAT_LATE_S:
        return f"no heartbeat from the engine process for {late:.1f} s (phase {snapshot.phase})"
    if snapshot.phase in ("step", "command") and snapshot.phase_age_s > STEP_STUCK_S:
        return f"the engine has been in one {snapshot.phase} for {snapshot.phase_age_s:.0f} s"
    return None
