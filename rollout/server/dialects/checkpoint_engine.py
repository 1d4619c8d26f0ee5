"""checkpoint-engine's parameter server: weights in one buffer of shared memory, told of over a socket for each rank.

It calls over HTTP with its sockets and then speaks first on each (REQ; this end is REP): the buffer's handle, lists of tensors and where
they lie in it, None when the buffer goes away, None again at the end; or an exception when it gives up. An empty answer means done, any
other says what went wrong. Its messages are pickles, which are read for handles, names and numbers, and never unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import zmq
import zmq.asyncio
from fastapi import Request

from ...errors import BadRequest, NotSupported, RollsyncError, UpdateRefused, show
from ..checks import Field, boolean, check, fail, object_schema, string
from ..replies import until_disconnect
from .sglang_control import Message, controlled, fields, service_of
from .sglang_state import GROUP_S, SglangState
from .tensor_pickle import (
    ITEM_BYTES,
    MAX_PICKLE_BYTES,
    Budget,
    Called,
    Machine,
    Named,
    OtherObject,
    dtype_of,
    ints,
    read_handle,
    refused_in,
)

SCHEME = "ipc://"
"""of its sockets: nothing else is dialled"""
GIVE_UP_S = 30.0
"""how long it may take to say that it gives up, once it was told of an error"""
FIRST_S = 60.0
"""how long its first message may take: other calls that change weights, and a pause, wait for it"""
FAREWELL_S = 5.0
"""how long its last word is waited for, once the update is current"""
MAX_FRAME_BYTES = 16 * MAX_PICKLE_BYTES
"""what zmq takes at all: a longer message is dropped, so that one too long is mostly received, and refused in words"""
Handle = dict[str, Any]


@check({"type": "object", "minProperties": 1, "additionalProperties": {"type": "string", "pattern": "^ipc://", "maxLength": 100}})
def sockets(path: str, value: Any) -> Any:
    """By the UUID of a rank's device, where its parameter server listens."""
    if not isinstance(value, dict) or not value:
        raise fail(path, "an object with a socket for each rank's device", value)
    for device, address in value.items():
        where = f"{path}.{show(device)}"
        if not string(where, address).startswith(SCHEME) or len(address) > 100 or "\0" in address:
            raise fail(where, f"an address that begins with {SCHEME}", address, field=path)
    return value


IPC_FIELDS = (
    Field(
        "zmq_handles", sockets, "where the parameter server's ranks listen, by device UUID: one for each rank of this engine", required=True
    ),
    Field("flush_cache", boolean, "accepted: cached prefixes of older weights are never found"),
    Field("weight_version", string, "what the new weights are called; a number not below the current version becomes the version"),
    Field("torch_empty_cache", boolean, "accepted; nothing is cached"),
)


class Silence(UpdateRefused):
    """Nothing came in time: there is nothing to answer."""


class Lines:
    """The sockets to the parameter server's ranks, which move in step."""

    def __init__(self, addresses: dict[str, str], timeout_s: float) -> None:
        self.devices = list(addresses)
        self._timeout_s, self._where = timeout_s, ", ".join(addresses.values())
        self._context = zmq.asyncio.Context()
        self._sockets = []
        try:
            for address in addresses.values():
                socket = self._context.socket(zmq.REP)
                self._sockets.append(socket)
                socket.linger = 1000
                socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
                socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise BadRequest(f"zmq_handles: {show(address)} cannot be connected to: {error}", field="zmq_handles") from None

    async def take(self, most_s: float = math.inf) -> list[Any]:
        """The next message of every rank, as tensor_pickle.Machine reads it. Silence if none comes in time, or in `most_s` seconds."""
        wait_s = min(self._timeout_s, most_s)
        try:
            async with asyncio.timeout(wait_s):
                found = await asyncio.gather(*(socket.recv_multipart() for socket in self._sockets))
        except TimeoutError:
            raise Silence(f"the parameter server at {self._where} sent nothing for {wait_s:g} s") from None
        for parts in found:
            if len(parts) != 1:
                raise BadRequest(f"zmq_handles: a message must have one part, got {len(parts)}", field="zmq_handles")
        budget = Budget()
        with refused_in("zmq_handles"):
            return await asyncio.to_thread(lambda: [Machine(budget).run(data) for (data,) in found])

    async def answer(self, words: str = "") -> None:
        for socket in self._sockets:
            await socket.send(words.encode(errors="replace"))

    async def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        await asyncio.to_thread(self._context.term)  # until the last answer has left


def _buffer(value: Any, device: str) -> Handle:
    """The handle of a rank's buffer: what torch's reduce_tensor gave for it."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], Named) or not isinstance(value[1], tuple):
        raise BadRequest("the first message must be what torch.multiprocessing.reductions.reduce_tensor gives for the buffer")
    handle = read_handle(Called(value[0].path, value[1]), "the buffer")
    if handle["dtype"] != "uint8" or len(handle["shape"]) != 1 or handle["stride"] != [1]:
        raise BadRequest(f"the buffer must be one row of bytes, got {handle['dtype']} {handle['shape']}")
    # Processes may count devices differently; the UUID says which is meant.
    return {**handle, "device": device.removeprefix("GPU-")} if handle["kind"] == "cuda" else handle


def _entries(payload: Any, buffers: list[Handle]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(tensors, where each lies) of a list that the parameter server sent; `buffers` by rank."""
    if not isinstance(payload, list):
        raise BadRequest(f"a message must be a list of tensors, None or an exception, got {type(payload).__name__}")
    tensors, places = [], []
    for entry in payload:
        if not isinstance(entry, dict) or entry.keys() != {"name", "dtype", "shape", "offset"} or not isinstance(entry["name"], str):
            raise BadRequest("each tensor of a list must have name, dtype, shape and offset, and nothing else")
        name, dtype, shape = entry["name"], dtype_of(entry["dtype"]), list(ints(entry["shape"], "shape"))
        (at,), unit = ints((entry["offset"],), "offset"), ITEM_BYTES[dtype]
        tensors.append({"name": name, "dtype": dtype, "shape": shape})
        handles = []
        for buffer in buffers:
            if at + math.prod(shape) * unit > buffer["shape"][0] or (buffer["offset"] + at) % unit:
                raise BadRequest(f"{name} must lie in the buffer of {buffer['shape'][0]} bytes at a multiple of {unit}, got offset {at}")
            handles.append({"buffer": buffer, "dtype": dtype, "shape": shape, "begin": at})
        places.append({"handles": handles})
    return tensors, places


async def _converse(lines: Lines, state: SglangState, text: str | None) -> None:
    """Take buckets in until the parameter server has no more. What goes wrong is answered first: it then stops its other ranks, too."""
    buffers: list[Handle] | None = None
    failed: RollsyncError | None = None
    while True:
        try:
            messages = await lines.take(GIVE_UP_S if failed is not None else FIRST_S if buffers is None else math.inf)
            if all(message is None for message in messages):
                if failed is not None:
                    raise failed
                return
            if failed is None:
                with refused_in("zmq_handles"):
                    buffers = await _take_in(messages, buffers, lines, state, text)
        except RollsyncError as error:
            if failed is not None:
                raise failed from None
            if isinstance(error, Silence):
                raise
            if isinstance(error, OtherObject):  # the pickle of an exception: it waits for no answer
                raise UpdateRefused(f"the parameter server gave up: {error}") from None
            failed = error
        await lines.answer("" if failed is None else str(failed) or type(failed).__name__)


async def _take_in(messages: list[Any], buffers: list[Handle] | None, lines: Lines, state: SglangState, text: str | None) -> list[Handle]:
    """A message of every rank. The handles of the buffers by rank, which are the first message."""
    if buffers is None:
        return [_buffer(message, device) for message, device in zip(messages, lines.devices, strict=True)]
    if any(message != messages[0] for message in messages):
        raise BadRequest("the parameter server's ranks sent different lists")
    tensors, places = _entries(messages[0], buffers)
    await state.bucket(tensors, {"kind": "tensors"}, places, text=text, kv_policy="recompute")
    return buffers


async def _ended(lines: Lines, state: SglangState) -> str:
    """Commit. If that is refused the parameter server hears of it, too, though it only waits for an answer there."""
    try:
        if state.session is not None and not state.session.tensors:
            raise UpdateRefused("the parameter server sent no tensor")
        return await state.commit()
    except RollsyncError as error:
        await lines.answer(str(error))
        raise


async def _farewell(lines: Lines) -> None:
    """The buffer goes away, and the parameter server says its last word. Whatever it does, what was taken is taken."""
    with contextlib.suppress(RollsyncError, TimeoutError, zmq.ZMQError):
        async with asyncio.timeout(FAREWELL_S):
            await lines.answer()
            await lines.take(FAREWELL_S)
            await lines.answer()


async def follow(request: Request, state: SglangState, addresses: dict[str, str], text: str | None, timeout_s: float = GROUP_S) -> str:
    """One update of the parameter server, from its first message to the last. Words on what became of it.

    Raises:
        RollsyncError: the update is dropped, and what was served serves on.
    """
    if not request.app.state.allow_tensor_pickle:
        raise NotSupported(
            "checkpoint-engine's messages are pickles, which are not read unless the server is started with --allow-tensor-pickle",
            field="zmq_handles",
        )
    ranks = service_of(request).engine.config.tp
    if len(addresses) != ranks:
        raise BadRequest(
            f"zmq_handles must hold a socket for each of this engine's {ranks} ranks, got {len(addresses)}: "
            "with several engines, give each its own ranks' (inference_group_ranks)",
            field="zmq_handles",
        )
    async with state.turn():
        own = state.session is None or not state.session.begun
        lines = Lines(addresses, timeout_s)
        try:
            if own:
                await state.begin(whole=True)
            await until_disconnect(request.receive, _converse(lines, state, text))
            done = await _ended(lines, state) if own else "the tensors are taken; /end_weight_update makes them current"
            await _farewell(lines)
            return done
        except BaseException as error:  # one that /begin_weight_update opened, too: half of it must not become current at its end
            with contextlib.suppress(RollsyncError):
                await state.abort(f"{type(error).__name__}: {error}"[:500])
            raise
        finally:
            await lines.close()


@controlled("/update_weights_from_ipc", takes="SglangIpc")
async def update_weights_from_ipc(request: Request, state: SglangState) -> Message:
    """Take an update from checkpoint-engine's parameter server on this machine; answered once it is current. It must be a whole model.

    CPU buffers lie in torch's named shared memory; CUDA IPC is read too, but was not run on a GPU yet. Off without --allow-tensor-pickle.
    """
    got = await fields(request, IPC_FIELDS)
    return await follow(request, state, got["zmq_handles"], got.get("weight_version"))


COMPONENTS = {"SglangIpc": object_schema(IPC_FIELDS)}
