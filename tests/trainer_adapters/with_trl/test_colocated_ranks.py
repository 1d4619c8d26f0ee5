"""Two trainer ranks with an engine in each: the bits of the sharded trainer on every rank, and errors alike on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import colocated_runs
import pytest

pytestmark = pytest.mark.adapters


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root: Path = tmp_path_factory.mktemp("colocated")
    return colocated_runs.run(root, "ranks")


@pytest.mark.parametrize(("name", "dtype"), [("ddp", "float32"), ("fsdp", "float32"), ("fsdp_bf16", "bfloat16")])
def test_every_rank_samples_the_trainers_bits(name: str, dtype: str, ranks: list[dict[str, Any]]) -> None:
    colocated_runs.check_phases([found[name] for found in ranks], dtype)
    assert all((found[name]["shared"] > 0) == (name == "ddp") for found in ranks)


def test_what_fails_on_one_rank_raises_on_both(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["failures"] for found in ranks)
    for found in (first, second):
        assert found["sync"].startswith("UpdateError: weight update failed in commit on trainer rank 1") and "finite" in found["sync"]
        assert found["versions"].startswith("TargetError") and "(rank 0 5, rank 1 6)" in found["versions"]
        assert first["version"] == second["version"] is not None
        assert found["sleep"].startswith("TargetError: trainer rank 1 failed at the end of the phase: OSError: no sleep")
        assert found["generate"].startswith("TargetError: trainer rank 1 failed at generate") and "prompts[0]" in found["generate"]
        assert found["making"].startswith("TargetError: trainer rank 1 failed at making the engine") and "KV pool" in found["making"]
        assert found["uneven"] == "nothing was raised" and not found["awake"]
    assert first["body"].startswith("TargetError: trainer rank 1 failed at the end of the phase: ZeroDivisionError: the reward")
    assert second["body"] == "ZeroDivisionError: the reward function failed"
