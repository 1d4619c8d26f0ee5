"""Checks of what callers send, and tables of fields: validation, error messages and the OpenAPI schema all come from one table.

Validation is strict: an unknown field, one whose feature this version lacks, and a wrong type are each a 400 that names the
field by its path. What can only be judged per prompt (too long, an id outside the vocabulary, empty) fails that prompt alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]

from ..engine.types import INCLUDES, is_utf8
from ..errors import BadRequest, NotSupported
from ..wire import is_array, unpack_array

Check = Callable[[str, Any], Any]
"""(path, value) -> the value to use, or BadRequest"""
NOT_YET_INCLUDES = ("sampling_mask", "routed_experts")


def fail(path: str, allowed: str, value: Any) -> BadRequest:
    shown = repr(value)
    return BadRequest(f"{path} must be {allowed}, got {shown if len(shown) <= 80 else shown[:77] + '...'}", field=path)


def integer(low: int, high: int, allowed: str) -> Check:
    def check(path: str, value: Any) -> Any:
        if type(value) is not int or not low <= value <= high:
            raise fail(path, allowed, value)
        return value

    return check


def string(path: str, value: Any) -> Any:
    if not isinstance(value, str) or not value:
        raise fail(path, "a non-empty string", value)
    return text(path, value)


def text(path: str, value: Any) -> Any:
    if not isinstance(value, str):
        raise fail(path, "a string", value)
    if not is_utf8(value):
        raise fail(path, "text that UTF-8 can encode (no lone surrogate)", value)
    return value


def boolean(path: str, value: Any) -> Any:
    if not isinstance(value, bool):
        raise fail(path, "true or false", value)
    return value


def seconds(path: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise fail(path, "a finite number of seconds > 0", value)
    return float(value)


def token_ids(path: str, value: Any) -> Any:
    """A list of ints, or a wire array of them; whether each is in the vocabulary is judged per prompt."""
    if is_array(value):
        if value["dtype"] not in ("<i4", "<i8", "<u4", "<u8"):
            raise fail(f"{path}.dtype", "an integer dtype", value["dtype"])
        value = unpack_array(value, path)
    if not isinstance(value, list):
        raise fail(path, "a list of token ids", value)
    for i, token in enumerate(value):
        if type(token) is not int:
            raise fail(f"{path}[{i}]", "a token id (an int)", token)
    return tuple(value)


def messages(path: str, value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise fail(path, "a non-empty list of messages", value)
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise fail(f"{path}[{i}]", 'an object with a "role"', message)
    return value


def mapping(path: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise fail(path, "an object", value)
    return value


def template_variables(path: str, value: Any) -> Any:
    """Variables only: a caller's own template would be a program of any length on the server."""
    if "chat_template" in mapping(path, value):
        raise BadRequest(
            f"{path}.chat_template is not allowed: the model's template is used; render it yourself and send text",
            field=f"{path}.chat_template",
        )
    return value


def include(path: str, value: Any) -> Any:
    if not isinstance(value, list):
        raise fail(path, "a list of names", value)
    for i, name in enumerate(value):
        if name in NOT_YET_INCLUDES:
            known = ", ".join(INCLUDES)
            raise NotSupported(f"{path}[{i}]: {name!r} is not supported by this version (known: {known})", field=f"{path}[{i}]")
        if name not in INCLUDES:
            raise fail(f"{path}[{i}]", f"one of {', '.join(INCLUDES)}", name)
    return tuple(dict.fromkeys(value))


def items(path: str, value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise fail(path, "a non-empty list of prompts", value)
    return value


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    check: Check | None
    """None: designed, not in this version"""
    schema: dict[str, Any]
    doc: str


def decode_body(body: bytes, content_type: str) -> Any:
    """JSON or msgpack to Python values. NaN and Infinity are refused in JSON."""
    if "msgpack" in content_type:
        try:
            return msgpack.unpackb(body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not valid msgpack: {type(error).__name__}: {error}") from None

    def refuse(word: str) -> Any:
        raise BadRequest(f"the body holds {word}, which is not JSON: numbers must be finite")

    try:
        return json.loads(body, parse_constant=refuse)
    except BadRequest:
        raise
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None


def read(value: Any, table: tuple[Field, ...], path: str) -> dict[str, Any]:
    """The fields of `value` that are not null, checked by `table`."""
    where = f"{path}." if path else ""
    if not isinstance(value, dict):
        raise fail(path, "an object", value) if path else BadRequest(f"the body must be an object, got {type(value).__name__}")
    known = {f.name: f for f in table}
    checked = {}
    for name, item in value.items():
        field = known.get(name)
        if field is None:
            names = ", ".join(f.name for f in table if f.check)
            raise BadRequest(f"{where}{name} is not a known field (known: {names})", field=f"{where}{name}")
        if field.check is None:
            raise NotSupported(f"{where}{name} is not supported by this version", field=f"{where}{name}")
        if item is not None:
            checked[name] = field.check(f"{where}{name}", item)
    return checked


def object_schema(table: tuple[Field, ...]) -> dict[str, Any]:
    properties = {f.name: {**f.schema, "description": f.doc} if "$ref" not in f.schema else f.schema for f in table if f.check}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def check_vocabulary(path: str, ids: tuple[int, ...], size: int | None) -> None:
    """BadRequest if an id is outside [0, size): the rows of the embedding, so padding rows are accepted as input."""
    if ids and size is not None and (min(ids) < 0 or max(ids) >= size):
        i, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < size)
        raise BadRequest(f"{path}[{i}] must be a token id in [0, {size}), got {bad}", field=f"{path}[{i}]")
