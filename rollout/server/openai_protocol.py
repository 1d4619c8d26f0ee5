"""The bodies of OpenAI's `/v1/completions` and `/v1/chat/completions`, with the fields that vLLM adds, and what each asks of the engine.

A field that would change the reply and that we do not have is refused by name, unless it holds the value that changes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from ..engine.params import MAX_SAMPLES, U64, SamplingParams
from ..errors import BadRequest, NotSupported, show
from ..wire import is_array
from .checks import (
    Check,
    Field,
    boolean,
    check,
    fail,
    integer,
    logit_bias,
    mapping,
    number,
    plain,
    read,
    seconds,
    stops,
    string,
    template_variables,
    text,
    token_ids,
)
from .protocol import CACHE_SALT, VERSION_FIELDS, version_fields

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default, for completions only; a chat takes the room that is left"""
MAX_PROMPTS = 65536
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest:
    """A valid body of either route."""

    chat: bool
    model: str | None
    prompts: list[str | tuple[int, ...]]
    """text or ids; empty for a chat, which has `messages`"""
    messages: list[dict[str, Any]]
    template: dict[str, Any]
    """variables of the chat template"""
    params: SamplingParams
    logprobs: int | None
    """None: none; else how many alternatives to show besides the token itself"""
    prompt_logprobs: bool
    echo: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool
    """show tokens as "token_id:7" instead of their text"""
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    add_special_tokens: bool
    request_id: str | None
    group: str | None
    session: str | None
    priority: int
    deadline_s: float | None
    prompt_field: str = "prompt"
    """what the body calls the prompt, for errors"""
    params_field: str = ""
    """what stands before sampling parameters in the body"""
    id_prefix: str = "cmpl-"
    """of the reply's id"""
    cache_salt: str | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    """those of VERSION_FIELDS that were given"""

    @property
    def needs_tokenizer(self) -> bool:
        return self.detokenize or self.chat or any(isinstance(p, str) for p in self.prompts)


def only(*allowed: Any, why: str) -> Check:
    """The values that change nothing. Others are refused: `why` says what there is instead."""

    names = {bool: "boolean", int: "integer", str: "string", dict: "object", list: "array"}
    kinds = {names[type(a)] for a in allowed} or {"string"}

    @check({"type": kinds.pop(), **({"enum": list(allowed)} if allowed else {})})
    def run(path: str, value: Any) -> Any:
        if not any(type(value) is type(a) and value == a for a in allowed):
            words = f"other than {' or '.join(json.dumps(a) for a in allowed)} " if allowed else ""
            raise NotSupported(f"{path} {words}is not supported: {why}", field=path)
        return value

    return run


def accept_any(kind: str) -> Check:
    """Whatever comes: nothing is done with it. `kind` is what its schema says."""
    return Check(lambda path, value: value, {"type": kind})


_PROMPT_KINDS = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
_ID_KINDS = [{"type": "array", "items": {"type": "integer"}}, {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}]


@check({"anyOf": [*_PROMPT_KINDS, *_ID_KINDS]})
def prompts(path: str, value: Any) -> Any:
    """A list of texts and id tuples. Ids stay what they are: nothing is ever tokenised again."""
    if isinstance(value, str):
        return [text(path, value)]
    if is_array(value):
        return [token_ids(path, value)]
    if not isinstance(value, list) or not value:
        raise fail(path, "a string, a list of strings, a list of token ids, or a list of such lists, and not empty", value)
    if type(value[0]) is int:
        return [token_ids(path, value)]
    if len(value) > MAX_PROMPTS:
        raise BadRequest(f"{path} must hold at most {MAX_PROMPTS} prompts, got {len(value)}", field=path)
    return [text(f"{path}[{i}]", v) if isinstance(v, str) else token_ids(f"{path}[{i}]", v) for i, v in enumerate(value)]


def _content(path: str, value: Any) -> str:
    """A string as it is; text parts joined by newlines, as vLLM joins them for templates that take strings."""
    if isinstance(value, str):
        return str(text(path, value))
    if not isinstance(value, list):
        raise fail(path, "a string or a list of text parts", value)
    parts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise fail(f"{path}[{i}]", 'an object with a "type"', part)
        if part["type"] != "text":
            where = f"{path}[{i}].type"
            raise NotSupported(f"{where} {show(part['type'])} is not supported: this server takes text only", field=where)
        parts.append(text(f"{path}[{i}].text", part.get("text")))
    return "\n".join(parts)


def _tool_calls(path: str, value: Any) -> Any:
    """Arguments as the object they spell, which is what templates render."""
    if not isinstance(value, list):
        raise fail(path, "a list of tool calls", value)
    calls = []
    for i, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise fail(f"{path}[{i}]", 'an object with a "function"', call)
        try:
            arguments = json.loads(function["arguments"])
        except (KeyError, TypeError, ValueError, RecursionError):
            arguments = None
        calls.append({**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call)
    return calls


_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_MESSAGE = {"type": "object", "required": ["role", "content"], "properties": {"role": {"type": "string"}, "content": _CONTENT}}
_ASSISTANT = {"type": "object", "required": ["role"], "properties": {"role": {"const": "assistant"}}}


@check({"type": "array", "minItems": 1, "items": {"anyOf": [_MESSAGE, _ASSISTANT]}})
def chat_messages(path: str, value: Any) -> Any:
    """Messages as templates take them. Further keys (name, tool_call_id, reasoning_content, …) reach the template as they are."""
    if not isinstance(value, list) or not value:
        raise fail(path, "a non-empty list of messages", value)
    found = []
    for i, message in enumerate(value):
        where = f"{path}[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise fail(where, 'an object with a "role"', message)
        message = {k: v for k, v in message.items() if v is not None}
        if "content" in message:
            message["content"] = _content(f"{where}.content", message["content"])
        elif message["role"] != "assistant":
            raise fail(f"{where}.content", "a string or a list of text parts", None)
        if "tool_calls" in message:
            message["tool_calls"] = _tool_calls(f"{where}.tool_calls", message["tool_calls"])
        found.append(plain(where, message))
    return found


@check({"type": "array", "items": {"type": "object"}})
def objects(path: str, value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise fail(path, "a list of objects", value)
    return plain(path, value) or None


@check({"type": "object", "properties": {"include_usage": {"type": "boolean"}}})
def stream_options(path: str, value: Any) -> Any:
    return read(value, STREAM_OPTIONS, path)


STREAM_OPTIONS = (
    Field("include_usage", boolean, "end the stream with a chunk that holds the usage and no choice"),
    Field("include_obfuscation", only(False, why="chunks are never padded"), "only false"),
    Field("continuous_usage_stats", only(False, why="the last chunk has the usage"), "only false"),
)

_penalty = number(-2.0, 2.0)
_count = integer(0, MAX_LOGPROBS, f"an int in [0, {MAX_LOGPROBS}]")
_tokens = integer(0, 1 << 31, "an int >= 0")

SAMPLING_FIELDS = (
    Field("n", integer(1, MAX_SAMPLES, f"an int in [1, {MAX_SAMPLES}]"), "choices per prompt", 1),
    Field("temperature", number(0.0, 1e6), "0 is greedy", 1.0),
    Field("top_p", number(0.0, 1.0), "keep the smallest set of likeliest ids whose mass reaches this; not 0", 1.0),
    Field("top_k", integer(-1, 1 << 62, "an int >= -1"), "keep this many likeliest ids; 0 or -1 keeps all", 0),
    Field("min_p", number(0.0, 1.0), "drop ids less likely than this fraction of the likeliest", 0.0),
    Field("seed", integer(0, U64 - 1, "an int in [0, 2**64)"), "key of the random stream; a choice's `seed` says which was used"),
    Field("stop", stops, "strings that end a choice; its text ends before them"),
    Field("include_stop_str_in_output", boolean, "end the text after the stop string, or the stop id, instead", False),
    Field("stop_token_ids", token_ids, "ids that end a choice besides the model's EOS ids; the text ends before them"),
    Field("ignore_eos", boolean, "go on past the model's EOS ids", False),
    Field("min_tokens", _tokens, "nothing ends a choice before this many tokens", 0),
    Field("presence_penalty", _penalty, "taken off the logits of ids in the output so far", 0.0),
    Field("frequency_penalty", _penalty, "taken off the logit of an id once for each time it is in the output so far", 0.0),
    Field("repetition_penalty", number(0.01, 100.0), "divides the logits of ids seen so far if positive, else multiplies them", 1.0),
    Field("logit_bias", logit_bias, "token ids (as decimal strings) and what is added to their logits, [-100, 100]"),
    Field("allowed_token_ids", token_ids, "the only ids that may be drawn"),
)

_COMMON_FIELDS = (
    Field("model", string, "the served model's name; it need not be given"),
    *SAMPLING_FIELDS,
    Field("stream", boolean, "reply in chunks, by server-sent events", False),
    Field("stream_options", stream_options, "only with stream"),
    Field("user", text, "accepted; nothing is done with it"),
    Field("return_token_ids", boolean, "add the ids of prompt and choices to the reply", False),
    Field("return_tokens_as_token_ids", boolean, 'name tokens in logprobs "token_id:7" instead of by their text', False),
    Field("prompt_logprobs", only(0, why="0 gives the prompt's own tokens"), "0 adds the log-probability of each prompt token"),
    Field("detokenize", boolean, "false leaves text empty; logprobs then name tokens by id", True),
    Field("skip_special_tokens", boolean, "leave special tokens out of the text; ids are never changed", True),
    Field("spaces_between_special_tokens", boolean, "put a space between a special token and what stands beside it", False),
    Field("request_id", string, "name of this call, for abort; it ends the reply's id; 409 while one of that name is in flight"),
    Field("priority", integer(-(1 << 31), 1 << 31, "an int"), "lower is admitted earlier and preempted later", 0),
    Field("group", string, "name shared by calls that are aborted together"),
    Field("session", string, "name of the conversation or worker this belongs to, for abort"),
    CACHE_SALT,
    Field("use_beam_search", only(False, why="samples are drawn"), "only false"),
    Field("deadline_s", seconds, 'seconds until the rest ends with what there is and finish_reason "abort"'),
    *VERSION_FIELDS,
)

COMPLETION_FIELDS = (
    Field("prompt", prompts, "text, ids, or a list of either", required=True),
    *_COMMON_FIELDS,
    Field("max_tokens", _tokens, "new tokens at most; the context may end a choice earlier", COMPLETION_MAX_TOKENS),
    Field("logprobs", _count, "log-probability of each token, and of this many likeliest in its place"),
    Field("echo", boolean, "put the prompt before each choice's text; with logprobs, its tokens too", False),
    Field("add_special_tokens", boolean, "add BOS to text prompts where the model has one", True),
    Field("best_of", integer(1, MAX_SAMPLES), "only the value of n"),
    Field("suffix", only("", why="no model here fills in the middle"), "only empty"),
)

_NO_TOOLS = "tool calls are not parsed: the text comes as the model wrote it"
CHAT_FIELDS = (
    Field("messages", chat_messages, "the chat, rendered by the model's template; content is a string or text parts", required=True),
    *_COMMON_FIELDS,
    Field("max_completion_tokens", _tokens, "new tokens at most; default: the room left in the context"),
    Field("max_tokens", _tokens, "older name of max_completion_tokens"),
    Field("logprobs", boolean, "log-probability of each token", False),
    Field("top_logprobs", _count, "and of this many likeliest in its place; needs logprobs", 0),
    Field("tools", objects, "given to the template; calls are not parsed out of the text"),
    Field("tool_choice", only("none", "auto", why=_NO_TOOLS), "only none or auto"),
    Field("parallel_tool_calls", boolean, "accepted; nothing depends on it"),
    Field("documents", objects, "given to the template"),
    Field("chat_template_kwargs", template_variables, "variables for the template"),
    Field("chat_template", only(why="the model's template is used; render it yourself and send /v1/completions the text"), "refused"),
    Field("add_generation_prompt", boolean, "end the prompt with the header of an assistant's turn", True),
    Field("continue_final_message", boolean, "end the prompt inside the last message, to go on with it", False),
    Field("add_special_tokens", only(False, why="the template writes the special tokens itself"), "only false"),
    Field("response_format", only({"type": "text"}, why="output is not constrained"), 'only {"type": "text"}'),
    Field("store", only(False, why="nothing is kept"), "only false"),
    Field("metadata", mapping, "accepted; nothing is done with it"),
)


def sampling_params(got: dict[str, Any], max_tokens: int | None, top_logprobs: int) -> SamplingParams:
    known = {f.name for f in fields(SamplingParams)}
    given = {f.name: got[f.name] for f in SAMPLING_FIELDS if f.name in got}
    if top_logprobs:
        given["top_logprobs"] = top_logprobs
    for name in given.keys() - known:
        raise NotSupported(f"{name} is not supported by this version", field=name)
    return SamplingParams(**given, max_tokens=max_tokens)


def common_fields(got: dict[str, Any]) -> dict[str, Any]:
    options = got.get("stream_options")
    if options is not None and not got.get("stream"):
        raise BadRequest("stream_options needs stream: true", field="stream_options")
    if got.get("stream") and "prompt_logprobs" in got:
        raise NotSupported("prompt_logprobs is not supported in a stream: it comes with the end of a choice", field="prompt_logprobs")
    detokenize = got.get("detokenize", True)
    return {
        "model": got.get("model"),
        "prompt_logprobs": "prompt_logprobs" in got,
        "stream": got.get("stream", False),
        "include_usage": (options or {}).get("include_usage", False),
        "return_token_ids": got.get("return_token_ids", False),
        "tokens_as_ids": got.get("return_tokens_as_token_ids", False) or not detokenize,
        "detokenize": detokenize,
        "skip_special_tokens": got.get("skip_special_tokens", True),
        "spaces_between_special_tokens": got.get("spaces_between_special_tokens", False),
        "request_id": got.get("request_id"),
        "group": got.get("group"),
        "session": got.get("session"),
        "cache_salt": got.get("cache_salt"),
        "priority": got.get("priority", 0),
        "deadline_s": got.get("deadline_s"),
        "versions": version_fields(got),
    }


def shown_logprobs(got: dict[str, Any], logprobs: int | None) -> int:
    """How many alternatives the engine has to report. A greedy token's own logprob is that of the likeliest (see openai_replies.py)."""
    return max(logprobs, 1 if got.get("temperature") == 0 else 0) if logprobs is not None else 0


def parse_completion(body: Any) -> OpenAIRequest:
    """Check a decoded body of `POST /v1/completions`. BadRequest names the first field that is wrong."""
    got = read(body, COMPLETION_FIELDS, "")
    if got.get("best_of", got.get("n", 1)) != got.get("n", 1):
        raise NotSupported(f"best_of other than n is not supported: ask for n = {got['best_of']} and choose", field="best_of")
    logprobs, echo = got.get("logprobs"), got.get("echo", False)
    common = common_fields(got)
    if common["stream"] and echo and logprobs is not None:
        raise NotSupported("echo with logprobs is not supported in a stream: the prompt's come with the end of a choice", field="echo")
    return OpenAIRequest(
        **{**common, "prompt_logprobs": common["prompt_logprobs"] or (echo and logprobs is not None)},
        chat=False,
        prompts=got["prompt"],
        messages=[],
        template={},
        params=sampling_params(got, got.get("max_tokens", COMPLETION_MAX_TOKENS), shown_logprobs(got, logprobs)),
        logprobs=logprobs,
        echo=echo,
        add_special_tokens=got.get("add_special_tokens", True),
    )


def parse_chat(body: Any) -> OpenAIRequest:
    """Check a decoded body of `POST /v1/chat/completions`. BadRequest names the first field that is wrong."""
    got = read(body, CHAT_FIELDS, "")
    max_tokens = got.get("max_completion_tokens", got.get("max_tokens"))
    if got.get("max_tokens", max_tokens) != max_tokens:
        raise BadRequest("max_tokens and max_completion_tokens are two names of one limit: give one of them", field="max_tokens")
    if got.get("top_logprobs") and not got.get("logprobs"):
        raise BadRequest("top_logprobs needs logprobs: true", field="top_logprobs")
    logprobs = got.get("top_logprobs", 0) if got.get("logprobs") else None
    variables = ("tools", "documents", "add_generation_prompt", "continue_final_message")
    template: dict[str, Any] = {name: got[name] for name in variables if name in got}
    if template.get("continue_final_message"):
        template.setdefault("add_generation_prompt", False)
    clash = next((name for name in template if name in got.get("chat_template_kwargs", {})), None)
    if clash is not None:
        raise BadRequest(f"{clash} is given twice: beside messages and in chat_template_kwargs", field=f"chat_template_kwargs.{clash}")
    return OpenAIRequest(
        **common_fields(got),
        chat=True,
        prompts=[],
        messages=got["messages"],
        id_prefix="chatcmpl-",
        template={**template, **got.get("chat_template_kwargs", {})},
        params=sampling_params(got, max_tokens, shown_logprobs(got, logprobs)),
        logprobs=logprobs,
        echo=False,
        add_special_tokens=False,
    )
