"""Every error a caller can meet, in one table that HTTP maps to status codes."""

from __future__ import annotations

import reprlib
from typing import Any


def describe(error: BaseException) -> str:
    """The class and the first thousand characters of an exception, as text that every wire can carry."""
    try:
        words = str(error)
    except Exception:  # a class of the caller's whose words are a fault of their own
        words = "its message cannot be shown"
    return f"{type(error).__name__}: {words[:1000]}".encode(errors="backslashreplace").decode()


class RollsyncError(Exception):
    """Base of the named errors. `status` is the HTTP status a server answers with."""

    status = 500
    code = "internal"


class BadRequest(RollsyncError, ValueError):
    """The caller sent something that can never work. The message names the field, what came and what is allowed."""

    status = 400
    code = "bad_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(BadRequest):
    """A prompt (plus one token) exceeds the context or the whole KV pool."""

    code = "prompt_too_long"


class ModelNotFound(BadRequest):
    """The `model` of an OpenAI body is not the one that is served; the message names that."""

    status = 404
    code = "model_not_found"


class DuplicateRequest(RollsyncError):
    """The same `request_id` is still in flight."""

    status = 409
    code = "duplicate_request"


class IllegalState(RollsyncError):
    """The engine's state does not allow this verb; the message says which it does."""

    status = 409
    code = "illegal_state"


class UpdateRefused(RollsyncError):
    """A weight update does not fit the model or is not what the sender says; the message lists everything. The old weights serve on."""

    status = 422
    code = "update_refused"


class Overloaded(RollsyncError):
    """The waiting queue is full; try again later."""

    status = 503
    code = "overloaded"


class VersionUnavailable(RollsyncError):
    """The weights served are older than the `min_version` of a request that does not wait for newer ones; try again later."""

    status = 503
    code = "version_unavailable"


class EngineDead(RollsyncError):
    """The engine process ended or stopped answering; the message holds its last words."""

    status = 503
    code = "engine_dead"


class ShuttingDown(EngineDead):
    """The server was told to end; what was in flight is lost."""

    code = "shutting_down"


class UnknownUpdate(RollsyncError):
    """No weight update of this id is open or remembered."""

    status = 404
    code = "unknown_update"


class UnknownRequest(RollsyncError):
    """No call of this id is in flight or kept."""

    status = 404
    code = "unknown_request"


class DetachLimit(RollsyncError):
    """Calls with `detach_s` would keep more than the server allows; the message names both. Try again later, or ask for less."""

    status = 503
    code = "detach_limit"


class ConfigError(RollsyncError, ValueError):
    """A start-up setting cannot be used."""

    status = 400
    code = "config"


class UnsupportedModel(ConfigError):
    """The checkpoint's architecture, rope type or tensor layout is not one we compute; lists what is."""

    code = "unsupported_model"


class NotSupported(BadRequest):
    """The field is designed but this version does not have it."""

    code = "not_supported"


class NotReady(RollsyncError):
    """The engine is still loading; try again later."""

    status = 503
    code = "not_ready"


class BodyTooLarge(RollsyncError):
    """The body exceeds the server's limit; the message names it."""

    status = 413
    code = "body_too_large"


class BodyTooSlow(RollsyncError):
    """The body came too slowly; the message names the pace that is asked for."""

    status = 408
    code = "body_too_slow"


class Unauthorized(RollsyncError):
    """The route needs a key or the control token, which was not sent or is another."""

    status = 401
    code = "unauthorized"


class Forbidden(RollsyncError):
    """The call may come from a web page (its Host or Origin is not this machine), or control is not open to it here."""

    status = 403
    code = "forbidden"


class ServerUnreachable(RollsyncError):
    """No answer from the server, or the connection broke; the message says from which address and how."""

    status = 503
    code = "unreachable"


class NoSuchRoute(RollsyncError):
    """The path is not served, or not with this method (then 405); /openapi.json lists what is."""

    status = 404
    code = "http"


class ProtocolMismatch(RollsyncError):
    """Server and client are of versions that do not understand each other."""

    code = "protocol_mismatch"


def error_classes(root: type[RollsyncError] = RollsyncError) -> list[type[RollsyncError]]:
    """`root` and every class below it, each before those below it."""
    return [root, *(cls for sub in root.__subclasses__() for cls in error_classes(sub))]


def sent_errors() -> list[type[RollsyncError]]:
    """Those that a server answers with, one for each code; the others are met at start-up or made by the client."""
    sent = (cls for cls in error_classes() if not issubclass(cls, ConfigError | ServerUnreachable | ProtocolMismatch))
    return [cls for cls in sent if "code" in vars(cls)]


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def show_name(name: Any) -> str:
    """A name that came, such as a field's, for an error message: at most 80 characters."""
    text = str(name[:80] if isinstance(name, str | bytes) else name)
    return text if len(text) < 80 else text[:77] + "..."


def show(value: Any) -> str:
    """What came, of any size and depth, for an error message: at most 80 characters."""
    try:
        text = _SHORT.repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits
        text = f"an int of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
