"""What a weight update costs a live server: seconds against a copy of the same bytes, token gaps, throughput, pauses, memory.

    python benchmarks/weight_sync.py --model FOLDER --out result.json

A trainer process syncs the checkpoint's own weights into a server, while requests run or not. Every ratio is of neighbours in one
run: the yardstick is timed right before each sync, and a sync's gaps are held against the decode steps around it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollsync.benchmarks import common
from rollsync.benchmarks.peers.processes import LOAD_DEADLINE_S, Group, Reaper, WorkerFailed, end_on_sigterm
from rollsync.benchmarks.peers.served import Served

YARDSTICKS = {"ipc": "memcpy", "http": "memcpy", "collective": "broadcast", "disk": "file"}
"""what each transport's seconds are held against"""
BOUNDS = {"ipc": 4.0, "collective": 1.5, "disk": 1.5}
JOB_S = 300.0
NICE = 10
BUCKET_BYTES = 32 << 20
SLACK_BYTES = 24 << 20
"""of what a process holds besides the buffers named: Python objects, arenas"""


class Trainer(Group):
    """A trainer_worker that is ready."""

    def __init__(self, reaper: Reaper, model: str, url: str, folder: str, nice: int = 0) -> None:
        super().__init__("trainer", [sys.executable, "-m", "rollsync.benchmarks.peers.trainer_worker"], reaper)
        try:
            self._send({"model": model, "url": url, "folder": folder, "nice": nice})
            self._answer("loading")
        except BaseException:
            self.close()
            raise

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def _answer(self, phase: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.line(LOAD_DEADLINE_S if phase == "loading" else JOB_S, phase))
        if "error" in answer:
            raise WorkerFailed(f"the trainer failed during {phase}: {answer['error']}\n{self.last_words()}")
        return answer

    def syncs(self, transport: str = "ipc", reps: int = 1, **options: Any) -> dict[str, Any]:
        """`reps` syncs after one that is not counted (`cold`: without it)."""
        job = {"apply": "staged", "kv_policy": "keep", "every_s": 0.0, "yardstick": None, **options}
        self._send({"op": "syncs", "transport": transport, "reps": reps, **job})
        return self._answer(f"{reps} syncs by {transport}")


class Running:
    """Samples being drawn, and when each of their tokens came. Ends with the `with` block."""

    def __init__(self, url: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self._url, self._prompts, self._max_tokens = url, prompts, max_tokens
        self._stop = threading.Event()
        self.tokens: list[list[tuple[float, int]]] = [[] for _ in prompts]
        """by sample: (monotonic time, how many); samples that end are begun anew, with a list of their own"""
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        from rollsync import RolloutClient

        params = {"max_tokens": self._max_tokens, "ignore_eos": True, "seed": 1}
        with RolloutClient(self._url) as client:
            while True:
                mine = self.tokens[-len(self._prompts) :]
                for item in client.stream(self._prompts, 1, params, tokens=True):
                    if item.delta is not None:
                        mine[item.prompt_index].append((time.monotonic(), len(item.delta.token_ids)))
                    if self._stop.is_set():
                        return
                self.tokens += [[] for _ in self._prompts]

    def __enter__(self) -> Running:
        self._thread.start()
        until = time.monotonic() + JOB_S
        while any(sum(n for _, n in t) < 8 for t in self.tokens[: len(self._prompts)]):
            if time.monotonic() > until or not self._thread.is_alive():
                raise WorkerFailed("the server's samples do not get on")
            time.sleep(0.01)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(JOB_S)

    def made(self) -> list[list[tuple[float, int]]]:
        """What came up to now."""
        return [list(sample) for sample in list(self.tokens)]


def gaps(tokens: Sequence[Sequence[tuple[float, int]]]) -> list[tuple[float, float]]:
    """(begin, end) between neighbouring tokens of every sample."""
    return [(a[0], b[0]) for sample in tokens for a, b in itertools.pairwise(sample)]


def in_flight(tokens: Sequence[Sequence[tuple[float, int]]], syncs: Sequence[dict[str, Any]], samples: int) -> dict[str, Any]:
    """What syncs did to `samples` running at a time: longest gap of each sync in decode steps, share of the throughput that was left."""
    windows = [(s["began"], s["ended"]) for s in syncs]
    every = gaps(tokens)
    longest = [max((b - a for a, b in every if a < end and b > begin), default=0.0) for begin, end in windows]
    times = [(t, n) for sample in tokens for t, n in sample]
    first, last = min(t for t, _ in times), max(t for t, _ in times)
    inside_s = sum(end - begin for begin, end in windows)
    inside = sum(n for t, n in times if any(begin <= t <= end for begin, end in windows))
    total = sum(n for _, n in times)
    rate = (total - inside) / max(last - first - inside_s, 1e-9)
    step_s = samples / rate  # every step makes a token of each
    return {
        "step_s": step_s,
        "longest_gap_s": longest,
        "longest_gap_steps": {"median": statistics.median(longest) / step_s, "max": max(longest) / step_s},
        "tokens_per_s": rate,
        "throughput_kept": inside / max(inside_s, 1e-9) / rate,
        "sync_s": common.summary([end - begin for begin, end in windows]),
    }


def verdict(value: float, limit: float, at_least: bool = False) -> dict[str, Any]:
    return {"value": value, "at_least" if at_least else "at_most": limit, "met": value >= limit if at_least else value <= limit}


class Run:
    """One server and the trainers that update it."""

    def __init__(self, args: argparse.Namespace, reaper: Reaper, served: Served, folder: str) -> None:
        self.args, self.reaper, self.served, self.folder = args, reaper, served, folder
        self.vocab = common.vocabulary(args.model)
        self.engine_pid = max(_children(served.pid), key=lambda pid: _resident(pid)["now"])

    def trainer(self, nice: int = 0) -> Trainer:
        return Trainer(self.reaper, self.args.model, self.served.url, self.folder, nice)

    def running(self, key: str) -> Running:
        prompts = common.random_prompts(key, self.args.samples, self.args.prompt_tokens, self.vocab)
        return Running(self.served.url, prompts, self.args.max_tokens)

    def memory(self, trainer: Trainer) -> dict[str, Any]:
        """What a first sync adds, in place and staged, on either side."""
        self._settle()
        found = {}
        for apply in ("in_place", "staged"):
            _forget_peak(self.engine_pid)
            before = _resident(self.engine_pid)
            done = trainer.syncs(apply=apply, cold=True)
            grown = _resident(self.engine_pid)["peak"] - before["now"]
            buffers = min(2 * BUCKET_BYTES, 2 * done["bytes"])
            allowed = buffers + (done["bytes"] if apply == "staged" else 0) + SLACK_BYTES
            found[apply] = {
                "weights_bytes": done["bytes"],
                "engine_extra_bytes": verdict(grown, allowed),
                "trainer_extra_bytes": verdict(done["extra_bytes"], buffers + SLACK_BYTES),
                "seconds": done["syncs"][0]["seconds"],
            }
        return found

    def _settle(self) -> None:
        """Wait until the engine has backed its KV pool, which it does in its first seconds."""
        until, last = time.monotonic() + JOB_S, -1
        while (now := _resident(self.engine_pid)["now"]) - last > (4 << 20) and time.monotonic() < until:
            last = now
            time.sleep(1.0)

    def transport(self, trainer: Trainer, name: str) -> dict[str, Any]:
        done = trainer.syncs(name, self.args.reps, yardstick=YARDSTICKS[name])
        totals = [s["seconds"]["total"] for s in done["syncs"]]
        pairs = [t / y for t, y in zip(totals, done["yardstick_s"], strict=True)]
        phases = {key: statistics.median(s["seconds"][key] for s in done["syncs"]) for key in done["syncs"][0]["seconds"]}
        ratio = statistics.median(totals) / statistics.median(done["yardstick_s"])
        return {
            "bytes": done["bytes"],
            "sync": common.summary(totals),
            "phases_s": phases,
            "yardstick": {"name": YARDSTICKS[name], **common.summary(done["yardstick_s"])},
            "ratio_of_medians": ratio,
            "paired_min": min(pairs),
            "paired_max": max(pairs),
            "bound": verdict(ratio, BOUNDS[name]) if name in BOUNDS else None,
        }

    def beside_requests(self, trainer: Trainer, kv_policy: str) -> dict[str, Any]:
        with self.running(kv_policy) as running:
            # A prefill must be over before the next sync.
            every_s = self.args.every * (1 if kv_policy == "keep" else 4)
            done = trainer.syncs(reps=self.args.reps, kv_policy=kv_policy, every_s=every_s)
            time.sleep(every_s)
            found = in_flight(running.made(), done["syncs"], self.args.samples)
        steps = found["longest_gap_steps"]["median"]
        found["throughput_bound"] = verdict(found["throughput_kept"], 0.6, at_least=True) if kv_policy == "keep" else None
        if kv_policy == "keep":
            return {**found, "gap_bound": verdict(steps, 2.0)}
        live = int(statistics.median(s["recompute_tokens"] for s in done["syncs"]))
        prefill_s = self.prefill(live)
        over = (statistics.median(found["longest_gap_s"]) - 2 * found["step_s"]) / prefill_s
        return {**found, "live_tokens": live, "prefill_s": prefill_s, "gap_bound": verdict(over, 1.1)}

    def prefill(self, tokens: int) -> float:
        """Median seconds of a prefill of so many tokens, by as many samples as were running."""
        each = max(1, tokens // self.args.samples)
        seconds = []
        for rep in range(3):
            prompts = common.random_prompts(f"prefill/{rep}", self.args.samples, each, self.vocab)
            job = {"prompts": prompts, "n": 1, "max_tokens": 1, "seed": 0}
            seconds.append(float(self.served.generate(job, one_call=True)["seconds"]))
        return statistics.median(seconds)

    def pauses(self) -> dict[str, Any]:
        """Seconds until a pause is acknowledged while samples run, against a decode step; a round trip is taken off."""
        from rollsync.weight_sync.control import HttpControl

        control = HttpControl(self.served.url)
        trips, took = [], []
        with self.running("pause") as running:
            before, at = sum(n for sample in running.made() for _, n in sample), time.monotonic()
            time.sleep(max(self.args.every, 0.2))
            made = sum(n for sample in running.made() for _, n in sample) - before
            step_s = self.args.samples * (time.monotonic() - at) / max(made, 1)
            for _ in range(self.args.pauses):
                began = time.monotonic()
                control.call("GET", "/health/live")
                trips.append(time.monotonic() - began)
                began = time.monotonic()
                control.call("POST", "/v1/engine/pause", b'{"mode": "keep", "owner": "benchmark"}', "application/json")
                took.append(time.monotonic() - began)
                control.call("POST", "/v1/engine/resume", b'{"owner": "benchmark"}', "application/json")
                time.sleep(0.1)
        control.close()
        steps = (statistics.median(took) - statistics.median(trips)) / step_s
        return {"pause": common.summary(took), "round_trip": common.summary(trips), "step_s": step_s, "bound": verdict(steps, 1.0)}


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def _resident(pid: int) -> dict[str, int]:
    from rollsync.benchmarks.peers.trainer_worker import resident_bytes

    return resident_bytes(pid)


def _forget_peak(pid: int) -> None:
    from rollsync.benchmarks.peers.trainer_worker import forget_peak

    forget_peak(pid)


@contextlib.contextmanager
def started(args: argparse.Namespace) -> Iterator[Run]:
    with (
        tempfile.TemporaryDirectory(prefix="rollsync-benchmark-") as folder,
        Reaper() as reaper,
        Served(reaper, args.model, {**args.engine_options, "weights_root": folder}) as served,
    ):
        yield Run(args, reaper, served, folder)


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """The body of the report."""
    body: dict[str, Any] = {"failed": {}, "transports": {}, "in_flight": {}}

    def part(where: dict[str, Any], name: str, work: Any) -> None:
        common.say(f"{name} ...")
        try:
            where[name] = work()
        except WorkerFailed as error:
            common.say(f"{name} failed: {error}")
            body["failed"][name] = str(error)

    with started(args) as run:
        with run.trainer() as trainer:
            part(body, "memory", lambda: run.memory(trainer))
            for name in args.transports:
                part(body["transports"], name, lambda name=name: run.transport(trainer, name))
        with run.trainer(NICE) as trainer:
            for policy in ("keep", "recompute"):
                part(body["in_flight"], policy, lambda policy=policy: run.beside_requests(trainer, policy))
        part(body, "pauses", run.pauses)
    return body


def bounds(body: dict[str, Any], name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every verdict in a report, with its place."""
    for key, value in body.items():
        if isinstance(value, dict):
            if "met" in value:
                yield f"{name}{key}", value
            else:
                yield from bounds(value, f"{name}{key}.")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="weight_sync.py", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--model", required=True, help="folder of a safetensors checkpoint")
    parser.add_argument("--out", help="file for the JSON report (default: stdout)")
    parser.add_argument("--transports", default=",".join(YARDSTICKS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--reps", type=int, default=7, help="syncs of each kind (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="running during syncs (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of each (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=1500, help="of each, at most (default: %(default)s)")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between syncs beside requests (default: %(default)s)")
    parser.add_argument("--pauses", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--engine-options", type=json.loads, default={}, metavar="JSON", help="options of the server's engine")
    parser.add_argument("--quick", action="store_true", help="one repetition: shows that it works, measures nothing")
    args = parser.parse_args(argv)
    args.transports = args.transports.split(",")
    if unknown := sorted(set(args.transports) - set(YARDSTICKS)):
        parser.error(f"--transports: unknown {', '.join(unknown)} (known: {', '.join(YARDSTICKS)})")
    if args.quick:
        args.reps, args.pauses, args.every, args.samples = 1, 2, 0.05, 2
    if args.reps < 1 or args.pauses < 1:
        parser.error("--reps and --pauses must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    end_on_sigterm()
    facts = common.begin()
    body = {"versions": common.versions("rollsync", "torch", "numpy", "httpx", "uvicorn"), **run_all(args)}
    common.write_json(common.report("weight_sync", vars(args), facts, body), args.out)
    for name, found in bounds(body):
        limit = next(f"{word.replace('_', ' ')} {found[word]:g}" for word in ("at_most", "at_least") if word in found)
        common.say(f"{name}: {found['value']:.3g} ({limit}): {'met' if found['met'] else 'NOT met'}")
    return 1 if body["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
