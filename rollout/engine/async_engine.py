"""One thread owns the engine; ONE queue brings it requests and commands, drained between steps.

`EngineLoop` is that thread. `AsyncEngine` puts asyncio on top of it for users in the same process; the engine process
(`process.py`) puts sockets on top of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import BadRequest, DuplicateRequest, EngineDead, RollsyncError
from .types import RolloutRequest, SampleOutput

STATS_PERIOD_S = 0.25


class EngineLike(Protocol):
    """What the loop needs of an engine (`engine.Engine`, or a stand-in in tests)."""

    @property
    def has_work(self) -> bool: ...
    def add_request(self, request: RolloutRequest) -> Any: ...
    def abort(
        self,
        request_id: str | None = None,
        *,
        group: str | None = None,
        session: str | None = None,
        all: bool = False,
        reason: str = ...,
    ) -> list[SampleOutput]: ...
    def step(self) -> list[SampleOutput]: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Sink(Protocol):
    """Where the loop reports to. Called on the loop's thread; must not block or raise."""

    def ready(self, engine: Any) -> None: ...
    def failed(self, error: BaseException) -> None:
        """The engine could not be built."""

    def outputs(self, outputs: list[SampleOutput]) -> None: ...
    def rejected(self, request_id: str, error: RollsyncError) -> None: ...
    def stats(self, stats: dict[str, Any]) -> None: ...
    def dead(self, words: str) -> None:
        """A step raised; every waiter has lost its request."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What the loop does, since when; readable from any thread."""

    phase: str
    """load, idle, step, command, dead or closed"""
    since: float
    """time.monotonic() at which the phase began"""
    steps: int


Reply = Callable[[Any], None]
"""called with the verb's value, or with the exception it raised"""


def _abort(engine: EngineLike, sink: Sink, args: dict[str, Any]) -> dict[str, Any]:
    ids = args.pop("request_ids", None)
    if ids is None:
        outputs = engine.abort(**args)
    else:
        outputs = [o for i in ids for o in engine.abort(request_id=i, **args)]
    if outputs:
        sink.outputs(outputs)
    return {"samples": len(outputs), "request_ids": sorted({o.request_id for o in outputs})}


def _status(engine: EngineLike, sink: Sink, args: dict[str, Any]) -> dict[str, Any]:
    return engine.stats()


VERBS: dict[str, Callable[[EngineLike, Sink, dict[str, Any]], Any]] = {"abort": _abort, "status": _status}
"""the commands; each runs between two steps on the thread that owns the engine"""


class EngineLoop:
    """The thread that owns the engine. It builds it, steps it while there is work, and closes it."""

    def __init__(self, build: Callable[[], EngineLike], sink: Sink) -> None:
        self._build, self._sink = build, sink
        self._queue: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
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
        self._sink.ready(engine)
        self._sink.stats(engine.stats())
        try:
            self._spin(engine)
            self._beat("closed")
        except BaseException:  # thread edge: reported to the sink
            self._beat("dead")
            self._sink.dead(traceback.format_exc())
        finally:
            with contextlib.suppress(Exception):
                engine.close()

    def _spin(self, engine: EngineLike) -> None:
        while True:
            self._drain(engine)
            if self._closing:
                return
            if engine.has_work:
                self._beat("step")
                outputs = engine.step()
                self._steps += 1
                if outputs:
                    self._sink.outputs(outputs)
                self._publish(engine, force=not engine.has_work)

    def _drain(self, engine: EngineLike) -> None:
        """Take in what has come; with nothing to do, sleep until something does."""
        block = not engine.has_work and not self._closing
        if block:
            self._beat("idle")
        changed = False
        while True:
            try:
                item = self._queue.get(block=block)
            except queue.Empty:
                break
            block = False
            changed = self._handle(engine, item) or changed
        if changed:
            self._publish(engine, force=not engine.has_work)

    def _handle(self, engine: EngineLike, item: tuple[Any, ...]) -> bool:
        """Take one request or run one command. True if the engine's numbers may have changed."""
        if item[0] == "request":
            try:
                engine.add_request(item[1])
            except RollsyncError as error:
                self._sink.rejected(item[1].request_id, error)
            except Exception as error:  # one request's fault must not end the others'
                traceback.print_exc(file=sys.stderr)
                self._sink.rejected(item[1].request_id, RollsyncError(f"{type(error).__name__}: {error}"))
            return True
        if item[0] != "command":
            return False
        _, verb, args, reply = item
        self._beat("command")
        try:
            if verb not in VERBS:
                raise BadRequest(f"command must be one of {', '.join(VERBS)}, got {verb!r}", field="verb")
            value: Any = VERBS[verb](engine, self._sink, dict(args))
        except RollsyncError as error:
            value = error
        except TypeError as error:  # arguments the verb does not take
            traceback.print_exc(file=sys.stderr)
            value = BadRequest(f"{verb}: {error}", field=verb)
        except Exception as error:  # one command's fault must not end the others' requests
            traceback.print_exc(file=sys.stderr)
            value = RollsyncError(f"{type(error).__name__}: {error}")
        reply(value)
        return bool(verb != "status")

    def _publish(self, engine: EngineLike, force: bool) -> None:
        now = time.monotonic()
        if force or now - self._stats_at >= STATS_PERIOD_S:
            self._stats_at = now
            self._sink.stats(engine.stats())


class AsyncEngine:
    """The engine for asyncio users in one process. Make it with `await AsyncEngine.start(config_or_model, **flat)`.

    Cancelling a task that awaits a request aborts that request.
    """

    def __init__(self, build: Callable[[], EngineLike]) -> None:
        self._aio = asyncio.get_running_loop()
        self._waiters: dict[str, asyncio.Queue[SampleOutput | RollsyncError]] = {}
        self._commands: set[asyncio.Future[Any]] = set()
        self._ready: asyncio.Future[Any] = self._aio.create_future()
        self._dead: EngineDead | None = None
        self._loop = EngineLoop(build, self)
        self._loop.start()

    @classmethod
    async def start(cls, config: Any, **flat: Any) -> AsyncEngine:
        """Build an `Engine` on its own thread and wait until it can serve."""

        def build() -> EngineLike:
            from .engine import Engine

            return Engine(config, **flat)

        self = cls(build)
        await self.wait_ready()
        return self

    async def wait_ready(self) -> Any:
        """The engine's `info`; raises what building it raised."""
        return await asyncio.shield(self._ready)

    @property
    def heartbeat(self) -> Heartbeat:
        return self._loop.heartbeat

    async def generate(self, request: RolloutRequest) -> list[SampleOutput]:
        """The finished samples of `request`, by sample index."""
        finals = [o async for o in self.stream(request) if o.finished]
        return sorted(finals, key=lambda o: o.sample_index)

    async def stream(self, request: RolloutRequest) -> AsyncIterator[SampleOutput]:
        """Outputs as they come: token deltas if `request.stream`, and one final output per sample."""
        if self._dead is not None:
            raise self._dead
        if request.request_id in self._waiters:
            raise DuplicateRequest(f"request_id {request.request_id!r} is still in flight")
        mailbox: asyncio.Queue[SampleOutput | RollsyncError] = asyncio.Queue()
        self._waiters[request.request_id] = mailbox
        left = request.params.n
        self._loop.submit(request)
        try:
            while left:
                item = await mailbox.get()
                if isinstance(item, RollsyncError):
                    left = 0
                    raise item
                left -= item.finished
                yield item
        finally:
            del self._waiters[request.request_id]
            if left and self._dead is None:
                self._loop.command("abort", {"request_id": request.request_id, "reason": "cancelled"}, lambda _: None)

    async def command(self, verb: str, **args: Any) -> Any:
        """Run a command between two steps and return its value."""
        if self._dead is not None:
            raise self._dead
        done: asyncio.Future[Any] = self._aio.create_future()

        def settle(value: Any) -> None:
            if not done.done():
                done.set_result(value)

        self._commands.add(done)
        try:
            self._loop.command(verb, args, lambda value: self._call(lambda: settle(value)))
            value = await done
        finally:
            self._commands.discard(done)
        if isinstance(value, BaseException):
            raise value
        return value

    async def abort(self, **which: Any) -> dict[str, Any]:
        """End requests (`request_id=`, `group=`, `session=` or `all=True`); their waiters get the partial outputs."""
        value: dict[str, Any] = await self.command("abort", **which)
        return value

    async def close(self) -> None:
        """End the thread. Whoever still waits gets EngineDead."""
        await asyncio.to_thread(self._loop.close)
        self._lose("the engine was closed")

    # The sink: called on the loop's thread, hands over to asyncio.

    def _call(self, function: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the asyncio loop is closed: nobody waits
            self._aio.call_soon_threadsafe(function)

    def ready(self, engine: Any) -> None:
        def serve() -> None:
            if not self._ready.done():
                self._ready.set_result(getattr(engine, "info", None))

        self._call(serve)

    def failed(self, error: BaseException) -> None:
        def fail() -> None:
            if not self._ready.done():
                self._ready.set_exception(error)
            self._lose(f"the engine could not start: {type(error).__name__}: {error}")

        self._call(fail)

    def outputs(self, outputs: list[SampleOutput]) -> None:
        self._call(lambda: self._deliver(outputs))

    def rejected(self, request_id: str, error: RollsyncError) -> None:
        self._call(lambda: self._post(request_id, error))

    def stats(self, stats: dict[str, Any]) -> None:
        self.last_stats = stats

    def dead(self, words: str) -> None:
        self._call(lambda: self._lose(f"the engine ended: {words.strip()}"))

    def _deliver(self, outputs: list[SampleOutput]) -> None:
        for output in outputs:
            self._post(output.request_id, output)

    def _post(self, request_id: str, item: SampleOutput | RollsyncError) -> None:
        mailbox = self._waiters.get(request_id)
        if mailbox is not None:
            mailbox.put_nowait(item)

    def _lose(self, words: str) -> None:
        self._dead = self._dead or EngineDead(words)
        for mailbox in self._waiters.values():
            mailbox.put_nowait(self._dead)
        for command in self._commands:
            if not command.done():
                command.set_result(self._dead)
        if not self._ready.done():
            self._ready.set_exception(self._dead)
            self._ready.exception()  # seen: nobody need be waiting for it
