"""The engine's thread goes on whatever its sink, a caller's reply or a message does; who is concerned is told."""

from __future__ import annotations

import queue
import threading
from typing import Any

import msgpack
import pytest
import zmq
from fake_runner import oracle
from harness import expect, make, request
from rollsync import Engine, SampleOutput, SamplingParams
from rollsync.rollout.engine import outputs, process
from rollsync.rollout.engine.loop import EngineLoop
from rollsync.rollout.errors import RollsyncError
from rollsync.rollout.server.ticket import _aborted_output as aborted_output
from rollsync.rollout.wire import COLUMNS, TABLES, slice_column, unpack_array

LONG: dict[str, Any] = {"ignore_eos": True, "seed": 1}


class Picky:
    """A sink that takes everything but what `refuses` names; what it took is in `taken`."""

    def __init__(self, refuses: Any) -> None:
        self.refuses, self.taken, self.died = refuses, queue.Queue[Any](), ""

    def ready(self, engine: Any) -> None: ...

    def failed(self, error: BaseException) -> None:
        raise error

    def outputs(self, outputs: list[SampleOutput]) -> None:
        if any(self.refuses(o) for o in outputs):
            raise BufferError("cannot send that")
        for output in outputs:
            self.taken.put(output)

    def rejected(self, request_id: str, error: RollsyncError) -> None:
        raise BufferError("nor that")

    def stats(self, stats: dict[str, Any]) -> None:
        raise BufferError("nor those")

    def dead(self, words: str) -> None:
        self.died = words


def finals(taken: queue.Queue[Any], count: int) -> dict[tuple[str, int], SampleOutput]:
    found: dict[tuple[str, int], SampleOutput] = {}
    while len(found) < count:
        output = taken.get(timeout=20)
        if output.finished:
            assert (output.request_id, output.sample_index) not in found, "two final outputs"
            found[output.request_id, output.sample_index] = output
        else:
            assert (output.request_id, output.sample_index) not in found, "a delta after the final output"
    return found


GOOD = (request("good", [1, 2, 3], stream=True, max_tokens=20, **LONG), request("group", [5, 6], n=3, max_tokens=12, **LONG))


@pytest.mark.parametrize("what", ["deltas", "finals", "the third delta of one sample"])
def test_an_output_that_the_sink_refuses_ends_its_request_and_no_other(what: str) -> None:
    def refuses(output: SampleOutput) -> bool:
        if output.request_id != "bad" or output.error is not None:
            return False
        if what == "the third delta of one sample":
            seen.update([output.sample_index] if output.sample_index == 1 and not output.finished else [])
            return output.sample_index == 1 and not output.finished and output.token_ids == third
        return output.finished == (what == "finals")

    seen: set[int] = set()
    engine, _ = make()
    bad = request("bad", [7, 8, 9], n=3, stream=True, max_tokens=15, **LONG)
    third = [oracle(bad, 1, engine.info, 1).token_ids[2]]
    sink = Picky(refuses)
    loop = EngineLoop(lambda: engine, sink)
    loop.start()
    for r in (GOOD[0], bad, GOOD[1]):
        loop.submit(r)
    found = finals(sink.taken, 7)
    for r in GOOD:
        for i in range(r.params.n):
            expect(found[r.request_id, i], r, engine)
    for i in range(3):
        assert (found["bad", i].finish_reason, found["bad", i].error) == ("error", "BufferError: cannot send that")
    loop.submit(request("too long", [1] * 99))  # refused, and the refusal cannot be sent
    answers: queue.Queue[Any] = queue.Queue()

    def reply(value: Any) -> None:
        if not isinstance(value, RollsyncError):
            raise TypeError("not packable")
        answers.put(value)

    loop.command("status", {}, reply)
    assert "could not be sent" in str(answers.get(timeout=20))
    loop.submit(request("good", [1, 2, 3], stream=True, max_tokens=20, **LONG))
    expect(finals(sink.taken, 1)["good", 0], GOOD[0], engine)
    assert loop.close() and sink.died == "" and engine.stats()["free_blocks"] == 64


def test_the_process_passes_over_messages_and_columns_it_cannot_read_or_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    real = outputs.pack_array

    def pack_array(dtype: str, values: list[Any]) -> dict[str, Any]:
        if 100 in values:
            raise OverflowError("does not fit")
        return real(dtype, values)

    monkeypatch.setattr(outputs, "pack_array", pack_array)
    engine, _ = make()
    bad = request("bad", [1], forced_token_ids=(5, 100), n=2, max_tokens=9, **LONG)
    context: zmq.Context[Any] = zmq.Context()
    back, inbox, front = context.socket(zmq.PULL), context.socket(zmq.PULL), context.socket(zmq.PUSH)
    back.bind("inproc://out")
    inbox.bind("inproc://in")
    front.connect("inproc://in")
    back.rcvtimeo = 20000
    outbox = process.Outbox(context, "inproc://out")
    loop = EngineLoop(lambda: engine, outbox)
    loop.start()
    serving = threading.Thread(target=process.serve_messages, args=(loop, outbox, inbox), daemon=True)
    serving.start()
    try:
        wires = [r.to_wire() for r in (bad, *GOOD)]
        strange = [{**wires[1], "request_id": "strange", "colour": 3}, {**wires[1], "request_id": "hot", "params": {"temperature": -1}}]
        messages: list[Any] = [7, ["request"], ["request", 5], ["request", {}], *(["request", w] for w in (*strange, *wires))]
        for frame in (b"", b"\xc1", *map(msgpack.packb, messages)):
            front.send(frame)
        rejected, found = {}, {}
        while len(found) < 6 or len(rejected) < 2:
            kind, *rest = msgpack.unpackb(back.recv())
            assert kind != "dead", rest
            if kind == "rejected":
                rejected[rest[0]] = rest[1]
            if kind == "outputs":
                found.update({(o["request_id"], o["sample_index"]): o for o in rest[0] if o.get("finish_reason")})
        assert rejected.keys() == {"strange", "hot"} and "colour" in rejected["strange"]["message"]
        assert rejected["hot"]["field"] == "temperature"
        assert [found["bad", i]["error"] for i in range(2)] == ["OverflowError: does not fit"] * 2
        assert slice_column(found["bad", 0]["logprobs"], 3) == {"dtype": "<f4", "shape": [0], "data": b""}  # a stream had sent some
        for r in GOOD:
            for i in range(r.params.n):
                assert unpack_array(found[r.request_id, i]["token_ids"]) == oracle(r, 1, engine.info, i).token_ids
    finally:
        assert loop.close()
        outbox.ended.set()
        serving.join(10)
        outbox.close()
        context.destroy(linger=0)


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("include", [(), ("entropy",), ("model_logprobs", "temperature_logprobs", "prompt_logprobs")])
def test_an_output_without_tokens_has_the_columns_asked_for_whoever_makes_it(include: tuple[str, ...], top: int) -> None:
    made = request("x", [5, 6], include, top_logprobs=top, first_sample=3, **LONG)
    engine, _ = make()
    engine.add_request(made)
    by_engine = outputs.output_to_wire(engine.abort("x", reason="early")[0])
    assert aborted_output(made, "early") == by_engine
    (refused,) = engine.generate([[]], made.params, include=include, on_error="return")[0].samples
    columns = [name for name in COLUMNS if name in by_engine]
    assert [name for name in COLUMNS if name in outputs.output_to_wire(refused)] == columns
    assert set(columns) == {"token_ids", "logprobs", *include, *(TABLES if top else ())} - {"prompt_logprobs"}


def test_generate_after_a_fault_is_whole() -> None:
    engine: Engine
    engine, runner = make()
    runner.faults = lambda prefix, init: "spoiled" if prefix[0] == 2 and len(prefix) == 4 else None
    outs = engine.generate([[1], [2], [3]], SamplingParams(seed=1, max_tokens=6, ignore_eos=True))
    assert [o.samples[0].finish_reason for o in outs] == ["length", "error", "length"] and outs[1].samples[0].error == "spoiled"
    assert len(outs[1].samples[0].token_ids) == len(outs[1].samples[0].logprobs) == 3
