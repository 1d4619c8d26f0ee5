"""Parity across two trainer processes: DDP and FSDP2 have the bits of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks_worker
import torch
from rollsync.rollout.selftest.model import write_model
from rollsync.trainer_adapters.parity import rollsync_parity


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """A model's folder, and what each rank computed on it."""
    root = tmp_path_factory.mktemp("ranks")
    folder = write_model(root / "model", "llama")
    command = [sys.executable, str(Path(ranks_worker.__file__)), folder]
    processes = [
        subprocess.Popen([*command, str(rank), str(root / "store"), str(root)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        for process in processes:
            words, _ = process.communicate(timeout=120)
            assert process.returncode == 0, words
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return folder, [torch.load(root / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("name", "dtype"), [("ddp", torch.float32), ("fsdp", torch.float32), ("fsdp_bf16", torch.bfloat16)])
def test_logits_are_those_of_one_process(name: str, dtype: torch.dtype, ranks: tuple[str, list[dict[str, Any]]]) -> None:
    folder, found = ranks
    model = ranks_worker.load(folder).to(torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for rank in range(2):
        with torch.no_grad():
            with rollsync_parity(model):
                want = model(**ranks_worker.batch(rank)).logits
            stock = model(**ranks_worker.batch(rank)).logits
        real = ranks_worker.batch(rank)["attention_mask"].bool()
        logits, gradients = found[rank][name]
        assert torch.equal(logits[real], want[real])
        assert not torch.equal(logits[real], stock[real]), "the stock model has the same bits, so this shows nothing"
        assert gradients.isfinite().all() and gradients.any()


def test_recomputed_layers_change_nothing(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    for found in ranks[1]:
        for plain, again in zip(found["fsdp_bf16"], found["fsdp_bf16_checkpointed"], strict=True):
            assert torch.equal(plain, again)
