"""The parent's side: workers as process groups that compute one at a time and all end with this process."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Self

BENCHMARKS = Path(__file__).resolve().parent.parent
LOAD_DEADLINE_S = 900.0
JOB_DEADLINE_S = 1800.0
CLOSE_DEADLINE_S = 15.0

_REAPER = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    pgid = int(line)
    groups.add(pgid) if pgid > 0 else groups.discard(-pgid)
for pgid in groups:
    try:
        os.killpg(pgid, signal.SIGKILL)
    except OSError:
        pass
"""


class WorkerFailed(RuntimeError):
    """A worker ended, refused, or let a deadline pass; the message names it, the phase, and its last words."""


class Reaper:
    """Kills the groups it was told of when this process ends, however it ends: it waits on a pipe that closes then."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _REAPER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def _tell(self, pgid: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{pgid}\n")
            self._process.stdin.flush()

    def watch(self, pgid: int) -> None:
        self._tell(pgid)

    def forget(self, pgid: int) -> None:
        self._tell(-pgid)

    def close(self) -> None:
        """Kill what is still watched, and end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def end_on_sigterm() -> None:
    """Make SIGTERM leave by SystemExit, so that every `finally` runs."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))


class Group:
    """A process in a session of its own, with its output; stdout is read line by line with deadlines."""

    def __init__(self, name: str, command: Sequence[str], reaper: Reaper, env: dict[str, str] | None = None) -> None:
        self.name, self._reaper, self._closed = name, reaper, False
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=env, start_new_session=True
        )
        reaper.watch(self.process.pid)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def line(self, deadline_s: float, phase: str) -> str:
        """The next line of stdout.

        Raises:
            WorkerFailed: it ended, or the deadline passed.
        """
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty:
            raise WorkerFailed(f"{self.name} gave no answer within {deadline_s:g} s of {phase}\n{self.last_words()}") from None
        if line is None:
            raise WorkerFailed(f"{self.name} ended during {phase}\n{self.last_words()}")
        return line

    def last_words(self, num_bytes: int = 4000) -> str:
        """The end of its stderr."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - num_bytes))
        text = self._log.read().decode(errors="replace")
        self._log.seek(0, os.SEEK_END)
        return text

    def signal(self, signum: int) -> None:
        """To every process of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def cpu_s(self) -> float:
        """CPU seconds that the group's living processes have used."""
        return sum(ticks for _, ticks in _members(self.pid)) / os.sysconf("SC_CLK_TCK")

    def pids(self) -> list[int]:
        return [pid for pid, _ in _members(self.pid)]

    def close(self) -> None:
        """Ask it to end by closing stdin, then kill the group. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        self.signal(signal.SIGCONT)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_DEADLINE_S)
        self.signal(signal.SIGKILL)
        self.process.wait(CLOSE_DEADLINE_S)
        self._reaper.forget(self.pid)
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _members(pgid: int) -> Iterator[tuple[int, int]]:
    """(pid, ticks of CPU time) of the processes in a group."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(words[2]) == pgid:
                    yield int(entry.name), int(words[11]) + int(words[12])


class Worker(Group):
    """A loop.py worker: loaded once, stopped (SIGSTOP) unless it is its turn, so that an idle one cannot burn a core."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        reaper: Reaper,
        model: str,
        options: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        super().__init__(name, command, reaper, env)
        try:
            self._send({"model": model, "options": options or {}})
            self.ready = self._answer(LOAD_DEADLINE_S, "loading")
            self.ready["from_command_s"] = time.perf_counter() - self.began
            self.signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise WorkerFailed(f"{self.name} takes no jobs: {error}\n{self.last_words()}") from None

    def _answer(self, deadline_s: float, phase: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.line(deadline_s, phase))
        if "error" in answer:
            raise WorkerFailed(f"{self.name} failed during {phase}: {answer['error']}\n{self.last_words()}")
        return answer

    def ask(self, job: dict[str, Any], deadline_s: float = JOB_DEADLINE_S) -> dict[str, Any]:
        """Let it run, give it a job, wait for the answer, stop it again."""
        self.signal(signal.SIGCONT)
        try:
            self._send(job)
            return self._answer(deadline_s, str(job.get("case", job.get("op", "a job"))))
        finally:
            self.signal(signal.SIGSTOP)


# How to start each side


def _peer_environment() -> dict[str, str]:
    """Ours without what would lead a rival's Python to our packages; no network."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**env, "PYTHONPATH": str(BENCHMARKS), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _prefix(python: str) -> Path:
    return Path(python).absolute().parent.parent


def openmp_of(python: str) -> Path | None:
    """libiomp5.so of the environment `python` belongs to."""
    found = sorted(_prefix(python).glob("lib/libiomp5.so")) or sorted(_prefix(python).rglob("libiomp5.so"))
    return found[0] if found else None


def vllm_environment(python: str, in_process: bool, preload: Sequence[str] = ()) -> dict[str, str]:
    """vLLM on CPU at its best: every core bound and none reserved, Intel's OpenMP preloaded, invariance off.

    Args:
        in_process: run its engine in the worker's own process; then the OpenMP settings that vLLM would give its worker
            process have to come from here.
        preload: further libraries, e.g. libtcmalloc.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    iomp = openmp_of(python)
    libraries = [*preload, *([str(iomp)] if iomp else [])]
    env = {
        **_peer_environment(),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_BATCH_INVARIANT": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if libraries:
        env["LD_PRELOAD"] = ":".join(libraries)
    if in_process:
        env["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
        env |= {"KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]", "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
    return env


def rollsync_command() -> list[str]:
    return [sys.executable, "-m", "rollsync.benchmarks.peers.rollsync_worker"]


def start(name: str, reaper: Reaper, args: Any) -> Worker:
    """A loaded worker: "rollsync", "vllm" (engine in processes of its own), "vllm-inproc" or "transformers".

    Args:
        args: of the command line: model, engine_options, peer_python, transformers_python, vllm_options, vllm_preload.
    """
    if name == "rollsync":
        return Worker(name, rollsync_command(), reaper, args.model, args.engine_options)
    if name == "transformers":
        command = [args.transformers_python, "-m", "peers.transformers_worker"]
        return Worker(name, command, reaper, args.model, env=_peer_environment())
    env = vllm_environment(args.peer_python, name == "vllm-inproc", args.vllm_preload)
    return Worker(name, [args.peer_python, "-m", "peers.vllm_worker"], reaper, args.model, args.vllm_options, env)
