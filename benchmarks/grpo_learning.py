"""Whether a trainer learns through Rollsync: examples/grpo_trl.py on several seeds, each beside the same run with learning rate 0.

    python benchmarks/grpo_learning.py --model FOLDER --out result.json

Runs are processes, one after another; the report is written anew after each. Its times are worth something on an idle machine only, its
rewards everywhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollsync.benchmarks import common

BOUND = 0.2
"""how much higher the reward at the end must be than with learning rate 0"""
LONGEST_S = 900.0
"""for a run, on two cores that have nothing else to do; reported only"""
START_S, STEP_S = 600.0, 300.0
"""after so long, and so much more for each step, a run hangs"""


def run(args: argparse.Namespace, seed: int, learning_rate: float) -> dict[str, Any]:
    """What the example writes. CalledProcessError, after its last words on stderr: it failed; TimeoutExpired: it hung."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(common.ROOT / "examples" / "grpo_trl.py"), args.model, "--json", str(out)]
        command += ["--seed", str(seed), "--steps", str(args.steps), "--learning-rate", str(learning_rate), "--threads", str(args.threads)]
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=START_S + STEP_S * args.steps)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def judged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By seed: the reward at the end of both runs. The bounds hold if they do on every seed that has both."""
    ends: dict[int, dict[str, float]] = {}
    for one in runs:
        ends.setdefault(one["seed"], {})["still" if one["learning_rate"] == 0 else "learning"] = one["reward_last"]
    gains = {seed: round(both["learning"] - both["still"], 4) for seed, both in ends.items() if len(both) == 2}
    differences = [row["max_logp_difference"] for one in runs if one["parity"] for row in one["curve"]]
    return {
        "gain": {"by_seed": gains, "bound": BOUND, "met": bool(gains) and min(gains.values()) >= BOUND},
        "max_logp_difference": {"value": max(differences, default=None), "bound": 0.0, "met": bool(differences) and max(differences) == 0},
        "seconds": {"longest": max(one["seconds"] for one in runs), "bound": LONGEST_S},
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="grpo_learning.py", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--out", help="file for the JSON report (default: stdout)")
    parser.add_argument("--seeds", default="0,1,2", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-5, help="beside 0 (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch and of the engine, each (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one seed, one step: shows that everything works")
    args = parser.parse_args(argv)
    if args.quick:
        args.seeds, args.steps = "0", 1
    try:
        args.seeds = [int(seed) for seed in args.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds must be numbers, got {args.seeds!r}")
    if min(args.steps, args.threads) < 1 or args.learning_rate <= 0:
        parser.error("--steps and --threads must be at least 1, --learning-rate above 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    start_facts = common.begin()
    versions = common.versions("rollsync", "torch", "transformers", "trl")
    runs: list[dict[str, Any]] = []
    for seed in args.seeds:
        for learning_rate in (args.learning_rate, 0.0):
            common.say(f"seed {seed}, learning rate {learning_rate:g}")
            runs.append(run(args, seed, learning_rate))
            if args.out:
                body = {"versions": versions, **judged(runs), "runs": runs}
                common.write_json(common.report("grpo_learning", vars(args), start_facts, body), args.out)
    found = judged(runs)
    if not args.out:
        common.write_json(common.report("grpo_learning", vars(args), start_facts, {"versions": versions, **found, "runs": runs}), None)
    common.say(f"gain over learning rate 0 by seed: {found['gain']['by_seed']} (bound {BOUND}); largest difference of logprobs: "
               f"{found['max_logp_difference']['value']}")  # fmt: skip
    judges = ["max_logp_difference"] if args.quick else ["gain", "max_logp_difference"]  # one step learns nothing
    return 0 if all(found[name]["met"] for name in judges) else 1


if __name__ == "__main__":
    sys.exit(main())
