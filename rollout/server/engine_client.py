"""The front's end of the engine process: start it, talk to it, notice its end, and tell every waiter.

Everything here runs on the front's asyncio loop. Status, health and metrics come from the last snapshot the engine sent,
so they never wait for a step.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]
import zmq
import zmq.asyncio

from ..engine.config import EngineConfig
from ..engine.lifeline import exit_words
from ..engine.params import SamplingParams
from ..engine.types import RolloutRequest
from ..errors import BadRequest, ConfigError, EngineDead, RollsyncError, ShuttingDown, describe
from ..metrics import FrontCounters
from ..wire import error_from_wire
from .snapshot import Snapshot, liveness

Output = dict[str, Any]
"""a SampleOutput as it came: its columns are wire arrays"""
Progress = Callable[[str, float], None]
"""called with (phase, fraction done)"""
Deliver = Callable[[str, "Output | RollsyncError"], None]
"""called with (request id, output or error)"""

BEAT_LOST_S = 30.0
"""no heartbeat for this long: every waiter is told"""
COMMAND_S = 150.0
"""how long a command may take: it waits for the step at hand, which counts as stuck after STEP_STUCK_S, and may move memory"""
BEAT_WATCH_S = 1.0
"""between two looks at it"""


@dataclass(slots=True)
class _Waiter:
    deliver: Deliver
    left: int


def _params_to_wire(params: SamplingParams) -> dict[str, Any]:
    """`to_wire`, each id once."""
    return {k: list(dict.fromkeys(v)) if k in ("stop_token_ids", "allowed_token_ids") else v for k, v in params.to_wire().items()}


class EngineProcess:
    """One engine child. `start` spawns it, `ready` waits for it, `submit` and `command` use it, `stop` ends it."""

    def __init__(self, config: EngineConfig, *, factory: str | None = None, on_progress: Progress | None = None) -> None:
        self.config = config
        self.snapshot = Snapshot()
        self.counters = FrontCounters()
        self.dead: str | None = None
        """why the engine is gone; None while it lives"""
        self.load_error: RollsyncError | None = None
        self._factory, self._on_progress = factory, on_progress
        self._waiters: dict[str, _Waiter] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._late: dict[int, Callable[[Any], None]] = {}
        self._numbers = 0
        self._stopping = False
        self._ready = asyncio.Event()
        self._published = asyncio.Event()
        self._last_words: collections.deque[str] = collections.deque(maxlen=12)
        self._tasks: list[asyncio.Task[None]] = []
        self._process: asyncio.subprocess.Process | None = None
        self._folder: str | None = None
        names = ("hello", "progress", "ready", "failed", "outputs", "rejected", "reply", "stats", "beat", "dead")
        self._handlers: dict[str, Callable[..., None]] = {name: getattr(self, f"_got_{name}") for name in names}

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set() and self.dead is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    def lost(self) -> EngineDead:
        """What a caller is told once `dead` is set."""
        return (ShuttingDown if self._stopping else EngineDead)(self.dead)

    def why_not_live(self) -> str | None:
        return liveness(self.snapshot, self.dead, time.monotonic())

    async def start(self) -> None:
        """Spawn the child. Returns at once; `ready` waits until it can serve."""
        folder = self._folder = os.path.join(tempfile.gettempdir(), f"rollsync-{secrets.token_hex(8)}")
        self._context = zmq.asyncio.Context()
        self._to: zmq.Socket[bytes] = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
        self._from = self._context.socket(zmq.PULL)
        command = [sys.executable, "-m", "rollsync.rollout.engine.process", folder, str(os.getpid())]
        self._process = await asyncio.create_subprocess_exec(
            *command,
            *([self._factory] if self._factory else []),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
            process_group=0,  # a terminal's Ctrl-C reaches the front only
        )
        try:
            os.mkdir(folder, 0o700)  # now there is a child that removes it if this process is killed
            for socket, name in ((self._to, "in"), (self._from, "out")):
                socket.set_hwm(0)
                socket.linger = 0
                socket.bind(f"ipc://{folder}/{name}")
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(f"cannot make sockets in {folder} (TMPDIR chooses where): {error}") from None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self.config.to_flat()).encode())
        self._process.stdin.close()
        self.snapshot.beat_at = time.monotonic() + 10.0  # the interpreter has to come up before it can beat
        watches = (self._read_messages(), self._read_stderr(), self._watch_exit(), self._watch_beats())
        self._tasks = [asyncio.create_task(watch) for watch in watches]
        for task in self._tasks:
            task.add_done_callback(self._watch_ended)

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        """A reader that raised would leave every waiter waiting: the engine counts as lost instead."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._stopping:
            self._lose(f"the front can no longer follow the engine process: {type(error).__name__}: {error}")

    async def ready(self) -> dict[str, Any]:
        """The engine's info once it serves. Raises the load's error, or EngineDead."""
        await self._ready.wait()
        if self.load_error is not None:
            raise self.load_error
        if self.dead is not None:
            raise self.lost()
        return self.snapshot.info

    async def published(self, timeout_s: float) -> None:
        """Return once the engine has published its state anew, or has ended, or after that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # Python 3.11's wait_for loses a cancellation that comes with the event
                await self._published.wait()

    def share(self, params: SamplingParams) -> int:
        """Tell the engine of params that several requests have in common, under the key returned, until `unshare`."""
        if self.dead is not None:
            raise self.lost()
        self._numbers += 1
        self._send("params", self._numbers, _params_to_wire(params))
        return self._numbers

    def unshare(self, key: int) -> None:
        """All requests that name these params are sent."""
        with contextlib.suppress(EngineDead):
            self._send("params", key, None)

    def submit(self, request: RolloutRequest, deliver: Deliver, shared: tuple[int, dict[str, int]] | None = None) -> None:
        """Send a request; its outputs, or its error, go to `deliver` on this loop.

        `shared` says what its params are: the key of those told before, and what differs from them (see SamplingParams.varied).
        """
        if self.dead is not None:
            raise self.lost()
        self._send("request", request.to_wire(_params_to_wire(request.params) if shared is None else shared))
        self._waiters[request.request_id] = _Waiter(deliver, request.params.n)

    def forget(self, request_id: str) -> bool:
        """Deliver nothing more for this request. True if it was still in flight."""
        return self._waiters.pop(request_id, None) is not None

    async def command(self, verb: str, timeout_s: float = COMMAND_S, **args: Any) -> Any:
        """Run a command between two steps. EngineDead if no reply came within `timeout_s`."""
        return await self.run(verb, args, timeout_s)

    async def run(self, verb: str, args: dict[str, Any], timeout_s: float = COMMAND_S) -> Any:
        """`command`, for verbs whose arguments have names of ours."""
        return await self._ask(repr(verb), timeout_s, "command", verb, args)

    async def _ask(self, what: str, timeout_s: float, kind: str, *message: Any, late: Callable[[Any], None] | None = None) -> Any:
        """A reply. `late` is called with one that comes when nobody waits for it any more."""
        number = self._send_numbered(kind, *message)
        future = self._replies[number] = asyncio.get_running_loop().create_future()
        if late is not None:
            self._late[number] = late
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise EngineDead(f"the engine did not answer {what} within {timeout_s:g} s (phase {self.snapshot.phase})") from None
        finally:
            del self._replies[number]

    async def _loaded(self, timeout_s: float) -> None:
        """Return once the engine serves: lanes do not wait for it."""
        if not self._ready.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.ready()

    async def aside(self, lane: str, verb: str, timeout_s: float = 60.0, **args: Any) -> Any:
        """Run what may take long beside the steps, in order with what the same lane was given before (see engine/loop.py)."""
        return await self.run_aside(lane, verb, args, timeout_s)

    async def run_aside(self, lane: str, verb: str, args: dict[str, Any], timeout_s: float = 60.0) -> Any:
        """`aside`, for verbs whose arguments have names of ours."""
        await self._loaded(timeout_s)
        return await self._ask(repr(verb), timeout_s, "aside", lane, verb, args)

    async def open(self, verb: str, args: dict[str, Any], timeout_s: float = COMMAND_S, lane: str | None = None) -> Any:
        """Open a weight update, by a command or (`lane`) aside. Should it come about after its caller was told that it did not, it is
        aborted: nobody knows of it."""
        message = ("command", verb, args) if lane is None else ("aside", lane, verb, args)
        await self._loaded(timeout_s)
        return await self._ask(repr(verb), timeout_s, *message, late=self._drop_update)

    def _drop_update(self, opened: dict[str, Any]) -> None:
        told = {"update_id": opened["id"], "reason": "its caller was told that it could not be opened", "cause": "connection"}
        with contextlib.suppress(EngineDead):
            self._send_numbered("command", "abort_update", told)

    async def chunk(
        self, update_id: str, sender: int, sequence: int, where: dict[str, Any], timeout_s: float = 60.0, count: int | None = None
    ) -> Any:
        """Have a chunk of a weight update received and taken in, or `count` of a sender's, beside those of other senders."""
        lane, more = (update_id, {}) if count is None else (f"{update_id} {sender}", {"count": count})
        return await self.aside(lane, "chunk", timeout_s, update_id=update_id, sender=sender, sequence=sequence, where=where, **more)

    async def extend(self, update_id: str, tensors: list[dict[str, Any]], layout: dict[str, Any]) -> list[list[int]]:
        """Name more tensors of an update that grows; [sender, sequence] of the chunks that bring them, in order."""
        reply = await self.aside(update_id, "extend", update_id=update_id, tensors=tensors, layout=layout)
        chunks: list[list[int]] = reply["chunks"]
        return chunks

    def abort_quietly(self, request_ids: list[str], reason: str) -> None:
        """Free requests nobody waits for; no reply is awaited."""
        if self.dead is None and request_ids:
            with contextlib.suppress(EngineDead):  # then nothing is left to free
                self._send_numbered("command", "abort", {"request_ids": request_ids, "reason": reason})

    async def stop(self, timeout_s: float = 4.0) -> None:
        """End the child: SIGTERM, then SIGKILL. Waiters get EngineDead."""
        self._stopping = True
        self._lose("the server is shutting down")
        if self._process is not None:
            await self._end_child(self._process, timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process is not None:
            self._to.close()
            self._from.close()
            self._context.term()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    async def _end_child(self, process: asyncio.subprocess.Process, timeout_s: float) -> None:
        for act in (process.terminate, process.kill):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    act()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), timeout_s)

    def _send(self, *message: Any) -> None:
        try:
            packed = msgpack.packb(message)
        except (ValueError, OverflowError) as error:  # within an object that is checked by the engine only
            raise BadRequest(f"the call holds a value that cannot be sent (text is UTF-8, ints have 64 bits): {describe(error)}") from None
        try:
            self._to.send(packed, zmq.NOBLOCK)
        except zmq.Again:  # its socket is gone; its exit status will follow
            raise EngineDead("the engine process has just ended") from None

    def _send_numbered(self, kind: str, *message: Any) -> int:
        if self.dead is not None:
            raise self.lost()
        self._numbers += 1
        self._send(kind, self._numbers, *message)
        return self._numbers

    async def _read_messages(self) -> None:
        while True:
            message = msgpack.unpackb(await self._from.recv())
            self._handlers[message[0]](*message[1:])
            await asyncio.sleep(0)  # a message that is there already is received without waiting

    def _got_hello(self) -> None:
        with contextlib.suppress(EngineDead):
            self._send("welcome")

    def _got_progress(self, phase: str, done: float) -> None:
        self.snapshot.progress = (phase, done)
        if self._on_progress:
            self._on_progress(phase, done)

    def _got_ready(self, info: dict[str, Any]) -> None:
        self.snapshot.info = info
        self.snapshot.progress = ("ready", 1.0)
        self.snapshot.beat_at = time.monotonic()
        self._ready.set()

    def _got_failed(self, error: dict[str, Any]) -> None:
        self.load_error = error_from_wire(error)
        self._lose(f"the engine could not start: {self.load_error}")

    def _got_outputs(self, outputs: list[Output]) -> None:
        for output in outputs:
            request_id = output["request_id"]
            final = "finish_reason" in output
            if final:
                self.counters.finished(output, self.snapshot.stats.get("weight_version", 0))
            waiter = self._waiters.get(request_id)
            if waiter is None:
                continue
            if final:
                waiter.left -= 1
                if waiter.left == 0:
                    del self._waiters[request_id]
            waiter.deliver(request_id, output)

    def _got_rejected(self, request_id: str, error: dict[str, Any]) -> None:
        self.counters.rejected(error["code"])
        waiter = self._waiters.pop(request_id, None)
        if waiter is not None:
            waiter.deliver(request_id, error_from_wire(error))

    def _got_reply(self, number: int, ok: bool, value: Any) -> None:
        future, late = self._replies.get(number), self._late.pop(number, None)
        if future is not None and not future.done():
            if ok:
                future.set_result(value)
            else:
                future.set_exception(error_from_wire(value))
        elif late is not None and ok:
            late(value)

    def _got_stats(self, stats: dict[str, Any]) -> None:
        self.snapshot.stats, self.snapshot.stats_at = stats, time.monotonic()
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        self._published.set()
        self._published = asyncio.Event()

    def _got_beat(self, phase: str, age_s: float, steps: int, memory: dict[str, int], update: dict[str, Any] | None) -> None:
        self._folder = None  # the child removed it
        now = self.snapshot
        now.phase, now.phase_age_s, now.steps, now.memory, now.beat_at = phase, age_s, steps, memory, time.monotonic()
        now.update = update

    def _got_dead(self, words: str) -> None:
        self._lose(f"a step failed: {words.strip()}")

    async def _read_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while True:
            try:
                line = await self._process.stderr.readline()
            except ValueError:  # a line over the limit: the stream dropped it and goes on
                continue
            if not line:
                return
            text = line.decode(errors="replace")
            self._last_words.append(text.rstrip())
            sys.stderr.write(text)
            sys.stderr.flush()

    async def _watch_exit(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.sleep(0.1)  # let its last message and last lines arrive
        if not self._stopping:
            said = " | ".join(line for line in self._last_words if line.strip())
            words = f"; last words: {said}" if said else ""
            self._lose(f"the engine process (pid {self._process.pid}) ended: {exit_words(code)}{words}")

    async def _watch_beats(self) -> None:
        while self.dead is None:
            begun = time.monotonic()
            await asyncio.sleep(BEAT_WATCH_S)
            now = time.monotonic()
            held_up_s = max(0.0, now - begun - BEAT_WATCH_S)  # this loop, so that beats lie unread: not the engine's silence
            self.snapshot.beat_at = min(now, self.snapshot.beat_at + held_up_s)
            late = now - self.snapshot.beat_at
            if late > BEAT_LOST_S and self._waiters:
                left = list(self._waiters)
                self._fail_waiters(EngineDead(f"no heartbeat from the engine process for {late:.0f} s"))
                self.abort_quietly(left, "no heartbeat")  # read when it comes back: nobody waits for this work

    def _lose(self, words: str) -> None:
        if self.dead is None:
            self.dead = words
        self._ready.set()
        self._wake_watchers()
        self._fail_waiters(self.lost())

    def _fail_waiters(self, error: RollsyncError) -> None:
        waiters, self._waiters = self._waiters, {}
        for request_id, waiter in waiters.items():
            waiter.deliver(request_id, error)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)
