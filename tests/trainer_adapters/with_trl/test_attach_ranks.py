"""`attach` on two trainer ranks under DDP: each samples its own rows, they send weights together, and fail alike."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import Server, serving
from trl_cases import write_text_model

pytestmark = pytest.mark.adapters
FLAGS = ("--num-blocks", "128", "--max-model-len", "1024")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Server]:
    with serving(folder, *FLAGS) as found:
        yield found


def run(case: str, folder: str, out: Path, *targets: str, timeout_s: float = 400.0) -> list[dict[str, Any]]:
    """What both ranks found; {} for one that was killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).parent / "ranks_of_trl.py")
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, case, folder, str(out / str(rank)), *targets], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    found = []
    try:
        for rank in ranks:
            words, errors = rank.communicate(timeout=timeout_s)
            lines = [line for line in words.splitlines() if line.startswith("FOUND ")]
            assert lines or rank.returncode == -9, errors[-3000:]
            found.append(json.loads(lines[-1].removeprefix("FOUND ")) if lines else {})
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return found


@pytest.mark.parametrize("where", ["server", "engines"])
def test_groups_that_lie_on_two_ranks(where: str, folder: str, server: Server, tmp_path: Path) -> None:
    """T5: each rank asks for its own rows only, no sample comes twice, and both go on with the same weights."""
    one, two = run("plain", folder, tmp_path, *([server.url] if where == "server" else []))
    for found in (one, two):
        assert "error" not in found, found
        assert found["syncs"] == found["version"] == 2 and found["model"] == "DistributedDataParallel"
        assert [len(c["prompts"]) for c in found["calls"]] == [2, 2]
        assert max(found["difference"]) < 1e-5 if found["difference"] else found is two  # rank 0 logs for all
    assert one["weights"] == two["weights"]
    first, second = (found["calls"][0] for found in (one, two))
    shared = {tuple(p) for p in first["prompts"]} & {tuple(p) for p in second["prompts"]}
    assert shared, "no group lies on both ranks: this shows nothing"
    rows = [tuple(row) for found in (first, second) for row in found["rows"]]
    assert len(set(rows)) == len(rows) == 4


def test_what_fails_on_one_rank_is_told_on_both(folder: str, server: Server, tmp_path: Path) -> None:
    one, two = run("long", folder, tmp_path, server.url)
    assert one == two and "TargetError: the rollout failed on trainer rank 1" in one["error"]
    assert "rows 0, 1" in one["error"] and "1024" in one["error"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_leaves_the_server_whole(victim: int, folder: str, server: Server, tmp_path: Path) -> None:
    """Within a sync: nothing is left open, the weights before it serve on, and the next run may begin at once."""
    found = run(f"killed_{victim}", folder, tmp_path, server.url)
    assert found[victim] == {} and "error" in found[1 - victim]
    state = httpx.get(f"{server.url}/v1/weights").json()
    assert state["update"] is None and state["weights"]["valid"] and state["weights"]["version"] == 1
    again = run("plain", folder, tmp_path / "again", server.url)
    assert all(found.get("version") == 2 for found in again), again


def test_ranks_with_tools_generate_as_often_as_each_needs(folder: str, server: Server, tmp_path: Path) -> None:
    one, two = run("tools", folder, tmp_path, server.url)
    assert (one, two) == ({"calls": 2, "syncs": 1}, {"calls": 1, "syncs": 1})
