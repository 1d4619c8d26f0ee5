"""The code of docs/own_loop.md, as it stands there, on a tiny model: in one process and on two ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import own_loop_worker
import pytest
import torch
from servers import serving

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own_loop.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 256}
    path = tmp_path_factory.mktemp("own_loop") / "m"
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def url(folder: str) -> Iterator[str]:
    with serving(folder, "--num-blocks", "64") as server:
        yield server.url


@pytest.fixture(scope="module")
def code() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


def check(facts: dict[str, Any], exact: bool) -> None:
    limit = 0.0 if exact else 1e-4
    assert facts["difference"] <= limit and facts["after"] <= limit
    steps, rows = own_loop_worker.STEPS, len(own_loop_worker.PROMPTS) * 4
    (last,) = facts["served"]
    assert facts["versions"] == [[last - steps + step] for step in range(steps) for _ in range(rows)]
    assert facts["again"]


@pytest.mark.parametrize("kind", ["plain", "parity"])
def test_the_loop_learns_from_and_syncs_to_a_server(kind: str, code: str, folder: str, url: str) -> None:
    check(own_loop_worker.run(code, kind, folder, url), kind == "parity")


@pytest.mark.slow
@pytest.mark.parametrize("kind, size", [("accelerate", 1), ("fsdp2", 2), ("ddp", 2)])
def test_the_loop_under_what_wraps_a_model(kind: str, size: int, code: str, folder: str, url: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(code)
    outs = [tmp_path / f"{rank}.json" for rank in range(size)]
    more = [[str(rank), str(tmp_path / "store")] if size > 1 else [] for rank in range(size)]
    command = [sys.executable, own_loop_worker.__file__, str(tmp_path / "code.py"), kind, folder]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen([*command, str(outs[i]), url, *more[i]], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for i in range(size)
    ]
    try:
        for rank in ranks:
            words, _ = rank.communicate(timeout=180)
            assert rank.returncode == 0, words
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for out in outs:
        check(json.loads(out.read_text()), exact=False)
