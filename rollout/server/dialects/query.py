"""Parameters of the query, checked by the same tables as the fields of a body."""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request

from ...errors import BadRequest
from ..checks import Field, Schema, read
from ..schemas import parameter

_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
"""in any case: Python clients write True"""


def _kind(field: Field) -> str:
    found = field.schema.get("type", "string")
    return str(next(k for k in found if k != "null") if isinstance(found, list) else found)


def _value(kind: str, text: str) -> Any:
    """What `text` says, if it says one of that kind; else itself, which the field's check refuses."""
    if kind == "boolean":
        return _BOOLEANS.get(text.lower(), text)
    if kind == "integer" and len(text) <= 20 and text.removeprefix("-").isascii() and text.removeprefix("-").isdigit():
        return int(text)
    if kind == "number" and _NUMBER.fullmatch(text):
        return float(text)
    return text


def read_query(request: Request, table: tuple[Field, ...]) -> dict[str, Any]:
    """The query's parameters. BadRequest names the first that is unknown, wrong, or given twice and no list."""
    kinds = {f.name: _kind(f) for f in table if f.check}
    found: dict[str, Any] = {}
    for name, text in request.query_params.multi_items():
        kind = kinds.get(name, "string")
        if kind == "array":
            found.setdefault(name, []).append(text)
        elif name in found:
            raise BadRequest(f"{name} is given twice in the query", field=name)
        else:
            found[name] = _value(kind, text)
    return read(found, table, "")


def query_parameters(table: tuple[Field, ...]) -> tuple[Schema, ...]:
    """OpenAPI's words for `table`, for `route(parameters=...)`."""
    return tuple(parameter(f.name, f.check.schema, f.doc) for f in table if f.check)
