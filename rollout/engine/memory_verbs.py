"""Memory given to the system and had back, tag by tag, with what that means for requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import IllegalState
from .lifecycle import SLEEP_OWNER
from .pauses import Pauses


class MemoryVerbs(Pauses):
    """Sleep and wake. Owned by the thread that steps."""

    def sleep(self, tags: Sequence[str] | None = None, weights: str = "offload") -> dict[str, Any]:
        """Give memory to the system, under a lease of its own. Requests stay; they are computed anew after `wake`.

        Args:
            tags: of weights and kv_cache; None means both.
            weights: offload (to a file) or discard (invalid until a full update commits).

        Returns:
            "freed_bytes" by tag, as the system counts them.

        Raises:
            IllegalState: an update is open, or there is no room for the weights to be kept in; then they are where they were.
        """
        self._engine.check_alive()
        moves = self.lifecycle.plan_sleep(tags, weights)
        report: dict[str, Any] = {"changed": bool(moves), "freed_bytes": {}}
        for tag, state in moves.items():
            if tag == "kv_cache":
                report["recompute_tokens"] = self._engine.scheduler.preempt_all()
                self._engine.scheduler.blocks.reset_cache()
            try:
                report["freed_bytes"][tag] = self._engine.runner.sleep(tag, keep=state == "offloaded")
            except (OSError, MemoryError) as error:
                raise IllegalState(f"{tag} cannot sleep: {error}; it stays as it was, free some room or discard it") from error
            self.lifecycle.hold(SLEEP_OWNER, "recompute")
            self.lifecycle.moved(tag, state)
        return report

    def wake(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Have memory back. Only sleep's own lease is given back, and only once nothing is asleep: another's pause survives.

        Raises:
            IllegalState: the memory is not to be had; it stays asleep and `wake` may be tried again.
        """
        self._engine.check_alive()
        moves = self.lifecycle.plan_wake(tags)
        for tag in moves:
            try:
                self._engine.runner.wake(tag)
            except (OSError, MemoryError) as error:
                raise IllegalState(f"{tag} cannot wake: {error}; it stays asleep, try again") from error
            self.lifecycle.moved(tag, "resident")
        if not self.lifecycle.asleep:
            self.lifecycle.release(SLEEP_OWNER)
        reason = self.lifecycle.why_not_running()
        return {"changed": bool(moves), "asleep": list(self.lifecycle.asleep), "running": reason is None, "reason": reason}
