"""Rewards go up: the demo's last act as it is; and the TRL example and the step benchmark from end to end on a tiny model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from rollsync.benchmarks import grpo_step
from servers import serving
from test_examples import example
from trl_cases import write_text_model

pytestmark = pytest.mark.adapters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_model(tmp_path_factory.mktemp("learning") / "model", dtype=torch.bfloat16)


def test_the_demos_model_learns_to_sort() -> None:
    args = argparse.Namespace(steps=40, warm_up_steps=150, prompts=32, samples=8, seed=1, kernels=None)
    steps = example("demo_grpo").learn(args)
    assert steps[0].reward < 0.3 and steps[-1].reward > 0.7
    assert all(step.exact == step.tokens for step in steps)


def test_the_trl_example_on_a_server(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, png = tmp_path / "out.json", tmp_path / "reward.png"
    flags = ["--steps", "2", "--threads", "1", "--json", str(out), "--plot", str(png)]
    with serving(folder, "--dtype", "bfloat16", "--num-blocks", "64") as server:
        assert example("grpo_trl").main([folder, "--url", server.url, *flags]) == 0
    found = json.loads(out.read_text())
    assert [row["step"] for row in found["curve"]] == [1, 2] and png.read_bytes().startswith(b"\x89PNG")
    assert all(row["max_logp_difference"] == 0 and row["staleness"] == 0 and row["sync_s"] > 0 for row in found["curve"])
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_the_step_benchmark_quickly(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert grpo_step.main(["--model", folder, "--quick", "--threads", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["sides"].keys() == {"rollsync", "rollsync-url", "trl"}
    for parts in found["sides"].values():
        assert sum(parts[part]["median_s"] for part in ("generation", "sync", "train")) == pytest.approx(parts["seconds"]["median_s"])
    assert found["sides"]["rollsync-url"]["sync"]["median_s"] > 0 and found["floor"].keys() == {"rollsync", "rollsync-url"}
