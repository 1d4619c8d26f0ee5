"""What a GPU gives: bits first, then speed. One command, at most five minutes with every kernel still to compile, one JSON and a table.

    python benchmarks/gpu_check.py --out docs/devices/h200.json     everything
    python benchmarks/gpu_check.py --sections tiles,matmul          some of it
    python benchmarks/gpu_check.py --dry-run                        tiny sizes on Triton's interpreter, to see that the script runs

Every section has a time budget and stands alone: one that fails or takes too long costs the others nothing. One that leaves the device
in an error which nothing clears has the script start over with the sections that are left. The exit code is 1 if a check was not met,
2 if a section failed. Needs torch and Triton; no web server.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {
    # name: (module, function, seconds, of which those that come first for their shapes spend up to 30 on compiling)
    "tiles": ("gpu_kernels", "tiles", 45),
    "attention_bits": ("gpu_kernels", "attention_bits", 20),
    "cells": ("gpu_engine", "cells", 70),
    "graphs": ("gpu_engine", "graphs", 20),
    "updates": ("gpu_engine", "updates", 15),
    "sleep": ("gpu_engine", "sleep", 25),
    "decode": ("gpu_engine", "decode", 80),
    "matmul": ("gpu_kernels", "matmul", 20),
    "shards": ("gpu_kernels", "shards", 10),
    "attention": ("gpu_kernels", "attention_speed", 15),
    "sampler": ("gpu_kernels", "sampler", 10),
    "ipc": ("gpu_transports", "ipc", 20),
    "nccl": ("gpu_transports", "nccl", 25),
}
"""bits before speed, and what needs another process last"""


class OutOfTime(BaseException):
    """A section's budget is spent. Not an Exception: what sections catch of a kernel that fails is not this."""


@dataclass
class Check:
    """One figure, and what it is held against."""

    name: str
    value: Any
    bound: str = ""
    """"== 1", ">= 0.8", "<= 1.15"; nothing: only told"""

    @property
    def met(self) -> bool | None:
        if not self.bound:
            return None
        sign, _, limit = self.bound.partition(" ")
        value = float(self.value)
        return {"==": value == float(limit), ">=": value >= float(limit), "<=": value <= float(limit)}[sign]


@dataclass
class Context:
    """What sections get."""

    device: Any
    tiny: bool
    """sizes for the interpreter"""
    ends: float = 0.0
    checks: list[Check] = field(default_factory=list)

    def add(self, name: str, value: Any, bound: str = "") -> None:
        self.checks.append(Check(name, value, bound))

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()

    def seconds(self, work: Callable[[], Any], *, repeat: int = 20) -> float:
        """Median of what `work` takes on the device, with its caches emptied before each run."""
        import torch

        if self.tiny or self.device.type == "cpu":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        for _ in range(3):
            work()
        flush = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        found = []
        for _ in range(repeat):
            flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(torch.cuda.current_stream())
            work()
            end.record(torch.cuda.current_stream())
            end.synchronize()
            found.append(float(begin.elapsed_time(end)) / 1e3)
        return float(statistics.median(found))


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(signum: int, frame: Any) -> None:
        raise OutOfTime(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_section(name: str, context: Context, budget_s: float) -> dict[str, Any]:
    """One section's report; nothing it does comes through as an exception."""
    module, function, own_s = SECTIONS[name]
    limit_s = min(own_s, budget_s) if not context.tiny else 120.0
    context.checks, context.ends = [], time.monotonic() + limit_s
    began, error = time.monotonic(), None
    try:
        with _alarm(limit_s):
            getattr(importlib.import_module(f"rollsync.benchmarks.{module}"), function)(context)
    except (Exception, OutOfTime) as problem:
        error = f"{type(problem).__name__}: {problem}"
        traceback.print_exc(file=sys.stderr)
    checks = [{**asdict(check), "met": check.met} for check in context.checks]
    return {"seconds": round(time.monotonic() - began, 2), "error": error, "checks": checks}


def broken(device: Any) -> bool:
    """Whether an error is left that every later call would meet: only a new process is rid of it."""
    import torch

    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def start_over(found: dict[str, Any], args: argparse.Namespace, left_s: float) -> None:
    """This script anew, in this process's place, with what was found and the sections that are left."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(found, file)
    rest = [name for name in args.sections if name not in found]
    command = [sys.executable, str(Path(__file__).resolve()), "--found", file.name, "--budget-s", f"{left_s:.0f}"]
    command += ["--out", str(args.out)] if args.out else []
    print(f"the device is left in an error: starting over with {', '.join(rest)}", file=sys.stderr, flush=True)
    os.execv(sys.executable, [*command, "--sections", ",".join(rest)])


def _machine(device: Any) -> dict[str, Any]:
    import torch

    if device.type != "cuda":
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
        return {"cpu": name, "cores": len(os.sched_getaffinity(0)), "system": platform.system(), "gpu": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "cpu": properties.name,  # the README's table names a machine by this
        "cores": properties.multi_processor_count,
        "system": platform.system(),
        "gpu": {"name": properties.name, "bytes": properties.total_memory, "capability": torch.cuda.get_device_capability(device)},
    }


def document(found: dict[str, Any], device: Any) -> dict[str, Any]:
    """The result as docs/devices has them; docs/tables.py reads it."""
    import torch
    import triton
    from rollsync import __version__

    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    checks = [check for section in found.values() for check in section["checks"]]
    failed = [name for name, section in found.items() if section["error"]]
    met = sum(check["met"] is True for check in checks)
    missed = [check["name"] for check in checks if check["met"] is False]
    what = "" if device.type == "cuda" else "Triton's interpreter, tiny sizes in float32: "
    what += f"{met} of {met + len(missed)} checks met in {len(found)} sections"
    what += f", not met: {', '.join(missed)}" if missed else ""
    what += f", failed: {', '.join(failed)}" if failed else ""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": head,
        "rollsync": __version__,
        "python": platform.python_version(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "machine": _machine(device),
        "results": [{"device": "cuda", "level": "run" if device.type == "cuda" else "CPU stand-in", "what": what}],
        "sections": found if device.type == "cuda" else {},  # times of an interpreter tell nothing
    }


def table(found: dict[str, Any]) -> str:
    lines = [f"{'check':58}{'value':>14}  {'bound':10}"]
    for name, section in found.items():
        lines.append(f"-- {name}, {section['seconds']} s{'  FAILED: ' + section['error'] if section['error'] else ''}")
        for check in section["checks"]:
            value = f"{check['value']:.4g}" if isinstance(check["value"], float) else str(check["value"])
            mark = {True: "met", False: "NOT MET", None: ""}[check["met"]]
            lines.append(f"{check['name']:58}{value:>14}  {check['bound']:10}{mark}")
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here, after every section")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"some of {','.join(SECTIONS)} (default: all)")
    parser.add_argument("--budget-s", type=float, default=290.0, help="for everything together (default: 290)")
    parser.add_argument("--found", type=Path, metavar="FILE", help=argparse.SUPPRESS)  # written by start_over
    parser.add_argument("--needs-device", action="store_true", help="only say whether there is a device")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, by Triton's interpreter")
    args = parser.parse_args(argv)
    args.sections = args.sections.split(",")
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parser.error(f"--sections: unknown {', '.join(unknown)} (known: {', '.join(SECTIONS)})")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        print(f"no CUDA device here, torch {torch.__version__}: nothing to check (--dry-run runs the script on the CPU)", file=sys.stderr)
        return 3
    if args.needs_device:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        return 0
    device = torch.device("cpu") if args.dry_run else torch.device("cuda", torch.cuda.current_device())
    context, ends = Context(device, args.dry_run), time.monotonic() + args.budget_s
    found: dict[str, Any] = {}
    if args.found:
        found = json.loads(args.found.read_text())
        args.found.unlink()
    for name in args.sections:
        left = ends - time.monotonic()
        if left < 3 and not args.dry_run:
            found[name] = {"seconds": 0.0, "error": "OutOfTime: the whole budget is spent", "checks": []}
            continue
        found[name] = run_section(name, context, left)
        print(f"{name}: {found[name]['seconds']} s{' FAILED' if found[name]['error'] else ''}", file=sys.stderr, flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(document(found, device), indent=1) + "\n")
        if found[name]["error"] and name != args.sections[-1] and broken(device):
            start_over(found, args, ends - time.monotonic())
    print(table(found))
    if any(section["error"] for section in found.values()):
        return 2
    return int(any(check["met"] is False for section in found.values() for check in section["checks"]))


if __name__ == "__main__":
    sys.exit(main())
