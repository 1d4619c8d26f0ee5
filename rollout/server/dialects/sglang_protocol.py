"""The body of SGLang's `/generate`, and the calls that it asks for: one per prompt, since there each has params and a name of its own.

A field that would change the reply and that we do not have is refused by name, unless it holds the value that changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...engine.params import MAX_SAMPLES, MAX_TOP_LOGPROBS, U64, SamplingParams
from ...errors import BadRequest, NotSupported, RollsyncError
from ..checks import (
    Check,
    Field,
    boolean,
    check,
    described_by,
    fail,
    integer,
    logit_bias,
    mapping,
    number,
    object_schema,
    read,
    stops,
    string,
    text,
    token_ids,
)
from ..openai_protocol import only
from ..protocol import Naming, PromptSpec, RolloutCall, check_kind, check_num_samples

MAX_NEW_TOKENS = 128
"""SGLang's default"""
MAX_BATCH = 4096
ENGINE_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_THEIRS = {ours: theirs for theirs, ours in ENGINE_NAMES.items()}


def one_or_each(inner: Check, what: str) -> Check:
    """One value for all prompts, or a list of one for each."""

    @check({"anyOf": [inner.schema, {"type": "array", "items": inner.schema}]})
    def run(path: str, value: Any) -> Any:
        if not isinstance(value, list):
            return inner(path, value)
        if len(value) > MAX_BATCH:
            raise BadRequest(f"{path} must hold at most {MAX_BATCH} {what}, got {len(value)}", field=path)
        return [inner(f"{path}[{i}]", v) for i, v in enumerate(value)]

    return run


_IDS = {"type": "array", "items": {"type": "integer"}}


@check({"anyOf": [_IDS, {"type": "array", "items": _IDS}]})
def ids_or_batch(path: str, value: Any) -> Any:
    """A tuple of ids, or a list of such tuples."""
    if isinstance(value, list) and value and isinstance(value[0], list | tuple | dict):
        if len(value) > MAX_BATCH:
            raise BadRequest(f"{path} must hold at most {MAX_BATCH} prompts, got {len(value)}", field=path)
        return [token_ids(f"{path}[{i}]", v) for i, v in enumerate(value)]
    return token_ids(path, value)


def nothing(why: str) -> Check:
    """Null or an empty list, which clients send for what they do not use."""

    @check({"type": "array", "maxItems": 0})
    def run(path: str, value: Any) -> Any:
        if value not in ([], ""):
            raise NotSupported(f"{path} is not supported: {why}", field=path)
        return value

    return run


_tokens = integer(0, 1 << 31, "an int >= 0")
_penalty = number(-2.0, 2.0)
_unconstrained = only(why="output is not constrained")

CUSTOM_FIELDS = (Field("return_top_p_token_ids", boolean, "add the ids each token could be drawn from, as slime reads them", False),)
SAMPLING_FIELDS = (
    Field("max_new_tokens", _tokens, "new tokens at most; null: the room left in the context", MAX_NEW_TOKENS),
    Field("min_new_tokens", _tokens, "nothing ends a sample before this many tokens", 0),
    Field("temperature", number(0.0, 1e6), "0 is greedy", 1.0),
    Field("top_p", number(0.0, 1.0), "keep the smallest set of likeliest ids whose mass reaches this; not 0", 1.0),
    Field("top_k", integer(-1, 1 << 62, "an int >= -1"), "keep this many likeliest ids; 0 or -1 keeps all", -1),
    Field("min_p", number(0.0, 1.0), "drop ids less likely than this fraction of the likeliest", 0.0),
    Field("frequency_penalty", _penalty, "taken off the logit of an id once for each time it is in the output so far", 0.0),
    Field("presence_penalty", _penalty, "taken off the logits of ids in the output so far", 0.0),
    Field("repetition_penalty", number(0.01, 100.0), "divides the logits of ids seen so far if positive, else multiplies them", 1.0),
    Field("n", integer(1, MAX_SAMPLES, f"an int in [1, {MAX_SAMPLES}]"), "samples per prompt; the reply is then a list", 1),
    Field("stop", stops, "strings that end a sample"),
    Field("stop_token_ids", token_ids, "ids that end a sample besides the model's EOS ids"),
    Field("ignore_eos", boolean, "go on past the model's EOS ids", False),
    Field("no_stop_trim", boolean, "leave the stop string, or the text of the stop id, in the text", False),
    Field("skip_special_tokens", boolean, "leave special tokens out of the text; ids are never changed", True),
    Field("spaces_between_special_tokens", boolean, "put a space between a special token and what stands beside it", False),
    Field("logit_bias", logit_bias, "token ids (as decimal strings) and what is added to their logits, [-100, 100]"),
    Field("sampling_seed", integer(0, U64 - 1, "an int in [0, 2**64)"), "key of the random stream; equal seed and prompt, equal sample"),
    Field("stop_regex", only(why="use stop or stop_token_ids"), "refused"),
    Field("json_schema", _unconstrained, "refused"),
    Field("regex", _unconstrained, "refused"),
    Field("ebnf", _unconstrained, "refused"),
    Field("structural_tag", _unconstrained, "refused"),
    Field("custom_params", Check(lambda path, value: read(value, CUSTOM_FIELDS, path), object_schema(CUSTOM_FIELDS)), "of slime's servers"),
    Field("stream_interval", only(1, why="tokens are sent as they come"), "only 1"),
)
_TEXT_ONLY = ("skip_special_tokens", "spaces_between_special_tokens")

_no_media = nothing("this server takes text and ids only")
_one_model = nothing("there is one model and no adapters")
_alone = nothing("prefill and decode are one process")
GENERATE_FIELDS = (
    Field("text", one_or_each(text, "texts"), "the prompt, tokenised with the special tokens the tokenizer adds; or a list of prompts"),
    Field("input_ids", ids_or_batch, "the prompt as ids, or a list of prompts"),
    Field("sampling_params", one_or_each(described_by("SglangSampling"), "objects"), "how to choose tokens; or one for each prompt"),
    Field("rid", one_or_each(string, "names"), "name of the request, for /abort_request; of a list, prompt i is named rid_i or by its own"),
    Field("session_id", string, "name of the conversation this belongs to"),
    Field("return_logprob", one_or_each(boolean, "values"), "add log-probabilities", False),
    Field(
        "logprob_start_len",
        one_or_each(integer(-1, 1 << 31, "an int >= -1"), "values"),
        "first prompt token whose log-probability is wanted; -1: none",
        -1,
    ),
    Field(
        "top_logprobs_num",
        one_or_each(integer(0, MAX_TOP_LOGPROBS, f"an int in [0, {MAX_TOP_LOGPROBS}]"), "values"),
        "alternatives per output token",
        0,
    ),
    Field("return_sampling_mask", boolean, "add the ids each token could be drawn from; needs top_k, top_p or min_p", False),
    Field("sampling_logprobs_mode", only("selected", why="logprobs of a mask are those of the tokens drawn"), "only selected"),
    Field("return_text_in_logprobs", boolean, "add each token's text", False),
    Field("return_prompt_token_ids", boolean, "add the prompt's ids to the reply", False),
    Field("stream", boolean, "server-sent events, each with all that there is so far", False),
    Field("priority", integer(-(1 << 31), 1 << 31, "an int"), "higher is admitted earlier and preempted later", 0),
    Field("log_metrics", boolean, "accepted; metrics are always kept"),
    Field("no_logs", boolean, "accepted; prompts are never logged"),
    Field("custom_labels", mapping, "accepted; nothing is done with it"),
    Field("routing_key", text, "accepted; there is one engine"),
    Field("conversation_id", text, "accepted; nothing is done with it"),
    Field("routed_dp_rank", only(0, why="there is one engine"), "only 0"),
    Field("data_parallel_rank", only(0, why="there is one engine"), "only 0"),
    *(Field(name, _no_media, "only empty") for name in ("image_data", "video_data", "audio_data", "modalities", "input_embeds")),
    Field("token_ids_logprob", nothing("top_logprobs_num gives alternatives"), "only empty"),
    Field("session_params", only({}, why="a prompt is always given whole"), "only {}"),
    Field("lora_path", _one_model, "only empty"),
    Field("custom_logit_processor", nothing("it would be a program of the caller's"), "only empty"),
    *(Field(f"bootstrap_{name}", _alone, "only empty") for name in ("host", "port", "room")),
    Field("cache_salt", text, "cached prefixes are shared only by calls of the same salt; new weights need none"),
    Field("extra_key", text, "likewise, beside it"),
    *(
        Field(name, only(False, why="it is not recorded here"), "only false")
        for name in (
            "return_hidden_states",
            "return_routed_experts",
            "return_indexer_topk",
            "return_entropy",
            "return_flat_raw_top_logprobs",
            "return_flat_raw_top_logprobs_b64",
            "return_bytes",
            "background",
            "require_reasoning",
        )
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One prompt of a body, as the call it makes and as its reply shows it."""

    call: RolloutCall
    where: str
    """the prompt as the caller wrote it, for errors"""
    logprobs: bool
    start: int
    """first prompt token whose logprob is wanted; -1: none"""
    top: int
    mask: bool
    """whether the ids each token could be drawn from are wanted"""
    kept: bool = False
    """whether slime wants them; logprobs are then renormalised over them"""

    @property
    def params(self) -> SamplingParams:
        return self.call.prompts[0].params

    def rename(self, error: RollsyncError) -> RollsyncError:
        """The same error in the words of the body."""
        if not isinstance(error, BadRequest):
            return error

        def renamed(words: str) -> str:
            for ours in ("prompts[0].token_ids", "prompts[0].text"):
                words = words.replace(ours, self.where)
            return words.replace("prompts[0].prompt_logprobs_start", "logprob_start_len").replace("prompts[0]", self.where)

        return type(error)(renamed(str(error)), field=error.field and renamed(error.field))


def _truncates(params: SamplingParams) -> bool:
    return bool(params.top_k or params.top_p < 1 or params.min_p)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A valid body of `/generate`."""

    asked: list[Asked]
    listed: bool
    """whether the reply is a list"""
    stream: bool
    token_texts: bool
    prompt_ids: bool

    @property
    def needs_tokenizer(self) -> bool:
        return self.token_texts or any(a.call.prompts[0].text is not None for a in self.asked)


def sampling_params(raw: dict[str, Any], path: str, top: int = 0) -> tuple[SamplingParams, dict[str, bool]]:
    """Params of the engine, and how text is made. Errors name the field by `path`."""
    got = read(raw, SAMPLING_FIELDS, path)
    names = (f.name for f in SAMPLING_FIELDS if f.name not in ("stop_regex", "custom_params", "stream_interval", *_TEXT_ONLY))
    given = {ENGINE_NAMES.get(name, name): got[name] for name in names if name in got}
    given.setdefault("max_tokens", None if "max_new_tokens" in raw else MAX_NEW_TOKENS)
    try:
        return SamplingParams(**given, top_logprobs=top), {name: got[name] for name in _TEXT_ONLY if name in got}
    except BadRequest as error:
        words = re.sub(r"\b(max_tokens|min_tokens)\b", lambda m: _THEIRS[m[0]], str(error))
        field = (error.field or "").partition("[")[0]
        raise BadRequest(f"{path}.{words}", field=f"{path}.{_THEIRS.get(field, field)}") from None


def _each(got: dict[str, Any], name: str, count: int, listed: bool, default: Any) -> Callable[[int], Any]:
    """The value of a field for prompt i."""
    value = got.get(name, default)
    if not isinstance(value, list):
        return lambda i: value
    if not listed or len(value) != count:
        raise fail(name, f"one value, or with a list of prompts a list of as many ({count if listed else 'here is one prompt'})", value)
    return lambda i: value[i]


def _rids(got: dict[str, Any], count: int, listed: bool) -> Callable[[int], str | None]:
    rid = got.get("rid")
    if isinstance(rid, list) or not listed or rid is None:
        return _each(got, "rid", count, listed, None)
    return lambda i: f"{rid}_{i}"


def parse_generate(body: Any) -> GenerateRequest:
    """Check a decoded body. BadRequest names the first field that is wrong."""
    got = read(body, GENERATE_FIELDS, "")
    check_kind(got, "", ("text", "input_ids"))
    kind = "text" if "text" in got else "input_ids"
    listed = isinstance(got[kind], list)
    prompts = got[kind] if listed else [got[kind]]
    if not prompts:
        raise fail(kind, "a prompt or a list of prompts, and not empty", [])
    shared: dict[int, tuple[SamplingParams, dict[str, bool]]] = {}
    value = {
        name: _each(got, name, len(prompts), listed, default)
        for name, default in (("return_logprob", False), ("logprob_start_len", -1), ("top_logprobs_num", 0), ("sampling_params", {}))
    }
    rid = _rids(got, len(prompts), listed)
    asked = []
    for i, prompt in enumerate(prompts):
        logprobs = value["return_logprob"](i)
        start, top = (value["logprob_start_len"](i), value["top_logprobs_num"](i)) if logprobs else (-1, 0)
        path = f"sampling_params[{i}]" if isinstance(got.get("sampling_params"), list) else "sampling_params"
        if top and start >= 0:
            raise NotSupported("top_logprobs_num has no prompt tokens: leave logprob_start_len at -1", field="top_logprobs_num")
        if path.endswith("]") or top not in shared:
            shared[top] = sampling_params(value["sampling_params"](i), path, top)
        kept = bool((value["sampling_params"](i).get("custom_params") or {}).get("return_top_p_token_ids")) and _truncates(shared[top][0])
        call = _call(got, kind, prompt, rid(i), shared[top], path, logprobs, start, listed, kept)
        where, mask = f"{kind}[{i}]" if listed else kind, got.get("return_sampling_mask", False)
        asked.append(Asked(call=call, where=where, logprobs=logprobs, start=start, top=top, mask=mask, kept=kept))
    samples = [a.params.n for a in asked]
    if len(set(samples)) > 1:
        raise BadRequest(f"sampling_params must ask for the same n for every prompt, got {sorted(set(samples))}", field="sampling_params")
    check_num_samples(len(prompts), samples[0])
    return GenerateRequest(
        asked=asked,
        listed=listed or samples[0] > 1,
        stream=got.get("stream", False),
        token_texts=got.get("return_text_in_logprobs", False),
        prompt_ids=got.get("return_prompt_token_ids", False),
    )


def _call(
    got: dict[str, Any],
    kind: str,
    prompt: Any,
    rid: str | None,
    sampling: tuple[SamplingParams, dict[str, bool]],
    path: str,
    logprobs: bool,
    start: int,
    listed: bool,
    kept: bool,
) -> RolloutCall:
    params, how = sampling
    spec = PromptSpec(
        ids=prompt if kind == "input_ids" else None,
        text=prompt if kind == "text" else None,
        messages=None,
        chat_template_kwargs={},
        params=params,
        first_sample=0,  # equal prompts of one seed are equal samples there
        prompt_logprobs_start=max(0, start),
        add_special_tokens=True,
    )
    shown = ("model_logprobs" if params.temperature == 0 else "temperature_logprobs",) if logprobs else ()
    if kept:
        shown = (*shown, "sampling_mask")
    elif got.get("return_sampling_mask"):
        if not _truncates(params):
            why = "return_sampling_mask needs top_k, top_p or min_p: without them every id can be drawn"
            raise BadRequest(why, field="return_sampling_mask")
        shown = (*shown, "sampling_mask")
    return RolloutCall(
        prompts=[spec],
        naming=Naming(params=f"{path}."),
        include=(*shown, "prompt_logprobs") if start >= 0 else shown,
        request_id=rid,
        group=got["rid"] if listed and isinstance(got.get("rid"), str) else None,
        session=got.get("session_id"),
        cache_salt=repr([got.get(k) or "" for k in ("cache_salt", "extra_key")]) if got.get("cache_salt") or got.get("extra_key") else None,
        priority=-got.get("priority", 0),
        stream="tokens" if got.get("stream") else "",
        deadline_s=None,
        skip_special_tokens=how.get("skip_special_tokens", True),
        spaces_between_special_tokens=how.get("spaces_between_special_tokens", False),
    )
