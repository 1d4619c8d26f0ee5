"""The thread that feeds TRL's AsyncGRPOTrainer, on a fleet that answers at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rollsync import SamplingParams
from rollsync.trainer_adapters import trl_async_worker
from rollsync.trainer_adapters.trl_async import rollout_worker
from rollsync.trainer_adapters.trl_async_worker import Plan, RolloutWorker

ROWS = [{"prompt": str(i)} for i in range(5)]
PLAN = {
    "urls": ("http://there",), "token": None, "params": SamplingParams(), "num_generations": 2, "groups_in_flight": 3, "max_version_lag": 1,
    "seed": 0, "chat_template_kwargs": {}, "patience_s": 1.0, "reward_timeout_s": 30.0, "stop_timeout_s": 10.0,
}  # fmt: skip


class Fleet:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    async def rollouts(self, prompts: list[list[int]], n: int, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0.001)
        spans = [{"version": 0, "start": 0, "end": 1}]
        sample = SimpleNamespace(
            token_ids=[7], logprobs=[-1.0], temperature_logprobs=[-1.0], finish_reason="stop", abort_reason=None, weight_versions=spans
        )
        return SimpleNamespace(results=[SimpleNamespace(samples=[sample] * n)])


class Tokenizer:
    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(text)]}

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "seven"


def reward(completions: Any, **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RolloutWorker]]:
    made: list[RolloutWorker] = []
    monkeypatch.setattr(trl_async_worker, "AsyncRolloutFleet", Fleet)
    monkeypatch.setattr(trl_async_worker, "sample_class", lambda: SimpleNamespace)
    monkeypatch.setattr(RolloutWorker, "_check_versions", lambda self: None)

    def worker(*, func: Any = reward, dataset: Any = ROWS, buffer: int = 4, **changes: Any) -> RolloutWorker:
        made.append(RolloutWorker(Plan(**{**PLAN, **changes}), dataset, Tokenizer(), [func], [1.0], buffer))
        return made[-1]

    yield worker
    for one in made:
        one.stop()


def until(what: Callable[[], Any], deadline_s: float = 30.0) -> Any:
    end = time.monotonic() + deadline_s
    while not (found := what()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)
    return found


def failure(worker: RolloutWorker) -> str:
    worker.start()
    until(lambda: worker._failure)
    with pytest.raises(RuntimeError) as caught:
        worker.check_health(60.0)
    return str(caught.value)


@pytest.mark.parametrize("buffer", [1, 5])
def test_stops_lose_no_group_and_leave_no_half_of_one(make: Any, buffer: int) -> None:
    worker = make(buffer=buffer)
    got: list[tuple[int, Any]] = []
    for _ in range(6):
        worker.start()
        for _ in range(4):
            sample = worker.rollout_buffer.get(timeout=30)
            got.append((sample.group_id, sample.prompt[0]["content"]))
        worker.stop()
        assert (len(got) + worker.rollout_buffer.qsize()) % 2 == 0
    while not worker.rollout_buffer.empty():
        got.append((worker.rollout_buffer.get().group_id, None))
    numbers = [number for number, _ in got]
    assert numbers[::2] == numbers[1::2] and len(set(numbers[::2])) == len(numbers[::2]), "each group whole, and once"
    assert all(content in (None, str(number % 5)) for number, content in got)
    assert set(range(worker._next_group)) | worker._ended == set(numbers), "none is passed over"


def test_a_reward_function_that_fails_ends_the_run_and_one_that_is_late_may_be_so_three_times(make: Any) -> None:
    calls, release = [], threading.Event()

    def broken(**kwargs: Any) -> list[float]:
        calls.append(1)
        raise KeyError("answer")

    def late(**kwargs: Any) -> list[float]:
        release.wait(60)
        return [0.0, 0.0]

    assert "the reward function broken failed: KeyError: 'answer'" in failure(make(func=broken)) and len(calls) <= 3
    worker = make(func=late, reward_timeout_s=0.02)
    words = failure(worker)
    release.set()
    assert "4 groups in a row came to nothing" in words and "late gave nothing within 0.02 s" in words


def test_a_dataset_that_can_be_read_once(make: Any) -> None:
    class Once:
        def __init__(self) -> None:
            self.rows = iter(ROWS[:2])

        def __iter__(self) -> Any:
            yield from self.rows

    assert "the training dataset ended after 2 rows and cannot be read again" in failure(make(dataset=Once()))
    assert "the training dataset has no rows" in failure(make(dataset=[]))
    args = SimpleNamespace(num_generations=2)
    for wrong, words in ((iter(ROWS), "which is read once"), (None, "must be a dataset of rows, got None")):
        with pytest.raises(TypeError, match=words):
            rollout_worker("http://there", args, train_dataset=wrong, processing_class=Tokenizer(), reward_funcs=reward)


def test_what_no_queue_of_metrics_had_room_for_is_in_the_next_report(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_async_worker, "REPORT_S", 0.0)
    worker = make()
    worker.metrics_queue.maxsize = 1
    for count in (1.0, 2.0, 4.0):
        worker._add("rollout/failed_groups_total", count)
        worker._add("rollout/score_s", count, gauge=True)
        worker._report(0)
    assert worker.metrics_queue.get_nowait()["rollout/failed_groups_total"] == 1.0
    worker._report(0)
    found = worker.metrics_queue.get_nowait()
    assert found["rollout/failed_groups_total"] == 6.0 and found["rollout/score_s"] == (6.0, 2.0)
