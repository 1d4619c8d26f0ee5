"""The loop of docs/own_loop.md around a tiny model, on one rank of the trainer.

    python own_loop_worker.py CODE KIND MODEL OUT URL [RANK STORE]

KIND is plain, parity, ddp, fsdp2 or accelerate. The facts of the run are written to OUT as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rollsync import RolloutClient
from rollsync.kernels.logprobs import token_logprobs
from rollsync.trainer_adapters.parity import make_parity
from transformers import AutoModelForCausalLM

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
STEPS = 3
TORCHS = "logits.log_softmax(-1).gather(1, row[0, len(prompt) :, None])[:, 0]"
"""what parity puts its own in place of"""


def wrapped(kind: str, model: Any, optimizer_of: Any) -> Any:
    """The model as the trainer has it, and its optimizer."""
    if kind == "parity":
        make_parity(model)
    elif kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif kind == "accelerate":
        from accelerate import Accelerator

        prepared: Any = Accelerator(cpu=True).prepare(model, optimizer_of(model))
        return prepared
    return model, optimizer_of(model)


def run(code: str, kind: str, folder: str, url: str) -> dict[str, Any]:
    """What the loop did."""
    torch.manual_seed(0)
    model, optimizer = wrapped(kind, AutoModelForCausalLM.from_pretrained(folder), lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    differences: list[float] = []
    versions: list[list[int]] = []
    watch = "differences.append((new - old).abs().max().item()); versions.append([s['version'] for s in sample.weight_versions])"
    lines = code.replace("        loss.backward()", f"        {watch}\n        loss.backward()")
    if kind == "parity":
        lines = lines.replace(TORCHS, "token_logprobs(logits, row[0, len(prompt) :])")
    assert watch in lines and (TORCHS in lines) != (kind == "parity")
    given: dict[str, Any] = {"URLS": [url], "STEPS": STEPS, "model": model, "optimizer": optimizer, "prompts": PROMPTS}
    given |= {
        "reward": lambda ids: sum(i % 2 for i in ids) / len(ids),
        "differences": differences,
        "versions": versions,
        "token_logprobs": token_logprobs,
    }
    exec(compile(lines, "docs/own_loop.md", "exec"), given)
    try:
        given["sender"].sync()
        with RolloutClient(url) as client:
            (one,) = client.rollouts(PROMPTS[:1], sampling_params={"max_tokens": 8, "seed": 1}).results
            (score,) = client.score([(PROMPTS[0], one.samples[0].token_ids)])
        with torch.no_grad():
            trainer = given["logprobs"](PROMPTS[0], one.samples[0].token_ids)
    finally:
        given["fleet"].close()
        given["sender"].close()
    return {
        "difference": max(differences),
        "versions": versions,
        "again": score.model_logprobs == one.samples[0].logprobs,
        "after": (trainer - torch.tensor(one.samples[0].logprobs)).abs().max().item(),
        "served": [s["version"] for s in one.samples[0].weight_versions],
    }


def main(code: str, kind: str, folder: str, out: str, url: str, rank: str = "", store: str = "") -> None:
    torch.set_num_threads(1)
    if store:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    Path(out).write_text(json.dumps(run(Path(code).read_text(), kind, folder, url)))
    if store:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
