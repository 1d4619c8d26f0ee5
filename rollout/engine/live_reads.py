"""Reads of the weights in use, by checkpoint name, from any thread: of one version, never in the middle of a change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import IllegalState
from .memory_verbs import MemoryVerbs
from .update_record import Update


class LiveReads(MemoryVerbs):
    """Digests, values and shards of the live weights. `Control` keeps the updates."""

    updates: dict[str, Update]
    """the last ones, by id; at most one is open"""

    def digests(self) -> dict[str, str]:
        """Digest of every live tensor by name, in hexadecimal and the engine's dtype; from any thread.

        Raises:
            IllegalState: the weights are not there, or keep changing.
        """
        found = self._read_live(self._engine.runner.updates.digests)
        return {name: f"{value:016x}" for name, value in found.items()}

    def versioned_digests(self) -> tuple[int, dict[str, str]]:
        """`digests`, and the weight version they are of."""
        updates = self._engine.runner.updates
        before, found, after = self._read_live(lambda: (updates.version, updates.digests(), updates.version))
        if before != after:
            raise IllegalState("the weights changed while they were read: try again")
        return after, {name: f"{value:016x}" for name, value in found.items()}

    def _read_live(self, read: Callable[[], Any]) -> Any:
        """What `read` finds in the live weights, beside the engine's thread: of one version, never in the middle of a change."""
        self._engine.check_alive()
        for _ in range(3):
            before = self._live_state()
            found = read()
            if before is not None and before == self._live_state():
                return found
        raise IllegalState("the weights changed while they were read, three times: try again")

    def _live_state(self) -> tuple[Any, ...] | None:
        """What differs once the live weights do; None during a switch. IllegalState: they are away, or written to at this time."""
        state = self.lifecycle
        update = self.updates.get(state.update or "")
        if state.memory["weights"] != "resident" or (update is not None and update.apply == "in_place"):
            raise state.illegal("reading the weights")
        return None if update is not None and update.phase == "switching" else (state.epoch, state.memory_moves, state.invalid)

    def weight_values(self, name: str, rows: int) -> dict[str, Any]:
        """The first rows of a live tensor by its checkpoint name, as "values" (nested lists), and its "shape"; from any thread.

        Raises:
            IllegalState: the weights are not there, or keep changing. ValueError: the model has no tensor of this name.
        """
        found = self._read_live(lambda: self._engine.runner.updates.values(name, rows))
        shape = found["shape"]
        values = [[0.0] * (shape[1] if len(shape) == 2 else 1) for _ in range(min(rows, shape[0]))]
        for row, col, piece in found["pieces"]:
            for i, part in enumerate(piece):
                values[row + i][col : col + len(part)] = part
        return {"shape": shape, "values": values if len(shape) == 2 else [v for (v,) in values]}

    def shards(self) -> list[dict[str, list[list[list[int]]]]]:
        """What each rank keeps: [offsets, lengths] of boxes by checkpoint name; from any thread."""
        self._engine.check_alive()
        ranks = self._engine.runner.updates.wanted()
        return [{name: [[list(b.offset), list(b.length)] for b in boxes] for name, boxes in rank.items()} for rank in ranks]
