"""`/openapi.json`, from the routes and what each declares of itself (schemas.py)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from ..errors import sent_errors
from .checks import Schema
from .schemas import STRING, Item, parameter, reply_schema

STATUSES = {
    400: "The body, or a field of it, is wrong.",
    401: "The key or token is missing or wrong.",
    403: "Host or Origin is not this machine.",
    404: "No such thing.",
    408: "Out of time.",
    409: "The state does not allow it.",
    410: "Gone.",
    413: "The body is too large.",
    415: "A content type that is not taken.",
    422: "Understood, but it does not fit.",
    429: "Too many at once; try again later.",
    500: "A fault of the server's.",
    501: "Not in this version.",
    503: "Not now: loading, overloaded, or the engine is dead.",
}


def error_schema() -> Schema:
    """The body of every refusal; its codes are those of errors.py that a server sends."""
    codes = sorted({cls.code for cls in sent_errors()})
    inner = reply_schema(
        "What was wrong.",
        Item("code", {"type": "string", "enum": codes}, "the kind of error; docs/api.md lists them"),
        Item("message", STRING, "what came, what is allowed, what to do"),
        Item("field", STRING, "path of the field that is wrong, such as prompts[1].token_ids[0]", always=False),
    )
    return reply_schema("A refusal.", Item("error", inner))


def _operation(found: APIRoute, method: str) -> dict[str, Any]:
    extra = found.openapi_extra
    assert extra is not None, f"{found.path} declares nothing of itself"
    head, _, rest = (inspect.getdoc(found.endpoint) or "").partition("\n\n")
    responses = {}
    for status, response in sorted(extra["responses"].items()):
        responses[status] = {**response, "description": response["description"] or STATUSES[int(status)]}
    operation: dict[str, Any] = {
        "operationId": method.lower() + re.sub(r"\W+", "_", found.path).rstrip("_"),
        "summary": " ".join(head.split()),
        **({"description": " ".join(rest.split())} if rest else {}),
        **extra,
        "responses": responses,
    }
    named = {p["name"] for p in operation.get("parameters", ())}
    path = [parameter(n, STRING, "", "path") for n in re.findall(r"{(\w+)", found.path) if n not in named]
    return {**operation, **({"parameters": [*path, *operation.get("parameters", ())]} if path else {})}


def document(routes: Iterable[BaseRoute], version: str, components: dict[str, Schema]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of the routes that are in the schema, in their order."""
    paths: dict[str, Any] = {}
    for found in routes:
        if isinstance(found, APIRoute) and found.include_in_schema:
            path = re.sub(r":\w+}", "}", found.path)
            for method in sorted(found.methods or ()):
                paths.setdefault(path, {})[method.lower()] = _operation(found, method)
    schemes = {"key": {"type": "http", "scheme": "bearer", "description": "the API key or, for control routes, the control token"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rollsync", "version": version},
        "paths": paths,
        "components": {"schemas": {"Error": error_schema(), **components}, "securitySchemes": schemes},
        "security": [{}, {"key": []}],
    }
