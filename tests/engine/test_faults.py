"""An exception that concerns one request ends that request alone: neighbours keep every bit, and nothing leaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_runner import FakeMatcher, oracle
from harness import check, expect, make, request, run
from rollsync import Engine, RolloutRequest, SampleOutput, SamplingParams
from rollsync.rollout.engine import engine as engine_module
from rollsync.rollout.engine import scheduler as scheduler_module
from rollsync.rollout.engine.block_manager import BlockManager
from rollsync.rollout.engine.scheduler import Scheduler
from rollsync.rollout.engine.sequence import Request, Sequence
from rollsync.rollout.engine.types import SlotInit

OPENING = list(range(10, 19))
"""what the bad request and a neighbour have in common, so that they share blocks"""
LONG: dict[str, Any] = {"ignore_eos": True, "seed": 1}
BAD_PROMPT = [*OPENING, 66]
NEIGHBOURS = [
    request("shares", [*OPENING, 20], max_tokens=9, **LONG),
    request("streams", [30, 31], ("entropy",), stream=True, max_tokens=20, **LONG),
    request("group", [40, 41, 42, 43, 44], ("model_logprobs",), n=3, max_tokens=14, **LONG),
    request("chunked", list(range(50, 73)), ("prompt_logprobs",), max_tokens=3, **LONG),
    request("stops", [5, 6], stop=("A", "B", "C", "D", "E", "F"), max_tokens=15, **LONG),
]
BAD = {
    "single": request("bad", BAD_PROMPT, ("temperature_logprobs", "model_logprobs", "entropy"), max_tokens=12, stop="none", **LONG),
    "streaming group": request("bad", BAD_PROMPT, ("entropy",), n=4, stream=True, max_tokens=12, stop="none", **LONG),
    "scored": request("bad", BAD_PROMPT, ("prompt_logprobs",), n=2, forced_token_ids=(7, 8, 9, 11, 12), max_tokens=9, stop="none", **LONG),
}


def whose(*args: Any) -> bool:
    """Whether a call is about the bad request."""
    found = [a for a in args if isinstance(a, Request | Sequence | RolloutRequest)]
    ids = {a.request.id if isinstance(a, Sequence) else getattr(a, "request_id", None) or a.id for a in found}  # type: ignore[union-attr]
    return "bad" in ids or any(isinstance(a, list) and a[: len(BAD_PROMPT)] == BAD_PROMPT for a in args)


class Spoiled:
    """A function that raises when called for the bad request, from its `first` such call on; before or after it did its work."""

    def __init__(self, real: Callable[..., Any], first: int, late: bool) -> None:
        self.real, self.left, self.late, self.raised = real, first, late, 0

    def bind(self) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            mine = whose(*args)
            if mine:
                self.left -= 1
            spoil = mine and self.left < 0
            value = self.real(*args, **kwargs) if self.late or not spoil else None
            if spoil:
                self.raised += 1
                raise ZeroDivisionError("spoiled on purpose")
            return value

        return call


PLACES: dict[str, tuple[Any, str]] = {
    "sampling columns": (Sequence, "slot_init"),
    "laying out tokens": (Sequence, "start"),
    "hashing a prefix": (BlockManager, "extend_digests"),
    "gathering logprobs": (Scheduler, "_append_values"),
    "scoring": (Scheduler, "_score"),
    "stop rules": (Request, "ending"),
    "building an output": (scheduler_module, "sample_output"),
}


def small(max_batch_tokens: int = 7) -> Engine:
    """So few blocks and tokens that neighbours are chunked and preempted."""
    engine, _ = make(num_blocks=19, max_batch_tokens=max_batch_tokens, max_num_seqs=7, max_model_len=40)
    return engine


def survive(engine: Engine, bad: RolloutRequest, message: str = "ZeroDivisionError: spoiled on purpose") -> list[SampleOutput]:
    """Run the bad request among its neighbours, in the middle of their arrival; check these and the engine; its own outputs."""
    for r in (*NEIGHBOURS[:3], bad, *NEIGHBOURS[3:]):
        engine.add_request(r)
    outputs: list[SampleOutput] = []
    while engine.has_work:
        outputs += engine.step()
        check(engine)
        if engine.stats()["steps"] in (4, 11):
            engine.scheduler.preempt_all()
    finals = [o for o in outputs if o.finished]
    mine = sorted((o for o in finals if o.request_id == "bad"), key=lambda o: o.sample_index)
    assert [o.sample_index for o in mine] == list(range(bad.params.n))
    for output in mine:
        if output.finish_reason == "error":
            assert output.error == message
            whole = oracle(bad, 1, engine.info, output.sample_index)
            count = len(output.token_ids)
            for name in ("token_ids", "logprobs", "temperature_logprobs", "model_logprobs", "entropy"):
                column = getattr(output, name)
                assert column is None or column == getattr(whole, name)[:count], name
        else:
            expect(output, bad, engine)
    for neighbour in NEIGHBOURS:
        theirs = [o for o in finals if o.request_id == neighbour.request_id]
        assert len(theirs) == neighbour.params.n
        for output in theirs:
            expect(output, neighbour, engine)
    streamed = [t for o in outputs if o.request_id == "streams" and not o.finished for t in o.token_ids]
    assert streamed == oracle(NEIGHBOURS[1], 1, engine.info).token_ids[:-1]
    assert engine.stats()["free_blocks"] == 19
    return mine


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch, place: str, kind: str) -> None:
    owner, name = PLACES[place]
    num_raised = 0
    for first, late in ((0, False), (1, True), (7, False)):
        engine, bad = small(), BAD[kind]
        spoiled = Spoiled(getattr(owner, name), first, late)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, spoiled.bind())
            mine = survive(engine, bad)
        errors = [o for o in mine if o.finish_reason == "error"]
        assert bool(errors) == bool(spoiled.raised) and engine.stats()["faults"] == len(errors)
        num_raised += spoiled.raised
    assert all(o.finish_reason == "length" for o in survive(engine, bad)), "the same request is served once the cause is gone"
    assert num_raised or (place == "scoring" and kind != "scored")


@pytest.mark.parametrize(
    ("kind", "length", "index", "failed"),
    [
        ("single", 10, 0, [0]),
        ("single", 13, 0, [0]),
        ("streaming group", 10, 2, [2]),
        ("streaming group", 12, 0, [0]),
        ("scored", 4, 0, [0, 1]),  # what a prompt's or given token's row says is common to all samples
        ("scored", 12, 0, [0, 1]),
        ("scored", 15, 0, [0]),
        ("scored", 16, 1, [1]),
    ],
)
@pytest.mark.parametrize("max_batch_tokens", [7, 64])
def test_a_row_that_the_runner_cannot_sample_ends_the_samples_that_need_it(
    kind: str, length: int, index: int, failed: list[int], max_batch_tokens: int
) -> None:
    engine = small(max_batch_tokens)

    def faults(prefix: list[int], init: SlotInit) -> str | None:
        mine = init.sample_index == index and prefix[:10] == BAD_PROMPT[: len(prefix)] and init.temperature == 0.75
        return "no id is left" if mine and len(prefix) == length else None

    engine.runner.faults = faults  # type: ignore[attr-defined]
    bad = replace(BAD[kind], params=replace(BAD[kind].params, temperature=0.75))
    mine = survive(engine, bad, "no id is left")
    assert [o.sample_index for o in mine if o.finish_reason == "error"] == failed and engine.stats()["faults"] == len(failed)


def test_a_fault_at_admission_is_the_callers_alone_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((engine_module, "check_request"), (Request, "__init__"), (Sequence, "__init__"), (Scheduler, "add")):
        engine, bad = small(), BAD["single"]
        engine.add_request(NEIGHBOURS[1])
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *args, **kwargs: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                engine.add_request(bad)
        assert engine.stats()["waiting"] == 0
        survivors = run(engine)
        expect(survivors[-1], NEIGHBOURS[1], engine)
        survive(engine, bad)


def test_generate_gives_errors_for_the_prompt_that_could_not_be_added_and_samples_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make()
    real = Scheduler.add
    monkeypatch.setattr(Scheduler, "add", lambda self, r, **kw: real(self, r, **kw) if r.prompt != (2,) else 1 // 0)
    outs = engine.generate([[1], [2], [3]], SamplingParams(n=2, seed=4, max_tokens=3, ignore_eos=True))
    assert [[s.finish_reason for s in o.samples] for o in outs] == [["length"] * 2, ["error"] * 2, ["length"] * 2]
    assert [s.error for s in outs[1].samples] == ["ZeroDivisionError: integer division or modulo by zero"] * 2
    assert outs[2].samples[1].token_ids == oracle(request("x", [3], seed=4, max_tokens=3, ignore_eos=True), 4, engine.info, 1).token_ids


def test_a_stop_matcher_that_fails_on_given_tokens_ends_the_request_before_it_begins() -> None:
    class Picky(FakeMatcher):
        def push(self, token_id: int) -> str | None:
            if token_id == 11:
                raise UnicodeError("half a character \udc80")
            return super().push(token_id)

    engine = small()
    engine._stop_matcher = Picky
    mine = survive(engine, BAD["scored"], "UnicodeError: half a character \\udc80")
    assert [o.finish_reason for o in mine] == ["error"] * 2 and mine[0].token_ids == []


def test_an_exception_that_cannot_be_shown_is_named_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    class Silent(FakeMatcher):
        def push(self, token_id: int) -> str | None:
            raise Mute

    engine = small()
    engine._stop_matcher = Silent
    engine.add_request(BAD["single"])
    (output,) = run(engine)
    assert output.error == "Mute: its message cannot be shown" and len(output.token_ids) == len(output.logprobs) == 1
