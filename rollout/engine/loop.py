"""The thread that owns an engine. ONE queue brings it requests and commands, drained between steps.

`AsyncEngine` (async_engine.py) puts asyncio on top of it for users in the same process; the engine process (process.py) puts
sockets on top of it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ...weight_sync.manifest import Manifest
from ..errors import BadRequest, IllegalState, RollsyncError, describe
from .commands import ASIDE, READS, VERBS, EngineLike, Later, Reply, Sink, call_verb, deliver, report
from .control import Control
from .folder_update import FolderUpdate
from .lanes import Lanes
from .types import RolloutRequest

log = logging.getLogger(__name__)

STATS_PERIOD_S = 0.25
LONGEST_SLEEP_S = 3600.0
"""what waits longer (a deadline of 1e300 s) is looked at again"""
COMMAND_S = 120.0
"""how long a lane waits for its command to begin: as long as a step may take"""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What the loop does, since when; readable from any thread."""

    phase: str
    """load, idle, step, command, dead or closed"""
    since: float
    """time.monotonic() at which the phase began"""
    steps: int


class _Asked:
    """A command of a lane's: carried out, or given up before it began; never both."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = ""

    def take(self, state: str) -> bool:
        """True for the first to say what becomes of it."""
        with self._lock:
            first, self._state = not self._state, self._state or state
        return first


class EngineLoop:
    """The thread that owns the engine. It builds it, steps it while there is work, and closes it."""

    def __init__(self, build: Callable[[], EngineLike], sink: Sink) -> None:
        self._build, self._sink = build, sink
        self._queue: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._control: Control | None = None
        self._lanes = Lanes()
        self._opens: dict[str, Callable[..., Any]] = {"open_folder": self._open_folder, "open_manifest": self._open_manifest}
        """commands that run on a lane and there have the engine's thread do a part"""
        self._closing = False
        self._steps = 0
        self._stats_at = 0.0
        self.heartbeat = Heartbeat("load", time.monotonic(), 0)
        self._thread = threading.Thread(target=self._main, name="rollsync-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: RolloutRequest) -> None:
        """Queue a request. A refusal comes back through `sink.rejected`."""
        self._queue.put(("request", request))

    def command(self, verb: str, args: dict[str, Any], reply: Reply) -> None:
        """Queue a command; `reply` is called on the loop's thread."""
        self._queue.put(("command", verb, args, reply))

    def aside(self, lane: str, verb: str, args: dict[str, Any], reply: Reply) -> None:
        """Run one of ASIDE on a lane, in order with what that lane was given before; `reply` is called there."""
        control = self._control
        if control is None:
            reply(IllegalState("the engine is not serving yet"))
        elif verb in self._opens:
            self._lanes.submit(lane, lambda: self._opens[verb](control, **args), reply)
        elif verb in ASIDE:
            self._lanes.submit(lane, lambda: attrgetter(ASIDE[verb])(control)(**args), reply)
        else:
            reply(BadRequest(f"command must be one of {', '.join([*self._opens, *ASIDE])}, got {verb!r}", field="verb"))

    def open_update(self) -> dict[str, Any] | None:
        """How far the open weight update is, for whoever asks while the engine is busy; from any thread."""
        with contextlib.suppress(Exception):  # the heartbeat asks: it must go on
            return None if self._control is None else self._control.open_update_status()
        return None

    def _open_folder(self, control: Control, commit: bool = False, **args: Any) -> dict[str, Any]:
        """On a lane: open an update from a folder and have it read; with `commit`, answered once it is current."""
        update = FolderUpdate(control, self._run_verb, control.weights_root)
        status = update.open(**args)
        if commit:
            update.read()
            return update.commit()
        self._lanes.submit(status["id"], update.read, lambda value: None)  # what went wrong is the update's reason
        return status

    def _open_manifest(self, control: Control, manifest: Any, **args: Any) -> Any:
        """On a lane: read the manifest there, as it may name many tensors, and open an update with it."""
        return self._run_verb("open_update", manifest=Manifest.from_wire(manifest), **args)

    def _run_verb(self, verb: str, **args: Any) -> Any:
        """A command's value; for threads beside the engine's."""
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        asked = _Asked()
        self._queue.put(("command", verb, args, done.put, asked))
        try:
            value = done.get(timeout=COMMAND_S)
        except queue.Empty:
            if asked.take("given up"):  # it will not be carried out when nobody knows of it any more
                raise IllegalState(f"the engine did not come to {verb} within {COMMAND_S:g} s") from None
            value = done.get(timeout=COMMAND_S)  # it is being carried out
        if isinstance(value, BaseException):
            raise value
        return value

    def close(self, timeout_s: float = 5.0) -> bool:
        """End after the step in progress. False if the thread did not end in time."""
        self._closing = True
        self._queue.put(("wake",))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _beat(self, phase: str) -> None:
        self.heartbeat = Heartbeat(phase, time.monotonic(), self._steps)

    def _main(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:  # thread edge: reported to the sink
            self._beat("dead")
            self._sink.failed(error)
            return
        self._control = getattr(engine, "control", None)
        self._publish(engine, force=True)  # first: who hears that it is ready may ask for its state
        self._sink.ready(engine)
        try:
            self._spin(engine)
            self._beat("closed")
        except BaseException:  # thread edge: reported to the sink
            self._beat("dead")
            self._sink.dead(traceback.format_exc())
        finally:
            self._lanes.close()
            with contextlib.suppress(Exception):
                engine.close()

    def _spin(self, engine: EngineLike) -> None:
        while True:
            self._drain(engine)
            if self._closing:
                return
            self._poll(engine)
            self._publish(engine, force=not engine.has_work)
            if engine.has_work:
                self._beat("step")
                outputs = engine.step()
                self._steps += 1
                if outputs:
                    deliver(engine, self._sink, outputs)
                self._publish(engine, force=not engine.has_work)
                if not engine.has_work:
                    self._poll(engine)  # this step may have ended a drain, and nothing else may come for long

    def _poll(self, engine: EngineLike) -> None:
        if outputs := engine.poll():
            deliver(engine, self._sink, outputs)

    def _drain(self, engine: EngineLike) -> None:
        """Take in what has come; with nothing to do, sleep until something does."""
        block = not engine.has_work and not self._closing
        if block:
            self._beat("idle")
        while True:
            try:
                item = self._queue.get(block, self._patience(engine) if block else None)
            except queue.Empty:
                break
            block = False
            self._handle(engine, item)

    @staticmethod
    def _patience(engine: EngineLike) -> float | None:
        """Seconds to sleep at most; None for as long as nothing comes."""
        deadline = engine.next_deadline()
        return None if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_SLEEP_S)

    def _handle(self, engine: EngineLike, item: tuple[Any, ...]) -> None:
        """Take one request or run one command."""
        if item[0] == "request":
            try:
                engine.add_request(item[1])
            except RollsyncError as error:
                report(self._sink.rejected, item[1].request_id, error)
            except Exception as error:  # one request's fault must not end the others'
                log.error("request %r could not be added", item[1].request_id, exc_info=error)
                report(self._sink.rejected, item[1].request_id, RollsyncError(describe(error)))
        elif item[0] == "command" and (len(item) < 5 or item[4].take("begun")):
            self._run_command(engine, *item[1:4])

    def _run_command(self, engine: EngineLike, verb: str, args: dict[str, Any], reply: Reply) -> None:
        self._beat("command")
        try:
            if verb not in VERBS:
                raise BadRequest(f"command must be one of {', '.join(VERBS)}, got {verb!r}", field="verb")
            value: Any = call_verb(VERBS[verb], engine, self._sink, args)
            if isinstance(value, Later):
                value.reply = lambda found: self._answer(engine, verb, found, reply)
                return
        except RollsyncError as error:
            value = error
        except Exception as error:  # one command's fault must not end the others' requests
            log.error("command %s", verb, exc_info=error)
            value = RollsyncError(describe(error))
        self._answer(engine, verb, value, reply)

    def _answer(self, engine: EngineLike, verb: str, value: Any, reply: Reply) -> None:
        """Reply, once the engine's state is published: who has the answer finds the state it speaks of."""
        if verb not in READS and not isinstance(value, BaseException):
            self._publish(engine, force=verb != "abort")
        if not report(reply, value):
            report(reply, RollsyncError(f"{verb}: its answer could not be sent"))

    def _publish(self, engine: EngineLike, force: bool) -> None:
        now = time.monotonic()
        if force or now - self._stats_at >= STATS_PERIOD_S:
            self._stats_at = now
            report(lambda: self._sink.stats(engine.stats()))
