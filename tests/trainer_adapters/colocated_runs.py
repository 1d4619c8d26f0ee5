"""Starting the two ranks of colocated_worker.py, and what must hold of the phases they ran."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rollsync.rollout.selftest.model import write_model


def run(root: Path, which: str) -> list[dict[str, Any]]:
    """What each rank saved."""
    folder = write_model(root / "model", "llama")
    here = Path(__file__).parent
    worker = str(here / "colocated_worker.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])}
    processes = [
        subprocess.Popen(
            [sys.executable, worker, folder, str(rank), str(root / "store"), str(root), which],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            words, _ = process.communicate(timeout=300)
            assert process.returncode == 0, words
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(root / f"{rank}.pt") for rank in range(2)]


def check_phases(found: list[dict[str, Any]], dtype: str) -> None:
    """Equal bits in every phase, other weights in each, versions from the step, and memory given back."""
    for rank in found:
        assert rank["dtype"] == dtype
        assert rank["equal"] == [True] * 3
        assert sorted(set(rank["versions"])) == [0, 10, 20]
        assert rank["seen"][0] != rank["seen"][1] != rank["seen"][2], "training changed nothing, so this shows nothing"
        assert all(freed > 0 for freed in rank["freed"])
    assert found[0]["seen"] != found[1]["seen"], "both ranks served the same rows"
