"""GRPO on a sharded model with an engine in each rank: memory goes to whoever works, and every ratio before a step is exactly 1.

    torchrun --nproc_per_node 2 examples/colocated_fsdp2.py [FOLDER] [STEPS]

FOLDER is a Hugging Face model (SmolLM2-135M, for instance); without one, a small model of random weights. Float32 masters are sharded by
`fully_shard` and compute in bfloat16. Each rank samples for prompts of its own; the reward is a toy (even token ids).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from rollsync import SamplingParams
from rollsync.kernels.logprobs import token_logprobs
from rollsync.rollout.engine.host_memory import resident_bytes
from rollsync.trainer_adapters.colocated import ColocatedEngine
from rollsync.trainer_adapters.parity import make_parity
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PROMPTS = ["Name a colour.", "What is the capital of France?", "Describe the sea.", "Count to three."]
TEMPERATURE, SAMPLES, MAX_TOKENS = 0.7, 4, 24


def load(folder: str | None) -> tuple[Any, list[list[int]]]:
    """A model and prompts for it, alike on every rank."""
    if folder is None:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
        return LlamaForCausalLM(config), [[5 + i, 17, 400 + i] for i in range(len(PROMPTS))]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), [tokenizer(text)["input_ids"] for text in PROMPTS]


def shard(model: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def score(model: Any, outputs: list[Any]) -> list[Tensor]:
    """The trainer's logprobs of every sample's tokens, with gradients: all rows in one batch, padded on the left."""
    pairs = [(output.prompt_token_ids, sample.token_ids) for output in outputs for sample in output.samples]
    rows = [torch.tensor([*prompt, *tokens]) for prompt, tokens in pairs]
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return [
        token_logprobs(logits[i, -len(tokens) - 1 : -1], torch.tensor(tokens), temperature=TEMPERATURE)
        for i, (_, tokens) in enumerate(pairs)
    ]


def grpo_loss(model: Any, outputs: list[Any]) -> tuple[Tensor, int, int, float]:
    """The loss, how many ratios are exactly 1, of how many, and the mean reward."""
    rewards = torch.tensor([[sum(t % 2 == 0 for t in s.token_ids) / len(s.token_ids) for s in output.samples] for output in outputs])
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    old = [torch.tensor(s.logprobs) for output in outputs for s in output.samples]
    ratios = [(new - o).exp() for new, o in zip(score(model, outputs), old, strict=True)]
    loss = -torch.stack([(ratio * a).mean() for ratio, a in zip(ratios, advantages, strict=True)]).mean()
    return loss, sum(int((r == 1).sum()) for r in ratios), sum(map(len, old)), float(rewards.mean())


def main(folder: str | None, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    model, prompts = load(folder)
    make_parity(model.train())
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    wrong = 0
    with ColocatedEngine(model, memory_bytes=128 << 20) as engine:
        for step in range(steps):
            with engine.generating(version=step):
                params = SamplingParams(n=SAMPLES, max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=1000 * step + rank)
                outputs = engine.generate(prompts[rank::size], params)
            began = time.perf_counter()
            loss, exact, tokens, reward = grpo_loss(model, outputs)
            loss.backward()
            peak = resident_bytes()
            optimizer.step()
            optimizer.zero_grad()
            wrong += tokens - exact
            print(
                f"[{rank}] step {step}, generate: {engine.last_phase}\n"
                f"[{rank}] step {step}, train: {time.perf_counter() - began:.2f} s, {peak / 2**20:.0f} MiB; "
                f"the ratio is 1 for {exact} of {tokens} tokens, mean reward {reward:.2f}",
                flush=True,
            )
    dist.destroy_process_group()
    if wrong:
        sys.exit(f"{wrong} ratios are not 1")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None, int(sys.argv[2]) if len(sys.argv) > 2 else 3)
