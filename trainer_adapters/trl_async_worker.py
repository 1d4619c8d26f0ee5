"""The rollouts of TRL's AsyncGRPOTrainer: a thread that keeps groups in flight on servers, scores them, and queues them for the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..rollout.client import RolloutClient
from ..rollout.engine.params import SamplingParams
from ..rollout.errors import BadRequest, describe
from ..rollout.fleet import AsyncRolloutFleet
from .errors import TargetError
from .group_scores import LateRewards, RewardFunc, Scores, score
from .rows import check_rows, derived_seed
from .trl_params import is_plain

log = logging.getLogger(__name__)

REPORT_S = 1.0
"""between two entries of metrics"""
TICK_S = 0.1
MAX_FAILURES = 4
"""the worker fails with so many groups in a row that were refused, gave rows nobody can train on, or got their rewards too late"""
OUTDATED = "max_version_lag"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a worker does. Seconds, samples."""

    urls: tuple[str, ...]
    token: str | None
    params: SamplingParams
    num_generations: int
    groups_in_flight: int
    max_version_lag: int
    seed: int
    chat_template_kwargs: dict[str, Any]
    patience_s: float
    reward_timeout_s: float
    stop_timeout_s: float


@functools.cache
def sample_class() -> type:
    """TRL's RolloutSample with `weight_versions`: int64, as long as `input_ids`, the version that drew each token; -1 in the prompt."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    made: type = dataclasses.make_dataclass("VersionedSample", [("weight_versions", Any, None)], bases=(RolloutSample,))
    return made


class RolloutWorker:
    """What stands in AsyncGRPOTrainer's `rollout_worker`. See `trl_async.rollout_worker`."""

    def __init__(
        self,
        plan: Plan,
        dataset: Any,
        tokenizer: Any,
        reward_funcs: Sequence[RewardFunc],
        reward_weights: Sequence[float],
        buffer: int,
        first_group: int = 0,
    ) -> None:
        self.plan, self._dataset, self._tokenizer = plan, dataset, tokenizer
        self._funcs, self._weights = list(reward_funcs), list(reward_weights)
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=max(buffer, plan.num_generations))  # groups go in whole
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(maxsize=4096)
        self.model_version = 0
        self._next_group = first_group
        self._ended: set[int] = set()
        self._rows_read = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._beat = time.monotonic()
        self._sums: dict[str, Any] = {}
        self._reported_at = self._beat

    # What the trainer calls, from its own thread

    def start(self) -> None:
        """Begin. A worker that runs already goes on.

        Raises:
            TargetError: a server does not serve the version the trainer is at: the numbers of tokens would mean nothing.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        self._check_versions()
        self._failure, self._beat = None, time.monotonic()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="rollsync rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End everything under way, here and on the servers, within `stop_timeout_s`.

        What is queued stays queued; groups that are not, `start` begins anew.
        """
        self._stopping.set()
        thread, loop, main = self._thread, self._loop, self._main
        if thread is None:
            return
        if loop is not None and main is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(main.cancel)
        thread.join(self.plan.stop_timeout_s)
        if thread.is_alive():
            log.error("the rollout worker did not end within %g s: a reward function holds its loop", self.plan.stop_timeout_s)
        self._thread = None

    def update_model_version(self, model_version: int) -> None:
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """RuntimeError with the words of whatever ended the worker, or if its loop has stood still for so long."""
        if self._failure is not None:
            raise RuntimeError(f"the rollout worker has failed: {describe(self._failure)}") from self._failure
        if self._thread is not None and (age_s := time.monotonic() - self._beat) > stale_after_s:
            raise RuntimeError(f"the rollout worker has stood still for {age_s:.0f} s: is a reward function blocking its loop?")

    def _check_versions(self) -> None:
        problems = []
        for url in self.plan.urls:
            with RolloutClient(url, self.plan.token, timeout_s=self.plan.patience_s) as client:
                found = client.weights()["weights"]["version"]
            if found != self.model_version:
                problems.append(f"{url} serves version {found} of the weights and the trainer is at {self.model_version}")
        if problems:
            raise TargetError([*problems, "weights must come by rollsync's weight_transfer alone, which numbers them as TRL does"])

    # The thread

    def _run(self) -> None:
        try:
            asyncio.run(self._supervise())
        except BaseException as error:  # check_health tells the trainer
            if isinstance(error, asyncio.CancelledError) and self._stopping.is_set():
                return
            self._failure = error
            log.error("the rollout worker has failed: %s", describe(error))

    async def _supervise(self) -> None:
        """Keep so many groups in flight, until stopped, a failure that others would repeat, or one too many of the kind they may not."""
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        if self._stopping.is_set():
            return
        plan, rows = self.plan, self._rows()
        going: set[asyncio.Task[str | None]] = set()
        failures = 0
        async with AsyncRolloutFleet(plan.urls, plan.token, patience_s=plan.patience_s) as fleet:
            try:
                while True:
                    while len(going) < plan.groups_in_flight:
                        going.add(asyncio.create_task(self._group(fleet, *next(rows))))
                    done, going = await asyncio.wait(going, timeout=TICK_S, return_when="FIRST_COMPLETED")
                    self._beat = time.monotonic()
                    _raise_failures(done)
                    for words in [task.result() for task in done]:
                        failures = 0 if words is None else failures + 1
                        if failures >= MAX_FAILURES:
                            raise TargetError([f"{failures} groups in a row came to nothing: {words}"])
                    self._report(len(going))
            finally:
                for task in going:
                    task.cancel()
                await asyncio.gather(*going, return_exceptions=True)

    def _rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows of the dataset in its order, over and over, each with the number of its group; after a stop, those of unended groups."""
        number = skip = self._next_group
        if hasattr(self._dataset, "__len__") and len(self._dataset):
            skip %= len(self._dataset)
        while True:
            found = False
            for row in self._dataset:
                found = True
                self._rows_read += 1
                if skip:
                    skip -= 1
                    continue
                if number >= self._next_group and number not in self._ended:
                    yield number, dict(row)
                number += 1
            if not found:
                ended = f"ended after {self._rows_read} rows and cannot be read again" if self._rows_read else "has no rows"
                raise TargetError([f"the training dataset {ended}"])

    def _end(self, group_id: int) -> None:
        """This group is queued, or will never be. `_next_group` is the lowest that has not ended, `_ended` holds those above it."""
        self._ended.add(group_id)
        while self._next_group in self._ended:
            self._ended.remove(self._next_group)
            self._next_group += 1

    async def _group(self, fleet: AsyncRolloutFleet, group_id: int, row: dict[str, Any]) -> str | None:
        """Sample, score and queue one group. Words if it came to nothing and others may do better.

        Raises:
            TargetError, ServerUnreachable, ...: no group will do better. A reward function that fails is such a case: what it makes of
                one sample it makes of the next, and a group without its rewards would be a silent change of the task.
        """
        plan, began = self.plan, time.monotonic()
        params = dataclasses.replace(plan.params, seed=derived_seed(plan.seed, group_id))
        column = "temperature_logprobs" if is_plain(params) else "logprobs"
        include = [column] if column != "logprobs" else []
        try:
            prompt_ids = self._prompt_ids(row)
            answer = await fleet.rollouts([prompt_ids], plan.num_generations, params, include, max_version_lag=plan.max_version_lag)
        except BadRequest as error:
            return self._passed_over(group_id, f"the prompt was refused: {error}")
        samples = list(answer.results[0].samples)
        fresh = [s for s in samples if s.abort_reason != OUTDATED and self._lag(s) <= plan.max_version_lag]
        self._add("rollout/dropped_outdated_total", float(len(samples) - len(fresh)))
        if len(fresh) < min(2, plan.num_generations):
            self._end(group_id)
            return None  # nothing to compare with
        try:
            check_rows(fresh, len(fresh), 1 << 31, column=column)
        except TargetError as error:
            return self._passed_over(group_id, str(error))
        self._add("rollout/group_s", time.monotonic() - began, gauge=True)
        try:
            scored = await self._scored(group_id, row, prompt_ids, fresh, column)
        except LateRewards as error:
            return self._passed_over(group_id, str(error))
        await self._queue(group_id, scored)
        return None

    def _passed_over(self, group_id: int, words: str) -> str:
        where = f"group {group_id}"
        if hasattr(self._dataset, "__len__"):
            where += f" (row {group_id % len(self._dataset)} of the dataset)"
        log.warning("%s was passed over: %s", where, words)
        self._add("rollout/failed_groups_total", 1.0)
        self._end(group_id)
        return f"{where}: {words}"

    def _lag(self, sample: Any) -> int:
        return self.model_version - min((span["version"] for span in sample.weight_versions), default=self.model_version)

    def _prompt_ids(self, row: dict[str, Any]) -> list[int]:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False, **self.plan.chat_template_kwargs}
        return list(self._tokenizer.apply_chat_template(prompt, **options))

    async def _scored(self, group_id: int, row: dict[str, Any], prompt_ids: list[int], samples: list[Any], column: str) -> list[Any]:
        """TRL's samples, with rewards and advantages."""
        began, count, prompt = time.monotonic(), len(samples), row["prompt"]
        texts = [self._tokenizer.decode(s.token_ids, skip_special_tokens=True) for s in samples]
        spoken = isinstance(prompt, str)
        said = [[{"role": "assistant", "content": text}] for text in texts]
        columns = {name: [value] * count for name, value in row.items() if name not in ("prompt", "completion", "completion_ids")}
        columns |= {"prompts": [prompt] * count, "completions": texts if spoken else said}
        columns |= {"completion_ids": [list(s.token_ids) for s in samples]}
        scores = await score(self._funcs, self._weights, columns, count, self.plan.reward_timeout_s)
        self._add("rollout/score_s", time.monotonic() - began, gauge=True)
        chat = [{"role": "user", "content": prompt}] if spoken else prompt
        return [self._sample(group_id, chat, said[i], prompt_ids, s, column, scores, i) for i, s in enumerate(samples)]

    def _sample(
        self, group_id: int, prompt: Any, completion: Any, prompt_ids: list[int], sample: Any, column: str, scores: Scores, i: int
    ) -> Any:
        num_prompt, num_new = len(prompt_ids), len(sample.token_ids)
        versions = np.full(num_prompt + num_new, -1, np.int64)
        for span in sample.weight_versions:
            versions[num_prompt + span["start"] : num_prompt + span["end"]] = span["version"]
        drawn_by = versions[num_prompt:]
        metrics = {"reward": scores.rewards[i], "reward_std": scores.std, "sample/versions_mean": float(len(set(drawn_by.tolist())))}
        metrics |= {f"rewards/{name}": values[i] for name, values in scores.by_func.items()}
        self._add("rollout/generated_tok_s", float(num_new))
        self._add("rollout/mixed_tokens_frac", (float((drawn_by != drawn_by[0]).sum()), float(num_new)))
        return sample_class()(
            prompt=prompt,
            completion=completion,
            input_ids=np.asarray([*prompt_ids, *sample.token_ids], np.int64),
            completion_mask=np.asarray([0] * num_prompt + [1] * num_new, np.int64),
            old_log_probs=np.asarray([0.0] * num_prompt + list(getattr(sample, column)), np.float32),
            advantage=scores.advantages[i],
            model_version=int(drawn_by.min()),
            group_id=group_id,
            metrics=metrics,
            weight_versions=versions,
        )

    async def _queue(self, group_id: int, samples: list[Any]) -> None:
        """Hand over the whole group, once there is room: while the trainer is behind, no further groups begin."""
        began = time.monotonic()
        while self.rollout_buffer.maxsize - self.rollout_buffer.qsize() < len(samples):
            await asyncio.sleep(TICK_S / 2)
        for sample in samples:  # nothing is awaited from here on: a stop leaves no half of a group behind
            sample.enqueued_at = time.time()
            self.rollout_buffer.put_nowait(sample)
        self._end(group_id)
        if (waited_s := time.monotonic() - began) > TICK_S / 2:
            self._add("rollout/backpressure_s", waited_s, gauge=True)

    # Metrics: what TRL's own worker reports goes by its names

    def _add(self, name: str, value: Any, *, gauge: bool = False) -> None:
        """Into the next report. Gauges come as (sum, count), of which TRL logs the mean."""
        if gauge:
            value = (value, 1.0)
        before = self._sums.get(name, (0.0, 0.0) if isinstance(value, tuple) else 0.0)
        self._sums[name] = tuple(a + b for a, b in zip(before, value, strict=True)) if isinstance(value, tuple) else before + value

    def _report(self, in_flight: int) -> None:
        now = time.monotonic()
        if now - self._reported_at < REPORT_S:
            return
        sums = {**self._sums, "rollout/inflight": float(in_flight * self.plan.num_generations)}
        sums["rollout/generated_tok_s"] = (float(sums.get("rollout/generated_tok_s", 0.0)), now - self._reported_at)
        with contextlib.suppress(queue.Full):  # a trainer that never logs must not hold anything up: later reports have the sums
            self.metrics_queue.put_nowait(sums)
            self._sums, self._reported_at = {}, now


def _raise_failures(done: Iterable[asyncio.Task[Any]]) -> None:
    """The first failure among them; the others are logged."""
    failures = [asyncio.CancelledError() if task.cancelled() else task.exception() for task in done]
    found = list({describe(error): error for error in failures if error is not None}.values())
    for error in found[1:]:
        log.error("a group failed as well: %s", describe(error))
    if found:
        raise found[0]
