"""What both benchmarks share: prompts from a seed, statistics, facts of the machine, one JSON file out. Standard library only."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEMA_VERSION = 1
FLAGS_OF_INTEREST = (
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "hypervisor",
)
FIRST_PLAIN_ID = 100
"""ids below this may be special tokens"""


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


# Work


def vocabulary(model: str | Path) -> int:
    """`vocab_size` of a model folder."""
    return int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])


def random_prompts(key: str, count: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """`count` prompts of `num_tokens` ids each; a pure function of the arguments, so all sides get the same."""
    rng = random.Random(key)
    return [[rng.randrange(FIRST_PLAIN_ID, vocab_size) for _ in range(num_tokens)] for _ in range(count)]


# Statistics


def summary(samples_s: Sequence[float], tokens: int | None = None) -> dict[str, Any]:
    """All samples with median, minimum and maximum; tokens per second at the median if `tokens` were made in each."""
    found: dict[str, Any] = {
        "samples_s": [round(s, 6) for s in samples_s],
        "median_s": statistics.median(samples_s),
        "min_s": min(samples_s),
        "max_s": max(samples_s),
    }
    if tokens is not None:
        found["tokens"] = tokens
        found["tokens_per_s"] = tokens / found["median_s"]
    return found


def compare(ours_s: Sequence[float], theirs_s: Sequence[float]) -> dict[str, float]:
    """How many times faster we are: the ratio of medians, and the range of the ratios of neighbouring repetitions."""
    pairs = [b / a for a, b in zip(ours_s, theirs_s, strict=False)]
    ratio = statistics.median(theirs_s) / statistics.median(ours_s)
    return {"ratio_of_medians": ratio, "paired_min": min(pairs), "paired_max": max(pairs)}


def verdict(floor: float, ratios: dict[str, float]) -> dict[str, Any] | None:
    """Whether the smallest of `ratios` (by rival) reaches `floor`; None without a rival."""
    if not ratios:
        return None
    rival = min(ratios, key=lambda name: ratios[name])
    return {"floor": floor, "against": rival, "ratio": ratios[rival], "met": ratios[rival] >= floor}


# Facts


def _first(path: str, default: str = "") -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return default


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        found[f"L{_first(f'{index}/level')} {_first(f'{index}/type').lower()}"] = _first(f"{index}/size")
    return found


def hardware() -> dict[str, Any]:
    """CPU, cores this process may use, memory, and what else decides timings."""
    rows = [line.split(":", 1) for line in _first("/proc/cpuinfo").split("\n\n")[0].splitlines() if ":" in line]
    cpu = {key.strip(): value.strip() for key, value in rows}
    flags = set(cpu.get("flags", "").split())
    memory = dict(line.split(":", 1) for line in _first("/proc/meminfo").splitlines() if ":" in line)
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "family_model_stepping": "/".join(cpu.get(key, "?") for key in ("cpu family", "model", "stepping")),
        "flags": [flag for flag in FLAGS_OF_INTEREST if flag in flags],
        "caches": _caches(),
        "cores": len(os.sched_getaffinity(0)),
        "core_ids": sorted(os.sched_getaffinity(0)),
        "memory_bytes": int(memory.get("MemTotal", "0 kB").split()[0]) * 1024,
        "memory_available_bytes": int(memory.get("MemAvailable", "0 kB").split()[0]) * 1024,
        "huge_pages": _first("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
    }


def versions(*packages: str) -> dict[str, str | None]:
    """Python and the installed versions of `packages`; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> dict[str, Any]:
    """The commit that is checked out and whether files differ from it; None and None outside a checkout."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "modified": None if changed is None else bool(changed)}


# Memory of a process


def memory_of(pid: int) -> dict[str, int]:
    """Bytes of a process that no file backs, split into pools and the rest.

    Pools are mappings advised to use huge pages: in an engine process the weights and the KV pages touched so far.

    Raises:
        OSError: no such process, or not ours.
    """
    rest = pools = anonymous = 0
    mapping: dict[str, int] = {}
    unnamed = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "VmFlags":
            own = mapping.get("Rss", 0) if unnamed else mapping.get("Anonymous", 0)
            pools, rest = (pools + own, rest) if " hg" in line else (pools, rest + own)
            anonymous += mapping.get("Anonymous", 0)
        elif value.endswith(" kB"):
            mapping[key] = int(value.split()[0]) * 1024
        elif "-" in line.split(" ", 1)[0]:
            words = line.split(maxsplit=5)
            unnamed = len(words) < 6 or words[5].startswith(("[", "/dev/zero"))
            mapping = {}
    return {"anonymous_bytes": anonymous, "pool_bytes": pools, "beyond_pools_bytes": rest}


# Output


def begin() -> dict[str, Any]:
    """Facts to take before the work: the time, the machine as it is, the commit."""
    now = time.time()
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    return {"began": now, "facts": {"started_at": at, "hardware": hardware(), **commit()}}


def public(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without what only holds on this machine: files by their last name, no interpreters."""
    kept = {key: value for key, value in config.items() if key != "out" and not key.endswith("python")}
    return {key: Path(value).name if isinstance(value, str) else value for key, value in kept.items()} | {
        "vllm_preload": [Path(p).name for p in config.get("vllm_preload", ())]
    }


def report(kind: str, config: dict[str, Any], start: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """The JSON document: what ran, where, and what came out. `start` is from `begin`."""
    seconds = round(time.time() - start["began"], 1)
    head = {"schema_version": SCHEMA_VERSION, "benchmark": kind, **start["facts"], "seconds": seconds}
    return {**head, "config": public(config), **body}


def write_json(document: dict[str, Any], out: str | None) -> None:
    """To the file `out`, or to stdout."""
    text = json.dumps(document, indent=1, sort_keys=False) + "\n"
    if out is None:
        sys.stdout.write(text)
        return
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    say(f"written: {path}")
