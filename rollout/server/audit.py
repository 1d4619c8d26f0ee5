"""One line of JSON on stderr per call of a control route: when, who, what, of which update, and how it ended.

No token and no body is ever in it. Names that callers choose are shortened and escaped as JSON, so that none can begin a line of its
own. Lines are written by a thread: a reader of stderr that stands still costs lines, and says how many, but holds up nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request

NOTED = ("owner", "version", "update", "mode", "kind")
"""what a line says of a body, or of a reply"""
LONGEST_NAME = 120
WAITING_LINES = 10_000
"""lines that may wait for the reader of stderr"""


def _to_stderr(line: bytes) -> None:
    while line:  # not through sys.stderr, whose lock would then be held by a thread that waits
        line = line[os.write(2, line) :]


class AuditLog:
    """Takes lines from the event loop and never waits. `write` is called on a thread."""

    def __init__(self, write: Callable[[bytes], None] = _to_stderr) -> None:
        self._write = write
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING_LINES)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def add(self, facts: Mapping[str, Any]) -> None:
        """One line; values are ints, floats, strings or None, of which long ones are cut and empty ones left out."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rollsync-audit", daemon=True)
            self._thread.start()
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        shown = {k: v[:LONGEST_NAME] if isinstance(v, str) else v for k, v in facts.items() if v is not None}
        try:
            self._queue.put_nowait({"audit": "control", "time": time, **shown, **({"dropped": self._dropped} if self._dropped else {})})
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def close(self, timeout_s: float = 0.5) -> None:
        """Write what waits, within that time."""
        if self._thread is not None:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(timeout_s)
            self._thread = None

    def _run(self) -> None:
        while (facts := self._queue.get()) is not None:
            with contextlib.suppress(OSError):  # nobody reads any more
                self._write((json.dumps(facts) + "\n").encode())


def note(request: Request, facts: Any) -> None:
    """Let the audit line of this call, if it gets one, say what `facts` (a body as it was read, or a reply) has of `NOTED`."""
    kept = request.scope.get("state", {}).get("audit")
    if kept is not None and isinstance(facts, Mapping):
        kept.update({name: facts[name] for name in NOTED if isinstance(facts.get(name), int | float | str)})
