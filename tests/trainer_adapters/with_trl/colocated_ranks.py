"""One rank of a GRPO run under DDP and parity, whose engine sleeps while it trains: `torchrun colocated_ranks.py FOLDER OUT`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent.parent))
from rollsync.trainer_adapters.colocated import ColocatedEngine
from rollsync.trainer_adapters.trl import attach
from trl_cases import grpo, load, logged

if __name__ == "__main__":
    folder, out = sys.argv[1:]
    torch.set_num_threads(1)
    trainer = grpo(folder, out, load(folder), ddp_backend="gloo")
    with ColocatedEngine(trainer, threads=1, memory_bytes=16 << 20) as engine:
        generation = attach(trainer, engine, parity=True)
        trainer.train()
        assert engine.last_phase is not None
        found = {
            "syncs": generation.num_syncs, "version": engine.last_phase.version, "model": type(trainer.model_wrapped).__name__,
            "difference": logged(trainer, "sampling/sampling_logp_difference/max"), "freed": engine.last_phase.freed_bytes,
        }  # fmt: skip
    Path(out, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
