"""Engines on the fake runner, run step by step with every count checked."""

from __future__ import annotations

from typing import Any

from fake_runner import FakeMatcher, FakeRunner, FakeTokenizer, make_info, oracle
from rollsync import Engine, RolloutRequest, SampleOutput, SamplingParams

COMPARED = (
    "token_ids", "logprobs", "temperature_logprobs", "model_logprobs", "entropy", "prompt_logprobs", "finish_reason", "stop_reason",
)  # fmt: skip


def make(**info: Any) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(make_info(**info))
    return Engine("fake", runner=runner, tokenizer=FakeTokenizer(), stop_matcher=FakeMatcher), runner  # type: ignore[arg-type]


def check(engine: Engine) -> None:
    scheduler = engine.scheduler
    scheduler.blocks.check_integrity([seq.blocks for seq in scheduler.running])
    slots = [seq.slot for seq in scheduler.running]
    assert len(set(slots)) == len(slots) and min(slots, default=0) >= 0
    assert len(slots) + len(scheduler._free_slots) == engine.config.scheduler.max_num_seqs
    assert scheduler.running == sorted(scheduler.running, key=lambda seq: seq.key)
    waiting = len(scheduler._waiting) - scheduler._num_dead + sum(r.pending for r in scheduler.requests.values())
    assert scheduler.num_waiting == waiting
    assert scheduler._num_dead == sum(seq.end is not None for _, seq in scheduler._waiting)
    unfilled = {digest for seq in scheduler.running for digest in seq.digests[seq.num_registered :]}
    assert scheduler._filling.keys() <= unfilled, "somebody would wait for a block that nobody prefills"


def run(engine: Engine, max_steps: int = 20000) -> list[SampleOutput]:
    outputs = []
    for _ in range(max_steps):
        if not engine.has_work:
            return [output for output in outputs if output.finished]
        outputs += engine.step()
        check(engine)
    raise AssertionError("no end in sight")


def expect(output: SampleOutput, request: RolloutRequest, engine: Engine, weights: int = 0) -> None:
    wanted = oracle(request, output.seed, engine.info, output.sample_index - request.first_sample, weights)
    for name in COMPARED:
        assert getattr(output, name) == getattr(wanted, name), name
    ends = [span["end"] for span in output.weight_versions]
    assert [span["start"] for span in output.weight_versions] == [0, *ends][: len(ends)] and (ends or [0])[-1] == len(output.token_ids)


def request(rid: str, prompt: list[int], include: tuple[str, ...] = (), **kw: Any) -> RolloutRequest:
    own = {name: kw.pop(name) for name in RolloutRequest.__slots__ if name in kw}
    return RolloutRequest(request_id=rid, prompt_token_ids=tuple(prompt), params=SamplingParams(**kw), include=include, **own)
