"""`make demo`'s last act: a tiny model learns to sort digits by GRPO, in about a minute; its reward can be watched going up.

    python examples/demo_grpo.py [--steps 60] [--seed 0]

The loop is all here, without a trainer library: a random model of transformers, a short warm-up in which it learns the form of an answer
(the same digits in any order), and then steps of GRPO: send the weights to the engine, sample groups, reward, one gradient step. The
model is under parity, so the trainer's logprobs are the engine's bits, and every ratio before a step is exactly 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from rollsync import Engine, SamplingParams
from rollsync.kernels.logprobs import token_logprobs
from rollsync.trainer_adapters import parity
from rollsync.trainer_adapters.targets import target_of
from rollsync.weight_sync.ranks import Alone
from rollsync.weight_sync.sources import weights_from
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

DIGITS = 6
ANSWER, END = 10, 11
"""token ids; those of digits are the digits"""
ROWS_SHOWN = 15
Sample = tuple[list[int], Any]
"""prompt, and what the engine made of it"""


@dataclass
class Step:
    """What a step did."""

    reward: float
    sorted: float
    tokens: int
    exact: int
    """tokens whose ratio between trainer and engine is 1"""
    sync_s: float
    sample_s: float
    examples: list[str]


def new_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=12, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=64, eos_token_id=END, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    return [[*rng.sample(range(10), DIGITS), ANSWER] for _ in range(count)]


def warm_up(model: Any, rng: random.Random, steps: int) -> None:
    """Supervised, towards the prompt's digits in a random order: it learns nothing about sorting."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        rows = torch.tensor([[*prompt, *rng.sample(prompt[:-1], DIGITS), END] for prompt in prompts(rng, 128)])
        logits = model(input_ids=rows).logits[:, DIGITS:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, DIGITS + 1 :].flatten())
        descend(model, optimizer, loss)


def descend(model: Any, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def reward(prompt: list[int], answer: list[int]) -> float:
    """The share of digits that stand where sorting puts them; 0 for an answer of another length."""
    wanted = sorted(prompt[:-1])
    if len(answer) != DIGITS + 1 or answer[-1] != END:
        return 0.0
    return sum(a == b for a, b in zip(answer, wanted, strict=False)) / DIGITS


def score(model: Any, samples: list[Sample]) -> list[Tensor]:
    """The trainer's logprobs of each sample's tokens, with gradients: all rows in one batch, padded on the right."""
    ids = torch.zeros(len(samples), 2 * DIGITS + 3, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, (prompt, sample) in enumerate(samples):
        row = torch.tensor([*prompt, *sample.token_ids])
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, DIGITS:-1]
    drawn = mask[:, DIGITS + 1 :].bool()
    logprobs = token_logprobs(logits[drawn], ids[:, DIGITS + 1 :][drawn])
    return list(logprobs.split([len(sample.token_ids) for _, sample in samples]))


def step(number: int, model: Any, optimizer: torch.optim.Optimizer, target: Any, asked: list[list[int]], n: int) -> Step:
    """One step of GRPO: `n` samples of each prompt."""
    begin = time.perf_counter()
    target.sync(weights_from(model), number + 1, Alone())
    synced = time.perf_counter()
    rows = [prompt for prompt in asked for _ in range(n)]
    samples = list(zip(rows, target.generate(rows, SamplingParams(max_tokens=DIGITS + 2), seed=number), strict=True))
    sampled = time.perf_counter()

    rewards = torch.tensor([reward(prompt, sample.token_ids) for prompt, sample in samples]).view(len(asked), n)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    ratios = [(new - torch.tensor(sample.logprobs)).exp() for new, (_, sample) in zip(score(model, samples), samples, strict=True)]
    loss = -torch.cat([ratio * advantage for ratio, advantage in zip(ratios, advantages, strict=True)]).mean()
    descend(model, optimizer, loss)
    return Step(
        reward=float(rewards.mean()),
        sorted=float((rewards == 1).float().mean()),
        tokens=sum(map(len, ratios)),
        exact=sum(int((ratio == 1).sum()) for ratio in ratios),
        sync_s=synced - begin,
        sample_s=sampled - synced,
        examples=[f"{word(prompt[:-1])} -> {word(sample.token_ids)}" for prompt, sample in samples[::n][:4]],
    )


def word(ids: list[int]) -> str:
    return "".join(str(i) if i < 10 else "" for i in ids)


def line(number: int, found: Step) -> str:
    bar = "#" * round(30 * found.reward)
    return (
        f"   {number:>4}  {found.reward:.3f} |{bar:<30}|  {found.sorted:>5.0%}  {found.tokens / found.sample_s:>8.0f}"
        f"  {found.sync_s:>6.3f}  {found.exact} of {found.tokens}"
    )


def learn(args: argparse.Namespace) -> list[Step]:
    """All of it, printed."""
    rng = random.Random(args.seed)
    model = new_model(args.seed)
    begin = time.perf_counter()
    warm_up(model, rng, args.warm_up_steps)
    size = sum(p.numel() for p in model.parameters())
    print(f"   A random Llama of {size / 1e3:.0f} thousand weights has learned to repeat {DIGITS} digits in any order,", flush=True)
    print(f"   in {time.perf_counter() - begin:.0f} s. From here on only rewards: the share of digits in the right place.\n", flush=True)
    print("   step  reward                                  sorted  tokens/s  sync s  ratio is exactly 1", flush=True)
    found: list[Step] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with Engine(folder, num_blocks=1024, **({"kernels": args.kernels} if args.kernels else {})) as engine:
            parity.make_parity(model)
            target = target_of(engine)
            for number in range(args.steps):
                found.append(step(number, model, optimizer, target, prompts(rng, args.prompts), args.samples))
                if number % max(1, round(args.steps / ROWS_SHOWN)) == 0 or number == args.steps - 1:
                    print(line(number, found[-1]), flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up-steps", type=int, default=150)
    parser.add_argument("--prompts", type=int, default=32, help="in a step")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", help="amx, avx512, avx2 or reference; default: the best this machine runs")
    args = parser.parse_args(argv)
    for name in ("steps", "warm_up_steps", "prompts", "samples"):
        if getattr(args, name) < (least := 2 if name == "samples" else 1):
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    quiet: Any = transformers_logging
    quiet.disable_progress_bar()
    found = learn(args)
    tokens, exact = sum(s.tokens for s in found), sum(s.exact for s in found)
    print(f"\n   first step: {'   '.join(found[0].examples)}\n   last step:  {'   '.join(found[-1].examples)}", flush=True)
    if exact != tokens:
        print(f"   FAILED: the trainer's ratio to the engine is not 1 for {tokens - exact} of {tokens} tokens", flush=True)
    return 0 if exact == tokens else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
