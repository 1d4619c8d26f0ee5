"""Tensor parallel ranks as threads of this process: what their programs compute, without processes around them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from rollsync.rollout.engine.config import make_config
from rollsync.rollout.engine.model_runner import ModelRunner
from rollsync.rollout.engine.types import StepPlan, StepResult
from torch import Tensor


class ThreadGroup:
    """One rank's end; ranks of a group share `shared` and `barrier`."""

    def __init__(self, rank: int, size: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._shared, self._barrier = rank, size, shared, barrier

    def all_gather(self, parts: list[Tensor]) -> None:
        self._shared[self.rank] = parts[self.rank]
        self._barrier.wait(30)
        for rank, part in enumerate(parts):
            if rank != self.rank:
                part.copy_(self._shared[rank])
        self._barrier.wait(30)

    gather = all_gather

    def finish(self, wait: Callable[[float | None], None]) -> None:
        wait(None)


class ThreadRanks:
    """A Runner over `tp` ModelRunners."""

    def __init__(self, model: str, *, tp: int, **options: Any) -> None:
        shared, barrier = [None] * tp, threading.Barrier(tp)
        config = replace(make_config(model, options), tp=tp)
        self.ranks = [ModelRunner(config, group=ThreadGroup(rank, tp, shared, barrier)) for rank in range(tp)]
        self.info, self.updates = self.ranks[0].info, self.ranks[0].updates
        self._pool = ThreadPoolExecutor(tp)

    def execute(self, plan: StepPlan) -> StepResult:
        results = list(self._pool.map(lambda rank: rank.execute(plan), self.ranks))
        return results[0]

    def check(self) -> None:
        return None

    def close(self) -> None:
        self._pool.shutdown()
        for rank in self.ranks:
            rank.close()
