"""One of two trainer ranks under DDP: a GRPO run by name, and what it found as one line of JSON.

    RANK=0 WORLD_SIZE=2 ... python ranks_of_trl.py CASE FOLDER OUT TARGET...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.path.append(str(Path(__file__).parent.parent))

import torch
from rollsync import Engine
from rollsync.trainer_adapters.trl import attach
from trl_cases import asked_by, grpo, logged, tool_user

RANK = int(os.environ["RANK"])
COMMON = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "ddp_backend": "gloo"}


def train(trainer: Any, generation: Any) -> dict[str, Any]:
    calls = asked_by(generation)
    trainer.train()
    weights = sum(float(p.detach().double().sum()) for p in trainer.model.parameters())
    return {
        "calls": calls, "syncs": generation.num_syncs, "version": generation.target.version, "weights": weights,
        "difference": logged(trainer, "sampling/sampling_logp_difference/max"), "model": type(trainer.model_wrapped).__name__,
    }  # fmt: skip


def case_plain(folder: str, out: str, target: Any) -> dict[str, Any]:
    """Groups of 4 that lie on two ranks."""
    trainer = grpo(folder, out, **COMMON)
    return train(trainer, attach(trainer, target))


def case_long(folder: str, out: str, target: Any) -> dict[str, Any]:
    """The prompts of rank 1 exceed the engine's context in the second step."""
    trainer = grpo(folder, out, **COMMON)
    generation = attach(trainer, target)
    generate = generation.target.generate

    def longer(prompts: Any, *args: Any, **kw: Any) -> Any:
        return generate([[*p, *[5] * 2000] for p in prompts] if RANK == 1 and generation.num_syncs == 2 else prompts, *args, **kw)

    generation.target.generate = longer
    return train(trainer, generation)


class Dying:
    """Weights in the middle of which this process is killed."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def share(self, ranks: Any) -> Dying:
        return Dying(self.weights.share(ranks))

    def metadata(self) -> Any:
        return self.weights.metadata()

    def __iter__(self) -> Any:
        for i, item in enumerate(self.weights):
            if i == 5:
                os.kill(os.getpid(), 9)
            yield item
        os.kill(os.getpid(), 9)


def killed(rank: int, folder: str, out: str, target: Any) -> dict[str, Any]:
    """A rank is killed while it sends the weights of the second step; of plain DDP, rank 0 sends them all."""
    trainer = grpo(folder, out, **COMMON)
    generation = attach(trainer, target)
    sync = generation.target.sync
    generation.target.sync = lambda w, version, ranks: sync(Dying(w) if (RANK, version) == (rank, 2) else w, version, ranks)
    return train(trainer, generation)


def case_killed_0(folder: str, out: str, target: Any) -> dict[str, Any]:
    return killed(0, folder, out, target)


def case_killed_1(folder: str, out: str, target: Any) -> dict[str, Any]:
    return killed(1, folder, out, target)


def case_tools(folder: str, out: str, target: Any) -> dict[str, Any]:
    """Only the rows of rank 0 call a tool, so that it generates more often."""
    trainer, generation, calls = tool_user(folder, out, target, calls_tools=RANK == 0, ddp_backend="gloo")
    trainer.train()
    return {"calls": len(calls), "syncs": generation.num_syncs}


def main(case: str, folder: str, out: str, targets: list[str]) -> None:
    torch.set_num_threads(1)
    run = globals()[f"case_{case}"]
    try:
        if targets:
            found = run(folder, out, targets)
        else:
            with Engine(folder, threads=1, num_blocks=128) as engine:
                found = run(folder, out, engine)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    print("FOUND", json.dumps(found), flush=True)
    os._exit(0)  # a rank whose peer was killed must not wait for it


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
