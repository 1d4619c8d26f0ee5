"""Writes finished samples to a trace, beside the engine's thread: a slow disk costs lines, which are counted, and never a step."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from ...kernels.priority import give_way
from ..errors import IllegalState
from ..wire import is_array
from .lanes import NICE
from .outputs import output_to_wire
from .runner_info import RunnerInfo
from .sequence import Request
from .trace_file import TraceFile
from .trace_line import LineMaker, weights_digest
from .types import SampleOutput

log = logging.getLogger(__name__)

WAITING_BYTES = 64 << 20
"""values of samples that may wait to be written"""
SAMPLE_BYTES = 1024
"""what a sample counts besides its values"""
CLOSE_S = 1.5
"""how long closing waits for what is not written yet"""
SWITCH_S = 0.01
"""what tells of new weights is a commit: it ends first"""
VERSIONS_KNOWN = 1024
"""whose digest is remembered"""

ReadDigests = Callable[[], tuple[int, dict[str, str]]]
"""version and digests by name of the live weights; from any thread"""


class TraceWriter:
    """What the scheduler tells of finished samples and new weights goes through a bounded queue to a thread that writes.

    Args:
        path: appended to; see TraceFile for what it may be.
        info: of the engine; stands in every line.
        version: of rollsync.
        read_digests: called by the thread once per weight version.

    Raises:
        ConfigError: nothing can be written there.
    """

    def __init__(self, path: str, info: RunnerInfo, version: str, read_digests: ReadDigests) -> None:
        self._file = TraceFile(path)
        self._maker = LineMaker(info, version)
        self._read_digests = read_digests
        self._queue: queue.SimpleQueue[tuple[Request, dict[str, Any], int] | str] = queue.SimpleQueue()
        self._digests: dict[int, str] = {}
        self._added_bytes = self._taken_bytes = 0
        self._written = self._unwritten = self._refused = 0
        self._shown = (0, 0)
        self._is_dropping = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rollsync-trace", daemon=True)
        self._thread.start()
        self.weights_changed()
        atexit.register(self.close)

    def stats(self) -> dict[str, int]:
        """Lines written, and those lost to a queue that was full or a disk that failed."""
        self._shown = (self._written, self._refused + self._unwritten)
        return {"trace_lines": self._shown[0], "trace_dropped_lines": self._shown[1]}

    @property
    def is_settled(self) -> bool:
        """Whether `stats` has told what became of every sample."""
        return self._added_bytes == self._taken_bytes and self._shown == (self._written, self._refused + self._unwritten)

    def weights_changed(self) -> None:
        """New weights are current, from the engine's thread: their digest is taken before others replace them."""
        self._queue.put("weights")

    def finished(self, request: Request, output: SampleOutput) -> None:
        """A sample has ended, from the engine's thread. Never waits and never raises."""
        try:
            wire = output_to_wire(output)
            size = SAMPLE_BYTES + 4 * len(request.prompt) + sum(len(v["data"]) for v in wire.values() if is_array(v))
            if self._closed or (self._added_bytes - self._taken_bytes + size > WAITING_BYTES and self._added_bytes > self._taken_bytes):
                self._refused += 1
                self._say(f"the disk is slower than the samples come ({WAITING_BYTES >> 20} MiB wait)")
                return
            self._added_bytes += size
            self._queue.put((request, wire, size))
        except Exception as error:  # a trace's trouble is not the sample's
            self._refused += 1
            self._say(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Write what waits, within CLOSE_S. Twice is fine."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._queue.put("close")
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.warning("trace: %s is written too slowly: what had not been written within %g s is lost", self._file.path, CLOSE_S)

    def _say(self, why: str) -> None:
        """Once per time of trouble."""
        if not self._is_dropping:
            self._is_dropping = True
            log.warning("trace: samples are left out of %s: %s", self._file.path, why)

    def _run(self) -> None:
        give_way(NICE)
        while (item := self._queue.get()) != "close":
            if isinstance(item, tuple):
                self._write(*item)
            else:
                time.sleep(SWITCH_S)
                self._take_digest()
        self._file.close()

    def _write(self, request: Request, wire: dict[str, Any], size: int) -> None:
        try:
            versions = {span["version"] for span in wire["weight_versions"]}
            if versions - self._digests.keys():
                self._take_digest()
            self._file.append(self._maker.line(request, wire, self._digests))
            self._written += 1
            if self._is_dropping:
                self._is_dropping = False
                log.warning("trace: %s is written again; %d samples are not in it", self._file.path, self._refused + self._unwritten)
        except Exception as error:  # thread edge: the next line may go well again
            self._unwritten += 1
            self._say(error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")
        self._taken_bytes += size

    def _take_digest(self) -> None:
        """Of the live weights; they may be asleep, or be written to just now: then that of a later line is tried."""
        try:
            version, digests = self._read_digests()
        except (IllegalState, ValueError) as error:
            log.info("trace: no digest of the weights now: %s", error)
            return
        self._digests.pop(version, None)
        self._digests[version] = weights_digest(digests)
        if len(self._digests) > VERSIONS_KNOWN:
            del self._digests[next(iter(self._digests))]
