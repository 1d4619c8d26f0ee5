"""`--report-to wandb`: the numbers of live weights, logged by a child of the front process, which alone imports wandb.

Whatever goes wrong there is one warning on stderr; serving never waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from ..errors import ConfigError
from ..live_numbers import Number, live_numbers
from .engine_client import EngineProcess

REPORT_S = 10.0
"""between two rows, unless an update ends"""
CLOSE_S = 5.0
WAITING_ROWS = 100


def check_report_to(name: str | None) -> None:
    """ConfigError if it cannot be reported there."""
    if name not in (None, "none", "wandb"):
        raise ConfigError(f"--report-to must be wandb or none, got {name!r}")
    if name == "wandb" and find_spec("wandb") is None:
        raise ConfigError("--report-to wandb needs the package wandb: pip install 'rollsync[wandb]'")


class Reporter:
    """Rows of numbers to a child process (wandb_child.py), by a thread: a child that is stuck, or has ended, holds up nobody."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "rollsync.rollout.server.wandb_child")) -> None:
        self._command = command
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING_ROWS)
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        self._queue.put(dict(config))
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, process_group=0
        )  # a terminal's Ctrl-C reaches the server only
        self._thread = threading.Thread(target=self._run, args=(self._process,), name="rollsync-report", daemon=True)
        self._thread.start()

    def add(self, numbers: list[Number]) -> None:
        """One row. Never waits: a row that finds no room is left out."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait({number.key: number.value for number in numbers})

    def close(self) -> None:
        """Have what waits logged, within CLOSE_S, and end the child."""
        if self._process is None:
            return
        with contextlib.suppress(queue.Full, subprocess.TimeoutExpired):
            self._queue.put_nowait(None)
            self._process.wait(CLOSE_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _run(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and said why
            while (row := self._queue.get()) is not None:
                process.stdin.write(json.dumps(row) + "\n")
                process.stdin.flush()
        with contextlib.suppress(OSError):
            process.stdin.close()


async def report(engine: EngineProcess, reporter: Reporter) -> None:
    """Until cancelled: a row every REPORT_S, and one as soon as an update has ended."""
    info = await engine.ready()
    reporter.start({name: info[name] for name in ("model", "dtype", "fingerprint", "kernels") if name in info})
    ended: Any = None
    while engine.dead is None:
        reporter.add(live_numbers(engine.snapshot.stats, engine.counters.lags))
        until = asyncio.get_running_loop().time() + REPORT_S
        while (left := until - asyncio.get_running_loop().time()) > 0 and engine.dead is None:
            await engine.published(left)
            updates = engine.snapshot.stats.get("updates", {})
            now = (updates.get("commits"), updates.get("aborts"))
            if now != ended:
                ended = now
                break
