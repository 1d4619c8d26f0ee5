"""One rank of a GRPO run under DDP and parity, with an engine of its own: `torchrun parity_ranks.py FOLDER OUT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from rollsync import Engine
from rollsync.trainer_adapters.trl import attach
from trl_cases import grpo, load, logged

if __name__ == "__main__":
    folder, out = sys.argv[1:]
    torch.set_num_threads(1)
    trainer = grpo(folder, out, load(folder), max_completion_length=12)
    with Engine(folder, dtype="float32", threads=1, num_blocks=64) as engine:
        generation = attach(trainer, engine, parity=True)
        trainer.train()
    differences = logged(trainer, "sampling/sampling_logp_difference/max") if trainer.accelerator.is_main_process else [0.0, 0.0]
    Path(out, f"rank{os.environ['RANK']}.txt").write_text(f"{differences} {generation.num_syncs}")
