"""Writes finished samples to a trace, beside the engine's thread: a slow disk costs lines, which are counted, and never a step."""

from __future__ import annotations

import weakref

from ..wire import is_array, is_mask
from .outputs import output_to_wire
from .runner_info import RunnerInfo
from .sequence import Request
from .trace_file import TraceFile
from .trace_line import LineMaker
from .trace_thread import Finished, ReadDigests, TraceThread
from .types import SampleOutput

WAITING_BYTES = 64 << 20
"""values of samples that may wait to be written"""
SAMPLE_BYTES = 1024
"""what a sample counts besides its values"""


class TraceWriter:
    """What the scheduler tells of finished samples and new weights goes through a bounded queue to a thread that writes.

    Args:
        path: appended to; see TraceFile for what it may be.
        info: of the engine; stands in every line.
        version: of rollsync.
        read_digests: a bound method, called by the thread once per weight version; its object is not kept alive.

    Raises:
        ConfigError: nothing can be written there.
    """

    def __init__(self, path: str, info: RunnerInfo, version: str, read_digests: ReadDigests) -> None:
        self._thread = TraceThread(TraceFile(path), LineMaker(info, version), weakref.WeakMethod(read_digests))
        self._shown = (0, 0)
        self._closed = False
        weakref.finalize(self, self._thread.stop).atexit = False  # an engine that is dropped: what waits is still written
        self.weights_changed()

    def stats(self) -> dict[str, int]:
        """Lines written, and those lost to a queue that was full or a disk that failed."""
        self._shown = self._thread.counts()
        return {"trace_lines": self._shown[0], "trace_dropped_lines": self._shown[1]}

    @property
    def is_settled(self) -> bool:
        """Whether `stats` has told what became of every sample."""
        return self._thread.waiting_bytes == 0 and self._shown == self._thread.counts()

    def weights_changed(self) -> None:
        """New weights are current, from the engine's thread: their digest is taken before others replace them."""
        self._thread.weights_changed()

    def finished(self, request: Request, output: SampleOutput) -> None:
        """A sample has ended, from the engine's thread. Never waits and never raises."""
        try:
            wire = output_to_wire(output)
            values = sum(len(v["data"]) for v in wire.values() if is_array(v) or is_mask(v))
            size, waiting = SAMPLE_BYTES + 4 * len(request.prompt) + values, self._thread.waiting_bytes
            if self._closed or (waiting + size > WAITING_BYTES and waiting > 0):
                self._thread.refuse(f"the disk is slower than the samples come ({WAITING_BYTES >> 20} MiB wait)")
            else:
                self._thread.put(Finished(request, wire, request.prompt_versions, size))
        except Exception as error:  # a trace's trouble is not the sample's
            self._thread.refuse(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Write what waits, within CLOSE_S. Twice is fine."""
        if not self._closed:
            self._closed = True
            self._thread.close()
