"""What a route takes and gives, declared beside the route: `@router.post(path, openapi_extra=route(...))`.

`openapi.py` makes `/openapi.json` of it, and docs/api.py makes docs/api.md of that. Bodies are tables of `checks.Field`;
replies are tables of `Item`. A schema is named by adding it to the components that app.py collects, and used by `ref(name)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..engine.params import Bound
from ..fields import field_docs
from ..wire import COLUMNS, MSGPACK, TABLES
from .checks import Schema, nullable, ref

JSON = "application/json"
SSE = "text/event-stream"

INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}

Needs = Literal["open", "traffic", "control"]


@dataclass(frozen=True, slots=True)
class Item:
    """One field of a reply."""

    name: str
    schema: Schema
    doc: str = ""
    always: bool = True
    """False: there only if asked for, or if it applies"""


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_MASK_IDS: Schema = {"type": "array", "items": {"type": "integer"}}
MASK: Schema = {
    "type": "object",
    "properties": {
        "vocab_size": {"type": "integer", "minimum": 0, "description": "ids that can be drawn at all are those below it"},
        "tokens": {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "null"},
                    _MASK_IDS,
                    {"type": "object", "properties": {"not": _MASK_IDS}, "required": ["not"]},
                    {"type": "object", "properties": {"bits": {"type": "string"}}, "required": ["bits"]},
                ]
            },
            "description": "per token null (every id), the ids, the ids left out, or a bit per id (base64 of little-endian int32 words)",
        },
    },
    "required": ["vocab_size", "tokens"],
    "x-msgpack-array": "mask",
}
"""of a sampling mask in JSON; in msgpack `tokens` is their number, and `data` holds the rows (kernels/sampling_mask.py)"""


def column(name: str) -> Schema:
    """A column of wire.COLUMNS: a list in JSON (null where a float is not finite), raw little-endian bytes in msgpack."""
    dtype = COLUMNS[name]
    if dtype == "mask":
        return MASK
    of = INTEGER if dtype[1] in "iu" else nullable(NUMBER)
    return {**array(array(of) if name in TABLES else of), "x-msgpack-array": dtype}


def reply_schema(doc: str, *items: Item, **more: Any) -> Schema:
    """An object with these fields; later versions may add more."""
    properties = {i.name: {**i.schema, **({"description": i.doc} if i.doc else {})} for i in items}
    return {"type": "object", "description": doc, "properties": properties, "required": [i.name for i in items if i.always], **more}


def of_hint(hint: Any) -> Schema:
    """The schema of a type annotation: scalars, lists and tuples of them, dicts, and unions."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kinds = [of_hint(a) for a in args if a is not NoneType]
        schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        return nullable(schema) if NoneType in args else schema
    if origin in (list, tuple):
        return array(of_hint(args[0]))
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": of_hint(args[1])}
    return {int: INTEGER, float: NUMBER, str: STRING, bool: BOOLEAN}[hint]


def _bounded(schema: Schema, bound: Bound) -> Schema:
    """`schema` with the bound on it, or on its values if it is an object of them."""
    if schema["type"] == "object":
        return {**schema, "additionalProperties": _bounded(schema["additionalProperties"], bound)}
    return {**schema, "exclusiveMinimum" if bound.above else "minimum": bound.low, "maximum": bound.high}


def of_dataclass(cls: type, bounds: Mapping[str, Bound], skip: tuple[str, ...] = (), **special: Schema) -> Schema:
    """A body whose fields are those of a dataclass: types, defaults, and docstrings from its source. null is as if left out.

    Args:
        bounds: of its numbers.
        skip: fields that are not in the body.
        special: schemas of fields whose annotation says too little.
    """
    docs, hints = field_docs(cls), get_type_hints(cls)
    properties: dict[str, Schema] = {}
    for f in fields(cls):
        if f.name in skip:
            continue
        schema = special.get(f.name) or of_hint(hints[f.name])
        shown = {**nullable(_bounded(schema, bounds[f.name]) if f.name in bounds else schema), "description": docs[f.name]}
        if f.default is not None and f.default is not MISSING:
            shown["default"] = list(f.default) if isinstance(f.default, tuple) else f.default
        properties[f.name] = shown
    return {"type": "object", "description": inspect.getdoc(cls) or "", "additionalProperties": False, "properties": properties}


def _content(schema: Schema, kinds: tuple[str, ...]) -> dict[str, Any]:
    return {kind: {"schema": schema} for kind in kinds}


def route(
    tag: str,
    needs: Needs,
    *,
    takes: str | None = None,
    gives: str | Schema | None = None,
    events: str | None = None,
    errors: tuple[int, ...] = (),
    error: str = "Error",
    also: dict[int, str | tuple[str, ...]] | None = None,
    kinds: tuple[str, ...] = (JSON, MSGPACK),
    parameters: tuple[Schema, ...] = (),
) -> dict[str, Any]:
    """What a route takes and gives, for its `openapi_extra`.

    Args:
        tag: the chapter of docs/api.md it stands in.
        needs: what a caller must show. "open": nothing, for what probes ask; "traffic": the API key; "control", for what changes the
            engine: the control token.
        takes: component of the body, if there is one; then 400, 408 and 413 are documented by themselves.
        gives: component (or schema) of the reply with status 200.
        events: component of one event of the stream that the body may ask for.
        errors: further statuses it answers with, each with the body `error`; 401, 403, 500 and 503 are documented everywhere.
        error: component of its errors; a dialect's shape is made by dialects/errors.py.
        also: statuses other than 200 with a reply of their own: component, or those it may be, by status.
        kinds: content types of body and reply.
        parameters: OpenAPI parameters; those of the path are found without.
    """
    given = ref(gives) if isinstance(gives, str) else gives or {}
    content = _content(given, kinds)
    if events is not None:
        content[SSE] = {"schema": ref(events)}
        if MSGPACK in kinds:  # a stream of frames has that type too
            content[MSGPACK] = {"schema": {"anyOf": [given, ref(events)]}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    for status, names in (also or {}).items():
        own = ref(names) if isinstance(names, str) else {"anyOf": [ref(name) for name in names]}
        responses[str(status)] = {"description": "", "content": _content(own, kinds)}
    error_kinds = kinds if JSON in kinds else (JSON,)
    for status in sorted({*errors, *((400, 408, 413) if takes else ()), 401, 403, 500, 503} - set(also or {})):
        responses[str(status)] = {"description": "", "content": _content(ref(error), error_kinds)}
    found: dict[str, Any] = {"tags": [tag], "x-needs": needs, "responses": responses}
    if error != "Error":
        found["x-error"] = error
    if takes is not None:
        found["requestBody"] = {"required": True, "content": _content(ref(takes), kinds)}
    if parameters:
        found["parameters"] = list(parameters)
    return found


def parameter(name: str, schema: Schema, doc: str, where: str = "query") -> Schema:
    """An OpenAPI parameter; `where` is "query", "path" or "header"."""
    return {"name": name, "in": where, "required": where == "path", "schema": schema, "description": doc}
