"""Replies as bytes, JSON or msgpack: small ones at once, others in a thread and in small steps.

An encoder holds the interpreter's lock for as long as one call to it lasts, in a thread too, and the event loop waits for it. So what
is large is written part by part, and how large it is is estimated first, by as much of it as has to be seen to know.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]

from ...kernels.sampling_mask import SamplingMask
from ..wire import is_array, is_mask, jsonable, unpack_array

ASIDE_BYTES = 1 << 16
"""what is estimated to be of more is encoded in a thread: some 10 ms of JSON"""
STEP_BYTES = 1 << 14
"""of one call to an encoder"""
NUMBER_BYTES = 8
RUN = 64
"""small items of a list that are encoded together"""

_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def encode(value: Any, binary: bool) -> bytes:
    """msgpack, or strict JSON (see wire.jsonable), in one call."""
    if binary:
        packed: bytes = msgpack.packb(value)
        return packed
    return _json(jsonable(value)).encode()


def is_large(value: Any, limit_bytes: int) -> bool:
    """Whether encoding `value` gives more than about so many bytes: lists, columns and texts count, keys do not."""
    total, rest = 0, [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str | bytes):
            total += len(item) + NUMBER_BYTES
        elif is_array(item):
            total += 2 * len(item["data"])
        elif isinstance(item, dict | list | tuple):
            total += NUMBER_BYTES * len(item)
            if total <= limit_bytes:
                rest.extend(item.values() if isinstance(item, dict) else item)
        else:
            total += NUMBER_BYTES
        if total > limit_bytes:
            return True
    return False


async def encode_aside(value: Any, binary: bool) -> bytes:
    """`encode` that holds nobody up, whatever the size."""
    if not is_large(value, ASIDE_BYTES):
        return encode(value, binary)
    gone = threading.Event()
    try:
        return await asyncio.to_thread(encode_in_steps, value, binary, gone)
    finally:
        gone.set()


def encode_in_steps(value: Any, binary: bool, gone: threading.Event | None = None) -> bytes:
    """What `encode` gives; something shorter once nobody waits for it."""
    parts = _msgpack_parts(value) if binary else _json_parts(value)
    return b"".join(parts if gone is None else itertools.takewhile(lambda _: not gone.is_set(), parts))


def _runs(items: list[Any] | tuple[Any, ...]) -> Iterator[tuple[bool, Any]]:
    """(False, neighbours that are small together) and (True, a large item), in order."""
    run: list[Any] = []
    for item in items:
        large = isinstance(item, dict | list | tuple | str) and is_large(item, STEP_BYTES // RUN)
        if run and (large or len(run) == RUN):
            yield False, run
            run = []
        if large:
            yield True, item
        else:
            run.append(item)
    if run:
        yield False, run


def _json_parts(value: Any) -> Iterator[bytes]:
    if not isinstance(value, dict | list | tuple) or not is_large(value, STEP_BYTES):
        yield encode(value, binary=False)
    elif isinstance(value, dict) and is_array(value):
        yield from _json_parts(unpack_array(value))
    elif is_mask(value):
        yield from _mask_parts(value)
    elif isinstance(value, dict):
        for i, (key, item) in enumerate(value.items()):
            yield f"{',' if i else '{'}{_json(key)}:".encode()
            yield from _json_parts(item)
        yield b"}"
    else:
        opening = b"["
        for large, part in _runs(value):
            yield opening
            opening = b","
            if large:
                yield from _json_parts(part)
            else:
                yield encode(part, binary=False)[1:-1]
        yield b"]"


def _mask_parts(value: Any) -> Iterator[bytes]:
    """A mask, row by row: each is of no more than a bit per id."""
    yield f'{{"vocab_size":{value["vocab_size"]},"tokens":['.encode()
    for token, row in enumerate(SamplingMask.from_wire(value).json_rows()):
        yield ("," * (token > 0) + _json(row)).encode()
    yield b"]}"


def _msgpack_parts(value: Any) -> Iterator[bytes]:
    if is_array(value) or not isinstance(value, dict | list | tuple) or not is_large(value, STEP_BYTES):
        yield msgpack.packb(value)
    elif isinstance(value, dict):
        yield msgpack.Packer().pack_map_header(len(value))
        for key, item in value.items():
            yield msgpack.packb(key)
            yield from _msgpack_parts(item)
    else:
        yield msgpack.Packer().pack_array_header(len(value))
        for large, part in _runs(value):
            if large:
                yield from _msgpack_parts(part)
            else:
                yield from map(msgpack.packb, part)
