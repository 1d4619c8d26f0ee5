"""One of two trainer ranks: a stock model under parity in DDP and FSDP2. Saves what it computed; run by test_parity_ranks.py."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rollsync.trainer_adapters.parity import make_parity, rollsync_parity
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def batch(rank: int) -> dict[str, Tensor]:
    """Every rank has rows of its own."""
    ids = torch.randint(3, 256, (2, 40), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def load(folder: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def shard(model: Any, **options: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def gradients(model: Any) -> Tensor:
    grads = [p.grad for p in model.parameters()]
    return torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for g in grads])


def step(model: Any, inputs: dict[str, Tensor], under: Any = None) -> tuple[Tensor, Tensor]:
    """Logits and gradients. With `under`, only the forward pass lies in the context: backward passes come when they come."""
    model.zero_grad()
    if under is None:
        logits = model(**inputs).logits
    else:
        with rollsync_parity(under):
            logits = model(**inputs).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), inputs["input_ids"][:, 1:].flatten()).backward()
    return logits.detach().clone(), gradients(model)


def main(folder: str, rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    inputs, found = batch(rank), {}

    model = load(folder)
    found["ddp"] = step(DistributedDataParallel(model), inputs, under=model)

    model = load(folder)
    make_parity(model)
    shard(model)  # patched first, sharded then
    found["fsdp"] = step(model, inputs)

    model = load(folder)
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    found["fsdp_bf16"] = step(model, inputs, under=model)
    model.activation_checkpointing_enable()
    found["fsdp_bf16_checkpointed"] = step(model, inputs, under=model)

    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
