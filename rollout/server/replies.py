"""Replies in the caller's format, streams, and the watch for a caller that went away."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import BadRequest, BodyTooLarge, BodyTooSlow, Overloaded, RollsyncError, show
from ..wire import MSGPACK, error_to_wire
from .audit import note
from .checks import decode_body
from .dialects.errors import shaped
from .encoding import encode, encode_aside
from .openai_errors import error_body, is_openai, retry_headers

T = TypeVar("T")
BODY_GRACE_S = 60.0
BODY_BYTES_PER_S = 16 << 10
"""a body that is not whole BODY_GRACE_S, and a second per so many bytes, after its headers is refused"""
ASIDE_BYTES = 1 << 16
"""bodies of more than this are worked on in a thread"""
CHUNK_BYTES = 1 << 18
"""bodies are sent in pieces of this many, each once the last has left: a caller that hangs up is noticed"""
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}, 503: {"Retry-After": "1"}}
"""what goes with a status"""
CALL_HEADERS = {**HEADERS, 409: HEADERS[503]}
"""likewise of a call that samples or scores: there, what the engine's state forbids now it may allow later"""


class ClientGone(Exception):
    """The connection dropped before the reply was ready; nobody reads what is answered now."""


def wants_msgpack(request: Request) -> bool:
    """By Accept; without a preference there, by the request's Content-Type."""
    accept = request.headers.get("accept", "*/*")
    if "msgpack" in accept:
        return True
    if "json" in accept or "text/event-stream" in accept:
        return False
    return "msgpack" in request.headers.get("content-type", "")


async def give(request: Request, value: Any, status: int = 200) -> Response:
    """`reply`, for values of any size."""
    binary = wants_msgpack(request)
    return WholeReply(await encode_aside(value, binary), status, binary)


class BodyRoom:
    """What bodies may take: each for itself, and all that are being read or decoded together."""

    def __init__(self, limit_bytes: int, total_bytes: int) -> None:
        self.limit_bytes, self.total_bytes = limit_bytes, total_bytes
        self.taken_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Overloaded if there is no room for so many more."""
        if self.taken_bytes + num_bytes > self.total_bytes:
            raise Overloaded(f"bodies of {self.taken_bytes} bytes are being read, of at most {self.total_bytes}: try again")
        self.taken_bytes += num_bytes


@contextlib.asynccontextmanager
async def body_of(request: Request) -> AsyncIterator[bytes]:
    """The whole body, counted in the room of all bodies for as long as the block lasts."""
    room: BodyRoom = request.app.state.bodies
    chunks: list[bytes] = []
    try:
        async for chunk in _body_chunks(request, room.limit_bytes):
            room.take(len(chunk))
            chunks.append(chunk)
        yield b"".join(chunks)
    finally:
        room.taken_bytes -= sum(map(len, chunks))


async def take(request: Request, parse: Callable[[Any], T], *, empty: Any = None) -> T:
    """What `parse` makes of the body; a large one is decoded and checked in a worker thread. `empty` stands for no body at all."""
    async with body_of(request) as body:
        kind = request.headers.get("content-type", "application/json")
        if not body and empty is not None:
            found = parse(empty)
        elif len(body) < ASIDE_BYTES:
            found = parse(decode_body(body, kind))
        else:
            found = await asyncio.to_thread(lambda: parse(decode_body(body, kind, in_steps=True)))
    note(request, found)
    return found


def reply(request: Request, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    binary = wants_msgpack(request)
    headers = {**HEADERS.get(status, {}), **(headers or {})}
    return Response(encode(value, binary), status, headers, media_type=MSGPACK if binary else "application/json")


def error_reply(request: Request, error: BaseException, status: int | None = None, headers: Mapping[str, str] | None = None) -> Response:
    """{"error": {"code", "message", "field"?}} with the status of the error's class; on a dialect's routes as its engine writes it."""
    status = status or (error.status if isinstance(error, RollsyncError) else 500)
    if is_openai(request.url.path):
        return reply(request, error_body(error, status), status, {**retry_headers(status), **(headers or {})})
    if own := shaped(request.scope.get("error_shape"), error, status):
        return reply(request, own, status, headers)
    return reply(request, {"error": error_to_wire(error)}, status, headers)


async def _body_chunks(request: Request, limit_bytes: int) -> AsyncIterator[bytes]:
    """The body as it comes. BodyTooLarge as soon as it exceeds the limit, BodyTooSlow once it falls behind, ClientGone."""
    coding = request.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise BadRequest(f"Content-Encoding must be identity (send the body as it is), got {show(coding)}")
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isascii() and declared.isdigit() else 0
    if size <= limit_bytes:
        size, begun_at = 0, asyncio.get_running_loop().time()
        stream = request.stream()
        while size <= limit_bytes:
            try:
                async with asyncio.timeout_at(begun_at + BODY_GRACE_S + size / BODY_BYTES_PER_S):
                    chunk = await anext(stream)
            except StopAsyncIteration:
                return
            except ClientDisconnect:
                raise ClientGone from None
            except TimeoutError:
                pace = f"{BODY_GRACE_S:g} s and one more for every {BODY_BYTES_PER_S} bytes"
                raise BodyTooSlow(f"a body may take {pace}; {size} bytes had come by then") from None
            size += len(chunk)
            if size <= limit_bytes:
                yield chunk
    raise BodyTooLarge(f"the body must be at most {limit_bytes} bytes (--max-body-bytes), got at least {size}")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; if the caller hangs up first, `work` is cancelled and ClientGone raised."""
    task, watch = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def frame(event: dict[str, Any], binary: bool) -> bytes:
    """One stream event: a u32 little-endian length and msgpack, or a server-sent event, named by its "event" if it has one."""
    data = await encode_aside(event, binary)
    if binary:
        return struct.pack("<I", len(data)) + data
    name = f"event: {event['event']}\n" if "event" in event else ""
    return b"%bdata: %b\n\n" % (name.encode(), data)


async def _send_watched(receive: Receive, sending: Coroutine[Any, Any, None], leave: Callable[[bool], None]) -> None:
    """Send until it is done or the caller hangs up; `leave` is called however it ends, with whether it was sent to its end."""
    sent = False
    try:
        await until_disconnect(receive, sending)
        sent = True
    except ClientGone:
        pass
    finally:
        leave(sent)


class StreamReply(Response):
    """Sends events as they come. `leave` is called however the stream ends, with whether it was sent to its end."""

    def __init__(self, events: AsyncIterator[dict[str, Any]], leave: Callable[[bool], None], binary: bool) -> None:
        super().__init__(media_type=MSGPACK if binary else "text/event-stream", headers={"Cache-Control": "no-store"})
        self._events, self._leave, self._binary = events, leave, binary
        self.raw_headers = [h for h in self.raw_headers if h[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def run() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": await frame(event, self._binary), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await _send_watched(receive, run(), self._leave)


class WholeReply(Response):
    """One body; `leave` is called with whether it was sent to its end before the caller hung up."""

    def __init__(self, body: bytes, status: int, binary: bool, leave: Callable[[bool], None] = lambda sent: None) -> None:
        super().__init__(body, status, CALL_HEADERS.get(status), media_type=MSGPACK if binary else "application/json")
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def run() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for at in range(0, len(self.body), CHUNK_BYTES):
                more = at + CHUNK_BYTES < len(self.body)
                await send({"type": "http.response.body", "body": self.body[at : at + CHUNK_BYTES], "more_body": more})

        await _send_watched(receive, run(), self._leave)
