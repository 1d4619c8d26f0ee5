"""The fields of `POST /v1/rollouts` and `POST /v1/engine/abort`, and what becomes of them."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field
from typing import Any

from ..engine.params import MAX_IDS, MAX_SAMPLES, SAMPLING_BOUNDS, SAMPLING_NAMES, U64, SamplingParams
from ..engine.types import ON_UNAVAILABLE, VERSION_LIMIT
from ..errors import BadRequest
from ..fields import is_message
from ..wire import is_array
from .checks import (
    Field,
    Schema,
    boolean,
    check,
    choice,
    described_by,
    fail,
    include,
    integer,
    logit_bias,
    messages,
    number,
    object_schema,
    objects,
    read,
    seconds,
    stops,
    string,
    template_variables,
    text,
    token_ids,
)
from .schemas import of_dataclass

MAX_ADDRESS_CHARS = 1024
_seed = integer(0, U64 - 1, "an int in [0, 2**64)")
_max_tokens = integer(0, 1 << 31, "an int >= 0")
_first = integer(0, (1 << 32) - MAX_SAMPLES, f"an int in [0, 2**32 - {MAX_SAMPLES}]")
_start = integer(0, 1 << 31, "an int >= 0")
_STREAM_DOC = (
    'reply as a stream: "samples" (or true) sends each sample when it is finished; "tokens" also sends its tokens as they come. '
    "The deltas of a sample add up to the sample, which follows them whole"
)
MAX_CALL_SAMPLES = 1 << 16
"""of all prompts of one call"""
_DETACH_DOC = (
    "seconds for which a dropped connection is no reason to end the call: it goes on, its reply is kept until it is read, and "
    "GET /v1/rollouts/{id} re-attaches. A call that does not stream needs a request_id for that; of a stream the start event tells the id"
)
_UNAVAILABLE_DOC = (
    '"queue": wait while the engine is paused or asleep, or for min_version (while it loads, 503); "refuse": 409 at once, and '
    "503 for min_version. Weights that are invalid are 409 in any case. Each with Retry-After"
)
_MIN_VERSION_DOC = "oldest weights that may make tokens; the call waits for them to be committed"
_LAG_DOC = 'a sample ends with abort_reason "max_version_lag" once the version served exceeds that of its first token by more than this'


@check({"anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["samples", "tokens"]}]})
def _stream(path: str, value: Any) -> str:
    """What RolloutCall.stream says."""
    if isinstance(value, bool):
        return "samples" if value else ""
    if value not in ("samples", "tokens"):
        raise fail(path, 'true, false, "samples" or "tokens"', value)
    return str(value)


TEXT_FIELDS = (
    Field("skip_special_tokens", boolean, "leave special tokens out of the text; ids are never changed", default=True),
    Field("spaces_between_special_tokens", boolean, "put a space between a special token and what stands beside it", default=False),
)

PROMPT_FIELDS = (
    Field("token_ids", token_ids, "the prompt as ids; give exactly one of token_ids, text, messages"),
    Field("text", text, "the prompt as text, tokenised by the server; no special token is added"),
    Field("messages", messages, "a chat, rendered by the model's template"),
    Field("chat_template_kwargs", template_variables, "variables for the template (only with messages)"),
    Field("max_tokens", _max_tokens, "overrides sampling_params.max_tokens"),
    Field("seed", _seed, "overrides sampling_params.seed"),
    Field("first_sample", _first, "index of the first sample in the seed's stream; left out, equal prompts of one seed count on"),
    Field("continue_from", token_ids, "output tokens already sampled (n = 1); sampling goes on after them, bit for bit"),
    Field("forced_token_ids", token_ids, "output tokens given instead of sampled; they are scored"),
    Field("prompt_logprobs_start", _start, "overrides that of the call"),
)

VERSION_FIELDS = (
    Field("on_unavailable", choice(*ON_UNAVAILABLE), _UNAVAILABLE_DOC, default="queue"),
    Field("min_version", integer(0, VERSION_LIMIT, "an int in [0, 2**63)"), _MIN_VERSION_DOC),
    Field("max_version_lag", integer(0, VERSION_LIMIT, "an int in [0, 2**63)"), _LAG_DOC),
)
"""of every call that samples or scores"""

CACHE_SALT = Field("cache_salt", string, "cached prefixes are shared only by calls of the same salt; new weights need none")
ENVELOPE_FIELDS = (
    Field("prompts", objects("Prompt", "prompts"), "one or more prompts", required=True),
    Field("n", integer(1, MAX_SAMPLES), "samples per prompt", default=1),
    Field("sampling_params", described_by("SamplingParams"), "how to choose tokens; left out: temperature 1, nothing else"),
    Field("include", include, "what to return besides ids and logprobs", default=[]),
    Field("prompt_logprobs_start", _start, "first prompt token that prompt_logprobs covers (0 to the prompt's length)", default=0),
    *TEXT_FIELDS,
    Field("request_id", string, "name of this call, for abort; 409 while one of that name is in flight"),
    Field("group", string, "name shared by calls that are aborted together"),
    Field("session", string, "name of the conversation or worker this belongs to, for abort"),
    CACHE_SALT,
    Field("priority", integer(-(1 << 31), 1 << 31, "an int"), "lower is admitted earlier and preempted later", default=0),
    Field("stream", _stream, _STREAM_DOC, default=False),
    Field("deadline_s", seconds, 'seconds until the rest ends with its partial output and abort_reason "deadline"'),
    Field("detach_s", number(0, 86400), _DETACH_DOC, default=0),
    *VERSION_FIELDS,
)


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """One prompt as sent: exactly one of `ids`, `text`, `messages`."""

    ids: tuple[int, ...] | None
    text: str | None
    messages: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any]
    params: SamplingParams
    """lists in it are the call's"""
    first_sample: int | None
    continue_from: tuple[int, ...] = ()
    forced_token_ids: tuple[int, ...] = ()
    prompt_logprobs_start: int = 0
    continuation: str | None = None
    """forced_token_ids as text"""
    add_special_tokens: bool = False
    """to `text`"""
    score_only: bool = False
    """score forced_token_ids to their end and sample nothing"""
    own: dict[str, int] = field(default_factory=dict)
    """what of `params` differs from the call's: max_tokens, seed"""

    @property
    def text_field(self) -> str:
        """The field whose text is made ids; empty if ids were sent."""
        return "text" if self.text is not None else "messages" if self.messages is not None else ""


@dataclass(frozen=True, slots=True)
class Naming:
    """How errors name what came: the list of the prompts, the engine's fields in one of them, and where SamplingParams' fields are."""

    items: str = "prompts"
    fields: tuple[tuple[str, str], ...] = (("prompt_token_ids", "token_ids"),)
    params: str = "sampling_params."

    def path(self, i: int, name: str = "") -> str:
        """`name` may go on: "token_ids[3] must be…"."""
        for ours, theirs in self.fields:
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
                break
        return f"{self.items}[{i}].{name}" if name else f"{self.items}[{i}]"


@dataclass(frozen=True, slots=True)
class RolloutCall:
    """A valid body of `POST /v1/rollouts`."""

    prompts: list[PromptSpec]
    include: tuple[str, ...]
    request_id: str | None
    group: str | None
    session: str | None
    priority: int
    stream: str
    """"samples", "tokens", or empty: one reply"""
    deadline_s: float | None
    detach_s: float = 0.0
    on_unavailable: str = "queue"
    min_version: int | None = None
    max_version_lag: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = False
    naming: Naming = Naming()
    cache_salt: str | None = None
    params: SamplingParams | None = None
    """those of prompts without own ones; None: all have those of the first"""
    all_or_none: bool = False
    """a prompt that is refused keeps those behind it from being looked at"""

    @property
    def shared_params(self) -> SamplingParams:
        """Those whose lists every prompt has."""
        return self.params or self.prompts[0].params


_IDS = {**token_ids.schema, "maxItems": MAX_IDS}


def _few_ids(path: str, value: Any) -> Any:
    """Ids of a list in SamplingParams, or of a wire array; how many are allowed is clear before they are looked at."""
    size = len(value) if isinstance(value, list) else 0
    if is_array(value) and isinstance(value["shape"], list) and value["shape"] and isinstance(value["shape"][0], int):
        size = value["shape"][0]
    if size > MAX_IDS:
        raise BadRequest(f"{path} must hold at most {MAX_IDS} ids, got {size}", field=path)
    return token_ids(path, value)


def _sampling(wire: dict[str, Any], path: str) -> SamplingParams:
    """SamplingParams of `wire`; errors name the field by `path`."""
    for name in ("stop_token_ids", "allowed_token_ids"):
        if wire.get(name) is not None:
            wire = {**wire, name: _few_ids(f"{path}.{name}", wire[name])}
    for name, look in (("stop", stops), ("logit_bias", logit_bias)):
        if wire.get(name) is not None:
            wire = {**wire, name: look(f"{path}.{name}", wire[name])}
    try:
        return SamplingParams.from_wire({k: v for k, v in wire.items() if v is not None}, unlisted=("n",))
    except BadRequest as error:
        name = (error.field or "").split("[")[0]
        message = str(error) if str(error).startswith(path) else f"{path}.{error}"
        raise BadRequest(message, field=f"{path}.{name}" if name else path) from None


def check_kind(got: dict[str, Any], path: str, names: tuple[str, ...] = ("token_ids", "text", "messages")) -> None:
    """BadRequest unless exactly one of `names` is there, and template variables only with messages."""
    kinds = [k for k in names if k in got]
    where = path or "the body"
    if len(kinds) != 1:
        raise BadRequest(f"{where} must have exactly one of {', '.join(names)}; got {', '.join(kinds) or 'none'}", field=path or None)
    if "chat_template_kwargs" in got and kinds != ["messages"]:
        name = f"{path}.chat_template_kwargs".lstrip(".")
        raise BadRequest(f"{name} needs messages", field=name)


def _refuse_misplaced(value: Any, table: tuple[Field, ...], path: str) -> None:
    """BadRequest for a sampling parameter that stands beside sampling_params."""
    if isinstance(value, dict):
        misplaced = SAMPLING_NAMES.difference(f.name for f in table)
        for name in value:
            if name in misplaced:
                where = f"{path}.{name}".lstrip(".")
                place = "beside prompts" if name == "n" else "in sampling_params"
                raise BadRequest(f"{where} is not a known field: give {name} {place}", field=where)


def _how_to_write(value: Any) -> str:
    return ' ({"text": "..."})' if isinstance(value, str) else ' ({"token_ids": [...]})' if isinstance(value, list) else ""


def _own_params(shared: SamplingParams, own: dict[str, int], path: str) -> SamplingParams:
    try:
        return shared.varied(**own) if own else shared
    except BadRequest as error:
        raise BadRequest(f"{path}.{error}", field=f"{path}.{error.field}") from None


def _prompt(value: Any, path: str, shared: SamplingParams, start: int) -> PromptSpec:
    if not isinstance(value, dict):
        raise fail(path, f"an object{_how_to_write(value)}", value)
    if is_message(value):
        raise BadRequest(f'{path} is one message of a chat: a prompt is the whole chat, {{"messages": [...]}}', field=path)
    _refuse_misplaced(value, PROMPT_FIELDS, path)
    got = read(value, PROMPT_FIELDS, path)
    check_kind(got, path)
    if "continue_from" in got and shared.n != 1:
        raise BadRequest(f"{path}.continue_from needs n = 1, got n = {shared.n}", field=f"{path}.continue_from")
    if "continue_from" in got and "forced_token_ids" in got:
        raise BadRequest(f"{path}: give continue_from or forced_token_ids, not both", field=f"{path}.continue_from")
    own: dict[str, Any] = {k: got[k] for k in ("max_tokens", "seed") if k in got}
    return PromptSpec(
        ids=got.get("token_ids"),
        text=got.get("text"),
        messages=got.get("messages"),
        chat_template_kwargs=got.get("chat_template_kwargs", {}),
        params=_own_params(shared, own, path),
        own=own,
        first_sample=got.get("first_sample"),
        continue_from=got.get("continue_from", ()),
        forced_token_ids=got.get("forced_token_ids", ()),
        prompt_logprobs_start=got.get("prompt_logprobs_start", start),
    )


def check_num_samples(num_prompts: int, n: int, prompts: str = "prompts") -> None:
    """BadRequest, before anything is made of them, if a call asks for too many samples."""
    if num_prompts * n > MAX_CALL_SAMPLES:
        raise BadRequest(
            f"n and {prompts} may ask for at most {MAX_CALL_SAMPLES} samples in one call, got {num_prompts} {prompts} x n = {n}: "
            f"{num_prompts * n}; send several calls",
            field="n",
        )


def _check_addressable(request_id: str) -> None:
    """BadRequest for a name that no URL can end in, even quoted: such a call could not be re-attached."""
    is_path = request_id in (".", "..")
    if is_path or len(request_id) > MAX_ADDRESS_CHARS or any(unicodedata.category(c) == "Cc" for c in request_id):
        words = f'other than "." and "..", at most {MAX_ADDRESS_CHARS} characters and no control character (it ends a URL)'
        raise fail("request_id", f"with detach_s {words}", request_id)


def version_fields(got: dict[str, Any]) -> dict[str, Any]:
    """Those of VERSION_FIELDS that a body gives, for RolloutCall."""
    return {f.name: got[f.name] for f in VERSION_FIELDS if f.name in got}


def parse_rollouts(body: Any, max_prompts: int = 65536) -> RolloutCall:
    """Check a decoded body of `POST /v1/rollouts`. BadRequest names the first field that is wrong."""
    _refuse_misplaced(body, ENVELOPE_FIELDS, "")
    got = read(body, ENVELOPE_FIELDS, "")
    if len(got["prompts"]) > max_prompts:
        raise BadRequest(f"prompts must hold at most {max_prompts} prompts, got {len(got['prompts'])}", field="prompts")
    n, sampling = got.get("n", 1), got.get("sampling_params", {})
    check_num_samples(len(got["prompts"]), n)
    if "n" in sampling:
        raise BadRequest("sampling_params.n is not a field here: give n beside prompts", field="sampling_params.n")
    shared = _sampling({**sampling, "n": n}, "sampling_params")
    if got.get("detach_s") and not got.get("stream") and "request_id" not in got:
        raise BadRequest("detach_s needs a request_id to re-attach by (or a stream, whose start event tells the id)", field="detach_s")
    if got.get("detach_s") and "request_id" in got:
        _check_addressable(got["request_id"])
    return RolloutCall(
        prompts=[_prompt(p, f"prompts[{i}]", shared, got.get("prompt_logprobs_start", 0)) for i, p in enumerate(got["prompts"])],
        params=shared,
        include=got.get("include", ()),
        request_id=got.get("request_id"),
        group=got.get("group"),
        session=got.get("session"),
        cache_salt=got.get("cache_salt"),
        priority=got.get("priority", 0),
        stream=got.get("stream", ""),
        deadline_s=got.get("deadline_s"),
        detach_s=got.get("detach_s", 0.0),
        **version_fields(got),
        skip_special_tokens=got.get("skip_special_tokens", True),
        spaces_between_special_tokens=got.get("spaces_between_special_tokens", False),
    )


ABORT_FIELDS = (
    Field("request_id", string, "the call of this name"),
    Field("group", string, "all calls of this group"),
    Field("session", string, "all calls of this session"),
    Field("all", boolean, "every call"),
    Field("reason", string, "what the partial outputs say as abort_reason", default="aborted by request"),
)


def parse_stream(query: dict[str, str]) -> str:
    """RolloutCall.stream of the query of `GET /v1/rollouts/{id}`."""
    got = read({k: {"true": True, "false": False}.get(v, v) for k, v in query.items()}, (Field("stream", _stream),), "")
    return str(got.get("stream", ""))


def parse_abort(body: Any) -> tuple[str, Any, str]:
    """("request_id" | "group" | "session" | "all", its value, reason) of a body of `POST /v1/engine/abort`."""
    got = read(body, ABORT_FIELDS, "")
    reason = got.pop("reason", "aborted by request")
    chosen = [(k, v) for k, v in got.items() if v is not False]
    if len(chosen) != 1:
        raise BadRequest(f"give exactly one of request_id, group, session, all: true; got {', '.join(k for k, _ in chosen) or 'none'}")
    return *chosen[0], reason


def schemas() -> dict[str, Schema]:
    """Component schemas of the request bodies."""
    one_of = [{"required": [name]} for name in ("token_ids", "text", "messages")]
    return {
        "Rollouts": object_schema(ENVELOPE_FIELDS),
        "Prompt": object_schema(PROMPT_FIELDS, "Exactly one of token_ids, text, messages.", anyOf=one_of),
        "SamplingParams": of_dataclass(
            SamplingParams, SAMPLING_BOUNDS, skip=("n",), stop=stops.schema, logit_bias=logit_bias.schema,
            stop_token_ids=_IDS, allowed_token_ids=_IDS,
        ),
        "Abort": object_schema(ABORT_FIELDS, "Exactly one of request_id, group, session, all."),
    }
