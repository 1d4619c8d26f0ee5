"""What bits that do not depend on the number of ranks cost: sums in `k_shards` parts against one, and 2 and 4 ranks against one.

    python benchmarks/shards.py --model FOLDER --out result.json

One rank: two engines of the model in this process, `k_shards` 1 and 4, repetitions alternating. Ranks: a random model whose heads 4
ranks can share, `k_shards` 4, engines of 1, 2 and 4 ranks with the cores divided among them; every rank is a process and partial sums
travel by gloo over loopback, so on one host this shows the price, never a gain.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollsync import Engine
from rollsync.benchmarks import common

CASES = {"decode-1": (1, 24, 96), "decode-32": (32, 24, 96), "decode-128": (128, 24, 64), "prefill": (8, 551, 1)}
"""prompts, their tokens, new tokens of each"""
QUICK = {"decode-4": (4, 24, 8), "prefill": (2, 64, 1)}
BOUND = 1.05
"""times the time of one accumulator"""
RANKS = (1, 2, 4)
RANKED = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}


def once(engine: Engine, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds of one batch, without a prefix to reuse."""
    engine.reset_prefix_cache()
    began = time.perf_counter()
    outputs = engine.generate(prompts, {"max_tokens": max_tokens, "ignore_eos": True, "seed": 1})
    seconds = time.perf_counter() - began
    assert all(len(sample.token_ids) == max_tokens for output in outputs for sample in output.samples)
    return seconds


def measure(engines: dict[str, Engine], cases: dict[str, tuple[int, int, int]], reps: int, vocab: int) -> dict[str, Any]:
    """Each case on every engine in turn, `reps` times after one that is not counted. Ratios are against the first engine."""
    found: dict[str, Any] = {}
    for name, (count, length, max_tokens) in cases.items():
        common.say(f"{name}: {', '.join(engines)}")
        prompts = common.random_prompts(name, count, length, vocab)
        seconds: dict[str, list[float]] = {side: [] for side in engines}
        for rep in range(reps + 1):
            for side, engine in engines.items():
                taken = once(engine, prompts, max_tokens)
                if rep:
                    seconds[side].append(taken)
        first = next(iter(seconds.values()))
        found[name] = {
            "sides": {side: common.summary(s, count * (max_tokens if max_tokens > 1 else length)) for side, s in seconds.items()},
            "times_the_time": {side: common.compare(first, s) for side, s in seconds.items() if s is not first},
        }
    return found


def shards(args: argparse.Namespace, cases: dict[str, tuple[int, int, int]]) -> dict[str, Any]:
    with ExitStack() as stack:
        engines = {f"k_shards {k}": stack.enter_context(Engine(args.model, k_shards=k)) for k in (1, 4)}
        return measure(engines, cases, args.reps, common.vocabulary(args.model))


def ranks(args: argparse.Namespace, cases: dict[str, tuple[int, int, int]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rollsync-shards-") as folder, ExitStack() as stack:
        (Path(folder) / "config.json").write_text(json.dumps(RANKED))
        options: dict[str, Any] = {"load_format": "random", "k_shards": 4, "memory_bytes": 512 << 20}
        engines = {f"tp {tp}": stack.enter_context(Engine(folder, tp=tp, **options)) for tp in RANKS}
        return measure(engines, cases, args.reps, RANKED["vocab_size"])  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The price of sums whose order does not depend on the number of ranks.")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a bfloat16 safetensors folder")
    parser.add_argument("--reps", type=int, default=5, help="repetitions of each side (default: 5)")
    parser.add_argument("--quick", action="store_true", help="only that everything works")
    parser.add_argument("--out", metavar="FILE", help="where the JSON goes (default: stdout)")
    args = parser.parse_args(argv)
    start, cases = common.begin(), QUICK if args.quick else CASES
    body: dict[str, Any] = {"shards": shards(args, cases)}
    # Ranks that are more than cores step on each other at every gather.
    body["ranks"] = ranks(args, {name: case for name, case in cases.items() if name != "decode-128"})
    body["cores"] = len(os.sched_getaffinity(0))
    worst = max(case["times_the_time"]["k_shards 4"]["ratio_of_medians"] for case in body["shards"].values())
    body["bound"] = {"times_the_time": BOUND, "worst": worst, "met": worst <= BOUND}
    common.write_json(common.report("shards", vars(args), start, body), args.out)
    for part in ("shards", "ranks"):
        for name, case in body[part].items():
            for side, ratios in case["times_the_time"].items():
                common.say(f"{name:12}{side:12}{ratios['ratio_of_medians']:.3f} times the time")
    common.say(f"bound of {BOUND} at one rank {'met' if worst <= BOUND else 'MISSED'}: {worst:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
