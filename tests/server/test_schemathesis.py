"""schemathesis against the real app: no 5xx, and every answer is one that /openapi.json tells of."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("schemathesis")
HERE = Path(__file__).parent
LEFT_OUT = "positive_data_acceptance"
"""a schema cannot say what a vocabulary holds, nor that of three fields exactly one is given"""


@pytest.fixture(scope="module")
def short(serving: Any, tokenizer_folder: Path) -> Iterator[Any]:
    with serving("--tokenizer", str(tokenizer_folder), model="fake-short") as server:
        yield server


def check(server: Any, scratch: Path, *flags: str) -> None:
    """Run schemathesis, and then see that the same engine still answers as it did."""

    def good() -> Any:
        answer = httpx.post(f"{server.url}/v1/rollouts", json={"prompts": [{"text": "abc"}], "request_id": "good", "include": ["text"]})
        return answer.status_code, answer.content, server.engine_pid

    before = good()
    command = [sys.executable, "-m", "schemathesis.cli", "--no-color", "run", f"{server.url}/openapi.json"]
    command += ["--continue-on-failure", "--exclude-checks", LEFT_OUT, "--request-timeout", "30", "--warnings", "off", *flags]
    paths = os.pathsep.join([str(HERE), *(p for p in (os.environ.get("PYTHONPATH"),) if p)])
    env = {**os.environ, "PYTHONPATH": paths, "SCHEMATHESIS_HOOKS": "schemathesis_hooks"}
    done = subprocess.run(command, env=env, cwd=scratch, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert before[0] == 200 and good() == before, "the same call is answered otherwise after it"


def test_what_it_makes_up_is_answered_as_documented(short: Any, tmp_path: Path) -> None:
    check(short, tmp_path, "--phases", "fuzzing", "--max-examples", "8", "--generation-deterministic")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_much_more_of_it(short: Any, tmp_path: Path, seed: int) -> None:
    database = ["--generation-database", "none", "--seed", str(seed)]
    check(short, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-examples", "300", "--max-failures", "40", *database)
