"""Triton's interpreter is chosen for a whole process, so its tests run in children: both at once, as each is one thread's work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _environment(cache: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return kept | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"} | more


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a child that compiles."""
    return _environment(tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="session")
def interpreters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """The tests in `ops`, and the cases of interpreted_engine.py, running."""
    folder = tmp_path_factory.mktemp("interpreted")
    commands = {
        "ops": ["-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", "-x", "--tb=short", str(HERE / "ops")],
        "engine": [str(HERE / "interpreted_engine.py"), str(folder)],
    }
    env = _environment(folder / "triton", TRITON_INTERPRET="1")
    running = {
        name: subprocess.Popen([sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    yield running
    for process in running.values():
        process.kill()
        process.communicate()
