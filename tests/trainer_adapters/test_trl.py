"""A stock GRPOTrainer that samples from an engine in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rollsync import Engine

pytest.importorskip("trl", reason="TRL is not installed: these tests need `trl`, `datasets` and `peft`")

from rollsync.trainer_adapters.trl import attach
from trl_cases import grpo, logged, write_text_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_model(tmp_path_factory.mktemp("trl") / "model")


def test_two_steps_of_grpo_in_process(folder: str, tmp_path: Path) -> None:
    with Engine(folder, threads=1, num_blocks=64) as engine:
        trainer = grpo(folder, tmp_path)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        generation = attach(trainer, engine)
        trainer.train()
        assert generation.num_syncs == 2 and engine.weight_version == 2
        assert all(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
        assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5
        assert all(abs(r - 1) < 1e-5 for r in logged(trainer, "sampling/importance_sampling_ratio/mean"))
