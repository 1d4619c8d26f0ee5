"""Errors as OpenAI writes them, on OpenAI's paths."""

from __future__ import annotations

from typing import Any

from ..errors import RollsyncError
from ..wire import error_to_wire

_PATHS = ("/v1/completions", "/v1/chat", "/v1/models")
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}


def is_openai(path: str) -> bool:
    """Whether answers on this path, errors too, are OpenAI's."""
    return any(path == p or path.startswith(f"{p}/") for p in _PATHS)


def error_body(error: BaseException, status: int | None = None) -> dict[str, Any]:
    """{"error": {"message", "type", "param", "code"}}; `code` is the same as on the other routes. `status`: if not the error's own."""
    status = status or (error.status if isinstance(error, RollsyncError) else 500)
    wire = error_to_wire(error)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": wire["message"], "type": kind, "param": wire.get("field"), "code": wire["code"]}}


def retry_headers(status: int) -> dict[str, str]:
    """OpenAI's client repeats what failed with 409 or 5xx by itself; only "not now" is worth that."""
    return {} if status in (408, 429, 503) else {"x-should-retry": "false"}
