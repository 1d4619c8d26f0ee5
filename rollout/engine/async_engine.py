"""The engine for asyncio users in one process: `EngineLoop` with an asyncio queue per request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from ..errors import DuplicateRequest, EngineDead, RollsyncError
from .commands import EngineLike, Reply
from .loop import EngineLoop, Heartbeat
from .types import RolloutRequest, SampleOutput


class AsyncEngine:
    """The engine for asyncio users in one process. Make it with `await AsyncEngine.start(config_or_model, **flat)`.

    Cancelling a task that awaits a request aborts that request; its id may be used again at once. To the engine every request has a
    name of its own, its number and id: what is still on its way for a cancelled one reaches nobody.
    """

    def __init__(self, build: Callable[[], EngineLike]) -> None:
        self._aio = asyncio.get_running_loop()
        self._waiters: dict[str, asyncio.Queue[SampleOutput | RollsyncError]] = {}
        """by name"""
        self._names: dict[str, str] = {}
        """by the id of the request in flight"""
        self._num_requests = 0
        self._commands: set[asyncio.Future[Any]] = set()
        self._ready: asyncio.Future[Any] = self._aio.create_future()
        self._dead: EngineDead | None = None
        self._loop = EngineLoop(build, self)
        self._loop.start()

    @classmethod
    async def start(cls, config: Any, **flat: Any) -> AsyncEngine:
        """Build an `Engine` on its own thread and wait until it can serve. Cancelled meanwhile, the engine ends once it is loaded."""

        def build() -> EngineLike:
            from .engine import Engine

            return Engine(config, **flat)

        self = cls(build)
        try:
            await self.wait_ready()
        except BaseException:
            self._loop.close(timeout_s=0)
            raise
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
        if request.request_id in self._names:
            raise DuplicateRequest(f"request_id {request.request_id!r} is still in flight")
        mailbox: asyncio.Queue[SampleOutput | RollsyncError] = asyncio.Queue()
        self._num_requests += 1
        name = self._names[request.request_id] = f"{self._num_requests}:{request.request_id}"
        self._waiters[name] = mailbox
        left = request.params.n
        self._loop.submit(replace(request, request_id=name))
        try:
            while left:
                item = await mailbox.get()
                if isinstance(item, RollsyncError):
                    left = 0
                    raise item
                left -= item.finished
                item.request_id = request.request_id
                yield item
        finally:
            del self._waiters[name], self._names[request.request_id]
            if left and self._dead is None:
                self._loop.command("abort", {"request_id": name, "reason": "cancelled"}, lambda _: None)

    async def command(self, verb: str, **args: Any) -> Any:
        """Run a command between two steps and return its value."""
        if self._dead is not None:
            raise self._dead
        if verb == "abort":
            args = self._with_names(args)
        value = await self._reply(lambda reply: self._loop.command(verb, args, reply))
        if verb == "abort":
            value["request_ids"] = sorted(name.partition(":")[2] for name in value["request_ids"])
        return value

    async def aside(self, lane: str, verb: str, **args: Any) -> Any:
        """Run one of `commands.ASIDE` (a chunk of a weight update, digests) beside the steps and return its value.

        Args:
            lane: work of one lane keeps its order.
        """
        if self._dead is not None:
            raise self._dead
        return await self._reply(lambda reply: self._loop.aside(lane, verb, args, reply))

    async def _reply(self, ask: Callable[[Reply], None]) -> Any:
        """What is replied to `ask`; its error is raised."""
        done: asyncio.Future[Any] = self._aio.create_future()

        def settle(value: Any) -> None:
            if not done.done():
                done.set_result(value)

        self._commands.add(done)
        try:
            ask(lambda value: self._call(lambda: settle(value)))
            value = await done
        finally:
            self._commands.discard(done)
        if isinstance(value, BaseException):
            raise value
        return value

    def _with_names(self, args: dict[str, Any]) -> dict[str, Any]:
        """Arguments of an abort with names for ids. An id that is not in flight has none, and what it becomes is nobody's."""
        if isinstance(args.get("request_id"), str):
            args = {**args, "request_id": self._names.get(args["request_id"], "")}
        if isinstance(args.get("request_ids"), list | tuple):
            args = {**args, "request_ids": [self._names[i] for i in args["request_ids"] if i in self._names]}
        return args

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
        """Who wants them asks: `command("status")`."""

    def dead(self, words: str) -> None:
        self._call(lambda: self._lose(f"the engine ended: {words.strip()}"))

    def _deliver(self, outputs: list[SampleOutput]) -> None:
        for output in outputs:
            self._post(output.request_id, output)

    def _post(self, name: str, item: SampleOutput | RollsyncError) -> None:
        mailbox = self._waiters.get(name)
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
