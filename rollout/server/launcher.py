"""`rollsync serve`: bind the port, start the engine, show how it comes up, end everything on a signal."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass
from typing import Any

from ..engine.config import EngineConfig
from ..engine.params import is_utf8
from ..errors import ConfigError, RollsyncError, show
from .app import DEFAULT_MAX_BODY_BYTES, create_app
from .connections import Server, bind, connection_limit
from .engine_client import EngineProcess
from .guard import Access
from .text import TextService


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """The listener."""

    host: str = "127.0.0.1"
    """address to listen on; one that is not loopback needs control_token"""
    port: int = 8000
    """port to listen on; 0 takes a free one and prints it"""
    api_key: str | None = None
    """key that traffic must send as Authorization: Bearer; @FILE reads it from a file"""
    control_token: str | None = None
    """token that control routes must send as Authorization: Bearer; @FILE reads it from a file"""
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    """largest request body accepted, in bytes"""
    served_model_name: str | None = None
    """name of the model on OpenAI's routes; its path or id, and the last part of that, are names too"""

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1:
            raise ConfigError(f"--max-body-bytes must be at least 1, got {self.max_body_bytes}")
        for flag, value in (("--served-model-name", self.served_model_name), ("--host", self.host)):
            if value is not None and (not value.strip() or not is_utf8(value)):
                raise ConfigError(f"{flag} must be a name that UTF-8 can encode, not empty, got {show(value)}")


def secret(value: str | None) -> str | None:
    """`value`, or the first line of the file that "@FILE" names (so that the secret is not in the process list)."""
    if value == "":
        raise ConfigError("a key or token must not be empty")
    if value is None or not value.startswith("@"):
        return value
    try:
        with open(value[1:]) as file:
            found = file.readline().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the secret from {value[1:]}: {error.strerror}") from None
    if not found:
        raise ConfigError(f"{value[1:]} holds no secret: its first line is empty")
    return found


def _size(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.1f} MiB"


def announcement(version: str, url: str, info: dict[str, Any]) -> str:
    """The one line that ends start-up."""
    tokens = int(info.get("num_blocks", 0)) * int(info.get("block_tokens", 0))
    parts = [
        f"Rollsync {version} listening on {url}",
        f"model {info.get('model', '?')}",
        str(info.get("dtype", "?")),
        f"KV {tokens:,} tokens ({_size(info.get('kv_bytes', 0))})",
        f"kernels {info.get('kernels', '?')}, {info.get('threads', '?')} threads",
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
        self._access = Access(host=options.host, api_key=secret(options.api_key), control_token=secret(options.control_token))
        self._access.validate()
        self._version = version
        self._socket = bind(options.host, options.port)
        host = f"[{options.host}]" if ":" in options.host else options.host
        self._url = f"http://{host}:{self._socket.getsockname()[1]}"
        self._progress = StartupProgress()
        self._engine = EngineProcess(config, factory=engine_factory, on_progress=self._progress.show)
        app = create_app(self._engine, TextService(config), self._access, version, options.max_body_bytes, options.served_model_name)
        self._server = Server(app, self._socket, connection_limit())
        self._signal: int | None = None
        self._wake = asyncio.Event()

    def _on_signal(self, signum: int) -> None:
        if self._signal is not None:
            self._server.force_exit = True
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
        serving = asyncio.create_task(self._server.serve())
        stopped = asyncio.create_task(self._wake.wait())
        try:
            code = await self._until_stopped(serving, stopped)
        finally:
            await self._engine.stop()
            self._server.should_exit = True
            await serving
            self._socket.close()
        return code

    async def _until_stopped(self, serving: asyncio.Task[None], stopped: asyncio.Task[Any]) -> int:
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
            print(announcement(self._version, self._url, info), flush=True)
            await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        loading.cancel()
        return 128 + self._signal if self._signal is not None else 1


def serve(config: EngineConfig, options: ServeOptions, version: str, engine_factory: str | None = None) -> int:
    """Run a server to its end and return the exit status. Raises ConfigError for what is wrong before it begins."""

    async def run() -> int:
        return await Launcher(config, options, version, engine_factory).run()

    return asyncio.run(run())
