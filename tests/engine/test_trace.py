"""A trace holds every finished sample, exactly, in whole lines; what the disk does never reaches the engine."""

from __future__ import annotations

import fcntl
import gc
import json
import logging
import math
import os
import random
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_runner import make_info
from live import OPTIONS, PROMPT, finish, request, sync, write_versions
from real_engine import bits, make_requests
from rollsync import ConfigError, Engine, EngineDead, IllegalState, read_trace
from rollsync.rollout.engine import trace_file, trace_thread, trace_writer
from rollsync.rollout.engine.config import EngineConfig
from rollsync.rollout.engine.outputs import output_to_wire
from rollsync.rollout.engine.trace_file import TraceFile
from rollsync.rollout.engine.trace_line import LineMaker, weights_digest
from rollsync.rollout.engine.types import SampleOutput
from rollsync.rollout.trace import TraceError


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_versions(tmp_path_factory.mktemp("traced"), 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def engine(versions: list[str], path: Path) -> Iterator[Engine]:
    with Engine(versions[0], trace=path, **OPTIONS) as found:
        yield found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.01)


def run(engine: Engine, *requests: Any) -> list[SampleOutput]:
    for each in requests:
        engine.add_request(each)
    return [o for samples in finish(engine).values() for o in samples]


def test_every_float32_comes_back_in_its_bits(path: Path) -> None:
    rng = random.Random(1)
    odd = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1.17549435e-38, 3.4028235e38, 1.0, 100.0, 16777216.0]
    values = odd + [v for v in (struct.unpack("<f", rng.randbytes(4))[0] for _ in range(10_000)) if v == v]
    values = [struct.unpack("<f", struct.pack("<f", v))[0] for v in values]
    output = SampleOutput(
        request_id="r", sample_index=0, token_ids=[1] * len(values), logprobs=values, finish_reason="length",
        top_token_ids=[[5, -1]] * len(values), top_logprobs=[[v, -math.inf] for v in values], error="a \ud800 \n \u2028",
    )  # fmt: skip

    class Made:
        seed, max_len, spec = 2**64 - 1, 8, request("r", max_tokens=None, logit_bias={7: 1.5}, allowed_token_ids=(7, 2))

    line = LineMaker(make_info(), "0").line(Made(), output_to_wire(output), {})  # type: ignore[arg-type]
    json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    path.write_bytes(line)
    (record,) = read_trace(path)
    assert [struct.pack("<f", v) for v in record.logprobs if v == v] == [struct.pack("<f", v) for v in values if v == v]
    assert record.logprobs[4] != record.logprobs[4] and record.top_logprobs is not None
    assert record.top_logprobs[3] == [-math.inf, -math.inf] and record.top_token_ids == output.top_token_ids
    assert (record.params, record.seed, record.error) == (Made.spec.params, 2**64 - 1, output.error)


def test_what_is_delivered_is_what_is_written(engine: Engine, path: Path) -> None:
    requests = make_requests(5, max_tokens=7, shared=9, step=3, n=2)
    more = [request("top", top_logprobs=3), request("none", max_tokens=0), request("given", continue_from=(5, 6))]
    delivered = run(engine, *requests, *more)
    engine.add_request(request("cut", max_tokens=None, stream=True))
    for _ in range(4):
        engine.step()
    delivered += engine.abort("cut", reason="enough")
    engine.close()
    records = {(r.request_id, r.sample_index): r for r in read_trace(path)}
    assert len(records) == len(delivered) == len(path.read_bytes().splitlines()) and engine.stats()["trace_lines"] == len(records)
    for output in delivered:
        record = records[output.request_id, output.sample_index]
        assert bits(record) == bits(output)  # type: ignore[arg-type]
        for name in ("seed", "weight_versions", "cached_tokens", "abort_reason", "error"):
            assert getattr(record, name) == getattr(output, name), name
        assert (record.fingerprint, record.dtype, record.model_digest) == (engine.info.fingerprint, "float32", engine.info.model_digest)
    given = records["given", 0]
    assert given.continue_from == (5, 6) and given.token_ids[:2] == [5, 6] and given.prompt_token_ids == list(PROMPT)
    assert records["cut", 0].max_len == OPTIONS["max_model_len"] and records["cut", 0].abort_reason == "enough"


def test_each_version_has_the_digest_of_its_weights(engine: Engine, versions: list[str], path: Path) -> None:
    digests = []
    for folder in versions:
        with Engine(folder, **OPTIONS) as fresh:
            digests.append(weights_digest(fresh.control.digests()))
    run(engine, request("old"))
    engine.add_request(request("both"))
    for _ in range(4):
        engine.step()
    sync(engine, versions[1])
    finish(engine)
    until(lambda: engine.stats()["trace_lines"] == 2)
    sync(engine, versions[2])
    sync(engine, versions[1], version=2)  # the same number again: other weights
    run(engine, request("last"))
    engine.close()
    found = {r.request_id: r.weights for r in read_trace(path)}
    assert found == {"old": {0: digests[0]}, "both": {0: digests[0], 1: digests[1]}, "last": {2: digests[1]}}


def test_a_digest_that_could_not_be_taken_is_null(
    engine: Engine, versions: list[str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(engine, request("old"))
    until(lambda: engine.stats()["trace_lines"] == 1)

    def away(read: Any) -> None:
        raise IllegalState("the weights are away")

    monkeypatch.setattr(engine.control, "_read_live", away)
    sync(engine, versions[1])
    run(engine, request("new"))
    engine.close()
    (old, new) = read_trace(path)
    assert old.weights[0] is not None and new.weights == {1: None}


def test_a_full_disk_costs_whole_lines_and_says_so_once(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, room = os.write, [10**9]

    def write(fd: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(28, "No space left on device")
        done = real(fd, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(trace_file.os, "write", write)
    run(engine, request("a"))
    until(lambda: engine.stats()["trace_lines"] == 1)
    room[0] = 100  # half a line, then nothing
    run(engine, request("b"), request("c"))
    until(lambda: engine.stats()["trace_dropped_lines"] == 2)
    room[0] = 10**9
    run(engine, request("d"))
    engine.close()
    assert [r.request_id for r in read_trace(path)] == ["a", "d"]
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 2 and "No space left on device" in said[0] and "2 samples are not in it" in said[1]


def test_a_disk_that_hangs_holds_up_nobody(engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, real = threading.Event(), TraceFile.append
    monkeypatch.setattr(TraceFile, "append", lambda self, line: (hangs.wait(20), real(self, line)))
    monkeypatch.setattr(trace_writer, "WAITING_BYTES", 20_000)
    outputs = run(engine, *(request(f"r{i}", n=4) for i in range(10)))
    assert len(outputs) == 40 and not hangs.is_set() and 0 < engine.stats()["trace_dropped_lines"] < 40
    hangs.set()
    engine.close()
    stats = engine.stats()
    assert stats["trace_lines"] + stats["trace_dropped_lines"] == 40 and len(list(read_trace(path))) == stats["trace_lines"]


def test_a_slow_disk_is_told_of_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, turns = TraceFile.append, threading.Semaphore(0)
    monkeypatch.setattr(TraceFile, "append", lambda self, line: (turns.acquire(timeout=20), real(self, line)))
    monkeypatch.setattr(trace_writer, "WAITING_BYTES", 3_000)
    for i in range(20):  # one line is written for some that come
        run(engine, request(f"r{i}", n=4))
        turns.release()
        until(lambda i=i: engine.stats()["trace_lines"] == i + 1)  # type: ignore[misc]
    assert engine.stats()["trace_dropped_lines"] > 40
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    turns.release(10**6)
    until(lambda: sum(engine.stats()[f"trace_{name}lines"] for name in ("", "dropped_")) == 80)
    run(engine, request("well"))
    engine.close()
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 2 and "samples are not in it" in said[1]


def test_what_waits_is_bounded_masks_included(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(TraceFile, "append", lambda self, line: hangs.wait(20))
    monkeypatch.setattr(trace_writer, "WAITING_BYTES", 9_000)  # a mask of these has some 1,000 bytes
    run(engine, *(request(f"r{i}", top_p=0.99, temperature=2.0, max_tokens=40, include=("sampling_mask",)) for i in range(6)))
    assert engine.stats()["trace_dropped_lines"] > 1
    hangs.set()


def test_trouble_ends_neither_the_thread_nor_the_count(
    engine: Engine, versions: list[str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(read: Any) -> None:
        raise EngineDead("rank 1 did not answer in 60 s")

    with monkeypatch.context() as patch:
        patch.setattr(engine.control, "_read_live", dead)
        sync(engine, versions[1])
        run(engine, request("a"))
        until(lambda: engine.stats()["trace_lines"] == 1)
    hangs, real = threading.Event(), TraceFile.append
    monkeypatch.setattr(TraceFile, "append", lambda self, line: (hangs.wait(20), real(self, line)))
    monkeypatch.setattr(trace_thread, "CLOSE_S", 0.1)
    run(engine, *(request(f"b{i}") for i in range(5)))
    engine.close()
    assert engine.stats() | {"trace_lines": 1, "trace_dropped_lines": 5} == engine.stats()
    hangs.set()
    until(lambda: engine.stats() | {"trace_lines": 2, "trace_dropped_lines": 4} == engine.stats())  # it was amid this one
    assert next((r.request_id, r.weights) for r in read_trace(path)) == ("a", {1: None})


def test_an_engine_that_is_dropped_is_freed_and_its_trace_written(versions: list[str], path: Path) -> None:
    engine = Engine(versions[0], trace=path, **OPTIONS)
    engine._stop_matcher = lambda stops, engine=engine: Watcher(engine)  # type: ignore[misc]  # what a request leads to
    run(engine, *(request(f"r{i}", stop=("x",)) for i in range(3)))
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    until(lambda: gone() is None or gc.collect() < 0)
    until(lambda: not any(t.name == "rollsync-trace" for t in threading.enumerate()))
    assert len(list(read_trace(path))) == 3


class Watcher:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def push(self, token_id: int) -> str | None:
        return None


def test_a_lock_that_others_hold_is_waited_for_but_not_for_ever(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_file, "LOCK_S", 0.1)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"trace\.jsonl: another process has held its lock \(flock\) for 0.1 s"):
            TraceFile(str(path))
        run(engine, request("lost"))
        until(lambda: engine.stats()["trace_dropped_lines"] == 1)
        assert "held its lock" in caplog.text
    run(engine, request("kept"))
    engine.close()
    assert [r.request_id for r in read_trace(path)] == ["kept"]


def test_what_cannot_be_a_trace_is_refused_by_name(tmp_path: Path, versions: list[str]) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("not yours")
    for bad, words in (
        (tmp_path, "Is a directory"), (tmp_path / "no" / "where", "No such file"),
        (other, "is no trace"), (Path("/dev/null"), "no ordinary file"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words) as refused:
            Engine(str(tmp_path / "no model, never looked for"), trace=bad)
        assert str(bad) in str(refused.value)
    assert other.read_text() == "not yours"
    with pytest.raises(ConfigError, match="trace must name a file"):
        Engine(versions[0], trace="")


def test_bad_lines_are_named(engine: Engine, path: Path) -> None:
    run(engine, request("a"), request("b", include=("entropy",)))
    engine.close()
    first, second = path.read_bytes().splitlines(keepends=True)
    wire = json.loads(second)
    without = {k: v for k, v in wire.items() if k != "seed"}
    for number, (text, words) in enumerate(
        (
            (second[:-40], "cut off after"),
            (b"nonsense\n", "not JSON"),
            (b"[1]\n", "no rollsync_trace"),
            (json.dumps({**wire, "rollsync_trace": 2}).encode() + b"\n", "is of format 2, and this version reads up to 1"),
            (json.dumps(without).encode() + b"\n", "lacks seed"),
            (json.dumps({**wire, "entropy": wire["entropy"][1:]}).encode() + b"\n", "entropy holds 11 values for 12 tokens"),
            (json.dumps({**wire, "logprobs": ["x"] * 12}).encode() + b"\n", "logprobs holds something that is not a number"),
            (json.dumps({**wire, "params": {"temperature": -1}}).encode() + b"\n", "temperature must be"),
        )
    ):
        path.write_bytes(first + text if number == 0 else first + text + first)
        with pytest.raises(TraceError, match=words) as refused:
            list(read_trace(path))
        assert f"{path}, line 2" in str(refused.value) and refused.value.line == 2
        told: list[TraceError] = []
        assert [r.line for r in read_trace(path, on_error=told.append)] == ([1] if number == 0 else [1, 3]) and len(told) == 1
    path.write_bytes(b"")
    for bad, words in ((path, "is empty"), (path.parent, "is a folder"), (path.parent / "gone", "No such file")):
        with pytest.raises(TraceError, match=words):
            list(read_trace(bad))


def test_a_half_line_of_another_engine_swallows_nobody_elses(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    mine, dead = TraceFile(str(path)), TraceFile(str(path))
    mine.append(b'{"rollsync_trace":1,"a":1}\n')
    os.write(dead._fd, b'{"rollsync_trace":1,"half')
    dead.close()
    mine.append(b'{"rollsync_trace":1,"b":1}\n')
    assert path.read_bytes() == b'{"rollsync_trace":1,"a":1}\n{"rollsync_trace":1,"b":1}\n'
    mine.close()


def test_a_file_that_is_removed_or_moved_away_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, line = tmp_path / "trace.jsonl", b'{"rollsync_trace":1}\n'
    file = TraceFile(str(path))
    file.append(line)
    path.rename(tmp_path / "yesterday.jsonl")
    file.append(line)
    path.unlink()
    file.append(line)
    file.close()
    assert path.read_bytes() == line == (tmp_path / "yesterday.jsonl").read_bytes()
    assert caplog.text.count("was removed or replaced") == 2


@pytest.mark.parametrize("path", [5, b"trace.jsonl", "a\0b", ""])
def test_a_trace_that_names_no_file_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match="trace must name a file, got"):
        EngineConfig(model="m", trace=path)
