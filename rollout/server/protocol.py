"""ONE table of the fields of `POST /v1/rollouts`: validation, error messages and the OpenAPI schema all come from it.

Validation is strict: an unknown field, one whose feature this version lacks, and a wrong type are each a 400 that names the
field by its path. What can only be judged per prompt (too long, an id outside the vocabulary, empty) fails that prompt alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import msgpack  # type: ignore[import-untyped]

from ..engine.types import INCLUDES, MAX_SAMPLES, U64, SamplingParams, is_utf8
from ..errors import BadRequest, NotSupported
from ..fields import field_docs
from ..wire import is_array, unpack_array

Check = Callable[[str, Any], Any]
"""(path, value) -> the value to use, or BadRequest"""
NOT_YET_INCLUDES = ("sampling_mask", "routed_experts")


def _fail(path: str, allowed: str, value: Any) -> BadRequest:
    shown = repr(value)
    return BadRequest(f"{path} must be {allowed}, got {shown if len(shown) <= 80 else shown[:77] + '...'}", field=path)


def integer(low: int, high: int, allowed: str) -> Check:
    def check(path: str, value: Any) -> Any:
        if type(value) is not int or not low <= value <= high:
            raise _fail(path, allowed, value)
        return value

    return check


def string(path: str, value: Any) -> Any:
    if not isinstance(value, str) or not value:
        raise _fail(path, "a non-empty string", value)
    return text(path, value)


def text(path: str, value: Any) -> Any:
    if not isinstance(value, str):
        raise _fail(path, "a string", value)
    if not is_utf8(value):
        raise _fail(path, "text that UTF-8 can encode (no lone surrogate)", value)
    return value


def boolean(path: str, value: Any) -> Any:
    if not isinstance(value, bool):
        raise _fail(path, "true or false", value)
    return value


def seconds(path: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise _fail(path, "a finite number of seconds > 0", value)
    return float(value)


def token_ids(path: str, value: Any) -> Any:
    """A list of ints, or a wire array of them; whether each is in the vocabulary is judged per prompt."""
    if is_array(value):
        if value["dtype"] not in ("<i4", "<i8", "<u4", "<u8"):
            raise _fail(f"{path}.dtype", "an integer dtype", value["dtype"])
        value = unpack_array(value, path)
    if not isinstance(value, list):
        raise _fail(path, "a list of token ids", value)
    for i, token in enumerate(value):
        if type(token) is not int:
            raise _fail(f"{path}[{i}]", "a token id (an int)", token)
    return tuple(value)


def messages(path: str, value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise _fail(path, "a non-empty list of messages", value)
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _fail(f"{path}[{i}]", 'an object with a "role"', message)
    return value


def mapping(path: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise _fail(path, "an object", value)
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
        raise _fail(path, "a list of names", value)
    for i, name in enumerate(value):
        if name in NOT_YET_INCLUDES:
            known = ", ".join(INCLUDES)
            raise NotSupported(f"{path}[{i}]: {name!r} is not supported by this version (known: {known})", field=f"{path}[{i}]")
        if name not in INCLUDES:
            raise _fail(f"{path}[{i}]", f"one of {', '.join(INCLUDES)}", name)
    return tuple(dict.fromkeys(value))


def items(path: str, value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise _fail(path, "a non-empty list of prompts", value)
    return value


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    check: Check | None
    """None: designed, not in this version"""
    schema: dict[str, Any]
    doc: str


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_INT = {"type": "integer"}
_STR = {"type": "string"}
_SAMPLING = {"$ref": "#/components/schemas/SamplingParams"}
_seed = integer(0, U64 - 1, "an int in [0, 2**64)")
_max_tokens = integer(0, 1 << 31, "an int >= 0")
_first = integer(0, (1 << 32) - MAX_SAMPLES, f"an int in [0, 2**32 - {MAX_SAMPLES}]")


def _later(*names: str) -> tuple[Field, ...]:
    return tuple(Field(name, None, {}, "not in this version") for name in names)


PROMPT_FIELDS = (
    Field("token_ids", token_ids, _IDS, "the prompt as ids; give exactly one of token_ids, text, messages"),
    Field("text", text, _STR, "the prompt as text, tokenised by the server; no special token is added"),
    Field("messages", messages, {"type": "array", "items": {"type": "object"}}, "a chat, rendered by the model's template"),
    Field("chat_template_kwargs", template_variables, {"type": "object"}, "variables for the template (only with messages)"),
    Field("max_tokens", _max_tokens, _INT, "overrides sampling_params.max_tokens"),
    Field("seed", _seed, _INT, "overrides sampling_params.seed"),
    Field("first_sample", _first, _INT, "index of the first sample in the seed's stream; default: equal prompts of one seed count on"),
    Field("continue_from", token_ids, _IDS, "output tokens already sampled (n = 1); sampling goes on after them, bit for bit"),
    Field("forced_token_ids", token_ids, _IDS, "output tokens given instead of sampled; they are scored"),
)

ENVELOPE_FIELDS = (
    Field("prompts", items, {"type": "array", "items": {"$ref": "#/components/schemas/Prompt"}, "minItems": 1}, "one or more prompts"),
    Field("n", integer(1, MAX_SAMPLES, f"an int in [1, {MAX_SAMPLES}]"), _INT, "samples per prompt; default 1"),
    Field("sampling_params", mapping, _SAMPLING, "how to choose tokens; default: temperature 1, nothing else"),
    Field("include", include, {"type": "array", "items": {"enum": list(INCLUDES)}}, "what to return besides ids and logprobs"),
    Field("request_id", string, _STR, "name of this call, for abort; 409 while one of that name is in flight"),
    Field("group", string, _STR, "name shared by calls that are aborted together"),
    Field("session", string, _STR, "name of the conversation or worker this belongs to, for abort"),
    Field("priority", integer(-(1 << 31), 1 << 31, "an int"), _INT, "lower is admitted earlier and preempted later; default 0"),
    Field("stream", boolean, {"type": "boolean"}, "reply as a stream, one event per finished sample"),
    Field("deadline_s", seconds, {"type": "number"}, 'seconds until the rest ends with its partial output and abort_reason "deadline"'),
    *_later("min_version", "max_version_lag", "detach_s", "on_unavailable"),
)

SAMPLING_LATER = ("logit_bias", "allowed_token_ids", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """One prompt as sent: exactly one of `ids`, `text`, `messages`."""

    ids: tuple[int, ...] | None
    text: str | None
    messages: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any]
    params: SamplingParams
    first_sample: int | None
    continue_from: tuple[int, ...]
    forced_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RolloutCall:
    """A valid body of `POST /v1/rollouts`."""

    prompts: list[PromptSpec]
    include: tuple[str, ...]
    request_id: str | None
    group: str | None
    session: str | None
    priority: int
    stream: bool
    deadline_s: float | None


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


def _read(value: Any, table: tuple[Field, ...], path: str) -> dict[str, Any]:
    """The fields of `value` that are not null, checked by `table`."""
    where = f"{path}." if path else ""
    if not isinstance(value, dict):
        raise _fail(path, "an object", value) if path else BadRequest(f"the body must be an object, got {type(value).__name__}")
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


def _sampling(wire: dict[str, Any], path: str) -> SamplingParams:
    """SamplingParams of `wire`; errors name the field by `path`."""
    for name in SAMPLING_LATER:
        if name in wire:
            raise NotSupported(f"{path}.{name} is not supported by this version", field=f"{path}.{name}")
    for name in ("stop_token_ids",):
        if wire.get(name) is not None:
            wire = {**wire, name: token_ids(f"{path}.{name}", wire[name])}
    if not isinstance(wire.get("stop", []), str | list | None):
        raise _fail(f"{path}.stop", "a string or a list of strings", wire["stop"])
    try:
        return SamplingParams.from_wire({k: v for k, v in wire.items() if v is not None})
    except BadRequest as error:
        name = (error.field or "").split("[")[0]
        message = str(error) if str(error).startswith(path) else f"{path}.{error}"
        raise BadRequest(message, field=f"{path}.{name}" if name else path) from None


def _prompt(value: Any, path: str, sampling: dict[str, Any], n: int) -> PromptSpec:
    got = _read(value, PROMPT_FIELDS, path)
    kinds = [k for k in ("token_ids", "text", "messages") if k in got]
    if len(kinds) != 1:
        raise BadRequest(f"{path} must have exactly one of token_ids, text, messages; got {', '.join(kinds) or 'none'}", field=path)
    if "chat_template_kwargs" in got and kinds != ["messages"]:
        raise BadRequest(f"{path}.chat_template_kwargs needs messages", field=f"{path}.chat_template_kwargs")
    if "continue_from" in got and n != 1:
        raise BadRequest(f"{path}.continue_from needs n = 1, got n = {n}", field=f"{path}.continue_from")
    if "continue_from" in got and "forced_token_ids" in got:
        raise BadRequest(f"{path}: give continue_from or forced_token_ids, not both", field=f"{path}.continue_from")
    own: dict[str, Any] = {k: got[k] for k in ("max_tokens", "seed") if k in got}
    return PromptSpec(
        ids=got.get("token_ids"),
        text=got.get("text"),
        messages=got.get("messages"),
        chat_template_kwargs=got.get("chat_template_kwargs", {}),
        params=_sampling({**sampling, **own, "n": n}, path if own else "sampling_params"),
        first_sample=got.get("first_sample"),
        continue_from=got.get("continue_from", ()),
        forced_token_ids=got.get("forced_token_ids", ()),
    )


def parse_rollouts(body: Any, max_prompts: int = 65536) -> RolloutCall:
    """Check a decoded body of `POST /v1/rollouts`. BadRequest names the first field that is wrong."""
    got = _read(body, ENVELOPE_FIELDS, "")
    if "prompts" not in got:
        raise BadRequest("prompts is missing: give a list of prompts", field="prompts")
    if len(got["prompts"]) > max_prompts:
        raise BadRequest(f"prompts must hold at most {max_prompts} prompts, got {len(got['prompts'])}", field="prompts")
    n, sampling = got.get("n", 1), got.get("sampling_params", {})
    if "n" in sampling:
        raise BadRequest("sampling_params.n is not a field here: give n beside prompts", field="sampling_params.n")
    _sampling(sampling, "sampling_params")
    return RolloutCall(
        prompts=[_prompt(p, f"prompts[{i}]", sampling, n) for i, p in enumerate(got["prompts"])],
        include=got.get("include", ()),
        request_id=got.get("request_id"),
        group=got.get("group"),
        session=got.get("session"),
        priority=got.get("priority", 0),
        stream=got.get("stream", False),
        deadline_s=got.get("deadline_s"),
    )


ABORT_FIELDS = (
    Field("request_id", string, _STR, "the call of this name"),
    Field("group", string, _STR, "all calls of this group"),
    Field("session", string, _STR, "all calls of this session"),
    Field("all", boolean, {"type": "boolean"}, "every call"),
    Field("reason", string, _STR, 'what the partial outputs say as abort_reason; default "aborted by request"'),
)


def parse_abort(body: Any) -> tuple[str, Any, str]:
    """("request_id" | "group" | "session" | "all", its value, reason) of a body of `POST /v1/engine/abort`."""
    got = _read(body, ABORT_FIELDS, "")
    reason = got.pop("reason", "aborted by request")
    chosen = [(k, v) for k, v in got.items() if v is not False]
    if len(chosen) != 1:
        raise BadRequest(f"give exactly one of request_id, group, session, all: true; got {', '.join(k for k, _ in chosen) or 'none'}")
    return *chosen[0], reason


def _object(table: tuple[Field, ...]) -> dict[str, Any]:
    properties = {f.name: {**f.schema, "description": f.doc} if "$ref" not in f.schema else f.schema for f in table if f.check}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def schemas() -> dict[str, Any]:
    """OpenAPI component schemas of the request bodies."""
    docs = field_docs(SamplingParams)
    sampling = {f.name: {"description": docs.get(f.name, "")} for f in fields(SamplingParams) if f.name != "n"}
    return {
        "Prompt": _object(PROMPT_FIELDS),
        "SamplingParams": {"type": "object", "additionalProperties": False, "properties": sampling},
        "Rollouts": {**_object(ENVELOPE_FIELDS), "required": ["prompts"]},
        "Abort": _object(ABORT_FIELDS),
    }


def check_vocabulary(path: str, ids: tuple[int, ...], size: int | None) -> None:
    """BadRequest if an id is outside [0, size): the rows of the embedding, so padding rows are accepted as input."""
    if ids and size is not None and (min(ids) < 0 or max(ids) >= size):
        i, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < size)
        raise BadRequest(f"{path}[{i}] must be a token id in [0, {size}), got {bad}", field=f"{path}[{i}]")
