"""The trainer's ranks: one of them, or a torch.distributed group. What they do together succeeds or fails on all of them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .control import UpdateError
from .manifest import DTYPE_BYTES, TensorEntry, TensorSlice, bad_dtype
from .sources import TensorMeta, WeightSource


class Ranks(Protocol):
    """The trainer's ranks, as far as a sender needs them. `torch.distributed` behind `DistRanks`; alone by default."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""


class Alone:
    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


class DistRanks:
    """Ranks of an initialised torch.distributed group; `group` must be able to carry objects (gloo)."""

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self._dist.all_gather_object(values, value, group=self._group)
        return values


def agree(ranks: Ranks, source: WeightSource) -> list[TensorEntry]:
    """Every tensor, and which rank holds which slice of it.

    Raises:
        UpdateError: on all ranks: one failed, they name different tensors, or a dtype that does not travel.
    """
    per_rank: list[list[TensorMeta]] = together(ranks, "connect", source.metadata)
    first = per_rank[0]
    for rank, metas in enumerate(per_rank):
        if [(m.name, m.dtype, m.shape) for m in metas] != [(m.name, m.dtype, m.shape) for m in first]:
            raise UpdateError(f"trainer ranks 0 and {rank} name different tensors: a source must list the same on every rank")
    if wrong := [bad_dtype(m.name, m.dtype) for m in first if m.dtype not in DTYPE_BYTES]:
        raise UpdateError(f"these weights cannot be sent: {'; '.join(wrong)}")
    entries = []
    for i, meta in enumerate(first):
        slices = tuple(TensorSlice(rank, box) for rank, metas in enumerate(per_rank) for box in metas[i].boxes)
        entries.append(TensorEntry(meta.name, meta.dtype, meta.shape, slices))
    return entries


def together(ranks: Ranks, phase: str, work: Callable[[], Any], lead: bool = False) -> Any:
    """Run `work` on every rank (`lead`: on rank 0); all raise UpdateError if one failed. Every rank's value, or the leader's."""
    outcome: tuple[bool, Any] = (True, None)
    if not lead or ranks.rank == 0:
        try:
            outcome = (True, work())
        except Exception as error:  # reported on every rank below
            outcome = (False, f"{error}" if isinstance(error, UpdateError) else f"{type(error).__name__}: {error}")
    outcomes = ranks.gather(outcome)
    for rank, (ok, value) in enumerate(outcomes):
        if not ok:
            where = f" on trainer rank {rank}" if ranks.size > 1 else ""
            raise UpdateError(f"weight update failed in {phase}{where}: {value}")
    return outcomes[0][1] if lead else [value for _, value in outcomes]
