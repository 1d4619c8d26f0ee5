"""A trainer as a process: it syncs a checkpoint's weights into a server, and times the yardsticks next to it.

One JSON line in (`model`, `url`, `nice`, `folder`), one out; then a job a line:

    {"op": "syncs", "transport", "apply", "kv_policy", "reps", "every_s", "yardstick": null | "memcpy" | "broadcast" | "file"}
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from ...rollout.engine.weight_digest import fast_fill
from ...weight_sync.sender import WeightSender
from ...weight_sync.sources import TensorSource

_RECEIVER = """
import sys, torch, torch.distributed as dist
port, size, count = map(int, sys.argv[1:])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2)
data, done = torch.empty(size, dtype=torch.uint8), torch.zeros(1)
for _ in range(count):
    dist.broadcast(data, 0)
    dist.broadcast(done, 1)
"""
CLOSE_S = 30.0


class Yardsticks:
    """The same bytes moved by nothing but the means at hand. Each takes seconds.

    Args:
        size: bytes.
        folder: to write to.
    """

    def __init__(self, size: int, folder: Path) -> None:
        self._folder = folder
        self._from, self._to = (torch.full((size,), i, dtype=torch.uint8) for i in (1, 2))
        self._receiver: subprocess.Popen[bytes] | None = None

    def memcpy(self) -> float:
        copy = ctypes.CDLL(None).memcpy
        copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        began = time.perf_counter()
        copy(self._to.data_ptr(), self._from.data_ptr(), self._from.numel())
        return time.perf_counter() - began

    def file(self) -> float:
        """Write, sync, read."""
        path, data = self._folder / "yardstick", self._from.numpy().data
        began = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            for at in range(0, len(data), 64 << 20):
                file.write(data[at : at + (64 << 20)])
            os.fsync(file.fileno())
        with open(path, "rb", buffering=0) as file:
            into = self._to.numpy().data
            at = 0
            while at < len(into) and (count := file.readinto(into[at:])):
                at += count
        seconds = time.perf_counter() - began
        path.unlink()
        return seconds

    def broadcast(self) -> float:
        """By gloo to one process, in one piece, until it says that it has it."""
        done = torch.zeros(1)
        began = time.perf_counter()
        dist.broadcast(self._from, 0)
        dist.broadcast(done, 1)
        return time.perf_counter() - began

    def begin(self, name: str | None, reps: int) -> Callable[[], float] | None:
        """A yardstick to be called `reps` times, ready and warm."""
        if name is None:
            return None
        if name == "broadcast":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            self._receiver = subprocess.Popen([sys.executable, "-c", _RECEIVER, *map(str, (port, self._from.numel(), reps + 1))])
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)
        yardstick: Callable[[], float] = {"memcpy": self.memcpy, "broadcast": self.broadcast, "file": self.file}[name]
        yardstick()
        return yardstick

    def end(self) -> None:
        if self._receiver is not None:
            dist.destroy_process_group()
            self._receiver.wait(CLOSE_S)
            self._receiver = None


def resident_bytes(pid: int | str = "self") -> dict[str, int]:
    """Resident memory of a process: now, and the most since `forget_peak`."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {name: int(rows[key].split()[0]) * 1024 for name, key in (("now", "VmRSS"), ("peak", "VmHWM"), ("anonymous", "RssAnon"))}


def forget_peak(pid: int | str = "self") -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def syncs(weights: dict[str, torch.Tensor], setup: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """The job; times are of the system-wide monotonic clock, so that others can compare them with theirs."""
    size = sum(t.numel() * t.element_size() for t in weights.values())
    disk = job["transport"] == "disk"
    options: dict[str, Any] = {"folder": setup["folder"]} if disk else {"fill": fast_fill()}
    forget_peak()
    before = resident_bytes()
    done: list[dict[str, Any]] = []
    rulers: list[float] = []
    sources = TensorSource(weights)
    options |= {"apply": job["apply"], "kv_policy": job["kv_policy"]}
    with WeightSender(setup["url"], sources, **{"transport": job["transport"], **options}) as sender:
        if not job.get("cold"):
            sender.sync()
        after = resident_bytes()
        yardsticks = Yardsticks(size if job["yardstick"] else 1, Path(setup["folder"]))
        try:
            measure = yardsticks.begin(job["yardstick"], job["reps"])
            for _ in range(job["reps"]):
                if measure is not None:
                    rulers.append(measure())
                time.sleep(job["every_s"])
                began = time.monotonic()
                report = sender.sync()
                (engine,) = report.engines.values()
                words = {"recompute_tokens": engine.get("recompute_tokens"), "version": report.version}
                done.append({"began": began, "ended": time.monotonic(), "seconds": report.seconds, **words})
                if job.get("cold"):
                    after = resident_bytes()
        finally:
            yardsticks.end()
    return {"bytes": size, "syncs": done, "yardstick_s": rulers, "extra_bytes": max(0, after["peak"] - before["now"])}


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    os.nice(setup["nice"])  # before any thread is started: each has its own
    weights = {k: v.clone() for file in sorted(Path(setup["model"]).glob("*.safetensors")) for k, v in load_file(file).items()}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        try:
            answer = syncs(weights, setup, json.loads(line))
        except Exception as error:  # process edge: the parent hears of it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
