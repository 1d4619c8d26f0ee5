"""Rewards and advantages of a group: functions sync and async, weighted; what they do wrong is said by name."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rollsync.trainer_adapters.errors import TargetError
from rollsync.trainer_adapters.group_scores import LateRewards, score

COLUMNS = {"completion_ids": [[1], [1, 2], [1, 2, 3]], "answer": ["a", "a", "a"]}


def lengths(completion_ids: Any, **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


async def known(answer: Any, **kwargs: Any) -> list[float | None]:
    return [1.0, None, 3.0]


class Judge:
    async def __call__(self, completion_ids: Any, **kwargs: Any) -> list[float | None]:
        return [None] * len(completion_ids)


def scored(*funcs: Callable[..., Any], weights: Any = None, timeout_s: float = 10.0) -> Any:
    return asyncio.run(score(funcs, weights or [1.0] * len(funcs), COLUMNS, 3, timeout_s))


def test_rewards_are_weighted_sums_of_what_was_given() -> None:
    found = scored(lengths, known, weights=[1.0, 10.0])
    assert found.rewards == [11.0, 2.0, 33.0] and math.isclose(found.mean, 46 / 3)
    std = math.sqrt(sum((r - found.mean) ** 2 for r in found.rewards) / 3)
    assert found.advantages == pytest.approx([(r - found.mean) / (std + 1e-8) for r in found.rewards])
    assert list(found.by_func) == ["lengths", "known"] and math.isnan(found.by_func["known"][1])


def test_a_sample_that_nobody_scores_weighs_nothing() -> None:
    found = scored(known)
    assert math.isnan(found.rewards[1]) and found.advantages[1] == 0.0 and found.mean == 2.0
    assert found.advantages[0] == pytest.approx(-1.0) and found.advantages[2] == pytest.approx(1.0)
    assert scored(Judge()).advantages == [0.0, 0.0, 0.0]


def test_two_functions_of_one_name_are_two_columns() -> None:
    assert list(scored(lengths, functools.partial(lengths)).by_func) == ["lengths", "lengths#2"]


def raises(**kwargs: Any) -> list[float]:
    raise KeyError("answer")


def one_short(**kwargs: Any) -> list[float]:
    return [0.0, 0.0]


def words(**kwargs: Any) -> list[str]:
    return ["good", "bad", "ugly"]


class Slow:
    def __init__(self) -> None:
        self.release, self.finished = threading.Event(), threading.Event()

    def __call__(self, **kwargs: Any) -> list[float]:
        self.release.wait(60)
        self.finished.set()
        return [0.0] * 3


def test_all_that_is_wrong_is_said_at_once_and_nobody_waits_for_one_that_hangs() -> None:
    slow = Slow()
    with pytest.raises(TargetError) as caught:
        scored(raises, one_short, words, slow, timeout_s=1.0)
    failed, short, text, late = caught.value.problems
    assert "raises failed: KeyError" in failed and "one_short gave [0.0, 0.0] for 3 samples" in short
    assert "words gave ['good'" in text and "Slow gave nothing within 1 s" in late and not isinstance(caught.value, LateRewards)
    with pytest.raises(LateRewards, match="Slow gave nothing"):
        scored(lengths, slow, timeout_s=0.1)
    assert not slow.finished.is_set()
    slow.release.set()


@pytest.mark.parametrize("error", [TimeoutError, asyncio.CancelledError])
def test_what_a_function_raises_is_its_own_failure(error: type[BaseException]) -> None:
    async def judge(**kwargs: Any) -> list[float]:
        raise error("the judge is out")

    def in_a_thread(**kwargs: Any) -> list[float]:
        raise error("the judge is out")

    with pytest.raises(TargetError) as caught:
        scored(judge, in_a_thread)
    assert not isinstance(caught.value, LateRewards)
    assert [p.split(": ")[0] for p in caught.value.problems] == [f"the reward function {name} failed" for name in ("judge", "in_a_thread")]
    assert all(error.__name__ in p for p in caught.value.problems)


@pytest.mark.parametrize(
    "given", ["123", b"123", {0: 1.0, 1: 2.0, 2: 3.0}, {1.0, 2.0, 3.0}, ["1", "2", "3"], np.float64(1), np.array(1.0), [math.inf, 1, 1],
              [1, -math.inf, 1], [1, 1, 10**400], [1e300, -1e300, 0]],
)  # fmt: skip
def test_what_is_no_list_of_finite_numbers_is_refused(given: Any) -> None:
    with pytest.raises(TargetError, match=r"rewards? .*(gave|too large)"):
        scored(lambda **kwargs: given)
