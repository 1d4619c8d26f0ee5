"""What goes between rank 0 and the others: plans and errors as msgpack-able values."""

from __future__ import annotations

import traceback
from typing import Any

from ...weight_sync.manifest import ChunkError, ManifestError
from ...weight_sync.names import GroupError
from ..errors import RollsyncError
from ..wire import error_from_wire, error_to_wire
from .types import SlotInit, StepPlan

_PLAIN = ("step", "block_updates", "copies", "slots", "starts", "counts", "token_ids", "row_entry", "row_offset", "row_slot", "row_forced")


def plan_to_wire(plan: StepPlan) -> list[Any]:
    """A plan without what only sampling needs: that is rank 0's."""
    return [[init.slot for init in plan.new_slots], *(getattr(plan, name) for name in _PLAIN)]


def plan_from_wire(wire: list[Any]) -> StepPlan:
    new_slots = [SlotInit(slot=s, seed=0, sample_index=0, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0) for s in wire[0]]
    return StepPlan(new_slots=new_slots, **dict(zip(_PLAIN, wire[1:], strict=True)))


_BY_NAME: tuple[tuple[str, type[Exception]], ...] = (("chunk", ChunkError), ("value", ValueError), ("memory", MemoryError), ("os", OSError))


def fault_to_wire(error: BaseException) -> list[Any]:
    """[kind, words], and what else the error knows."""
    if isinstance(error, GroupError):
        return ["group", str(error), error.phase, error.cause]
    if isinstance(error, ManifestError):
        return ["manifest", error.problems]
    if isinstance(error, RollsyncError):
        return ["named", error_to_wire(error)]
    if type(error).__name__ == "RankLost":
        return ["lost", str(error)]
    for name, kind in _BY_NAME:
        if isinstance(error, kind):
            return [name, str(error)]
    return ["other", "".join(traceback.format_exception(error))]


def fault_from_wire(wire: list[Any], rank: int) -> Exception:
    """The error again; of an unknown kind with its traceback as words."""
    kind, words, *more = wire
    if kind == "group":
        group_error = GroupError.__new__(GroupError)
        group_error.args = (words,)
        group_error.phase, group_error.cause = more
        return group_error
    if kind == "manifest":
        return ManifestError(words)
    if kind == "named":
        return error_from_wire(words)
    found = dict(_BY_NAME).get(kind)
    return RuntimeError(f"rank {rank} failed:\n{words}") if found is None else found(f"{words} (on rank {rank})")
