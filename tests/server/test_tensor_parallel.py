"""A server whose engine has two ranks: it serves as one, and whatever is killed leaves no process behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollsync import Engine, RolloutClient, SamplingParams
from rollsync.rollout.errors import EngineDead, RollsyncError
from rollsync.rollout.selftest.model import write_model

OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 256, "threads": 1}
FLAGS = ("--tp", "2", "--dtype", "bfloat16", "--num-blocks", "256", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> str:
    folder = write_model(tmp_path_factory.mktemp("tp") / "model", max_position_embeddings=8192)
    for file in tokenizer_folder.iterdir():
        Path(folder, file.name).write_bytes(file.read_bytes())
    return folder


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def test_two_ranks_serve_as_one(serving: Any, until: Callable[..., None], alive: Callable[[int], bool], model: str) -> None:
    params = {"seed": 5, "max_tokens": 12, "ignore_eos": True}
    with Engine(model, **OPTIONS) as engine:
        want = engine.generate([[7, 8, 9]], SamplingParams(**params))[0].samples[0]  # type: ignore[arg-type]
    with serving(*FLAGS, model=model, factory=None) as server:
        assert "1 threads on each of 2 ranks" in server.line
        engine_pid = server.engine_pid
        (rank_pid,) = children(engine_pid)
        with RolloutClient(server.url) as client:
            (sample,) = client.rollouts([[7, 8, 9]], sampling_params=params).results[0].samples
            assert (list(sample.token_ids), list(sample.logprobs)) == (want.token_ids, want.logprobs)
            slept = httpx.post(f"{server.url}/v1/engine/sleep", json={}).json()
            assert set(slept["freed_bytes"]) == {"weights", "kv_cache"}
            httpx.post(f"{server.url}/v1/engine/wake", json={}).raise_for_status()
            (sample,) = client.rollouts([[7, 8, 9]], sampling_params=params).results[0].samples
            assert list(sample.logprobs) == want.logprobs
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 130
        until(lambda: not alive(engine_pid) and not alive(rank_pid), 5)


@pytest.mark.parametrize("victim", [pytest.param("front", marks=pytest.mark.slow), "engine", "rank"])
def test_whatever_is_killed_takes_the_rest_along(
    serving: Any, until: Callable[..., None], alive: Callable[[int], bool], model: str, victim: str
) -> None:
    with serving(*FLAGS, model=model, factory=None) as server:
        engine_pid = server.engine_pid
        (rank_pid,) = children(engine_pid)
        got: list[Any] = []

        def ask() -> None:
            with RolloutClient(server.url) as client:
                try:
                    got.append(client.rollouts([[1]], sampling_params={"max_tokens": 8000, "ignore_eos": True}))
                except RollsyncError as error:
                    got.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: server.running() == 1)
        os.kill({"front": server.process.pid, "engine": engine_pid, "rank": rank_pid}[victim], signal.SIGKILL)
        until(lambda: not alive(engine_pid) and not alive(rank_pid), 5)
        thread.join(5)
        assert len(got) == 1 and isinstance(got[0], RollsyncError), got
        if victim == "rank":
            assert isinstance(got[0], EngineDead) and f"rank 1 (pid {rank_pid}) ended: killed by SIGKILL" in str(got[0])
