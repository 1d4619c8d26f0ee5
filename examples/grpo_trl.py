"""GRPO with stock TRL on a small real model, on a CPU: a few minutes in which the reward visibly rises.

    python examples/grpo_trl.py FOLDER [--plot reward.png] [--report-to wandb] [--json out.json]

FOLDER is SmolLM2-135M-Instruct (`python examples/demo.py --where folder` says where the demo's is). The task: sums of two digits. A short
answer that ends in the right number is worth 1, parts of that a part. The one line that is Rollsync's is `attach(trainer, ...)`; with
parity, which is the default here, TRL's own `sampling/sampling_logp_difference/max` reads exactly 0 at every step. In the table,
staleness is how many steps older than the trainer's weights those are that drew the samples: 0 is on policy.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rollsync
import torch
from datasets import Dataset
from rollsync import Engine
from rollsync.trainer_adapters.trl import attach
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined, unused-ignore]

PROMPTS, SAMPLES, NEW_TOKENS = 8, 8, 8
TEMPERATURE = 0.7
MICRO_BATCH = 32
END = 5
"""steps over which the reward at the end is taken"""
DIFFERENCE = "sampling/sampling_logp_difference/max"
HEAD = " step  reward                             tokens/s  sync s  train s  staleness  max |logp - logp'|"


def problems(seed: int, count: int = 256) -> Dataset:
    """Sums of two numbers from 2 to 9, each with its answer."""
    rng = random.Random(seed)
    pairs = [(rng.randint(2, 9), rng.randint(2, 9)) for _ in range(count)]
    return Dataset.from_list([{"prompt": f"What is {a} + {b}? It is", "answer": a + b} for a, b in pairs])


def worth(text: str, answer: int, ended: bool) -> float:
    """0 to 1, for a completion such as " 12.": it ends by itself (0.2), it is one number and nothing else (0.2), its first number is the
    sum (0.3), or near it (up to 0.3; 0 from a distance of 6 on)."""
    found = re.search(r"\d+", text)
    distance = 6 if found is None else min(6, abs(int(found[0]) - answer))
    alone = re.fullmatch(r"\s*\d+\.?\s*", text) is not None
    return 0.2 * ended + 0.2 * alone + 0.3 * (distance == 0) + 0.3 * (1 - distance / 6)


def reward(completions: list[str], completion_ids: list[list[int]], answer: list[int], **_: Any) -> list[float]:
    """TRL's reward function. A completion that used up its tokens has not ended by itself."""
    ended = [len(ids) < NEW_TOKENS for ids in completion_ids]
    return [worth(text, right, end) for text, right, end in zip(completions, answer, ended, strict=True)]


class Table(TrainerCallback):
    """A line per step, and what goes into the files."""

    def __init__(self, generation: Any, report_to: str) -> None:
        self.rows: list[dict[str, Any]] = []
        self._generation, self._report_to = generation, report_to
        self._generated, self._began = (0, 0.0), 0.0
        self._generate, generation.generate = generation.generate, self._timed

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        found = self._generate(*args, **kwargs)
        self._generated = (sum(map(len, found[1])), time.perf_counter() - begin)
        return found

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs is None or "reward" not in logs:
            return
        tokens, seconds = self._generated
        sync_s = self._generation.last_sync.seconds["total"]
        row = {
            "step": state.global_step,
            "reward": logs["reward"],
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "sync_s": sync_s,
            "train_s": time.perf_counter() - self._began - seconds - sync_s,
            "staleness": state.global_step - self._generation.last_sync.version,
            "max_logp_difference": logs[DIFFERENCE],
            "mean_tokens": logs["completions/mean_length"],
        }
        if not self.rows:  # not before: what reports to wandb writes a banner when training begins
            print(HEAD, flush=True)
        self.rows.append(row)
        bar = "#" * round(24 * row["reward"])
        print(
            f"{row['step']:>5}  {row['reward']:.3f} |{bar:<24}|  {row['tokens_per_s']:>9.0f}  {row['sync_s']:>6.2f}  {row['train_s']:>7.1f}"
            f"  {row['staleness']:>9}  {row['max_logp_difference']:g}",
            flush=True,
        )
        if self._report_to == "wandb":
            import wandb

            numbers = {f"rollsync/{name}": row[name] for name in ("tokens_per_s", "sync_s", "train_s", "staleness")}
            wandb.log({**numbers, "train/global_step": state.global_step})


@contextlib.contextmanager
def target_of(args: argparse.Namespace) -> Iterator[Any]:
    """What the trainer samples from: the server at --url, or an engine in this process."""
    if args.url:
        yield args.url
        return
    with Engine(args.model, dtype="bfloat16", threads=args.threads, num_blocks=512) as engine:
        yield engine


def train(args: argparse.Namespace, target: Any, folder: str) -> Table:
    rewards: Any = [reward]
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    config = GRPOConfig(
        output_dir=folder, seed=args.seed, max_steps=args.steps, learning_rate=args.learning_rate, lr_scheduler_type="constant",
        per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=PROMPTS * SAMPLES // MICRO_BATCH, num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS, temperature=TEMPERATURE, bf16=True, use_cpu=True, gradient_checkpointing=False, logging_steps=1,
        save_strategy="no", report_to=[] if args.report_to == "none" else [args.report_to], disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32), args=config, reward_funcs=rewards,
        train_dataset=problems(args.seed), processing_class=tokenizer,
    )  # fmt: skip
    generation = attach(trainer, target, parity=args.parity)
    table = Table(generation, args.report_to)
    trainer.pop_callback(PrinterCallback)  # a dictionary of 30 numbers a step; the table has those that count
    trainer.add_callback(table)
    trainer.train()
    return table


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([row["step"] for row in rows], [row["reward"] for row in rows], marker=".")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="GRPO: TRL with Rollsync")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("model", metavar="FOLDER", help="a model in Hugging Face format; the task is for SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0, help="of problems, batches and samples")
    parser.add_argument("--url", help="sample from this server (default: an engine in this process)")
    parser.add_argument("--no-parity", dest="parity", action="store_false", help="the trainer's logprobs are transformers' own")
    parser.add_argument("--threads", type=int, help="of torch and of the engine, each (default: all cores)")
    parser.add_argument("--plot", metavar="PNG", help="draw the reward there (needs matplotlib)")
    parser.add_argument("--report-to", choices=("none", "wandb"), default="none")
    parser.add_argument("--json", metavar="OUT", help="write settings and every step's numbers there")
    args = parser.parse_args(argv)
    for option, value, package in (("--plot", args.plot, "matplotlib"), ("--report-to", args.report_to == "wandb", "wandb")):
        if value and importlib.util.find_spec(package) is None:
            parser.error(f"{option} needs the package {package}: pip install {package}")
    if not (Path(args.model) / "config.json").is_file():
        parser.error(f"FOLDER must hold a model with its config.json, got {args.model}")
    for option, path in (("--plot", args.plot), ("--json", args.json)):
        if path and not Path(path).resolve().parent.is_dir():
            parser.error(f"{option} goes to a folder that is not there: {Path(path).resolve().parent}")
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, about its own settings
    quiet: Any = transformers_logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    begin = time.perf_counter()
    with target_of(args) as target, tempfile.TemporaryDirectory() as folder:
        rows = train(args, target, folder).rows
    end = max(1, min(END, len(rows) // 2))  # in a short run the two must not overlap
    first, last = (sum(r["reward"] for r in some) / len(some) for some in (rows[:end], rows[-end:]))
    seconds = time.perf_counter() - begin
    print(f"mean reward {first:.3f} over the first {end} of {len(rows)} steps, {last:.3f} over the last {end}; {seconds:.0f} s", flush=True)
    if args.plot:
        plot(rows, args.plot)
    if args.json:
        settings = {name: getattr(args, name) for name in ("seed", "steps", "learning_rate", "parity", "url", "threads")}
        settings |= {"dtype": "bfloat16", "batch": PROMPTS * SAMPLES, "num_generations": SAMPLES}
        settings["versions"] = {name: version(name) for name in ("torch", "transformers", "trl")} | {"rollsync": rollsync.__version__}
        found = {**settings, "model": Path(args.model).name, "seconds": seconds, "reward_first": first, "reward_last": last, "curve": rows}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
