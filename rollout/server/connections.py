"""The listener: takes connections within the file limit, and lets go of those whose peer keeps it waiting.

A connection is a descriptor. With all of them taken, further callers get a plain 503 over a few that are kept for that; with
these taken too, callers wait in the kernel's backlog for the moment that takes. So accept never runs into the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import resource
import socket
import struct
import sys
import termios
from array import array
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import ConfigError

BACKLOG = 2048
"""connections the kernel holds until they are accepted"""
ACCEPTS_PER_TURN = 64
"""then the loop looks after the others"""
SPARE_FILES = 96
"""descriptors kept for everything that is not a served connection, REFUSALS included"""
REFUSALS = 32
"""connections over the limit that are told so at one time"""
MOST_CONNECTIONS = 65536
CONTROL_CONNECTIONS = 64
"""of a control listener of its own, taken from the traffic's: a crowd there does not keep a trainer out"""
LEAST_CONNECTIONS = 16
KEEP_ALIVE_S = 75
"""from a reply's end, or from connecting, to the end of the next request's headers; longer than clients keep idle connections, so that
none sends into one just closed"""
REFUSAL_S = 2.0
"""the same for a connection over the limit, and, while all places are taken, for one that has never asked for anything"""
STALLED_READER_S = 3600.0
"""a peer that takes nothing of what waits for it for this long is dropped, one that takes it slowly is not; a trainer may read its
stream between two long steps"""
MAX_PIPELINED_BYTES = 1 << 16
"""read ahead of a reply in progress, so that a peer's end is noticed although it has sent more"""
LAST_DATA_RECEIVED = 52
"""where Linux's tcp_info has tcpi_last_data_recv, in milliseconds"""
PROBE_IDLE_S, PROBE_EVERY_S, PROBES = 60, 15, 4
"""TCP keep-alive: a machine that vanished is noticed after two minutes"""


def connection_limit() -> int:
    """Raise the file limit as far as the system lets us. Returns how many connections it allows; ConfigError if next to none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + SPARE_FILES
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)), hard))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < SPARE_FILES + LEAST_CONNECTIONS:
        raise ConfigError(f"the file limit (ulimit -n) must be at least {SPARE_FILES + LEAST_CONNECTIONS}, got {files}")
    return min(files - SPARE_FILES, MOST_CONNECTIONS)


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening socket. ConfigError says what is wrong with the address or the port, which is that of `flag`."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"{flag} must be in [0, 65535], got {port}")
    host = host.removeprefix("[").removesuffix("]")
    sock = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted sockets inherit these
        for name, value in (("TCP_KEEPIDLE", PROBE_IDLE_S), ("TCP_KEEPINTVL", PROBE_EVERY_S), ("TCP_KEEPCNT", PROBES)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        if sock is not None:
            sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use: choose another with {flag} (0 takes a free one)") from None
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    sock.setblocking(False)
    return sock


def unread(sock: Any) -> int:
    """Bytes of a connected socket that wait to be read."""
    held = array("i", [0])
    with contextlib.suppress(OSError, ValueError):
        fcntl.ioctl(sock.fileno(), termios.FIONREAD, held)
    return held[0]


def silent_s(sock: socket.socket) -> float:
    """For how long the peer of a new connection has sent nothing, in the backlog too; 0 where the system does not tell."""
    with contextlib.suppress(OSError, struct.error):
        if hasattr(socket, "TCP_INFO") and not unread(sock):
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            return float(struct.unpack_from("=I", info, LAST_DATA_RECEIVED)[0]) / 1000
    return 0.0


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection that knows since when it waits for its peer."""

    def __init__(self, listener: Listener, over_limit: bool, silent_s: float = 0.0, **uvicorn_args: Any) -> None:
        super().__init__(**uvicorn_args)
        self._listener, self._over_limit, self._has_asked = listener, over_limit, False
        self._waits_for_request_since: float | None = self.loop.time() - silent_s
        self._untaken_bytes, self._took_at = 0, self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._listener.made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # of one that was reset too: its timer would keep it, and its last request, in memory
        self._listener.lost(self)

    def handle_events(self) -> None:
        """Begin the next request, if it is there: when data came, or when the reply before it has ended."""
        self.app_state = {"over_limit": self._over_limit, "crowded": self._listener.crowded, "listener": self._listener.name}
        super().handle_events()
        if self._replying:
            self._waits_for_request_since, self._has_asked = None, True
            self._unset_keepalive_if_required()
            if self.flow.read_paused and not self.cycle.more_body and len(self.conn.trailing_data[0]) < MAX_PIPELINED_BYTES:
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._replying:  # to a request sent ahead
            self._waits_for_request_since = self.loop.time()

    @property
    def _replying(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _untaken(self) -> int:
        """Bytes that wait for the peer: 0 if the kernel has them all, else with what it holds itself."""
        left = self.transport.get_write_buffer_size()
        if left:
            held = array("i", [0])
            with contextlib.suppress(OSError, ValueError):
                fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, held)
            left += held[0]
        return left

    def drop_if_kept_waiting(self, now: float) -> None:
        """Close without a word if the peer is too late with its request, or with taking its reply."""
        left = self._untaken()
        if not left or left != self._untaken_bytes:
            self._untaken_bytes, self._took_at = left, now
        if left:
            late = now - self._took_at > STALLED_READER_S
            if self._waits_for_request_since is not None:  # not before it has the reply
                self._waits_for_request_since = now
        else:
            is_idle = self._listener.is_full and not self._has_asked and not unread(self.transport.get_extra_info("socket"))
            request_s = REFUSAL_S if self._over_limit or is_idle else KEEP_ALIVE_S
            late = self._waits_for_request_since is not None and now - self._waits_for_request_since > request_s
            late = late and not self.transport.is_closing()
        if late:
            self.transport.abort()


class Listener:
    """Accepts on one socket for one uvicorn server; the application sees its `name` in the state of every call."""

    def __init__(self, sock: socket.socket, config: uvicorn.Config, state: uvicorn.server.ServerState, limit: int, name: str) -> None:
        self._socket, self._config, self._state, self._limit, self.name = sock, config, state, limit, name
        self._refusals = REFUSALS if name == "traffic" else 0  # a control listener's callers rather wait
        self._loop = asyncio.get_running_loop()
        self._num_taken = 0
        self._open: set[Connection] = set()
        self._greetings: set[asyncio.Task[None]] = set()
        self._listening = self._closed = False
        self._sweeper = self._loop.create_task(self._sweep())
        self._listen()

    @property
    def crowded(self) -> bool:
        """Replies end their connection, so that idle ones cannot hold all places."""
        return self._num_taken > self._limit * 3 // 4

    @property
    def is_full(self) -> bool:
        """All places are taken."""
        return self._num_taken >= self._limit

    def close(self) -> None:
        """Take no more connections; those there are live on."""
        self._closed = True
        self._pause()
        self._sweeper.cancel()

    def made(self, connection: Connection) -> None:
        self._open.add(connection)

    def lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._num_taken -= 1
        self._listen()

    def _listen(self) -> None:
        if not self._listening and not self._closed:
            self._listening = True
            self._loop.add_reader(self._socket, self._accept)

    def _pause(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._socket)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if self._num_taken >= self._limit + self._refusals:
                self._pause()  # until one is lost
                return
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # the whole machine is short of something: its connections wait
                print(f"warning: cannot accept connections: {error.strerror}; trying again", file=sys.stderr, flush=True)
                self._pause()
                self._loop.call_later(1.0, self._listen)
                return
            silence = silent_s(sock)
            if self.is_full and silence > REFUSAL_S:
                sock.close()  # as a place would be taken from it
                continue
            task = self._loop.create_task(self._greet(sock, self.is_full, silence))
            self._num_taken += 1
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)

    async def _greet(self, sock: socket.socket, over_limit: bool, silent_s: float) -> None:
        def connection() -> Connection:
            return Connection(self, over_limit, silent_s, config=self._config, server_state=self._state, app_state={}, _loop=self._loop)

        sock.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(connection, sock)
        except OSError:
            sock.close()
            self._num_taken -= 1
            self._listen()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = self._loop.time()
            for connection in list(self._open):
                connection.drop_if_kept_waiting(now)


class Server(uvicorn.Server):
    """uvicorn behind our listener. Signals are the launcher's business."""

    def __init__(self, app: Any, sock: socket.socket, limit: int, name: str = "traffic") -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=H11Protocol,
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=3,
            )
        )
        self._socket, self._limit, self._name = sock, limit, name
        self._listener: Listener | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._listener = Listener(self._socket, self.config, self.server_state, self._limit, self._name)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._listener is not None:
            self._listener.close()
        self._socket.close()
        await super().shutdown(sockets=[])
