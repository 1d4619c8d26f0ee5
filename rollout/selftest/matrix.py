"""The guarantee, cell by cell: one workload under every combination of conditions, each run compared bit for bit with the plainest.

A cell counts only if its conditions were met: every step is watched, and a run without the chunks, hits or preemptions it should
have had is an error.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.model_runner import ModelRunner
from ..engine.params import SamplingParams
from ..engine.runner_info import RunnerInfo
from ..engine.types import RolloutRequest, SampleOutput, StepPlan, StepResult

BLOCK = 32
SHARED, SHORTEST, OUTPUT, FORCED = 2 * BLOCK, 90, 48, 32
"""tokens: common opening of the prompts; shortest prompt; output; output given again where a cell re-prefills"""
CHUNK = 24
"""tokens of a step that has to cut every prompt, cached opening or not"""
WHOLE = 4096
PREEMPT_EVERY = 12
"""steps between forced preemptions of a request that is alone, and so is never pushed out by another"""
COLUMNS = ("model_logprobs", "temperature_logprobs", "entropy")
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
)

Outputs = dict[str, SampleOutput]
Floats = Sequence[float | None] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One combination. All false is the baseline's own."""

    prefilled: bool = False
    """most of the output is fed in again instead of sampled"""
    cached: bool = False
    preempted: bool = False
    batch: bool = False
    chunked: bool = False

    @property
    def num_blocks(self) -> int:
        """A pool that two to four requests outgrow, or one that holds all."""
        if not self.preempted:
            return 64
        return 10 if self.cached and self.prefilled else 9

    def __str__(self) -> str:
        names = [f.name if getattr(self, f.name) else "" for f in fields(self)]
        return ", ".join(filter(None, names)) or "plain"


def cells() -> Iterator[Cell]:
    for values in product((False, True), repeat=5):
        yield Cell(**dict(zip((f.name for f in fields(Cell)), values, strict=True)))


class ConditionNotMet(Exception):
    """A run was not what its cell says."""


class _Watch:
    """A runner that notes what the steps were."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.info: RunnerInfo = runner.info
        self.updates, self.sleep, self.wake, self.check = runner.updates, runner.sleep, runner.wake, runner.check
        self.forget()

    def forget(self) -> None:
        self.most_entries = 0
        self.partial_prefills = 0

    def execute(self, plan: StepPlan) -> StepResult:
        draws = {entry for entry, forced in zip(plan.row_entry, plan.row_forced, strict=True) if forced < 0}
        self.most_entries = max(self.most_entries, len(plan.slots))
        self.partial_prefills += len(plan.slots) - len(draws)
        return self._runner.execute(plan)

    def close(self) -> None:
        self._runner.close()


def make_workload(num_requests: int, vocab_size: int) -> list[RolloutRequest]:
    """Requests of all kinds of sampling whose prompts open alike; the same ones every time."""
    rng = random.Random(vocab_size)
    opening = [rng.randrange(vocab_size) for _ in range(SHARED)]
    return [
        RolloutRequest(
            request_id=f"request {i}",
            prompt_token_ids=(*opening, *(rng.randrange(vocab_size) for _ in range(SHORTEST + i % 6 - SHARED))),
            params=SamplingParams(seed=1000 + i, max_tokens=OUTPUT, ignore_eos=True, **SAMPLING[i % len(SAMPLING)]),
            include=COLUMNS,
        )
        for i in range(num_requests)
    ]


def open_engine(config: EngineConfig, **options: Any) -> tuple[Engine, _Watch]:
    """An engine of its own for `config` with a few fields changed."""
    changes: dict[str, Any] = {}
    for name in ("cache", "scheduler", "numerics"):
        part = getattr(config, name)
        names = {f.name for f in fields(part)}
        changes[name] = replace(part, **{k: v for k, v in options.items() if k in names})
    watch = _Watch(ModelRunner(replace(config, **changes)))
    return Engine(config, runner=watch), watch


def run(engine: Engine, requests: Sequence[RolloutRequest], *, alone: bool = True, preempt: bool = False) -> Outputs:
    """Final outputs by request, one request after another or all together; with `preempt` everything is pushed out now and then."""
    outputs: Outputs = {}
    for group in [[r] for r in requests] if alone else [list(requests)]:
        for request in group:
            engine.add_request(request)
        num_steps = 0
        while engine.has_work:
            outputs.update({o.request_id: o for o in engine.step() if o.finished})
            num_steps += 1
            if preempt and num_steps % PREEMPT_EVERY == 0:
                engine.scheduler.preempt_all()
    return outputs


def _packed(values: Floats) -> bytes:
    return b"".join(b"none" if v is None else struct.pack("<d", v) for v in values or ())


def differing(outputs: Outputs, baseline: Outputs) -> list[str]:
    """What differs in any bit: "request 3 from token 7 on: ids, logprobs"."""
    found = []
    for name, output in outputs.items():
        want = baseline[name]
        columns = [c for c in ("logprobs", *COLUMNS) if _packed(getattr(output, c)) != _packed(getattr(want, c))]
        if output.token_ids != want.token_ids or columns:
            pairs = zip(output.token_ids, output.logprobs, want.token_ids, want.logprobs, strict=False)
            at = next((i for i, (a, p, b, q) in enumerate(pairs) if (a, p) != (b, q)), len(output.token_ids))
            what = ["ids"] * (output.token_ids != want.token_ids) + columns
            found.append(f"{name} from token {at} on: {', '.join(what)}")
    return found


class Matrix:
    """All cells of one model and dtype. `config` names model, dtype, build and threads."""

    def __init__(self, config: EngineConfig, num_requests: int, num_alone: int) -> None:
        self.config = replace(config, max_model_len=SHORTEST + 6 + OUTPUT)
        self._num_alone = num_alone
        engine, watch = open_engine(self.config, num_blocks=64, max_batch_tokens=WHOLE, prefix_cache=False)
        with engine:
            self.info = engine.info
            self.requests = make_workload(num_requests, engine.info.vocab_size)
            self.baseline = run(engine, self.requests)
            self._check_conditions(Cell(), watch, self.baseline, engine.stats()["preemptions"])

    def verdicts(self, show: Callable[[Cell], None]) -> Iterator[tuple[Cell, list[str]]]:
        """Each cell with what is wrong in it; engines are opened once for all cells that can share one."""
        groups: dict[tuple[bool, bool, int], list[Cell]] = {}
        for cell in cells():
            groups.setdefault((cell.chunked, cell.cached, cell.num_blocks), []).append(cell)
        for (chunked, cached, num_blocks), group in groups.items():
            engine, watch = open_engine(
                self.config, num_blocks=num_blocks, max_batch_tokens=CHUNK if chunked else WHOLE, prefix_cache=cached
            )
            with engine:
                for cell in group:
                    show(cell)
                    yield cell, self._verdict(cell, engine, watch)

    def _verdict(self, cell: Cell, engine: Engine, watch: _Watch) -> list[str]:
        requests = self.requests if cell.batch else self.requests[: self._num_alone]
        if cell.cached:
            engine.reset_prefix_cache()
            ids = (*requests[0].prompt_token_ids[:SHARED], 0)
            run(engine, [RolloutRequest(request_id="opening", prompt_token_ids=ids, params=SamplingParams(max_tokens=1))])
        if cell.prefilled:
            requests = [replace(r, forced_token_ids=tuple(self.baseline[r.request_id].token_ids[:FORCED])) for r in requests]
        before = engine.stats()["preemptions"]
        watch.forget()
        outputs = run(engine, requests, alone=not cell.batch, preempt=cell.preempted and not cell.batch)
        try:
            self._check_conditions(cell, watch, outputs, engine.stats()["preemptions"] - before)
        except ConditionNotMet as problem:
            return [f"not tested: {problem}"]
        wrong = differing(outputs, self.baseline)
        if cell.prefilled and not cell.cached and not cell.preempted:
            wrong += self._scored(engine, requests, alone=not cell.batch)
        return wrong

    def _scored(self, engine: Engine, requests: Sequence[RolloutRequest], *, alone: bool) -> list[str]:
        """Prompt logprobs of prompt and output together, against the model logprobs the output was sampled with."""
        joined = [
            RolloutRequest(
                request_id=r.request_id,
                prompt_token_ids=(*r.prompt_token_ids, *self.baseline[r.request_id].token_ids),
                params=SamplingParams(max_tokens=0),
                include=("prompt_logprobs",),
            )
            for r in requests
        ]
        wrong = []
        for name, output in run(engine, joined, alone=alone).items():
            if _packed((output.prompt_logprobs or [])[-OUTPUT:]) != _packed(self.baseline[name].model_logprobs):
                wrong.append(f"{name}: prompt logprobs of prompt and output")
        return wrong

    @staticmethod
    def _check_conditions(cell: Cell, watch: _Watch, outputs: Outputs, preemptions: int) -> None:
        cached = [output.cached_tokens for output in outputs.values()]
        for met, problem in (
            ((watch.most_entries > 1) == cell.batch, f"steps held up to {watch.most_entries} requests"),
            (not cell.chunked or watch.partial_prefills >= len(outputs), f"only {watch.partial_prefills} prefills were cut"),
            (cell.chunked or watch.partial_prefills == 0, f"{watch.partial_prefills} prefills were cut"),
            (not cell.cached or min(cached) >= SHARED, f"only {min(cached)} prompt tokens came from the cache"),
            (cell.cached or max(cached) == 0, f"{max(cached)} prompt tokens came from the cache"),
            ((preemptions > 0) == cell.preempted, f"{preemptions} preemptions"),
            (all(output.finish_reason == "length" for output in outputs.values()), "a request did not run to its end"),
        ):
            if not met:
                raise ConditionNotMet(problem)

    def other(self, *, reverse: bool = False, **options: Any) -> list[str]:
        """What differs in a batch with other engine options, or with the requests in reverse order."""
        engine, _ = open_engine(self.config, **{"num_blocks": 64 * BLOCK // options.get("block_tokens", BLOCK), **options})
        with engine:
            return differing(run(engine, self.requests[:: -1 if reverse else 1], alone=False), self.baseline)
