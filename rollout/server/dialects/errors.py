"""Errors as the engine writes them whose dialect a route speaks. Which, the route declares: `route(..., error=NAME)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import RollsyncError
from ...wire import error_to_wire

Shape = Callable[[BaseException, int], dict[str, Any]]
_VLLM_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    422: "UnprocessableEntityError",
    503: "ServiceUnavailableError",
}


def vllm_error(error: BaseException, status: int) -> dict[str, Any]:
    """{"error": {"message", "type", "param", "code"}}, `code` being the HTTP status."""
    wire = error_to_wire(error)
    kind = _VLLM_TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": wire["message"], "type": kind, "param": wire.get("field"), "code": status}}


def sglang_failure(error: BaseException, status: int) -> dict[str, Any]:
    """{"success": false, "message"}, and the error as our own routes tell it."""
    wire = error_to_wire(error)
    return {"success": False, "message": wire["message"], "error": wire}


SHAPES: dict[str, Shape] = {"VllmError": vllm_error, "SglangFailure": sglang_failure}
"""by the name of the error's component"""


def shaped(name: str | None, error: BaseException, status: int | None = None) -> dict[str, Any] | None:
    """The body of an error on a route that declares `name`; None if that is no dialect's."""
    shape = SHAPES.get(name or "")
    return shape and shape(error, status or (error.status if isinstance(error, RollsyncError) else 500))
