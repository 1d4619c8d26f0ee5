"""Trainer ranks that do the same things in the same order: what fails on one raises on all, and nobody waits without end."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, TypeVar

from ..rollout.errors import describe
from ..weight_sync.ranks import Alone, DistRanks, Ranks
from .errors import TargetError

T = TypeVar("T")

LEAVING = "the end of the phase"


class PatientRanks(DistRanks):
    """All of torch.distributed, by a gloo group of their own, so that no other collective comes between and waits have a deadline."""

    def __init__(self, timeout_s: float) -> None:
        import torch.distributed as dist

        super().__init__(dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s)))
        self._timeout_s = timeout_s

    def gather(self, value: Any) -> list[Any]:
        try:
            return super().gather(value)
        except RuntimeError as error:
            words = f"trainer rank {self.rank} waited for the others (at most {self._timeout_s:g} s), and not all came: {error}"
            raise TargetError([words]) from error

    def close(self) -> None:
        """Give the group's sockets back, if torch.distributed still has it."""
        if self._dist.is_initialized():
            self._dist.destroy_process_group(self._group)


def ranks_here(timeout_s: float) -> Ranks:
    """All ranks of torch.distributed, or this process alone if it has none. A collective."""
    import torch.distributed as dist

    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return PatientRanks(timeout_s) if several else Alone()


class Lockstep:
    """Places at which all ranks meet, each of which tells how it fared.

    A rank whose error ends a phase early meets the others at whatever place they have come to: they raise there, and do not wait for it
    again.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._parted = False

    def begin(self) -> None:
        """A new phase: all are there again."""
        self._parted = False

    def together(self, place: str, work: Callable[[], T]) -> T:
        """`work` on every rank, then meet.

        Raises:
            TargetError: on every rank: one failed, or came to another place. Alone, the error itself.
        """
        value: Any = None
        trouble: Exception | None = None
        try:
            value = work()
        except Exception as error:  # raised on every rank below
            trouble = error
        self.meet(place, trouble)
        return value  # type: ignore[no-any-return]

    def meet(self, place: str, trouble: BaseException | None = None, value: Any = None) -> list[Any]:
        """Tell the others, and hear of them: every rank's `value`. See `together`."""
        if self._ranks.size == 1:
            if trouble is not None:
                raise trouble
            return [value]
        if self._parted:
            raise TargetError([f"trainer rank {self._ranks.rank} is alone at {place}: the others have left this phase"]) from trouble
        told: list[tuple[str, str | None, Any]]
        try:
            told = self._ranks.gather((place, None if trouble is None else describe(trouble), value))
        except TargetError as error:
            raise TargetError([f"at {place}: {words}" for words in error.problems]) from trouble or error
        self._parted = LEAVING in (there for there, _, _ in told)
        problems = [f"trainer rank {rank} failed at {there}: {words}" for rank, (there, words, _) in enumerate(told) if words]
        if not problems and any(there != place for there, _, _ in told):
            where = ", ".join(f"rank {rank} at {there}" for rank, (there, _, _) in enumerate(told))
            problems = [f"the trainer's ranks are at different places ({where}): all must make the same calls in a phase"]
        if problems:
            raise TargetError(problems) from trouble
        return [value for _, _, value in told]
