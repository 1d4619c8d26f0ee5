"""The engine as a child process: `python -m rollsync.rollout.engine.process FOLDER PARENT_PID [FACTORY]`.

The configuration comes as JSON on stdin. Messages are msgpack lists over pyzmq, requests and commands in by the socket FOLDER/in,
all else out by FOLDER/out; nothing is pickled. The process ends with its parent, whatever happens to that.

The folder is only there until both sides are connected. The front starts this process before it makes the folder, so that at any
moment one of them lives that removes it if the other is killed.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]
import zmq

from ..errors import RollsyncError, describe
from ..wire import error_to_wire
from .commands import EngineLike
from .config import EngineConfig
from .lifeline import die_with_parent, killed_with_parent
from .loop import EngineLoop
from .outputs import output_to_wire
from .params import SamplingParams
from .rank_processes import RankProcesses
from .types import RolloutRequest, SampleOutput

log = logging.getLogger(__name__)

BEAT_PERIOD_S = 0.25
CONNECT_TIMEOUT_S = 30.0
MESSAGE_OUTPUTS = 64
"""of one message; the front takes in one between others' turns"""


def info_to_wire(info: Any) -> dict[str, Any]:
    """The engine's `info` (a dataclass, a dict, or an object) as msgpack-able values."""
    found = asdict(info) if is_dataclass(info) and not isinstance(info, type) else dict(info if isinstance(info, dict) else vars(info))
    return {str(k): list(v) if isinstance(v, tuple | set | frozenset) else v for k, v in found.items()}


class Outbox:
    """The way out, shared by the engine's thread and the heartbeat's: a `Sink` that sends messages."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.linger = 500
        self._socket.connect(endpoint)
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self.exit_code = 0

    def send(self, *message: Any) -> None:
        self._send(msgpack.packb(message))

    def _send(self, frame: bytes) -> None:
        with self._lock:
            if not self._socket.closed:
                self._socket.send(frame)

    def close(self) -> None:
        with self._lock:
            self._socket.close()

    def ready(self, engine: Any) -> None:
        self.send("ready", info_to_wire(engine.info))

    def failed(self, error: BaseException) -> None:
        if not isinstance(error, RollsyncError):
            traceback.print_exception(error)
        self.send("failed", error_to_wire(error))
        self.exit_code = 1
        self.ended.set()

    def outputs(self, outputs: list[SampleOutput]) -> None:
        runs = (outputs[at : at + MESSAGE_OUTPUTS] for at in range(0, len(outputs), MESSAGE_OUTPUTS))
        frames = [msgpack.packb(("outputs", [output_to_wire(o) for o in run])) for run in runs]
        for frame in frames:  # all could be packed
            self._send(frame)

    def rejected(self, request_id: str, error: RollsyncError) -> None:
        self.send("rejected", request_id, error_to_wire(error))

    def stats(self, stats: dict[str, Any]) -> None:
        self.send("stats", stats)

    def dead(self, words: str) -> None:
        sys.stderr.write(words)
        sys.stderr.flush()
        self.send("dead", words)
        self.exit_code = 1
        self.ended.set()


def memory_bytes() -> dict[str, int]:
    """Resident and anonymous memory of this process (Linux; empty elsewhere)."""
    try:
        with open("/proc/self/status") as status:
            rows = dict(line.split(":", 1) for line in status if line.startswith(("VmRSS", "RssAnon")))
    except OSError:
        return {}
    return {name: int(rows[key].split()[0]) * 1024 for key, name in (("VmRSS", "rss"), ("RssAnon", "anonymous")) if key in rows}


def start_heartbeat(loop: EngineLoop, outbox: Outbox) -> None:
    def beat() -> None:
        ticks = 0
        memory = memory_bytes()
        while not outbox.ended.wait(BEAT_PERIOD_S):
            ticks += 1
            if ticks % 8 == 0:
                memory = memory_bytes()
            now = loop.heartbeat
            outbox.send("beat", now.phase, time.monotonic() - now.since, now.steps, memory, loop.open_update())

    threading.Thread(target=beat, name="rollsync-heartbeat", daemon=True).start()


def serve_messages(loop: EngineLoop, outbox: Outbox, inbox: zmq.Socket[Any]) -> None:
    """Hand what arrives to the loop until it ended."""
    shared: dict[int, SamplingParams] = {}  # by key: those of calls whose requests are coming
    while not outbox.ended.is_set():
        if not inbox.poll(200):
            continue
        frame = inbox.recv()
        try:
            message = msgpack.unpackb(frame)
            if message[0] == "request":
                _submit(loop, outbox, message[1], shared)
            elif message[0] == "params":
                shared.pop(message[1], None)
                if message[2] is not None:
                    shared[message[1]] = SamplingParams.from_wire(message[2])
            elif message[0] == "command":
                loop.command(message[2], message[3], _replier(outbox, message[1]))
            elif message[0] == "aside":
                _, number, lane, verb, args = message
                loop.aside(lane, verb, args, _replier(outbox, number))
        except Exception as error:  # a message that names nobody to tell: the others' requests go on
            log.error("a message could not be read", exc_info=error)


def _params(wire: Any, shared: dict[int, SamplingParams]) -> SamplingParams:
    """Of a request: its own, or [key of shared ones, what differs from them]."""
    if isinstance(wire, dict):
        return SamplingParams.from_wire(wire)
    key, own = wire
    if key not in shared:
        raise RollsyncError("the sampling_params of this request's call could not be read")
    return shared[key].varied(**own) if own else shared[key]


def _submit(loop: EngineLoop, outbox: Outbox, wire: dict[str, Any], shared: dict[int, SamplingParams]) -> None:
    try:
        loop.submit(RolloutRequest.from_wire(wire, _params(wire["params"], shared)))
    except RollsyncError as error:
        outbox.rejected(wire["request_id"], error)
    except Exception as error:
        log.error("request %r could not be read", wire["request_id"], exc_info=error)
        outbox.rejected(wire["request_id"], RollsyncError(describe(error)))


def _replier(outbox: Outbox, number: int) -> Callable[[Any], None]:
    def reply(value: Any) -> None:
        if isinstance(value, RollsyncError):
            outbox.send("reply", number, False, error_to_wire(value))
        else:
            outbox.send("reply", number, True, value)

    return reply


def real_engine(config: EngineConfig, progress: Callable[[str, float], None]) -> EngineLike:
    """Import and build `Engine`, telling what goes on."""
    progress("importing torch", 0.0)
    ranks = RankProcesses(config.tp) if config.tp > 1 else None
    from .engine import Engine
    from .parallel_runner import make_runner

    return Engine(config, runner=make_runner(config, progress=progress, ranks=ranks))


def _factory(path: str | None) -> Callable[[EngineConfig, Callable[[str, float], None]], EngineLike]:
    if path is None:
        return real_engine
    module, _, name = path.partition(":")
    found: Callable[[EngineConfig, Callable[[str, float], None]], EngineLike] = getattr(importlib.import_module(module), name)
    return found


def start_loop(settings: str, factory_path: str | None, outbox: Outbox) -> EngineLoop:
    config, factory = EngineConfig.from_flat(json.loads(settings)), _factory(factory_path)
    loop = EngineLoop(lambda: factory(config, lambda phase, done: outbox.send("progress", phase, done)), outbox)
    start_heartbeat(loop, outbox)
    loop.start()
    return loop


class _Terminated(BaseException):
    """SIGTERM, raised on the main thread."""


def _on_sigterm(signum: int, frame: Any) -> None:
    raise _Terminated


def connect(folder: str, context: zmq.Context[Any]) -> tuple[zmq.Socket[Any], Outbox]:
    """Both sockets, connected; then their names are removed."""
    inbox = context.socket(zmq.PULL)
    inbox.set_hwm(0)
    inbox.connect(f"ipc://{folder}/in")
    outbox = Outbox(context, f"ipc://{folder}/out")
    outbox.send("hello")
    if not inbox.poll(int(CONNECT_TIMEOUT_S * 1000)):
        raise TimeoutError(f"the front did not answer within {CONNECT_TIMEOUT_S:g} s of this process's start")
    welcome = msgpack.unpackb(inbox.recv())
    assert welcome == ["welcome"], welcome
    shutil.rmtree(folder, ignore_errors=True)
    return inbox, outbox


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides what Ctrl-C means
    signal.signal(signal.SIGTERM, _on_sigterm)
    folder, parent_pid = argv[0], int(argv[1])
    context: zmq.Context[Any] = zmq.Context()
    code, loop, outbox = 0, None, None
    try:
        settings = sys.stdin.read()
        die_with_parent(parent_pid, folder)
        if not settings:  # the front was killed before it could tell
            shutil.rmtree(folder, ignore_errors=True)
            return 1
        inbox, outbox = connect(folder, context)
        killed_with_parent(parent_pid)
        loop = start_loop(settings, argv[2] if len(argv) > 2 else None, outbox)
        serve_messages(loop, outbox, inbox)
    except _Terminated:
        code = 128 + signal.SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if loop is not None and loop.heartbeat.phase != "load":
        loop.close(timeout_s=2.0)
    if outbox is not None:
        outbox.ended.set()
        outbox.close()
    context.destroy(linger=500)
    sys.stderr.flush()
    os._exit(code or (outbox.exit_code if outbox else 0))  # a load or a step that cannot be interrupted must not hold the exit


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
