"""How much memory this host has, as the system counts it within its container's limit."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ..errors import ConfigError

_CGROUP_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def available_memory() -> int:
    """Bytes this process can have without swapping, within its container's limit."""
    free = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for limit, usage in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not this kind of cgroup, or "max"
            root = Path("/sys/fs/cgroup")
            free.append(max(0, int((root / limit).read_text()) - int((root / usage).read_text())))
    if free:
        return min(free)
    raise ConfigError("the available memory cannot be read here: give cache.memory_bytes or cache.num_blocks")


def total_memory() -> int:
    """Bytes this process could ever have: the machine's, or its container's limit. (What is free now may be page cache.)"""
    lines = Path("/proc/meminfo").read_text().splitlines()
    totals = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    for limit, _ in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            totals.append(int((Path("/sys/fs/cgroup") / limit).read_text()))
    return min(totals)


def resident_bytes() -> int:
    """Anonymous memory of this process that the system has behind it."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
