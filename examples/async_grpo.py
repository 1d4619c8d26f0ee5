"""Asynchronous GRPO by hand: generation never stops, while each step's weights go into the running server.

    python examples/async_grpo.py [FOLDER] [STEPS]

FOLDER is a Hugging Face model (SmolLM2-135M, for instance); without one, a small model of random weights. Samples go on across updates, so
one may hold tokens of several versions. Each token is weighed by the ratio to the version that drew it: exactly 1 for tokens of the version
that is being trained (the trainer computes the engine's bits), truncated for older ones. What is more than MAX_LAG versions old is ended by
the server, or dropped here. The reward is a toy (even token ids); the point is the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rollsync.kernels.logprobs import token_logprobs
from rollsync.rollout.fleet import AsyncRolloutFleet
from rollsync.trainer_adapters.parity import make_parity
from rollsync.weight_sync.sender import WeightSender
from rollsync.weight_sync.sources import weights_from
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

TEXTS = ["Name a colour.", "What is the capital of France?", "Describe the sea.", "Count to three."]
SAMPLES, GROUPS_A_STEP, GROUPS_IN_FLIGHT, MAX_TOKENS = 4, 4, 4, 32
MAX_LAG, MAX_RATIO = 2, 2.0


class Rollouts:
    """Keeps groups in flight in a thread of its own; finished ones wait in a bounded queue."""

    def __init__(self, url: str, prompts: list[list[int]]) -> None:
        self._url, self._prompts = url, prompts
        self._groups: queue.Queue[Any] = queue.Queue(maxsize=GROUPS_A_STEP)
        self._stop, self._failure = threading.Event(), ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.tokens = self.dropped = 0

    def __enter__(self) -> Rollouts:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        try:
            asyncio.run(self._generate())
        except Exception as error:  # the trainer says it when it asks for a group
            self._failure = f"{type(error).__name__}: {error}"

    async def _generate(self) -> None:
        going: set[asyncio.Task[Any]] = set()
        number = 0
        async with AsyncRolloutFleet([self._url], patience_s=20.0) as fleet:
            while not self._stop.is_set():
                while len(going) < GROUPS_IN_FLIGHT:
                    params = {"max_tokens": MAX_TOKENS, "seed": number}
                    prompt = self._prompts[number % len(self._prompts)]
                    going.add(asyncio.create_task(fleet.rollouts([prompt], SAMPLES, params, max_version_lag=MAX_LAG)))
                    number += 1
                done, going = await asyncio.wait(going, timeout=0.1, return_when="FIRST_COMPLETED")
                for task in done:
                    result = task.result().results[0]
                    self.tokens += sum(len(sample.token_ids) for sample in result.samples)
                    await self._put(result)
            for task in going:
                task.cancel()

    async def _put(self, result: Any) -> None:
        while not self._stop.is_set():
            try:
                self._groups.put_nowait(result)
                return
            except queue.Full:
                await asyncio.sleep(0.02)

    def next_groups(self, version: int) -> list[Any]:
        """Enough for a step, none with a token more than MAX_LAG versions old."""
        groups: list[Any] = []
        while len(groups) < GROUPS_A_STEP:
            try:
                result = self._groups.get(timeout=1.0)
            except queue.Empty:
                if self._failure:
                    raise RuntimeError(f"generation failed: {self._failure}") from None
                continue
            oldest = min(span["version"] for sample in result.samples for span in sample.weight_versions)
            if version - oldest > MAX_LAG or any(sample.finish_reason == "abort" for sample in result.samples):
                self.dropped += 1
            else:
                groups.append(result)
        return groups


def load(folder: str | None, home: str) -> tuple[Any, str, list[list[int]], float]:
    """A model, the folder a server can start it from, prompts and a learning rate."""
    if folder is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), folder, [tokenizer(t)["input_ids"] for t in TEXTS], 2e-5
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512))
    model.save_pretrained(home)
    return model, home, [[5 + i, 17, 400 + i] for i in range(len(TEXTS))], 2e-3


@contextlib.contextmanager
def serving(folder: str) -> Iterator[str]:
    command = [sys.executable, "-m", "rollsync.rollout.cli", "serve", folder, "--dtype", "bfloat16", "--port", "0", "--threads", "1"]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"listening on (http://\S+)", server.stdout.readline())
            if found is None:
                log.seek(0)
                sys.exit(f"the server did not start: {log.read()[-2000:]}")
            yield found[1]
        finally:
            server.terminate()


def score(model: Any, pairs: list[tuple[list[int], Any]]) -> list[Tensor]:
    """The model's logprobs of each sample's tokens, with gradients: all rows in one batch, padded on the left."""
    rows = [torch.tensor([*prompt, *sample.token_ids]) for prompt, sample in pairs]
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    counts = [len(sample.token_ids) for _, sample in pairs]
    return [token_logprobs(logits[i, -n - 1 : -1], torch.tensor(pairs[i][1].token_ids)) for i, n in enumerate(counts)]


def versions_of(sample: Any) -> Tensor:
    """The version that drew each token."""
    return torch.cat([torch.full((span["end"] - span["start"],), span["version"]) for span in sample.weight_versions])


def step_loss(model: Any, groups: list[Any], version: int) -> tuple[Tensor, dict[str, float]]:
    pairs = [(list(group.prompt_token_ids), sample) for group in groups for sample in group.samples]
    rewards = torch.tensor([[sum(t % 2 == 0 for t in s.token_ids) / len(s.token_ids) for s in g.samples] for g in groups])
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    lags = [version - versions_of(sample) for _, sample in pairs]
    new = score(model, pairs)
    ratios = [(n.detach() - torch.tensor(sample.logprobs)).exp() for n, (_, sample) in zip(new, pairs, strict=True)]
    weights = [torch.where(lag == 0, ratio, ratio.clamp(max=MAX_RATIO)) for ratio, lag in zip(ratios, lags, strict=True)]
    terms = [(w * a * n).sum() for w, a, n in zip(weights, advantages, new, strict=True)]
    lag, ratio = torch.cat(lags), torch.cat(ratios)
    fresh, old = ratio[lag == 0], ratio[lag > 0]
    facts = {
        "reward": float(rewards.mean()), "lag": float(lag.float().mean()), "most": float(lag.max()), "fresh": len(fresh) / len(ratio),
        "off": float((fresh - 1).abs().max()) if len(fresh) else 0.0, "spread": float((old.log().abs()).mean()) if len(old) else 0.0,
        "mixed": sum(len(set(one.tolist())) > 1 for one in lags) / len(lags),
    }  # fmt: skip
    return -torch.stack(terms).sum() / len(ratio), facts


def train(model: Any, url: str, prompts: list[list[int]], steps: int, lr: float) -> None:
    torch.set_num_threads(1)  # the server has the other one
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    make_parity(model.train())
    print("                                  versions behind  tokens of     samples of   |ratio - 1|  |log ratio|  groups")
    print("step  reward  tokens/s  sync s      mean  max      this version  several     of these     of older     dropped")
    with WeightSender(url, weights_from(model)) as sender:
        version = sender.sync(version=1, force=True).version
        with Rollouts(url, prompts) as rollouts:
            began, tokens = time.monotonic(), 0
            for step in range(1, steps + 1):
                loss, facts = step_loss(model, rollouts.next_groups(version), version)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report = sender.sync(version=version + 1)  # the server goes on sampling meanwhile
                version = report.version
                now, made = time.monotonic(), rollouts.tokens
                print(
                    f"{step:4d}  {facts['reward']:6.3f}  {(made - tokens) / (now - began):8.0f}  {report.seconds['total']:6.3f}"
                    f"  {facts['lag']:8.2f}  {facts['most']:3.0f}  {facts['fresh']:16.0%}  {facts['mixed']:7.0%}"
                    f"  {facts['off']:11.1e}  {facts['spread']:11.3f}  {rollouts.dropped:10d}",
                    flush=True,
                )
                began, tokens = now, made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("model", metavar="FOLDER", nargs="?", help="a Hugging Face model (default: a small one of random weights)")
    parser.add_argument("steps", metavar="STEPS", nargs="?", type=int, default=30)
    args = parser.parse_args()
    given, steps = args.model, args.steps
    if steps < 1:
        parser.error(f"STEPS must be at least 1, got {steps}")
    with tempfile.TemporaryDirectory() as home:
        model, folder, prompts, lr = load(given, str(Path(home)))
        with serving(folder) as url:
            train(model, url, prompts, steps, lr)
