"""What parity costs a trainer: a training step of a stock transformers model, under parity and as it comes (sdpa attention).

    python benchmarks/parity.py --model FOLDER --out result.json

Both sides are one model in one process; after one step of each that is not counted, steps alternate. A step is a forward pass, the
mean cross entropy over the batch, and a backward pass; no optimizer. Times are of the wall clock.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from rollsync.benchmarks import common

BOUND = 1.3
"""times the stock step that a step under parity may take"""
SIDES = ("stock", "parity")
STAGES = ("forward", "loss", "backward")


def cases(dtypes: Sequence[str], checkpointing: Sequence[bool]) -> list[tuple[str, bool]]:
    """(dtype, whether layers are recomputed) of every case."""
    return [(dtype, again) for dtype in dtypes for again in checkpointing]


def step(model: Any, inputs: dict[str, Any], under_parity: bool) -> dict[str, float]:
    """Seconds of each stage."""
    import torch
    from rollsync.trainer_adapters.parity import rollsync_parity

    model.zero_grad(set_to_none=True)
    times = [time.perf_counter()]
    with rollsync_parity(model) if under_parity else contextlib.nullcontext():
        logits = model(**inputs, use_cache=False).logits
        times.append(time.perf_counter())
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), inputs["input_ids"][:, 1:].flatten())
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
    return {stage: b - a for stage, a, b in zip(STAGES, times, times[1:], strict=False)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every case: all samples by side and stage, and how many times the stock step ours takes."""
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    ids = torch.tensor(common.random_prompts("parity", args.rows, args.tokens, common.vocabulary(args.model)))
    inputs, found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {}
    for dtype in args.dtypes:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sdpa").train()
        for _, again in cases([dtype], args.checkpointing):
            if again:
                _recompute(model, True)
            name = dtype + ("-checkpointed" if again else "")
            found[name] = _case(model, inputs, args.reps, name)
            _recompute(model, False)
    return found


def _recompute(model: Any, on: bool) -> None:
    """Of its layers; by the name that transformers has for it since 5.2x, or the older one."""
    verb = "enable" if on else "disable"
    switch = getattr(model, f"activation_checkpointing_{verb}", None) or getattr(model, f"gradient_checkpointing_{verb}")
    switch()


def _case(model: Any, inputs: dict[str, Any], reps: int, name: str) -> dict[str, Any]:
    samples: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for rep in range(-1, reps):
        for side in SIDES:
            times = step(model, inputs, side == "parity")
            if rep >= 0:
                samples[side].append(times)
                common.say(f"  {name} #{rep} {side}: " + ", ".join(f"{stage} {s:.3f}" for stage, s in times.items()))
    totals = {side: [sum(times.values()) for times in all_times] for side, all_times in samples.items()}
    ratio = statistics.median(totals["parity"]) / statistics.median(totals["stock"])
    pairs = [ours / theirs for ours, theirs in zip(totals["parity"], totals["stock"], strict=True)]
    stages = {
        stage: statistics.median(t[stage] for t in samples["parity"]) / statistics.median(t[stage] for t in samples["stock"])
        for stage in STAGES
    }
    sides = {
        side: {**common.summary(totals[side]), "stages_s": {stage: statistics.median(t[stage] for t in samples[side]) for stage in STAGES}}
        for side in SIDES
    }
    return {
        "sides": sides,
        "times_stock": {"ratio_of_medians": ratio, "paired_min": min(pairs), "paired_max": max(pairs), "stages": stages},
        "bound": {"bound": BOUND, "met": ratio <= BOUND},
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="parity.py", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--model", required=True, help="folder of a checkpoint")
    parser.add_argument("--out", help="file for the JSON report (default: stdout)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of float32, bfloat16 (default: %(default)s)")
    parser.add_argument("--checkpointing", default="off,on", help="recomputation of layers: off, on, or both (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="sequences in a batch (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens in each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")
    parser.add_argument("--reps", type=int, default=5, help="counted steps of each side and case (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short step of each: shows that everything works")
    args = parser.parse_args(argv)
    args.dtypes, args.checkpointing = args.dtypes.split(","), args.checkpointing.split(",")
    if unknown := sorted({*args.dtypes} - {"float32", "bfloat16"}):
        parser.error(f"--dtypes: unknown {', '.join(unknown)} (known: float32, bfloat16)")
    if unknown := sorted({*args.checkpointing} - {"off", "on"}):
        parser.error(f"--checkpointing: unknown {', '.join(unknown)} (known: off, on)")
    if args.quick:
        args.rows, args.tokens, args.reps = 2, 16, 1
    for name in ("rows", "threads", "reps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.tokens < 2:
        parser.error("--tokens must be at least 2")
    args.checkpointing = [value == "on" for value in args.checkpointing]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    start_facts = common.begin()
    body = {"versions": common.versions("rollsync", "torch", "transformers"), "cases": measure(args)}
    common.write_json(common.report("parity", vars(args), start_facts, body), args.out)
    for name, case in body["cases"].items():
        common.say(f"{name}: {case['times_stock']['ratio_of_medians']:.2f} times the stock step (bound {BOUND})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
