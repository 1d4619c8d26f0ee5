"""Work beside the engine's thread: receiving weights, joining a trainer's group, digests. No transfer ever holds up a step."""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from ...weight_sync.manifest import ChunkError, ManifestError
from ..errors import BadRequest, IllegalState, RollsyncError, UpdateRefused, describe

Work = Callable[[], Any]
Reply = Callable[[Any], None]

IDLE_S = 5.0
"""a lane's thread ends after so long without work"""


def outcome(work: Work) -> Any:
    """What `work` returns, or the error it raised as callers are told it."""
    try:
        return work()
    except RollsyncError as error:
        return error
    except ManifestError as error:
        return UpdateRefused(str(error))
    except (ChunkError, ValueError) as error:
        return BadRequest(str(error))
    except Exception as error:  # thread edge: the caller hears of it, the lane goes on
        traceback.print_exc(file=sys.stderr)
        return RollsyncError(describe(error))


class Lanes:
    """Threads by name: work of one lane keeps its order, and one that is stuck (a sender that froze) holds up no other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[str, queue.SimpleQueue[tuple[Work, Reply] | None]] = {}
        self._closed = False

    def submit(self, name: str, work: Work, reply: Reply) -> None:
        """Queue work on a lane; `reply` is called on its thread with the value, or with the error as a RollsyncError."""
        with self._lock:
            closed = self._closed
            if not closed:
                if name not in self._queues:
                    self._queues[name] = queue.SimpleQueue()
                    threading.Thread(target=self._run, args=(name,), name=f"rollsync-lane-{name[:12]}", daemon=True).start()
                self._queues[name].put((work, reply))
        if closed:
            reply(IllegalState("the engine is closing"))

    def close(self) -> None:
        """Let the threads end after what they are at."""
        with self._lock:
            self._closed = True
            for waiting in self._queues.values():
                waiting.put(None)

    def _next(self, name: str) -> tuple[Work, Reply] | None:
        waiting = self._queues[name]
        try:
            return waiting.get(timeout=IDLE_S)
        except queue.Empty:
            with self._lock:  # nobody submits while this looks
                if waiting.empty():
                    del self._queues[name]
                    return None
            return waiting.get()

    def _run(self, name: str) -> None:
        while (item := self._next(name)) is not None:
            work, reply = item
            value = outcome(work)
            try:
                reply(value)
            except Exception:  # the caller is gone
                traceback.print_exc(file=sys.stderr)
