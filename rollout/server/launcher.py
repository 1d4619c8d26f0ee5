"""`rollsync serve`: bind the port, start the engine, show how it comes up, end everything on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

from ..engine.config import EngineConfig
from ..engine.params import is_utf8
from ..engine.trace_file import check_trace_path
from ..errors import ConfigError, RollsyncError, show
from .access import Access, network
from .app import DEFAULT_MAX_BODY_BYTES, create_app
from .audit import AuditLog
from .connections import CONTROL_CONNECTIONS, Server, bind, connection_limit
from .engine_client import EngineProcess
from .report import Reporter, check_report_to, report
from .text import TextService


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """The listener."""

    host: str = "127.0.0.1"
    """address to listen on; if other machines can reach it, control routes need one of the three below"""
    port: int = 8000
    """port to listen on; 0 takes a free one and prints it"""
    api_key: str | None = None
    """key that traffic must send as Authorization: Bearer; @FILE reads it from a file, env:NAME from the environment"""
    control_token: str | None = None
    """token that control routes must send as Authorization: Bearer; @FILE and env:NAME as above. It opens all other routes too"""
    control_host: str | None = None
    """address of a listener of its own for control routes, which the other then refuses; needs control_port (default: 127.0.0.1)"""
    control_port: int | None = None
    """port of that listener; 0 takes a free one and prints it"""
    control_allow: tuple[str, ...] = ()
    """networks (CIDR) whose callers need no token for control routes: for trainers whose clients send none"""
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    """largest request body accepted, in bytes"""
    report_to: str | None = None
    """wandb: the numbers of live weights go there too"""
    served_model_name: str | None = None
    """name of the model on OpenAI's routes; its path or id, and the last part of that, are names too"""
    allow_tensor_pickle: bool = False
    """take pickles of tensor handles on SGLang's /update_weights_from_tensor; nothing but handles is read of them"""

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1:
            raise ConfigError(f"--max-body-bytes must be at least 1, got {self.max_body_bytes}")
        check_report_to(self.report_to)
        if self.control_host is not None and self.control_port is None:
            raise ConfigError("--control-host needs --control-port (0 takes a free one)")
        names = (("--served-model-name", self.served_model_name), ("--host", self.host), ("--control-host", self.control_host))
        for flag, value in names:
            if value is not None and (not value.strip() or not is_utf8(value)):
                raise ConfigError(f"{flag} must be a name that UTF-8 can encode, not empty, got {show(value)}")


def secret(value: str | None) -> str | None:
    """`value`, or what "env:NAME" or the first line of "@FILE" holds (so that the secret is not in the process list)."""
    if value is None:
        return None
    where, found = "a key or token", value
    if value.startswith("@"):
        where = value[1:]
        try:
            with open(where) as file:
                found = file.readline().strip()
        except OSError as error:
            raise ConfigError(f"cannot read the secret from {where}: {error.strerror}") from None
    elif value.startswith("env:"):
        where = f"the environment variable {value[4:]}"
        found = os.environ.get(value[4:], "")
    if not found:
        raise ConfigError(f"{where} holds no secret: it is empty")
    if found != found.strip() or not found.isprintable():
        raise ConfigError(f"{where} must not begin or end with a space, nor hold what cannot be printed: no header can carry it")
    return found


def _size(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.1f} MiB"


def url_of(host: str, sock: socket.socket) -> str:
    """Where a bound socket is reached."""
    host = host.removeprefix("[").removesuffix("]")
    return f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"


def announcement(version: str, url: str, info: dict[str, Any], control_url: str | None = None) -> str:
    """The one line that ends start-up."""
    ranks = (info.get("config") or {}).get("tp", 1)
    tokens = int(info.get("num_blocks", 0)) * int(info.get("block_tokens", 0))
    parts = [
        f"Rollsync {version} listening on {url}",
        *([f"control on {control_url}"] if control_url else []),
        f"model {info.get('model', '?')}",
        str(info.get("dtype", "?")),
        f"KV {tokens:,} tokens ({_size(info.get('kv_bytes', 0))})",
        f"kernels {info.get('kernels', '?')}, {info.get('threads', '?')} threads{f' on each of {ranks} ranks' if ranks > 1 else ''}",
    ]
    return " | ".join(parts)


class StartupProgress:
    """Start-up on stderr: one line that is rewritten on a terminal, else a line per phase and quarter."""

    def __init__(self) -> None:
        self._last = ("", -1)
        self._rewrites = sys.stderr.isatty()

    def show(self, phase: str, done: float) -> None:
        step = (phase, int(done * (100 if self._rewrites else 4)))
        if step != self._last:
            self._last = step
            line = f"{phase} {done:.0%}"
            sys.stderr.write(f"\r\x1b[K{line}" if self._rewrites else f"{line}\n")
            sys.stderr.flush()

    def end(self) -> None:
        if self._rewrites and self._last[0]:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


class Launcher:
    """One server from start to end."""

    def __init__(self, config: EngineConfig, options: ServeOptions, version: str, engine_factory: str | None = None) -> None:
        self._access = Access(
            host=options.host,
            api_key=secret(options.api_key),
            control_token=secret(options.control_token),
            control_host=None if options.control_port is None else options.control_host or "127.0.0.1",
            control_allow=tuple(network(cidr) for cidr in options.control_allow),
        )
        self._access.validate()
        if config.trace is not None:
            check_trace_path(config.trace)
        self._version = version
        self._sockets = [bind(options.host, options.port)]
        self._urls = [url_of(options.host, self._sockets[0])]
        if self._access.control_host is not None and options.control_port is not None:
            self._sockets.append(bind(self._access.control_host, options.control_port, "--control-port"))
            self._urls.append(url_of(self._access.control_host, self._sockets[1]))
        self._progress = StartupProgress()
        self._engine = EngineProcess(config, factory=engine_factory, on_progress=self._progress.show)
        self._audit = AuditLog()
        self._reporter = Reporter() if options.report_to == "wandb" else None
        app = create_app(
            self._engine,
            TextService(config),
            self._access,
            version,
            options.max_body_bytes,
            options.served_model_name,
            self._audit,
            options.allow_tensor_pickle,
        )
        limit, kept = connection_limit(), 0
        if len(self._sockets) > 1:
            kept = min(CONTROL_CONNECTIONS, limit // 4)
        limits = (limit - kept, kept)
        self._servers = [Server(app, *each) for each in zip(self._sockets, limits, ("traffic", "control"), strict=False)]
        self._signal: int | None = None
        self._wake = asyncio.Event()

    def _on_signal(self, signum: int) -> None:
        if self._signal is not None:
            for server in self._servers:
                server.force_exit = True
        self._signal = self._signal or signum
        self._wake.set()

    async def run(self) -> int:
        """Serve until a signal. The exit status: 128 + the signal (SIGINT, SIGTERM, SIGHUP), 1 if the engine could not start."""
        loop = asyncio.get_running_loop()
        signums = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
            signums.append(signal.SIGHUP)
        for signum in signums:
            loop.add_signal_handler(signum, self._on_signal, signum)
        for warning in self._access.warnings():
            print(f"WARNING: {warning}", file=sys.stderr, flush=True)
        serving = asyncio.ensure_future(asyncio.gather(*(server.serve() for server in self._servers)))
        stopped = asyncio.create_task(self._wake.wait())
        reporting = asyncio.create_task(self._report())
        try:
            code = await self._until_stopped(serving, stopped)
        finally:
            reporting.cancel()
            await self._engine.stop()
            for server in self._servers:
                server.should_exit = True
            await serving
            for sock in self._sockets:
                sock.close()
            self._audit.close()
            if self._reporter is not None:
                await asyncio.to_thread(self._reporter.close)
        return code

    async def _report(self) -> None:
        if self._reporter is not None:
            with contextlib.suppress(RollsyncError):  # the engine did not come up
                await report(self._engine, self._reporter)

    async def _until_stopped(self, serving: asyncio.Future[Any], stopped: asyncio.Task[Any]) -> int:
        await self._engine.start()
        loading = asyncio.create_task(self._engine.ready())
        await asyncio.wait({loading, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        self._progress.end()
        if loading.done():
            try:
                info = loading.result()
            except RollsyncError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                return 1
            print(announcement(self._version, self._urls[0], info, *self._urls[1:]), flush=True)
            await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        loading.cancel()
        return 128 + self._signal if self._signal is not None else 1


def serve(config: EngineConfig, options: ServeOptions, version: str, engine_factory: str | None = None) -> int:
    """Run a server to its end and return the exit status. Raises ConfigError for what is wrong before it begins."""

    async def run() -> int:
        return await Launcher(config, options, version, engine_factory).run()

    return asyncio.run(run())
