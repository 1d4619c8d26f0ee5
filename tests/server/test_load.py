"""More callers than files, and callers that hold a connection without moving: everyone is answered, nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import struct
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import uvicorn
from rollsync import AsyncRolloutClient
from rollsync.rollout.errors import Overloaded
from rollsync.rollout.server.connections import KEEP_ALIVE_S, STALLED_READER_S, Connection, Server, bind
from rollsync.rollout.wire import MSGPACK, pack_array

Until = Callable[..., None]
FOUR, LONG = (json.dumps({"prompts": [{"token_ids": [1]}], "sampling_params": {"max_tokens": m}}).encode() for m in (4, 700))


def file_limit(files: int) -> str:
    return f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({min(files, 256)}, {files}))"


def head(length: int) -> bytes:
    return f"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """(status, headers, body) of one reply on a connection."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines if line)}
    return int(first.split()[1]), headers, json.loads(await reader.readexactly(int(headers["content-length"])))


async def raw_call(address: tuple[str, int]) -> str:
    """How one call over a connection of its own was answered."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(head(len(FOUR)) + FOUR)
        status, headers, body = await answer(reader)
    except (OSError, EOFError) as error:
        return f"{type(error).__name__}"
    finally:
        writer.close()
    if status == 503:
        assert headers["retry-after"] and body["error"]["code"] == "overloaded" and headers["connection"] == "close"
        return "refused"
    assert status == 200 and len(body["results"][0]["samples"][0]["token_ids"]) == 4
    return "answered"


async def client_call(client: AsyncRolloutClient) -> str:
    try:
        result = await client.rollouts([[1]], sampling_params={"max_tokens": 4})
    except Overloaded:
        return "refused"
    assert len(result.results[0].samples[0].token_ids) == 4
    return "answered"


async def crowd(server: Any, num_clients: int, num_raw: int) -> Counter[str]:
    async with AsyncRolloutClient(server.url) as client:
        calls = [client_call(client) for _ in range(num_clients)] + [raw_call(server.address) for _ in range(num_raw)]
        return Counter(await asyncio.wait_for(asyncio.gather(*calls), 300))


def check_crowd(serving: Any, until: Until, files: int, count: int) -> Counter[str]:
    with serving(first=file_limit(files)) as server:
        asyncio.run(crowd(server, 4, 4))  # what is made on first use
        until(lambda: server.holds()["calls"] == 0)
        idle = server.holds()
        begun = time.monotonic()
        told = asyncio.run(crowd(server, count // 2, count // 2))
        print(f"{count} calls, {files} files: {dict(told)}, {time.monotonic() - begun:.1f} s, {server.memory()}")
        assert told.keys() <= {"answered", "refused"}, told
        until(lambda: server.holds() == idle, 20)
        assert asyncio.run(crowd(server, 8, 8)) == {"answered": 16}
    return told


def test_more_callers_than_files_are_all_answered(serving: Any, until: Until) -> None:
    told = check_crowd(serving, until, files=200, count=300)
    assert told["answered"] >= 104


def test_connections_that_say_nothing_keep_nobody_out(serving: Any, until: Until) -> None:
    """Ten times as many as there are places, some with half a request: probes are answered, then calls are, then nothing is left."""
    with serving(first=f"from rollsync.rollout.server import connections\nconnections.KEEP_ALIVE_S = 3600\n{file_limit(128)}") as server:
        idle = server.holds()
        with contextlib.ExitStack() as stack:
            for i in range(320):
                sock = stack.enter_context(socket.create_connection(server.address))
                if i < 8:
                    sock.send(b"GET /hea")
            with socket.create_connection(server.address, timeout=60) as probe:
                probe.send(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert probe.recv(4096).startswith(b"HTTP/1.1 200")
            until(lambda: asyncio.run(raw_call(server.address)) == "answered", 60)
        until(lambda: server.holds() == idle, 20)


@pytest.mark.slow
@pytest.mark.parametrize("files", [1024, 20000])
def test_two_thousand_callers(serving: Any, until: Until, files: int) -> None:
    told = check_crowd(serving, until, files, 2000)
    assert told["answered"] >= min(2000, files - 96)


QUICK = (
    "from rollsync.rollout.server import connections, replies\n"
    "connections.KEEP_ALIVE_S, connections.STALLED_READER_S, replies.BODY_GRACE_S, replies.BODY_BYTES_PER_S = 1, 2, 1, 10"
)


@pytest.fixture(scope="module")
def quick(serving: Any) -> Iterator[Any]:
    """A server whose patience is short."""
    with serving(first=QUICK) as server:
        yield server


async def dribble(address: tuple[str, int], first: bytes, then: bytes = b"", pause_s: float = 0.0) -> bytes:
    """Send `first` at once, then `then` byte by byte until the server has had enough; what it says."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(first)
    said = asyncio.create_task(reader.read())
    for i in range(len(then)):
        if said.done():
            break
        writer.write(then[i : i + 1])
        await asyncio.sleep(pause_s)
    try:
        return await said
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def test_half_sent_requests_are_let_go_of(quick: Any, until: Until) -> None:
    line = b"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\n"

    async def run() -> list[bytes]:
        sends: list[tuple[Any, ...]] = [
            (b"",),
            (line,),
            (line, b"X: y\r\n" * 99, 0.1),
            (head(len(FOUR)) + FOUR[:9],),
            (head(len(FOUR) + 99), FOUR + b" " * 99, 0.5),
            (head(len(FOUR)), FOUR, 0.02),  # longer than the grace, but at a good pace
            (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",),
            (head(len(FOUR)) + FOUR + head(len(LONG)) + LONG,),  # lasts longer than the server waits for a request
        ]
        return await asyncio.gather(*(dribble(quick.address, *send) for send in sends))

    idle = quick.holds()
    said = asyncio.run(asyncio.wait_for(run(), 60))
    assert [words.split(b" ")[1:2] for words in said] == [[], [], [], [b"408"], [b"408"], [b"200"], [b"200"], [b"200"]], said
    assert said[-1].count(b"HTTP/1.1 200") == 2 and said[-1].endswith(b"}"), "the second of two calls sent at once is answered too"
    assert b"body_too_slow" in said[3] and b"connection: close" in said[3].lower()
    until(lambda: quick.holds() == idle, 20)


class Taker:
    """A transport whose peer takes what the test says."""

    def __init__(self) -> None:
        self.left, self.dropped = 0, False

    def get_write_buffer_size(self) -> int:
        return self.left

    def get_extra_info(self, name: str) -> Any:
        return socket.socket() if name == "socket" else None

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.dropped = True


def test_only_a_peer_that_takes_nothing_is_dropped_with_its_reply() -> None:
    async def run() -> None:
        config = uvicorn.Config(lambda: None, lifespan="off")
        listener, state, loop = SimpleNamespace(made=None, is_full=False), uvicorn.server.ServerState(), asyncio.get_running_loop()
        reader = Connection(listener, False, config=config, server_state=state, app_state={}, _loop=loop)  # type: ignore[arg-type]
        reader.transport = taker = Taker()  # type: ignore[assignment]
        now = loop.time()
        for left in range(10, 0, -1):  # hours for the last bytes of a reply whose end is written: idle it is not
            taker.left, now = left, now + STALLED_READER_S - 1
            reader.drop_if_kept_waiting(now)
        reader.drop_if_kept_waiting(now + STALLED_READER_S - 1)
        assert not taker.dropped
        reader.drop_if_kept_waiting(now + STALLED_READER_S + 1)
        assert taker.dropped
        taker.left, taker.dropped = 0, False
        reader.drop_if_kept_waiting(now + STALLED_READER_S + KEEP_ALIVE_S + 3)
        assert taker.dropped, "nothing left to take, and no request"

    asyncio.run(run())


def test_slow_readers_hold_up_nobody_and_are_let_go_of(quick: Any, until: Until) -> None:
    """Replies of 2 MB and more that nobody takes, or a byte a second; the others are served all along, and so is who takes 20 kB/s."""
    prompts = [{"token_ids": pack_array("<i4", [7] * 4000), "max_tokens": m} for m in [4, *[90] * 127]]

    async def slow(stream: Any, takes: bool) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(quick.address)
        reader, writer = await asyncio.open_connection(sock=sock, limit=1)
        body = msgpack.packb({"prompts": prompts, "stream": stream})
        begin = f"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Type: {MSGPACK}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(begin.encode() + body)
        with contextlib.suppress(ConnectionResetError):
            while takes and await reader.read(1):
                await asyncio.sleep(1.0)
            await asyncio.sleep(600)

    async def fair(enough: asyncio.Event) -> bytes:
        """What one gets who reads little until `enough`, then all."""
        loop, sock, body = asyncio.get_running_loop(), socket.socket(), msgpack.packb({"prompts": prompts})
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(quick.address)
        sock.setblocking(False)
        begin = f"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Type: {MSGPACK}\r\nConnection: close\r\n"
        await loop.sock_sendall(sock, f"{begin}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        found = b""
        while part := await loop.sock_recv(sock, 1 << 11):
            found += part
            if enough.is_set():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            else:
                await asyncio.sleep(0.1)
        sock.close()
        return found

    async def run() -> None:
        enough = asyncio.Event()
        takes_its_time = asyncio.create_task(fair(enough))
        hows = [("samples", False), ("tokens", False), ("samples", True), (False, False)]
        readers = [asyncio.create_task(slow(*how)) for how in hows]
        async with AsyncRolloutClient(quick.url) as client:
            while quick.holds()["front files"] < idle["front files"] + len(hows) + 1:
                await asyncio.sleep(0.02)
            while quick.holds()["front files"] > idle["front files"] + 2:  # the client's and the fair one's; the slow are let go of
                assert await client_call(client) == "answered"
        enough.set()
        head, _, content = (await takes_its_time).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and len(msgpack.unpackb(content)["results"]) == len(prompts)
        for reader in readers:
            reader.cancel()

    until(lambda: quick.holds()["calls"] == 0)
    idle, memory = quick.holds(), quick.memory()["front"]
    asyncio.run(asyncio.wait_for(run(), 60))
    until(lambda: quick.holds() == idle, 20)
    assert quick.memory()["front"] < memory + 60


def test_a_connection_that_is_reset_leaves_nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer lets go of each update it held by closing the connection, whatever is still to be read from it."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def call_and_reset(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    made: list[weakref.ref[Connection]] = []
    begin = Connection.connection_made

    def noted(self: Connection, transport: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, transport)

    monkeypatch.setattr(Connection, "connection_made", noted)

    def left() -> int:
        gc.collect()
        return sum(connection() is not None for connection in made)

    async def run() -> None:
        sock = bind("127.0.0.1", 0)
        server = Server(app, sock, 100)
        serving = asyncio.create_task(server.serve())
        for _ in range(5):
            await asyncio.to_thread(call_and_reset, sock.getsockname()[1])
        end = time.monotonic() + KEEP_ALIVE_S / 2
        while left() and time.monotonic() < end:
            await asyncio.sleep(0.2)
        assert len(made) == 5 and left() == 0
        server.should_exit = True
        await serving

    asyncio.run(run())
