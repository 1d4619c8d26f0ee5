"""vLLM's `/inference/v1/generate`: ids in, ids out. The call, its samples and their text are those of OpenAI's routes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...errors import BadRequest, NotSupported
from ..checks import Field, boolean, choice, described_by, integer, mapping, object_schema, read, string, token_ids
from ..openai import answer
from ..openai_protocol import (
    SAMPLING_FIELDS,
    OpenAIRequest,
    accept_any,
    common_fields,
    only,
    sampling_params,
    shown_logprobs,
    stream_options,
)
from ..openai_replies import Choice, Reply, Token, chat_logprobs
from ..openai_schemas import SPAN_OF_TEXT
from ..protocol import CACHE_SALT
from ..schemas import COUNT, INTEGER, NUMBER, OBJECT, STRING, Item, array, reply_schema, route
from .errors import vllm_error
from .version_names import VersionNames, names_of

router = APIRouter()
ERRORS = (404, 409, 503)
FLOOR = -9999.0
"""what vLLM writes for a logprob that is not finite"""
NOTHING = ("prompt_token_id_logprobs", "mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params")
"""fields of vLLM's reply that are always null here"""
_NO_MEDIA = "this server takes text only"
_NO_TRANSFER = "KV and encoder caches stay where they are"
_count = integer(0, 20, "an int in [0, 20]")

SAMPLING = (
    *SAMPLING_FIELDS,
    Field("max_tokens", integer(0, 1 << 31, "an int >= 0"), "new tokens at most; default: the room left in the context"),
    Field("logprobs", _count, "log-probability of each token, and of this many likeliest in its place"),
    Field("prompt_logprobs", only(0, why="0 gives the prompt's own tokens"), "0 adds the log-probability of each prompt token"),
    Field("detokenize", boolean, "needed for output_mode text; ids come either way", True),
    Field("skip_special_tokens", boolean, "leave special tokens out of the text", True),
    Field("spaces_between_special_tokens", boolean, "put a space between a special token and what stands beside it", True),
    Field("output_kind", integer(0, 2), "accepted: whether the reply comes whole is what stream says"),
    Field("stream_interval", integer(1, 1 << 31, "an int >= 1"), "accepted: tokens that wait for a slow reader come together anyway"),
    Field("flat_logprobs", boolean, "accepted: a matter of vLLM's own objects"),
    Field("skip_clone", boolean, "accepted: a matter of vLLM's own objects"),
    Field("output_text_buffer_length", only(0, why="it follows from stop"), "only 0"),
    Field("bad_words", only([], why="use logit_bias or allowed_token_ids"), "only empty"),
    Field("structured_outputs", only(why="output is not constrained"), "refused"),
    Field("watermarking", only(False, why="nothing is watermarked"), "only false"),
    Field("thinking_token_budget", only(why="use max_tokens"), "refused"),
    Field("repetition_detection", only(why="nothing looks for repetitions"), "refused"),
    Field("logprob_token_ids", only(why="POST /v1/logprobs scores given tokens"), "refused"),
    Field("prompt_logprob_token_ids", only(why="POST /v1/logprobs scores given tokens"), "refused"),
    Field("prompt_logprob_start", only(0, why="all of the prompt is scored"), "only 0"),
    Field("skip_reading_prefix_cache", only(False, why="cached blocks give the same bits"), "only false"),
    Field("routed_experts_prompt_start", only(0, why="routed experts are not returned"), "only 0"),
    Field("trace_decode_token_ids", only(why="POST /v1/rollouts takes forced_token_ids"), "refused"),
    Field("extra_args", only(why="no plugin reads it"), "refused"),
)
GENERATE_FIELDS = (
    Field("token_ids", token_ids, "the prompt", required=True),
    Field("sampling_params", described_by("VllmSamplingParams"), "how to choose tokens", required=True),
    Field("request_id", string, "name of this call, for abort; a header X-Request-Id goes before it"),
    Field("model", string, "the served model's name; it need not be given"),
    Field("output_mode", choice("tokens", "text"), "text adds the text, and names tokens by it in logprobs", "tokens"),
    Field("return_token_ids", boolean, "add the prompt's ids to the reply", False),
    Field("stream", boolean, "reply in chunks, by server-sent events", False),
    Field("stream_options", stream_options, "only with stream"),
    Field("priority", integer(-(1 << 31), 1 << 31, "an int"), "lower is admitted earlier and preempted later", 0),
    Field("token_offsets", accept_any("array"), "accepted; nothing is done with it"),
    Field("features", only(why=_NO_MEDIA), "refused"),
    Field("content_parts", only([], why=_NO_MEDIA), "only empty"),
    CACHE_SALT,
    Field("kv_transfer_params", only(why=_NO_TRANSFER), "refused"),
    Field("ec_transfer_params", only(why=_NO_TRANSFER), "refused"),
    Field("reasoning_ended", accept_any("boolean"), "accepted: it steers constrained output only"),
    Field("reasoning_parser_kwargs", mapping, "accepted: it steers constrained output only"),
)


def parse_generate(body: Any, headers: Mapping[str, str]) -> OpenAIRequest:
    """Check a decoded body. BadRequest names the first field that is wrong."""
    got = read(body, GENERATE_FIELDS, "")
    given = read(got["sampling_params"], SAMPLING, "sampling_params")
    is_text = got.get("output_mode") == "text"
    if is_text and not given.get("detokenize", True):
        raise BadRequest("output_mode text needs sampling_params.detokenize: true", field="output_mode")
    named = {name: headers[header] for header, name in (("x-request-id", "request_id"), ("x-session-id", "session")) if header in headers}
    for name, value in named.items():
        string(name, value)
    logprobs = given.get("logprobs")
    shown: dict[str, Any] = {k: given[k] for k in ("prompt_logprobs", "skip_special_tokens") if k in given}
    if got.get("stream") and "prompt_logprobs" in given:
        where = "sampling_params.prompt_logprobs"
        raise NotSupported(f"{where} is not supported in a stream: it comes with the end of a choice", field=where)
    spaces = given.get("spaces_between_special_tokens", True)
    common = common_fields({**got, **shown, **named, "detokenize": is_text, "spaces_between_special_tokens": spaces})
    return OpenAIRequest(
        **common,
        chat=False,
        prompts=[got["token_ids"]],
        messages=[],
        template={},
        params=_named(given, shown_logprobs(given, logprobs)),
        logprobs=logprobs,
        echo=False,
        add_special_tokens=False,
        prompt_field="token_ids",
        params_field="sampling_params.",
        id_prefix="generate-tokens-",
    )


def _named(given: dict[str, Any], top_logprobs: int) -> Any:
    """SamplingParams; errors name the field as it stands in the body."""
    try:
        return sampling_params(given, given.get("max_tokens"), top_logprobs)
    except BadRequest as error:
        raise type(error)(f"sampling_params.{error}", field=f"sampling_params.{error.field}") from None


def _floored(value: float | None) -> float:
    return FLOOR if value is None else max(value, FLOOR)


def token_logprobs(tokens: Iterable[Token], count: int) -> dict[str, Any]:
    """By id: the token drawn first, then the likeliest; as many of these together as were asked for, at least one."""
    content = []
    for token in tokens:
        ranks = {i: rank for rank, i in enumerate(token.top_ids, 1)}
        own = {"token_id": token.id, "logprob": _floored(token.logprob), "rank": ranks.get(token.id)}
        rest = [
            {"token_id": i, "logprob": _floored(value), "rank": ranks[i]}
            for i, (_, _, value) in zip(token.top_ids, token.top, strict=True)
            if i != token.id
        ]
        content.append({**own, "top_logprobs": [own, *rest][: max(count, 1)]})
    return {"content": content}


def text_logprobs(tokens: Iterable[Token]) -> dict[str, Any]:
    """OpenAI's form, with numbers where that has null."""
    content = chat_logprobs(tokens)["content"]
    for entry in content:
        entry["logprob"] = _floored(entry["logprob"])
    return {"content": content}


class GenerateReply(Reply):
    """The reply to one call, whole or in chunks.

    `names` are what trainers called weight versions.
    """

    def __init__(self, *args: Any, names: VersionNames, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._names_of_versions = names
        self._mode = "text" if self.request.detokenize else "tokens"

    def _spans(self, spans: list[dict[str, int]]) -> list[dict[str, Any]]:
        return [{**span, "version": self._names_of_versions.text(span["version"])} for span in spans]

    def _shown(self, choice: Choice, sample: dict[str, Any]) -> dict[str, Any]:
        """A choice, or what a delta adds to it."""
        text, ids, tokens = choice.take(sample)
        wanted = self.request.logprobs
        end: dict[str, Any] = {"finish_reason": None, "stop_reason": None, "weight_versions": None}
        if sample["finish_reason"] is not None:
            end = self._end(choice.prompt, sample)
            end["weight_versions"] = self._spans(end["weight_versions"])
        found = {
            "index": choice.index,
            "logprobs": None if wanted is None else text_logprobs(tokens) if self.request.detokenize else token_logprobs(tokens, wanted),
            **{name: end[name] for name in ("finish_reason", "stop_reason")},
            "token_ids": ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": end["weight_versions"],
        }
        return {**found, "text": text} if self.request.detokenize else found

    def whole(self, samples: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        choices = sorted((self._shown(self._choice(i, s), s) for i, s in samples), key=lambda c: int(c["index"]))
        request, prompt = self.request, self.prompts[0]
        return {
            "request_id": self._head["id"],
            "model": self._head["model"],
            "created": self._head["created"],
            "usage": self.usage(),
            "prompt_logprobs": self._prompt_logprobs(*samples[0]) if request.prompt_logprobs else None,
            "prompt_token_ids": list(prompt.ids) if request.return_token_ids else None,
            **dict.fromkeys(NOTHING),
            "output_mode": self._mode,
            "choices": choices,
        }

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"request_id": self._head["id"], "usage": None, "output_mode": self._mode, "choices": choices}

    def chunks(self, i: int, sample: dict[str, Any]) -> Iterable[dict[str, Any]]:
        choice = self._choice(i, sample)
        shown = self._shown(choice, sample)
        if not (shown["token_ids"] or shown.get("text") or shown["finish_reason"]):
            return
        chunk = self.chunk([shown])
        if self.request.return_token_ids and not any(c.begun for c in self._choices.values()):
            chunk["prompt_token_ids"] = list(choice.prompt.ids)
        choice.begun = True
        yield chunk


@router.post(
    "/inference/v1/generate",
    openapi_extra=route("vLLM", "traffic", takes="VllmGenerate", gives="VllmReply", events="VllmChunk", errors=ERRORS, error="VllmError"),
)
async def generate(request: Request) -> Response:
    """vLLM's generation from ids, whole or streamed.

    Logprobs are those of the distribution drawn from (vLLM's processed_logprobs); one that is not finite is -9999. Versions of weights are
    texts, as the trainer named them. A stream ends with `data: [DONE]`.
    """
    return await answer(
        request,
        lambda body: parse_generate(body, request.headers),
        functools.partial(GenerateReply, names=names_of(request)),
        lambda error: vllm_error(error, getattr(error, "status", 500)),
    )


_LOGPROB = (Item("token_id", INTEGER), Item("logprob", NUMBER), Item("rank", {"type": ["integer", "null"]}, "among those shown"))
_CHOICE = (
    Item("index", COUNT),
    Item("finish_reason", {"type": ["string", "null"], "enum": ["stop", "length", "abort", None]}),
    Item("stop_reason", {"type": ["integer", "string", "null"]}, "which id or string ended it"),
    Item("token_ids", array(INTEGER), "exactly the ids drawn, the final EOS included"),
    Item("logprobs", {"type": ["object", "null"]}, "{content: [{token_id, logprob, rank, top_logprobs}]}; in text mode OpenAI's form"),
    Item("weight_versions", {"type": ["array", "null"], "items": SPAN_OF_TEXT}, "when it ends: which weights made which of its tokens"),
    Item("routed_experts", {"type": "null"}),
    Item("sampling_mask", {"type": "null"}),
    Item("text", STRING, "with output_mode text", always=False),
)
_HEAD = (Item("request_id", STRING), Item("output_mode", {"type": "string", "enum": ["tokens", "text"]}))
_USAGE = {"type": ["object", "null"]}
_IDS = {"type": ["array", "null"], "items": INTEGER}
COMPONENTS = {
    "VllmGenerate": object_schema(GENERATE_FIELDS),
    "VllmSamplingParams": object_schema(SAMPLING),
    "VllmReply": reply_schema(
        "",
        *_HEAD,
        Item("model", STRING),
        Item("created", COUNT),
        Item("usage", OBJECT),
        Item("prompt_token_ids", _IDS, "with return_token_ids"),
        Item("prompt_logprobs", {"type": ["array", "null"], "items": {"type": ["object", "null"]}}, "null, or {id: {logprob, rank, ...}}"),
        *(Item(name, {"type": "null"}) for name in NOTHING),
        Item("choices", array(reply_schema("", *_CHOICE))),
    ),
    "VllmChunk": reply_schema(
        "", *_HEAD, Item("usage", _USAGE, "of the last chunk, if asked for"), Item("prompt_token_ids", _IDS, "of the first", always=False),
        Item("choices", array(reply_schema("", *_CHOICE))),
    ),
}  # fmt: skip
