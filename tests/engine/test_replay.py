"""Replay gives every bit again, whatever is sampled how; what differs is found and named, and what cannot be replayed refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live import OPTIONS, PROMPT, finish, request, steps, sync, write_versions
from real_engine import COLUMNS, changed, make_requests, prompt
from rollsync import Engine, IllegalState, read_trace, replay
from rollsync.rollout.cli import main
from rollsync.rollout.replay import Replayer, ReplayReport
from rollsync.rollout.selftest.model import write_model
from rollsync.rollout.trace import TraceError

Edit = Callable[[dict[str, Any]], Any]
FLAGS = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_versions(tmp_path_factory.mktemp("replayed"), 2)


@pytest.fixture(scope="module")
def trace(versions: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of every kind of request: 26 samples and one that is empty."""
    path = tmp_path_factory.mktemp("trace") / "all.jsonl"
    of = [
        *(changed(r, n=2) for r in make_requests(5, max_tokens=9, shared=9, step=3)),
        request("penalties", n=2, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={9: 3.0}, top_logprobs=4, temperature=0.8),
        request("allowed", allowed_token_ids=tuple(range(40)), min_tokens=5, ignore_eos=False, include=COLUMNS),
        request("eos", max_tokens=40, n=3, ignore_eos=False, stop_token_ids=tuple(range(100, 120)), min_tokens=2),
        request("from 3", n=2, first_sample=3, prompt_logprobs_start=4, include=("prompt_logprobs",)),
        request("continued", continue_from=(5, 6, 7), top_k=5, include=COLUMNS),
        request("forced", n=2, forced_token_ids=(8, 200, 9), top_k=5, include=COLUMNS),
        request("scored", forced_token_ids=prompt(3, 30), score_only=True, top_p=0.5, include=COLUMNS),
        request("prompt only", max_tokens=0, include=("prompt_logprobs",)),
        request("nothing", max_tokens=0),
        request("greedy", temperature=0.0, max_tokens=None, include=COLUMNS),
    ]
    with Engine(versions[0], trace=path, **OPTIONS) as engine:
        for each in of:
            engine.add_request(each)
        finish(engine)
        engine.add_request(request("cut off", n=2, max_tokens=None, min_tokens=0, include=COLUMNS))
        steps(engine, 7)
        engine.abort("cut off", reason="enough")
    return path


def written(engine: Engine, lines: int) -> None:
    """Wait for them: with it the digest of their weights was taken, and new ones may come."""
    deadline = time.monotonic() + 10
    while engine.stats()["trace_lines"] < lines:
        assert time.monotonic() < deadline, engine.stats()
        time.sleep(0.01)


def run(trace: Path, model: str, *, forced: bool = False, **options: Any) -> ReplayReport:
    with Engine(model, **{**OPTIONS, **options}) as engine:
        return replay(read_trace(trace), engine, forced=forced)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("options", [{}, {"block_tokens": 16, "max_batch_tokens": 7, "num_blocks": 12, "prefix_cache": False}])
def test_all_is_equal_however_the_engine_batches(trace: Path, versions: list[str], forced: bool, options: dict[str, Any]) -> None:
    report = run(trace, versions[0], forced=forced, **options)
    assert report.all_equal and report.first_mismatch is None, report
    records = list(read_trace(trace))
    assert (report.samples, report.empty) == (len(records) - 1, 1) and report.samples == 26
    assert report.tokens == report.equal_tokens == sum(len(r.token_ids) for r in records) > 250
    assert report.columns.keys() == {"token_ids", "logprobs", "top_token_ids", "top_logprobs", "sampling_mask", *COLUMNS}
    assert all(equal == total > 0 for equal, total in report.columns.values())


def test_one_line_is_enough_and_a_limit_holds(trace: Path, versions: list[str]) -> None:
    with Engine(versions[0], **OPTIONS) as engine:
        report = replay(read_trace(trace), engine, limit=3)
        assert report.all_equal and report.samples + report.empty == 3
        engine.add_request(request("mine"))
        with pytest.raises(IllegalState, match="without other requests"):
            replay(read_trace(trace), engine)
        engine.abort(all=True)


def edited(trace: Path, path: Path, name: str, edit: Edit) -> tuple[Path, int]:
    """A copy in which the first sample of a request is edited, and its line."""
    lines = [json.loads(text) for text in trace.read_text().splitlines()]
    at = next(i for i, wire in enumerate(lines) if wire["request_id"] == name)
    edit(lines[at])
    path.write_text("".join(json.dumps(wire) + "\n" for wire in lines))
    return path, at + 1


def next_float32(wire: dict[str, Any], column: str, at: int) -> None:
    import numpy as np

    wire[column][at] = float(np.nextafter(np.float32(wire[column][at]), np.float32(0)))


def flip(column: str, at: int) -> Edit:
    return lambda wire: next_float32(wire, column, at)


@pytest.mark.parametrize(
    ("name", "edit", "column", "position"),
    [
        ("r1", flip("logprobs", 4), "logprobs", 4),
        ("r1", flip("entropy", 0), "entropy", 0),
        ("r1", flip("prompt_logprobs", 3), "prompt_logprobs", 3),
        ("penalties", lambda wire: next_float32({"row": wire["top_logprobs"][2]}, "row", 1), "top_logprobs", 2),
        ("r1", lambda wire: wire["token_ids"].__setitem__(5, (wire["token_ids"][5] + 1) % 256), "token_ids", 5),
        ("greedy", lambda wire: wire.update(finish_reason="stop", stop_reason=7), "finish_reason", 44),
        ("r1", lambda wire: wire["logprobs"].__setitem__(0, "nan"), "logprobs", 0),
        ("r1", lambda wire: wire.update(seed=wire["seed"] + 1), "token_ids", None),
        ("r2", lambda wire: wire.update(sample_index=9), "token_ids", None),
        ("r1", lambda wire: wire["params"].update(temperature=0.9), "logprobs", None),
        ("r1", lambda wire: wire["prompt_token_ids"].__setitem__(0, 77), "logprobs", None),
    ],
)  # fmt: skip
def test_what_differs_is_found_and_named(
    trace: Path, versions: list[str], tmp_path: Path, name: str, edit: Edit, column: str, position: int | None
) -> None:
    path, line = edited(trace, tmp_path / "edited.jsonl", name, edit)
    report = run(path, versions[0])
    found = report.first_mismatch
    assert not report.all_equal and report.equal_samples == report.samples - 1 and found is not None
    assert (found.line, found.request_id) == (line, name)
    assert position is None or (found.column, found.position) == (column, position)
    assert f"line {line} (request {name}, sample" in str(found) and "the replay" in str(found)
    if position is not None and column != "finish_reason":
        assert report.columns[column][0] < report.columns[column][1]
    counted = column != "prompt_logprobs" and column != "finish_reason"
    assert (report.equal_tokens < report.tokens) == counted


def test_forced_replay_ignores_the_seed_and_finds_a_changed_token(trace: Path, versions: list[str], tmp_path: Path) -> None:
    path, _ = edited(trace, tmp_path / "seed.jsonl", "r1", lambda wire: wire.update(seed=99))
    assert run(path, versions[0], forced=True).all_equal
    path, line = edited(trace, tmp_path / "token.jsonl", "r1", lambda wire: wire["token_ids"].__setitem__(5, 77))
    found = run(path, versions[0], forced=True).first_mismatch
    assert found is not None and (found.line, found.column, found.position) == (line, "logprobs", 5)


def other_model(root: Path) -> str:
    return write_model(root / "other", "llama", rope_theta=5000.0)


REFUSALS: list[tuple[str, Edit | None, list[str], list[str]]] = [
    ("version", lambda wire: wire.update(rollsync="0.0.7"), [], ["was written by rollsync 0.0.7", "this is 0.1.0"]),
    ("model", None, ["--model", "OTHER"], ["is of another model", "the engine has"]),
    ("dtype", None, ["--dtype", "bfloat16"], ["was computed in float32", "computes in bfloat16"]),
    ("fingerprint", None, ["--k-shards", "2"], ["fingerprint v1-k4-", "the engine v1-k2-"]),
    ("weights", None, ["--model", "NEXT"], ["was made by weights", "(version 0), and the engine has"]),
    ("spans", lambda wire: wire.update(weights={"3": "aa", "4": "bb"}), [], ["spans the weight versions 3 (aa) and 4 (bb)"]),
    ("kv", lambda wire: wire["weight_versions"][0].update(mixed_kv=1), [], ["KV cache of older weights"]),
    ("unknown", lambda wire: wire.update(weights={"6": None}), [], ["which weights its version 6 was"]),
    ("no weights", lambda wire: wire.update(weights={}), [], ["holds values, and does not say which weights gave them"]),
    ("context", None, ["--max-model-len", "16"], ["cannot be computed by this engine", "16"]),
    ("limit", None, ["--limit", "0"], ["--limit must be at least 1"]),
]


MALFORMED: list[tuple[Edit, str]] = [
    (lambda wire: wire.update(options={"trace": "evil.jsonl"}), "options holds trace = "),
    (lambda wire: wire.update(options={"sample_padding": "yes"}), "options holds sample_padding = "),
    (lambda wire: wire.update(options=[1]), "options must be an object"),
    (lambda wire: wire.update(device=5), "device must be a string"),
    (lambda wire: wire["model"].update(name=5), "model must be a string"),
    (lambda wire: wire.update(finish_reason="bogus"), "finish_reason must be one of"),
    (lambda wire: wire.update(finish_reason=["stop"]), "finish_reason must be one of"),
    (lambda wire: wire.update(logprobs=None), "logprobs must be a list"),
]


def test_a_malformed_line_is_named_and_says_nothing_of_the_engine(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for edit, words in MALFORMED:
        path, line = edited(trace, tmp_path / "edited.jsonl", "r1", edit)
        assert main(["replay", str(path), *FLAGS]) == 2
        assert f"{path}, line {line} is malformed: {words}" in capsys.readouterr().err
    path.write_text('{"rollsync_trace":1,"x":' + "[" * 200000)
    assert main(["replay", str(path), *FLAGS]) == 2
    assert "line 1 is malformed: it is nested too deep" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["edited.jsonl"]


@pytest.mark.parametrize(("name", "edit", "flags", "words"), REFUSALS, ids=[case[0] for case in REFUSALS])
def test_what_cannot_be_replayed_is_refused_with_both_sides(
    trace: Path, versions: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    name: str, edit: Edit | None, flags: list[str], words: list[str],
) -> None:  # fmt: skip
    path, line = edited(trace, tmp_path / "edited.jsonl", "r1", edit or (lambda wire: None))
    places = {"OTHER": other_model, "NEXT": lambda root: versions[1]}
    flags = [places[flag](tmp_path) if flag in places else flag for flag in flags]
    assert main(["replay", str(path), *FLAGS, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    for each in words:
        assert each in err
    if edit is not None:  # one line of the many: the others can be replayed
        assert f"{path}, line {line} " in err
        assert main(["replay", str(path), *FLAGS, "--skip", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["samples"] == 25 and len(report["skipped"]) == 1 and words[0] in report["skipped"][0]


def test_the_command_says_what_it_compared(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--forced"]):
        assert main(["replay", str(trace), *FLAGS, *flags]) == 0
        out = capsys.readouterr().out
        assert "26 of        26 equal" in out and out.endswith("every bit is equal\n") and "without a token: 1 samples" in out
    path, line = edited(trace, tmp_path / "edited.jsonl", "r1", flip("logprobs", 4))
    assert main(["replay", str(path), *FLAGS]) == 1
    out = capsys.readouterr().out
    assert f"first difference: line {line} (request r1, sample 0), token 4, logprobs: the trace has" in out and out.endswith("NOT equal\n")
    half = tmp_path / "half.jsonl"
    half.write_bytes(trace.read_bytes()[:-30])
    assert main(["replay", str(half), *FLAGS]) == 2
    assert "cut off after" in capsys.readouterr().err
    assert main(["replay", str(half), *FLAGS, "--skip"]) == 0
    assert "skipped: 1 lines" in capsys.readouterr().out
    half.write_bytes(b"")
    for bad, words in ((half, "is empty"), (tmp_path, "is a folder"), (tmp_path / "gone", "No such file")):
        assert main(["replay", str(bad), "--skip"]) == 2
        assert words in capsys.readouterr().err


def test_after_an_update_each_sample_is_replayed_by_its_own_weights(versions: list[str], tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    with Engine(versions[0], trace=path, **OPTIONS) as engine:
        engine.add_request(request("old", include=COLUMNS))
        finish(engine)
        written(engine, 1)
        for name, policy in (("kept", "keep"), ("computed anew", "recompute")):
            engine.add_request(request(name, prompt=(*PROMPT, len(name)), max_tokens=30))
            steps(engine, 6)
            sync(engine, versions[1], kv_policy=policy)
        finish(engine)
        engine.add_request(request("new", include=COLUMNS))
        finish(engine)
    for folder, name in ((versions[0], "old"), (versions[1], "new")):
        refused: list[TraceError] = []
        with Engine(folder, **OPTIONS) as engine:
            report = replay(read_trace(path), engine, on_refusal=refused.append)
        assert report.all_equal and report.samples == 1 and report.tokens == 12
        lines = [json.loads(text)["request_id"] for text in path.read_text().splitlines()]
        assert sorted(lines[error.line - 1] for error in refused if error.line) == sorted({"old", "kept", "computed anew", "new"} - {name})
        assert sum("spans the weight versions" in str(error) for error in refused) == 2
        assert sum("was made by weights" in str(error) for error in refused) == 1


def test_a_prompt_that_was_only_scored_is_replayed_by_its_own_weights(versions: list[str], tmp_path: Path) -> None:
    path, scored = tmp_path / "prompts.jsonl", {"max_tokens": 0, "include": ("prompt_logprobs",)}
    with Engine(versions[0], trace=path, **{**OPTIONS, "max_batch_tokens": 8, "prefix_cache": False}) as engine:
        engine.add_request(request("old", **scored))
        finish(engine)
        written(engine, 1)
        for name, policy, start in (("two", "keep", 0), ("behind old KV", "keep", 12), ("anew", "recompute", 0)):
            engine.add_request(request(name, prompt_logprobs_start=start, **scored))
            steps(engine, 1)
            sync(engine, versions[1], kv_policy=policy)
            finish(engine)
        engine.add_request(request("nothing", prompt=(5,), **scored))
        finish(engine)
    found = {r.request_id: r for r in read_trace(path)}
    assert {name: list(r.weights) for name, r in found.items()} == {
        "old": [0], "two": [0, 1], "behind old KV": [2], "anew": [3], "nothing": [],
    }  # fmt: skip
    assert [name for name, r in found.items() if r.prompt_mixed_kv] == ["two", "behind old KV"]
    for folder, wanted in ((versions[0], "old"), (versions[1], "anew")):
        refused: list[TraceError] = []
        with Engine(folder, **OPTIONS) as engine:
            report = replay(read_trace(path), engine, on_refusal=refused.append)
        assert report.all_equal and (report.samples, report.empty, len(refused)) == (1, 1, 3)
        assert found[wanted].line not in {error.line for error in refused}


def test_a_trace_that_grows_is_replayed_as_far_as_it_was_looked_at(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, lines, compute = tmp_path / "growing.jsonl", trace.read_bytes().splitlines(keepends=True), Replayer.run
    bad = json.dumps({**json.loads(lines[0]), "weights": {"0": "00"}}).encode()

    def grown(self: Replayer, records: Any) -> ReplayReport:
        path.write_bytes(b"".join(lines[:4]) + bad + b"\nno JSON\n")
        return compute(self, records)

    monkeypatch.setattr(Replayer, "run", grown)
    for half, flags in ((b"", []), (lines[3][:100], ["--skip"])):
        path.write_bytes(b"".join(lines[:3]) + half)
        assert main(["replay", str(path), *FLAGS, *flags]) == 0
        out = capsys.readouterr().out
        assert "2 samples" in out and "without a token: 1" in out and out.count("skipped: 1 lines") == len(flags)
