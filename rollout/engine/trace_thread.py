"""The thread that writes a trace. It knows nothing of the engine, so that an engine which is dropped is freed."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...kernels.priority import give_way
from ..errors import IllegalState
from .lanes import NICE
from .sequence import PromptVersions, Request
from .trace_file import TraceFile
from .trace_line import LineMaker, weight_versions, weights_digest

log = logging.getLogger(__name__)

CLOSE_S = 1.5
"""how long closing waits for what is not written yet"""
SWITCH_S = 0.01
"""what tells of new weights is a commit: it ends first"""
VERSIONS_KNOWN = 1024
"""whose digest is remembered"""
QUIET_S = 60.0
"""between two times of trouble that the log tells of"""

ReadDigests = Callable[[], tuple[int, dict[str, str]]]
"""version and digests by name of the live weights; from any thread"""


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample that waits to be written."""

    request: Request
    output: dict[str, Any]
    prompt_versions: PromptVersions
    size: int
    """bytes it counts"""


class TraceThread:
    """Takes what `put` gives it, in order. Ends by `stop`, and in any case with the process.

    Args:
        file: closed in the end.
        read_digests: called once per weight version; None once the engine is gone.
    """

    def __init__(self, file: TraceFile, maker: LineMaker, read_digests: Callable[[], ReadDigests | None]) -> None:
        self._file, self._maker, self._read_digests = file, maker, read_digests
        self._queue: queue.SimpleQueue[Finished | str] = queue.SimpleQueue()
        self._digests: dict[int, str] = {}
        self._added_bytes = self._taken_bytes = 0
        self._added = self._refused = 0
        """samples, as the engine's thread counts"""
        self._written = self._unwritten = 0
        """lines, and those that could not be, as this one does"""
        self._is_dropping, self._said_at = False, -QUIET_S
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name="rollsync-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def waiting_bytes(self) -> int:
        """Of what was put and is not written."""
        return self._added_bytes - self._taken_bytes

    def put(self, item: Finished) -> None:
        """From the engine's thread, as `refuse`."""
        self._added += 1
        self._added_bytes += item.size
        self._queue.put(item)

    def refuse(self, why: str) -> None:
        """A sample is left out."""
        self._refused += 1
        self._say(why)

    def counts(self) -> tuple[int, int]:
        """Lines written, and samples that are not in the file: once it is closed, those too that still waited."""
        written = self._written
        return written, self._refused + (self._added - written if self._is_given_up else self._unwritten)

    def weights_changed(self) -> None:
        """New weights are current: their digest is taken before others replace them."""
        self._queue.put("weights")

    def stop(self) -> None:
        """End once all is written; does not wait, and may be called by the garbage collector."""
        self._queue.put("close")

    def close(self) -> None:
        """`stop`, and wait for it within CLOSE_S; what is not written then is lost."""
        atexit.unregister(self.close)
        self.stop()
        self._thread.join(CLOSE_S)
        self._is_given_up = True
        if lost := self._added - self._written - self._unwritten:
            log.warning("trace: %s is written too slowly: %d samples were not within %g s and are lost", self._file.path, lost, CLOSE_S)

    def _say(self, why: str) -> None:
        """Once per time of trouble."""
        if not self._is_dropping and time.monotonic() - self._said_at >= QUIET_S:
            self._is_dropping, self._said_at = True, time.monotonic()
            log.warning("trace: samples are left out of %s: %s", self._file.path, why)

    def _run(self) -> None:
        try:
            give_way(NICE)
        except Exception as error:  # thread edge
            log.warning("trace: its thread keeps the engine's priority: %s", error)
        while self._take(self._queue.get()):
            pass  # and no name is left here that leads to a request, and by it to the engine
        self._file.close()
        atexit.unregister(self.close)

    def _take(self, item: Finished | str) -> bool:
        """Whether there is more to do."""
        if item == "close" or self._is_given_up:
            return False
        if isinstance(item, Finished):
            self._write(item)
        else:
            time.sleep(SWITCH_S)
            self._take_digest()
        return True

    def _write(self, item: Finished) -> None:
        try:
            if set(weight_versions(item.output, item.prompt_versions)) - self._digests.keys():
                self._take_digest()
            self._file.append(self._maker.line(item.request, item.output, self._digests, item.prompt_versions))
            self._written += 1
            if self._is_dropping and self._added == self._written + self._unwritten:  # else the next ones may be left out again
                self._is_dropping = False
                log.warning("trace: %s is written again; %d samples are not in it", self._file.path, self.counts()[1])
        except Exception as error:  # thread edge: the next line may go well again
            self._unwritten += 1
            self._say(error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")
        self._taken_bytes += item.size

    def _take_digest(self) -> None:
        """Of the live weights; they may be asleep, or be written to just now: then that of a later line is tried."""
        try:
            read = self._read_digests()
            if read is None:
                return
            version, digests = read()
            self._digests.pop(version, None)
            self._digests[version] = weights_digest(digests)
        except (IllegalState, ValueError) as error:
            log.info("trace: no digest of the weights now: %s", error)
        except Exception as error:  # thread edge: lines without it say so
            log.warning("trace: no digest of the weights: %s: %s", type(error).__name__, error)
        if len(self._digests) > VERSIONS_KNOWN:
            del self._digests[next(iter(self._digests))]
