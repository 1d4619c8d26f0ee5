"""Work beside the engine's thread: receiving weights, joining a trainer's group, digests. No transfer ever holds up a step."""

from __future__ import annotations

import collections
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from ...kernels.priority import give_way
from ...weight_sync.manifest import ChunkError, ManifestError
from ..errors import BadRequest, IllegalState, RollsyncError, UpdateRefused, describe

Work = Callable[[], Any]
Reply = Callable[[Any], None]

IDLE_S = 5.0
"""a thread ends after so long without work"""


NICE = 10
"""of a thread that takes weights in, above the others: where the CPUs are busy with steps, it gets a tenth of what they do"""


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
    """Queues by name: work of one lane keeps its order, and one that is stuck (a sender that froze) holds up no other.

    A lane has a thread while it has work; then the thread goes on to another lane, or ends after a while.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[str, collections.deque[tuple[Work, Reply]]] = {}
        """of the lanes that have a thread"""
        self._idle = 0
        self._begun: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """lanes for threads that are idle"""
        self._closed = False

    def submit(self, name: str, work: Work, reply: Reply) -> None:
        """Queue work on a lane; `reply` is called on its thread with the value, or with the error as a RollsyncError."""
        with self._lock:
            refusal = IllegalState("the engine is closing") if self._closed else self._add(name, (work, reply))
        if refusal is not None:
            reply(refusal)

    def _add(self, name: str, item: tuple[Work, Reply]) -> RollsyncError | None:
        """Queue work, with a thread for its lane; or why it cannot be."""
        if name in self._queues:
            self._queues[name].append(item)
        elif self._idle:
            self._idle -= 1
            self._queues[name] = collections.deque([item])
            self._begun.put(name)
        else:
            try:
                self._queues[name] = collections.deque([item])
                threading.Thread(target=self._run, args=(name,), name="rollsync-lane", daemon=True).start()
            except RuntimeError as error:  # the system gives no more
                del self._queues[name]
                return RollsyncError(f"no thread for this work: {error}")
        return None

    def close(self) -> None:
        """Let the threads end after what they are at."""
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._begun.put(None)
            self._idle = 0

    def _next(self, name: str) -> tuple[Work, Reply] | None:
        """The lane's next work; without any, the lane has no thread any more."""
        with self._lock:
            if self._queues[name]:
                return self._queues[name].popleft()
            del self._queues[name]
            self._idle += not self._closed
            return None

    def _other_lane(self) -> str | None:
        """Where an idle thread is needed; None if it is to end."""
        try:
            return self._begun.get(timeout=0.0 if self._closed else IDLE_S)
        except queue.Empty:
            with self._lock:  # nobody submits while this looks
                try:
                    return self._begun.get_nowait()
                except queue.Empty:
                    self._idle -= not self._closed
                    return None

    def _run(self, name: str | None) -> None:
        give_way(NICE)
        while name is not None:
            while (item := self._next(name)) is not None:
                work, reply = item
                value = outcome(work)
                try:
                    reply(value)
                except Exception:  # the caller is gone
                    traceback.print_exc(file=sys.stderr)
            name = self._other_lane()
