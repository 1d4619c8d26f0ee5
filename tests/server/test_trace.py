"""`rollsync serve --trace FILE`: every route's samples are in it, once each, and they replay; a killed server leaves whole lines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollsync import RolloutClient, read_trace
from rollsync.rollout.cli import main
from rollsync.rollout.selftest.model import write_model
from rollsync.rollout.trace import TraceError

OPTIONS = {"block_tokens": 16, "num_blocks": 512, "max_model_len": 1000, "threads": 1}
FLAGS = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
PROMPT = list(range(3, 23))
SAMPLING = {"max_tokens": 6, "seed": 3, "temperature": 0.8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("traced"), "llama", max_position_embeddings=1024)


def test_every_route_is_traced_and_replays(
    serving: Any, model: str, tokenizer_folder: Path, tmp_path: Path, until: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    with serving(*FLAGS, "--tokenizer", str(tokenizer_folder), "--trace", str(path), model=model, factory=None) as server:
        with RolloutClient(server.url) as client:
            whole = client.rollouts([PROMPT, "a text"], n=2, sampling_params=SAMPLING, include=["entropy", "prompt_logprobs"])
            by_token = list(client.stream([PROMPT], n=2, sampling_params=SAMPLING, tokens=True))
            kept = client.rollouts([PROMPT], sampling_params={**SAMPLING, "stop": ["e"]}, request_id="kept", detach_s=5)
            client.score([(PROMPT, [5, 6, 7])])
            ending = threading.Thread(target=lambda: (until(lambda: server.running() == 2), client.abort(all=True)))
            ending.start()
            cut = client.rollouts([PROMPT], n=2, sampling_params={"max_tokens": 900, "ignore_eos": True})
            ending.join()
        http = httpx.Client(base_url=server.url, timeout=30)
        openai = {"max_tokens": 6, "seed": 3, "n": 2, "logprobs": 2}
        assert http.post("/v1/completions", json={"prompt": "abc", **openai}).is_success
        assert http.post("/v1/completions", json={"prompt": PROMPT, **openai, "stream": True}).text.endswith("data: [DONE]\n\n")
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
        assert http.post("/v1/chat/completions", json=chat).is_success
        vllm = {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "logprobs": 1}, "return_token_ids": True}
        assert http.post("/inference/v1/generate", json=vllm).is_success
        sglang = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "temperature": 0.0}, "return_logprob": True}
        assert http.post("/generate", json=sglang).is_success
        samples = 4 + 2 + 1 + 1 + 2 + 2 + 2 + 1 + 1 + 1
        until(lambda: http.get("/v1/engine/status").json()["stats"]["trace_lines"] == samples)
        metrics = http.get("/metrics").text
        assert f"rollsync_trace_lines_total {float(samples)}" in metrics and "rollsync_trace_dropped_lines_total 0.0" in metrics
        left = [PROMPT] * 40  # these are being written when the server is told to end
        with RolloutClient(server.url) as client:
            client.rollouts(left, n=5, sampling_params=SAMPLING)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 143
    records = list(read_trace(path))
    assert len(records) == samples + 200 and {r.options.get("tokenizer") for r in records} == {str(tokenizer_folder)}
    traced = Counter((tuple(r.prompt_token_ids), r.sample_index, r.seed, tuple(r.token_ids), tuple(r.logprobs)) for r in records)
    finals = [(result.prompt_token_ids, s) for call in (whole, kept, cut) for result in call.results for s in result.samples]
    finals += [(PROMPT, item.sample) for item in by_token if item.sample is not None]
    assert len(finals) == 4 + 2 + 1 + 2
    for prompt, s in finals:
        assert traced[tuple(prompt), s.index, s.seed, tuple(s.token_ids), tuple(s.logprobs)] > 0
    aborted = [r for r in records if r.finish_reason == "abort"]
    assert len(aborted) == 2 and all(r.abort_reason == s.abort_reason for r, s in zip(aborted, cut.results[0].samples, strict=True))
    for flags in ([], ["--forced"]):
        assert main(["replay", str(path), "--threads", "1", *flags]) == 0
        assert "every bit is equal" in capsys.readouterr().out


def test_a_killed_server_leaves_whole_lines_that_replay(
    serving: Any, model: str, tmp_path: Path, alive: Callable[[int], bool], until: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    with serving(*FLAGS, "--trace", str(path), model=model, factory=None) as server:
        pid = server.engine_pid

        def load() -> None:
            with RolloutClient(server.url) as client, contextlib.suppress(Exception):
                while True:
                    client.rollouts([PROMPT], n=8, sampling_params={"max_tokens": 30})

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: path.exists() and path.stat().st_size > 100_000)
        os.kill(server.process.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(10)
        until(lambda: not alive(pid))
    *whole, last = path.read_bytes().split(b"\n")
    assert len(whole) > 20 and all(json.loads(line)["finish_reason"] for line in whole)
    torn: list[TraceError] = []
    assert len(list(read_trace(path, on_error=torn.append))) == len(whole) and len(torn) == bool(last)
    assert main(["replay", str(path), "--threads", "1", "--limit", "40", "--skip"]) == 0
    assert "every bit is equal" in capsys.readouterr().out


def test_a_trace_that_cannot_be_written_is_refused_at_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "notes"
    notes.write_text("not a trace")
    for bad, words in ((tmp_path, "Is a directory"), (tmp_path / "no" / "where", "No such file"), (notes, "is no trace")):
        assert main(["serve", "a model", "--port", "0", "--trace", str(bad)]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: trace: ") and str(bad) in err and words in err
