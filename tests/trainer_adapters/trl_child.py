"""Runs a script of `with_trl` with the TRL of one's choice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent / "with_trl"


def child(script: str, *args: str, version: str = "1.16.0", timeout_s: float = 600.0, **env: str) -> dict[str, Any]:
    """What a script of this folder found, with that TRL first on its path."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env}
    if version != "1.16.0":
        folder = Path(sys.prefix, "versions", f"trl=={version}")
        if not folder.is_dir():
            pytest.skip(f"TRL {version} is not in {folder}: make test-adapters puts it there")
        env["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, str(HERE / script), *args]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    lines = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert run.returncode == 0 and lines, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND "))
    return found
