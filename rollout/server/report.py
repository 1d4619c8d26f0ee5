"""`--report-to wandb`: the numbers of live weights, logged by a thread of the front process.

wandb is imported on that thread. Whatever goes wrong there is one warning on stderr; serving never waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError, describe
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
    if name == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ConfigError("--report-to wandb needs the package wandb: pip install 'rollsync[wandb]'")


def _wandb_run(config: Mapping[str, Any]) -> Any:
    import wandb

    project = None if os.environ.get("WANDB_PROJECT") else "rollsync"
    return wandb.init(project=project, job_type="rollout", config=dict(config), settings=wandb.Settings(console="off", quiet=True))


class Reporter:
    """Rows of numbers to a run that `begin` makes, on a thread of its own."""

    def __init__(self, begin: Callable[[Mapping[str, Any]], Any] = _wandb_run) -> None:
        self._begin = begin
        self._queue: queue.Queue[dict[str, float] | None] = queue.Queue(WAITING_ROWS)
        self._thread: threading.Thread | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        self._thread = threading.Thread(target=self._run, args=(config,), name="rollsync-report", daemon=True)
        self._thread.start()

    def add(self, numbers: list[Number]) -> None:
        """One row. Never waits: a row that finds no room is left out."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait({number.key: number.value for number in numbers})

    def close(self) -> None:
        """Have what waits written, within CLOSE_S."""
        if self._thread is not None and self._thread.is_alive():
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(CLOSE_S)

    def _run(self, config: Mapping[str, Any]) -> None:
        try:
            run = self._begin(config)
            while (row := self._queue.get()) is not None:
                run.log(row)
            run.finish()
        except BaseException as error:  # thread edge: serving goes on
            print(f"warning: nothing more is reported to wandb: {describe(error)}", file=sys.stderr, flush=True)


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
