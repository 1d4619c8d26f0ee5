"""How schemathesis packs and reads msgpack; loaded by its command line (SCHEMATHESIS_HOOKS)."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import schemathesis
from rollsync.rollout.wire import jsonable

NOT_MSGPACK = b"\xc1"


@schemathesis.serializer("application/msgpack")
def pack(context: Any, value: Any) -> bytes:
    try:
        return msgpack.packb(value)
    except (OverflowError, ValueError, TypeError):  # an int of more than 64 bits, a lone surrogate
        return NOT_MSGPACK


@schemathesis.deserializer("application/msgpack")
def unpack(context: Any, response: Any) -> Any:
    """The reply with arrays as lists; of a stream its last frame."""
    content, last = response.content, None
    while len(content) >= 4 and (end := 4 + struct.unpack_from("<I", content)[0]) <= len(content):
        last, content = content[4:end], content[end:]
    return jsonable(msgpack.unpackb(response.content if last is None or content else last))
