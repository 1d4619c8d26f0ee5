"""Checks of what callers send, and tables of fields: validation, error messages, OpenAPI and docs/api.md come from one table.

Validation is strict: an unknown field, one whose feature this version lacks, and a wrong type are each a 400 that names the
field by its path. What can only be judged per prompt (too long, an id outside the vocabulary, empty) fails that prompt alone.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]

from ..engine.params import MAX_LOGIT_BIAS, MAX_STOP_CHARS, MAX_STOPS, is_utf8
from ..engine.types import INCLUDES
from ..errors import BadRequest, NotSupported, show, show_name
from ..fields import did_you_mean
from ..wire import is_array, unpack_array
from . import json_steps

NOT_YET_INCLUDES = ("routed_experts",)
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Check:
    """What a value must be: `run` (path, value) gives the value to use or raises BadRequest; `schema` says the same in JSON Schema.

    The schema is never narrower than `run`, and wider only where a schema cannot say it (a vocabulary, UTF-8).
    """

    run: Callable[[str, Any], Any]
    schema: Schema

    def __call__(self, path: str, value: Any) -> Any:
        return self.run(path, value)


def check(schema: Schema) -> Callable[[Callable[[str, Any], Any]], Check]:
    """Decorator: a check function and the schema of what it lets pass."""
    return lambda run: Check(run, schema)


def plain(path: str, value: Any) -> Any:
    """`value`, as deep as it may be, if it holds only what JSON can say and UTF-8 can carry: templates and tokenizers take nothing else."""
    rest = [(path, value)]
    while rest:
        where, item = rest.pop()
        if isinstance(item, dict):
            for key in item:
                if not isinstance(key, str) or not is_utf8(key):
                    raise fail(f"a key in {where}", "text that UTF-8 can encode (no lone surrogate)", key, field=where)
            rest.extend((f"{where}.{show_name(key)}", inner) for key, inner in reversed(item.items()))
        elif isinstance(item, list | tuple):
            rest.extend((f"{where}[{i}]", item[i]) for i in reversed(range(len(item))))
        elif isinstance(item, float) and not math.isfinite(item):
            raise BadRequest(f"{where} must be a finite number, got {item} (numbers must be finite)", field=where)
        elif isinstance(item, str):
            text(where, item)
        elif item is not None and not isinstance(item, bool | int | float):
            raise fail(where, "a value that JSON can say", item)
    return value


def fail(path: str, allowed: str, value: Any, field: str | None = None) -> BadRequest:
    """The refusal of `value`, which may be of any size or depth; `field` if it is not `path`."""
    return BadRequest(f"{path} must be {allowed}, got {show(value)}", field=field or path)


def integer(low: int, high: int, allowed: str = "") -> Check:
    """An int in [low, high]."""
    words = allowed or f"an int in [{low}, {high}]"

    @check({"type": "integer", "minimum": low, "maximum": high})
    def run(path: str, value: Any) -> Any:
        if type(value) is not int or not low <= value <= high:
            raise fail(path, words, value)
        return value

    return run


def number(low: float, high: float, allowed: str = "") -> Check:
    """A finite number in [low, high]."""
    words = allowed or f"a number in [{low:g}, {high:g}]"

    @check({"type": "number", "minimum": low, "maximum": high})
    def run(path: str, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise fail(path, words, value)
        return float(value)

    return run


def choice(*names: str) -> Check:
    """One of these strings."""

    @check({"type": "string", "enum": list(names)})
    def run(path: str, value: Any) -> Any:
        if not isinstance(value, str) or value not in names:
            raise fail(path, f"one of {', '.join(names)}", value)
        return value

    return run


def names(*allowed: str) -> Check:
    """A list of some of these strings, each counted once."""

    @check({"type": "array", "items": {"type": "string", "enum": list(allowed)}})
    def run(path: str, value: Any) -> Any:
        if not isinstance(value, list):
            raise fail(path, f"a list of {', '.join(allowed)}", value)
        for i, name in enumerate(value):
            if not isinstance(name, str) or name not in allowed:
                raise fail(f"{path}[{i}]", f"one of {', '.join(allowed)}", name)
        return list(dict.fromkeys(value))

    return run


def ref(name: str) -> Schema:
    """The component schema of this name (see openapi.py)."""
    return {"$ref": f"#/components/schemas/{name}"}


def objects(component: str, noun: str) -> Check:
    """A non-empty list; whoever calls reads each item by the table of `component`."""

    @check({"type": "array", "minItems": 1, "items": ref(component)})
    def run(path: str, value: Any) -> Any:
        if not isinstance(value, list) or not value:
            raise fail(path, f"a non-empty list of {noun}", value)
        return value

    return run


def described_by(component: str) -> Check:
    """An object; whoever calls reads it by the table of `component`."""
    return Check(mapping.run, ref(component))


@check({"type": "string", "minLength": 1})
def string(path: str, value: Any) -> Any:
    if not isinstance(value, str) or not value:
        raise fail(path, "a non-empty string", value)
    return text(path, value)


@check({"type": "array", "items": {"type": "string", "minLength": 1}})
def strings(path: str, value: Any) -> Any:
    if not isinstance(value, list):
        raise fail(path, "a list of non-empty strings", value)
    return [string(f"{path}[{i}]", item) for i, item in enumerate(value)]


@check({"type": "string"})
def text(path: str, value: Any) -> Any:
    if not isinstance(value, str):
        raise fail(path, "a string", value)
    if not is_utf8(value):
        raise fail(path, "text that UTF-8 can encode (no lone surrogate)", value)
    return value


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}


@check({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]})
def stops(path: str, value: Any) -> Any:
    """A tuple of stop strings."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or len(listed) > MAX_STOPS:
        raise fail(path, f"a string or a list of at most {MAX_STOPS} strings", value)
    for i, item in enumerate(listed):
        where = path if isinstance(value, str) else f"{path}[{i}]"
        if len(string(where, item)) > MAX_STOP_CHARS:
            raise fail(where, f"a string of at most {MAX_STOP_CHARS} characters", item)
    return tuple(listed)


@check({"type": "boolean"})
def boolean(path: str, value: Any) -> Any:
    if not isinstance(value, bool):
        raise fail(path, "true or false", value)
    return value


@check({"type": "number", "exclusiveMinimum": 0})
def seconds(path: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise fail(path, "a finite number of seconds > 0", value)
    return float(value)


@check({"type": "array", "items": {"type": "integer", "minimum": 0}, "x-msgpack-array": "<i4"})
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


_MESSAGE = {"type": "object", "required": ["role"], "properties": {"role": {"type": "string"}}}


@check({"type": "array", "minItems": 1, "items": _MESSAGE})
def messages(path: str, value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise fail(path, "a non-empty list of messages", value)
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise fail(f"{path}[{i}]", 'an object with a "role"', message)
    return plain(path, value)


@check({"type": "object"})
def mapping(path: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise fail(path, "an object", value)
    return value


@check({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}, "maxProperties": MAX_LOGIT_BIAS})
def logit_bias(path: str, value: Any) -> Any:
    """An object of so many values; what they must be is SamplingParams' to say."""
    if len(mapping(path, value)) > MAX_LOGIT_BIAS:
        raise BadRequest(f"{path} must name at most {MAX_LOGIT_BIAS} ids, got {len(value)}", field=path)
    return value


@check({"type": "object"})
def template_variables(path: str, value: Any) -> Any:
    """Variables only: a caller's own template would be a program of any length on the server."""
    if "chat_template" in mapping(path, value):
        raise BadRequest(
            f"{path}.chat_template is not allowed: the model's template is used; render it yourself and send text",
            field=f"{path}.chat_template",
        )
    return plain(path, value)


@check({"type": "array", "items": {"type": "string", "enum": list(INCLUDES)}})
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


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body. null is as if left out, unless the field is required."""

    name: str
    check: Check | None
    """None: designed, not in this version"""
    doc: str = "not in this version"
    default: Any = None
    """what is used when it is left out, if one value says it; shown, not filled in"""
    required: bool = False

    @property
    def schema(self) -> Schema:
        assert self.check is not None
        found = self.check.schema if self.required else nullable(self.check.schema)
        return {**found, "description": self.doc, **({} if self.default is None else {"default": self.default})}


def nullable(schema: Schema) -> Schema:
    """`schema`, or null."""
    if isinstance(schema.get("type"), list) and "null" in schema["type"]:
        return schema
    if "enum" in schema:
        return {**schema, "type": [schema["type"], "null"], "enum": [*schema["enum"], None]}
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """An object of its pairs; which of two values is meant cannot be known, so a key given twice is refused."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise BadRequest(f"the body gives {show(twice)} twice in one object", field=show_name(twice))
    return found


def _no_constant(word: str) -> Any:
    raise BadRequest(f"the body holds {word}, which is not JSON: numbers must be finite")


def decode_body(body: bytes, content_type: str, in_steps: bool = False) -> Any:
    """msgpack or strict JSON (UTF-8; no NaN, no Infinity) to Python values. BadRequest if it is neither, or gives a key twice.

    In steps, other threads get a turn meanwhile.
    """
    binary = "msgpack" in content_type
    try:
        if binary:
            return msgpack.unpackb(body, object_pairs_hook=_once)
        loads = json_steps.loads if in_steps else json.loads
        return loads(body.decode(), parse_constant=_no_constant, object_pairs_hook=_once)
    except BadRequest:
        raise
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid {'msgpack' if binary else 'JSON'}: {type(error).__name__}: {error}") from None


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
            names, shown = ", ".join(f.name for f in table if f.check), show_name(name)
            hint = did_you_mean(shown, known)
            raise BadRequest(f"{where}{shown} is not a known field{hint} (known: {names})", field=f"{where}{shown}")
        if field.check is None:
            raise NotSupported(f"{where}{name} is not supported by this version", field=f"{where}{name}")
        if item is not None:
            checked[name] = field.check(f"{where}{name}", item)
    for field in table:
        if field.required and field.name not in checked:
            raise BadRequest(f"{where}{field.name} is missing: give {field.doc}", field=f"{where}{field.name}")
    return checked


def object_schema(table: tuple[Field, ...], doc: str = "", **more: Any) -> Schema:
    """The schema of a body that `read` checks by `table`."""
    shown = [f for f in table if f.check]
    schema: Schema = {"type": "object", **({"description": doc} if doc else {}), "additionalProperties": False}
    schema["properties"] = {f.name: f.schema for f in shown}
    required = [f.name for f in shown if f.required]
    return {**schema, **({"required": required} if required else {}), **more}


def check_made(path: str, ids: tuple[int, ...], size: int | None) -> None:
    """`check_vocabulary` of ids that the tokenizer made of the text at `path`."""
    if ids and size is not None and (min(ids) < 0 or max(ids) >= size):
        bad = next(t for t in ids if not 0 <= t < size)
        words = f"token id {bad}, which this model does not have (its ids are below {size}): tokenizer and model do not fit"
        raise BadRequest(f"{path} makes {words}", field=path)


def check_vocabulary(path: str, ids: tuple[int, ...], size: int | None) -> None:
    """BadRequest if an id is outside [0, size): the rows of the embedding, so padding rows are accepted as input."""
    if ids and size is not None and (min(ids) < 0 or max(ids) >= size):
        i, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < size)
        raise BadRequest(f"{path}[{i}] must be a token id in [0, {size}), got {bad}", field=f"{path}[{i}]")
