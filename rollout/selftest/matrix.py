"""The guarantee, cell by cell: one workload under every combination of conditions, each run compared bit for bit with the plainest.

A cell counts only if its conditions were met: every step is watched, and a run without the chunks, hits or preemptions it should
have had is an error. So is an update that changed nothing on the way.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.parallel_runner import make_runner
from ..engine.params import SamplingParams
from ..engine.runner_info import Runner, RunnerInfo
from ..engine.types import RolloutRequest, SampleOutput, StepPlan, StepResult
from .cells import Cell, by_engine
from .trainer import Trainer
from .updates import Folders

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


class ConditionNotMet(Exception):
    """A run was not what its cell says."""


class _Watch:
    """A runner that notes what the steps were."""

    def __init__(self, runner: Runner) -> None:
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
    changes.update({k: v for k, v in options.items() if k in ("tp", "weights_root")})
    watch = _Watch(make_runner(replace(config, **changes)))
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


def packed(values: Floats) -> bytes:
    return b"".join(b"none" if v is None else struct.pack("<d", v) for v in values or ())


def differing(outputs: Outputs, baseline: Outputs) -> list[str]:
    """What differs in any bit: "request 3 from token 7 on: ids, logprobs"."""
    found = []
    for name, output in outputs.items():
        want = baseline[name]
        columns = [c for c in ("logprobs", *COLUMNS) if packed(getattr(output, c)) != packed(getattr(want, c))]
        if output.token_ids != want.token_ids or columns:
            pairs = zip(output.token_ids, output.logprobs, want.token_ids, want.logprobs, strict=False)
            at = next((i for i, (a, p, b, q) in enumerate(pairs) if (a, p) != (b, q)), len(output.token_ids))
            what = ["ids"] * (output.token_ids != want.token_ids) + columns
            found.append(f"{name} from token {at} on: {', '.join(what)}")
    return found


class Matrix:
    """All cells of one model and dtype. `config` names model, dtype, build and threads."""

    def __init__(self, config: EngineConfig, num_requests: int, num_alone: int, folders: Folders | None = None) -> None:
        self.config = replace(config, max_model_len=SHORTEST + 6 + OUTPUT)
        self._num_alone, self._folders = num_alone, folders
        engine, watch = open_engine(self.config, num_blocks=64, max_batch_tokens=WHOLE, prefix_cache=False)
        with engine:
            self.info = engine.info
            self.requests = make_workload(num_requests, engine.info.vocab_size)
            self.baseline = run(engine, self.requests)
            self.check_conditions(Cell(), watch, self.baseline, engine.stats()["preemptions"])
        self._trainer: Trainer | None = None

    def verdicts(self, cells: Iterable[Cell], show: Callable[[Cell], None]) -> Iterator[tuple[Cell, list[str]]]:
        """Each cell with what is wrong in it; engines are opened once for all cells that can share one."""
        for (tp, chunked, cached, num_blocks), group in by_engine(cells).items():
            root = self._folders.root if self._folders and any(cell.synced for cell in group) else None
            engine, watch = open_engine(
                self.config,
                num_blocks=num_blocks,
                max_batch_tokens=CHUNK if chunked else WHOLE,
                prefix_cache=cached,
                tp=tp,
                weights_root=root,
                threads=1 if tp > 1 else self.config.numerics.threads,
            )
            with engine:
                runs = _Runs(self, engine, watch)
                for synced in (False, True):
                    cells_then = [cell for cell in group if cell.synced == synced]
                    problem = self._sync(engine) if synced and cells_then else None
                    for cell in cells_then:
                        show(cell)
                        yield cell, [problem] if problem else runs.verdict(cell)
                    runs.forget()

    def _sync(self, engine: Engine) -> str | None:
        """Other weights, then the model's own again. What kept that from being a test."""
        assert self._folders is not None
        engine.control.load_folder(self._folders.other, version=1, kv_policy="abort")
        if not differing(run(engine, self.requests[:1]), self.baseline):
            return "not tested: other weights gave the same bits"
        engine.control.load_folder(self._folders.own, version=2, kv_policy="abort")
        return None

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            self._trainer = Trainer(self.config, self.info)
        return self._trainer

    def requests_of(self, cell: Cell) -> list[RolloutRequest]:
        requests = self.requests if cell.batch else self.requests[: self._num_alone]
        if cell.path != "re-prefilled":
            return requests
        return [replace(r, forced_token_ids=tuple(self.baseline[r.request_id].token_ids[:FORCED])) for r in requests]

    @staticmethod
    def check_conditions(cell: Cell, watch: _Watch, outputs: Outputs, preemptions: int) -> None:
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


class _Runs:
    """The runs of one engine."""

    def __init__(self, matrix: Matrix, engine: Engine, watch: _Watch) -> None:
        self._matrix, self._engine, self._watch = matrix, engine, watch
        self.forget()

    def forget(self) -> None:
        """What was sampled, for a trainer to compute again, is that of older weights."""
        self._sampled: dict[Cell, tuple[Outputs, list[str]]] = {}

    def verdict(self, cell: Cell) -> list[str]:
        """All that is wrong."""
        if cell.path == "re-prefilled":
            outputs, wrong = self._run(cell)
            if not wrong and not cell.cached and not cell.preempted:
                wrong = self._scored(cell)
            return wrong
        sampled = replace(cell, path="sampled")
        if sampled not in self._sampled:
            self._sampled[sampled] = self._run(sampled)
        outputs, wrong = self._sampled[sampled]
        if cell.path == "sampled" or wrong:
            return wrong
        left = cell.chunked if cell.batch else None
        return self._matrix.trainer.differing(
            self._matrix.requests_of(cell), outputs, left=left, checkpointed=cell.path == "checkpointed"
        )

    def _run(self, cell: Cell) -> tuple[Outputs, list[str]]:
        engine, requests = self._engine, self._matrix.requests_of(cell)
        if cell.cached:
            engine.reset_prefix_cache()
            ids = (*requests[0].prompt_token_ids[:SHARED], 0)
            run(engine, [RolloutRequest(request_id="opening", prompt_token_ids=ids, params=SamplingParams(max_tokens=1))])
        before = engine.stats()["preemptions"]
        self._watch.forget()
        outputs = run(engine, requests, alone=not cell.batch, preempt=cell.preempted and not cell.batch)
        try:
            Matrix.check_conditions(cell, self._watch, outputs, engine.stats()["preemptions"] - before)
        except ConditionNotMet as problem:
            return outputs, [f"not tested: {problem}"]
        return outputs, differing(outputs, self._matrix.baseline)

    def _scored(self, cell: Cell) -> list[str]:
        """Prompt logprobs of prompt and output together, against the model logprobs the output was sampled with."""
        baseline = self._matrix.baseline
        joined = [
            RolloutRequest(
                request_id=r.request_id,
                prompt_token_ids=(*r.prompt_token_ids, *baseline[r.request_id].token_ids),
                params=SamplingParams(max_tokens=0),
                include=("prompt_logprobs",),
            )
            for r in self._matrix.requests_of(replace(cell, path="sampled"))
        ]
        wrong = []
        for name, output in run(self._engine, joined, alone=not cell.batch).items():
            if packed((output.prompt_logprobs or [])[-OUTPUT:]) != packed(baseline[name].model_logprobs):
                wrong.append(f"{name}: prompt logprobs of prompt and output")
        return wrong
