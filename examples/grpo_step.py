"""GRPO by hand on a stock transformers model beside a server: every ratio between trainer and rollout is exactly 1 before a step.

    python examples/grpo_step.py FOLDER [STEPS]

The reward is a toy (short answers), the point is the loop: sample groups, score them again under parity with gradients, step, and send
the weights to the engine. Float32 masters compute in bfloat16 under autocast, with gradient checkpointing, in a left-padded batch.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import torch
from rollsync import RolloutClient, SamplingParams
from rollsync.kernels.logprobs import token_logprobs
from rollsync.trainer_adapters import parity
from rollsync.weight_sync.sender import WeightSender
from rollsync.weight_sync.sources import weights_from
from torch import Tensor
from transformers import AutoModelForCausalLM

PROMPTS = ["Name a colour.", "What is the capital of France?"]
TEMPERATURE, TOP_P = 0.7, 0.95


def score(model: Any, rollouts: list[tuple[list[int], Any]]) -> list[Tensor]:
    """The model's logprobs of each sample's tokens: all rows in one batch, padded on the left."""
    rows = [torch.tensor(prompt + list(sample.token_ids)) for prompt, sample in rollouts]
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    found = []
    for i, (_, sample) in enumerate(rollouts):
        tokens = torch.tensor(sample.token_ids)
        found.append(token_logprobs(logits[i, -len(tokens) - 1 : -1], tokens, temperature=TEMPERATURE, top_p=TOP_P))
    return found


def main(folder: str, url: str, steps: int) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    parity.make_parity(model)
    with RolloutClient(url) as client, WeightSender(url, weights_from(model)) as sender:
        for step in range(steps):
            params = SamplingParams(max_tokens=24, temperature=TEMPERATURE, top_p=TOP_P, seed=step)
            results = client.rollouts(PROMPTS, n=4, sampling_params=params).results
            rollouts = [(list(r.prompt_token_ids), s) for r in results for s in r.samples]
            rewards = torch.tensor([[-float(len(s.token_ids)) for s in r.samples] for r in results])
            advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
            logprobs = score(model, rollouts)
            old = [torch.tensor(sample.logprobs) for _, sample in rollouts]
            ratios = [(new - o).exp() for new, o in zip(logprobs, old, strict=True)]
            exactly_one = sum(int((r == 1).sum()) for r in ratios)
            loss = -sum(((r * a).mean() for r, a in zip(ratios, advantages, strict=True)), torch.zeros(())) / len(ratios)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report = sender.sync()
            print(
                f"step {step}: ratio is 1 for {exactly_one} of {sum(map(len, old))} tokens, mean reward {float(rewards.mean()):.1f}, "
                f"version {report.version} sent in {report.seconds['total']:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    folder, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    serve = [sys.executable, "-m", "rollsync.rollout.cli", "serve", folder, "--dtype", "bfloat16", "--port", "0"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"listening on (http://\S+)", server.stdout.readline())
            if found is None:
                sys.exit("the server did not start")
            main(folder, found[1], steps)
        finally:
            server.terminate()
