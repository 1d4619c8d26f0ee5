"""Random walks over everything that can be done to a live engine, by several clients at once. No model: a runner whose KV cells know
which weights wrote them, so that a token read from anything stale is another token.

Held after every move: block accounting is whole, and a refused move changed nothing. Held at the end: every sample ended exactly once,
and every token is the one that the weights its span names give on the tokens before it (where the span does not say `mixed_kv`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from fake_runner import EMPTY, FakeMatcher, FakeRunner, FakeTokenizer, Row, _hash, make_info, read_row
from harness import check
from rollsync import Engine, RolloutRequest, SampleOutput, SamplingParams
from rollsync.rollout.engine.control import Control
from rollsync.rollout.engine.types import SlotInit, StepPlan, StepResult
from rollsync.rollout.errors import BadRequest, IllegalState, Overloaded, RollsyncError, UnknownUpdate, UpdateRefused
from rollsync.weight_sync.boxes import Box
from rollsync.weight_sync.manifest import ChunkError, Manifest, TensorEntry, TensorSlice, plan

NUM_TENSORS = 3
MANIFEST = plan([TensorEntry(f"t{i}", "float32", (4,), (TensorSlice(0, Box.whole((4,))),)) for i in range(NUM_TENSORS)], 16)
LOST = -7
"""weights whose memory was given away"""


class Cell(int):
    """A token in the KV cache, and the weights that wrote it."""

    weights: int

    def __new__(cls, token: int, weights: int) -> Cell:
        cell = super().__new__(cls, token)
        cell.weights = weights
        return cell


class FakeUpdates:
    """Weights are a tuple of numbers, one per tensor; what the runner computes with is their hash."""

    def __init__(self, runner: LiveRunner) -> None:
        self._runner, self.version = runner, 0
        self.live = (0,) * NUM_TENSORS
        self._open: tuple[str, dict[int, int], bool, str | None] | None = None
        self.grown = 0

    def open(self, update_id: str, manifest: Manifest | None, *, mode: str | None, staged: bool, transport: Any) -> list[str]:
        assert self._open is None and manifest is not None
        if len(manifest.tensors) < NUM_TENSORS and mode == "full":
            return ["t2 is missing"]
        self._open = update_id, {}, staged, mode
        self.wanted = len(manifest.tensors)
        return []

    def extend(self, update_id: str, tensors: Sequence[TensorEntry], layout: Mapping[str, Any]) -> list[tuple[int, int]]:
        raise AssertionError("not walked")

    def chunk(self, update_id: str, sender: int, sequence: int, where: Mapping[str, Any]) -> bool:
        if self._open is None or self._open[0] != update_id or sequence >= self.wanted:
            raise ChunkError("no such chunk")
        if sequence in self._open[1]:
            return False
        self._open[1][sequence] = where["value"]
        if not self._open[2]:
            self._write(sequence, where["value"])
        return True

    def _write(self, sequence: int, value: int) -> None:
        self.live = (*self.live[:sequence], value, *self.live[sequence + 1 :])
        self._runner.weights = _hash(self.live)

    def lost(self) -> str | None:
        return None

    def missing(self) -> list[str]:
        return [f"t{i} is missing" for i in range(self.wanted, NUM_TENSORS)]

    def prepare(self, digests: Mapping[str, int] | None, *, refuse_nonfinite: bool) -> list[str]:
        assert self._open is not None
        return [f"chunk {i} is missing" for i in range(self.wanted) if i not in self._open[1]]

    def commit(self, version: int) -> None:
        assert self._open is not None and not self.prepare(None, refuse_nonfinite=True)
        for sequence, value in self._open[1].items():
            self._write(sequence, value)
        self._open, self.version = None, version
        self._runner.version = version
        self._runner.known.setdefault(version, set()).add(self._runner.weights)

    def abort(self) -> bool:
        open_, self._open = self._open, None
        return open_ is not None and bool(open_[1])

    def progress(self) -> dict[str, Any]:
        return {} if self._open is None else {"bytes": 48, "received_bytes": 0, "missing_chunks": self.wanted - len(self._open[1])}

    def digests(self) -> dict[str, int]:
        return {f"t{i}": value for i, value in enumerate(self.live)}


class LiveRunner(FakeRunner):
    """A fake runner with weights that change and memory that goes away."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.updates = FakeUpdates(self)
        self.weights = _hash(self.updates.live)
        self.known = {0: {self.weights}}
        """every weights that a version number stood for"""
        self.gone: dict[str, Any] = {}

    def sleep(self, tag: str, keep: bool) -> None:
        if tag == "kv_cache":
            self.kv = [[EMPTY] * self.info.block_tokens for _ in self.kv]
            self.gone[tag] = True
            return
        self.gone[tag] = self.updates.live if keep else (LOST,) * NUM_TENSORS
        self.updates.live = (LOST,) * NUM_TENSORS
        self.weights = _hash(self.updates.live)

    def wake(self, tag: str) -> None:
        kept = self.gone.pop(tag)
        if tag == "weights":
            self.updates.live = kept
            self.weights = _hash(kept)

    def execute(self, plan: StepPlan) -> StepResult:
        assert not self.gone, "a step without memory"
        assert self.weights in self.known[self.version], "a step on weights that no version stands for"
        cells = [Cell(t, self.weights) for t in plan.token_ids]
        plan.token_ids = cells  # type: ignore[assignment]
        return super().execute(plan)

    def _gather(self, slot: int, length: int) -> list[int]:
        cells = super()._gather(slot, length)
        if all(cell.weights == self.weights for cell in cells):  # type: ignore[attr-defined]
            return [int(cell) for cell in cells]
        return [*(int(cell) for cell in cells), *(-2 - cell.weights for cell in cells)][-length:]  # type: ignore[attr-defined]


class Walk:
    """One walk: clients that make moves, and what is known of their requests."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.runner = LiveRunner(make_info(num_blocks=24, max_num_seqs=6, max_batch_tokens=24, seed=seed, max_waiting=40))
        self.engine = Engine("fake", runner=self.runner, tokenizer=FakeTokenizer(), stop_matcher=FakeMatcher)  # type: ignore[arg-type]
        self.engine.control = Control(self.engine, lambda: self.now)
        self.requests: dict[str, RolloutRequest] = {}
        self.outputs: list[SampleOutput] = []
        self.updates: list[str] = []
        self.refused = self.done = 0
        self.prompts = [[self.random.randrange(5, 90) for _ in range(self.random.randint(1, 17))] for _ in range(4)]
        self.moves: list[Callable[[], Any]] = [
            self.submit, self.submit, self.abort, self.pause, self.resume, self.resume, self.resume, self.sleep, self.wake, self.wake,
            self.open, self.chunks, self.chunks, self.commit, self.commit, self.abort_update, self.reset, self.wait, self.sync, self.sync,
            self.steps, self.steps, self.steps, self.steps,
        ]  # fmt: skip

    def submit(self) -> None:
        rng = self.random
        prompt = rng.choice(self.prompts) + [rng.randrange(5, 90) for _ in range(rng.choice((0, 0, 3)))]
        params = SamplingParams(n=rng.choice((1, 1, 2, 4)), max_tokens=rng.randint(0, 25), ignore_eos=True, seed=rng.choice((None, 3)))
        name = f"r{len(self.requests)}"
        spec = RolloutRequest(request_id=name, prompt_token_ids=tuple(prompt), params=params, group=rng.choice(("a", "b")))
        self.engine.add_request(spec)
        self.requests[name] = spec

    def abort(self) -> None:
        which = self.random.random()
        if which < 0.1:
            self.outputs += self.engine.abort(all=True)
        elif which < 0.3:
            self.outputs += self.engine.abort(group=self.random.choice(("a", "b", "c")))
        else:
            self.outputs += self.engine.abort(f"r{self.random.randrange(len(self.requests) + 1)}")

    def pause(self) -> Any:
        rng = self.random
        mode = rng.choice(("keep", "recompute", "abort", "drain", "nonsense"))
        self.engine.control.pause(mode, rng.choice("xyz"), rng.choice((None, 5.0)), rng.choice((None, 3.0)), rng.choice(("abort", "keep")))

    def resume(self) -> Any:
        return self.engine.control.resume(self.random.choice(["x", "y", "z", None]))

    def sleep(self) -> Any:
        tags = self.random.choice((["kv_cache"], ["weights"], None))
        return self.engine.control.sleep(tags, self.random.choice(("offload", "offload", "discard")))

    def wake(self) -> Any:
        return self.engine.control.wake(self.random.choice((["kv_cache"], ["weights"], None, ["nonsense"])))

    def open(self) -> None:
        rng = self.random
        full = rng.random() < 0.7
        some = MANIFEST if full else plan(MANIFEST.tensors[: rng.choice((1, 2))], 16)
        update = self.engine.control.open_update(
            some,
            version=rng.choice((None, None, 1, 2, 9)),
            force=rng.random() < 0.5,
            mode="full" if full or rng.random() < 0.1 else "partial",
            apply=rng.choice(("staged", "staged", "in_place")),
            kv_policy=rng.choice(("recompute", "keep", "abort")),
            deadline_s=8.0,
        )
        self.updates.append(update.id)

    def _some_update(self) -> str:
        return self.random.choice([*self.updates[-2:], *self.updates[-1:] * 4, "none"]) if self.updates else "none"

    def chunks(self) -> None:
        update = self._some_update()
        for sequence in self.random.sample(range(NUM_TENSORS + (self.random.random() < 0.1)), NUM_TENSORS):
            if self.random.random() < 0.8:
                self.engine.control.take_chunk(update, 0, sequence, {"value": self.random.randrange(1 << 40)})

    def commit(self) -> Any:
        return self.engine.control.commit_update(self._some_update())

    def sync(self) -> None:
        """All of an update, as a trainer does it; it finds the engine in whatever state."""
        self.open()
        for sequence in range(self.runner.updates.wanted):
            self.engine.control.take_chunk(self.updates[-1], 0, sequence, {"value": self.random.randrange(1 << 40)})
            if self.random.random() < 0.3:
                self.steps()
        self.engine.control.commit_update(self.updates[-1])

    def abort_update(self) -> Any:
        return self.engine.control.abort_update(self._some_update()) if self.random.random() < 0.4 else None

    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    def wait(self) -> None:
        self.now += self.random.choice((0.1, 1.0, 4.0))

    def steps(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            self.outputs += self.engine.poll()
            if self.engine.has_work:
                self.outputs += self.engine.step()

    def facts(self) -> Any:
        scheduler = self.engine.scheduler
        return (self.engine.control.status(), scheduler.num_waiting, len(scheduler.running), scheduler.blocks.num_free, self.runner.weights)

    def move(self) -> None:
        move = self.random.choice(self.moves)
        before = self.facts()
        try:
            move()
            self.done += 1
        except (IllegalState, BadRequest, UpdateRefused, UnknownUpdate, Overloaded, ChunkError):
            self.refused += 1
            if move not in (self.chunks, self.sync):  # a part of those may have been done before the refusal
                assert self.facts() == before, f"{move.__name__} was refused and changed something"
        self.outputs += self.engine.control.take_outputs()
        check(self.engine)

    def settle(self) -> None:
        """Whatever state the walk left: back to an engine that serves, and all requests to their end."""
        control = self.engine.control
        if control.lifecycle.update is not None:
            control.abort_update(control.lifecycle.update)
        control.wake()
        if control.lifecycle.invalid is not None:
            update = control.open_update(MANIFEST, force=True).id
            for sequence in range(NUM_TENSORS):
                control.take_chunk(update, 0, sequence, {"value": sequence})
            control.commit_update(update)
        control.resume(None)
        for _ in range(10000):
            self.outputs += self.engine.poll()
            if not self.engine.has_work:
                break
            self.outputs += self.engine.step()
            check(self.engine)
        assert control.lifecycle.why_not_running() is None and not self.engine.scheduler.has_work
        self.outputs += control.take_outputs()

    def verify(self) -> None:
        blocks = self.engine.scheduler.blocks
        assert blocks.num_free == blocks.num_blocks, "blocks leaked"
        finals = [(o.request_id, o.sample_index) for o in self.outputs if o.finished]
        assert sorted(finals) == sorted((name, i) for name, spec in self.requests.items() for i in range(spec.params.n))
        for output in self.outputs:
            self.check_tokens(output)

    def check_tokens(self, output: SampleOutput) -> None:
        spec = self.requests[output.request_id]
        assert output.finish_reason in ("length", "abort") and len(output.logprobs) == len(output.token_ids)
        if output.finish_reason == "length":
            assert len(output.token_ids) == min(spec.params.max_tokens or 0, 64 - len(spec.prompt_token_ids))
        init = SlotInit(slot=0, seed=output.seed, sample_index=output.sample_index, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        at = 0
        for span in output.weight_versions:
            assert span["start"] == at
            at = span["end"]
            if span.get("mixed_kv"):
                continue
            weights = self.runner.known[span["version"]]
            rows: list[set[tuple[int, float]]] = []
            for i in range(span["start"], span["end"]):
                prefix = [*spec.prompt_token_ids, *output.token_ids[:i]]
                found: list[Row] = [read_row(prefix, init, -1, w) for w in weights]
                rows.append({(row.token, row.logprob) for row in found})
            for i, allowed in enumerate(rows, span["start"]):
                assert (output.token_ids[i], output.logprobs[i]) in allowed, f"token {i} of {output.request_id}: stale or mixed"
        assert at == len(output.token_ids)


def walk(seed: int, moves: int) -> Walk:
    one = Walk(seed)
    try:
        for _ in range(moves):
            one.move()
        one.settle()
        one.verify()
    except RollsyncError as error:
        raise AssertionError(f"walk {seed}: {error}") from error
    return one


def test_random_walks_lose_nothing_and_mix_nothing() -> None:
    walks = [walk(seed, 250) for seed in range(40)]
    assert sum(w.done for w in walks) > 3000 and sum(w.refused for w in walks) > 1000
    assert sum(w.engine.control.lifecycle.epoch for w in walks) > 250
    ends = [o.finish_reason for w in walks for o in w.outputs]
    assert ends.count("length") > 300 and ends.count("abort") > 300


@pytest.mark.slow
def test_a_thousand_walks() -> None:
    for seed in range(100, 1100):
        walk(seed, 400)
