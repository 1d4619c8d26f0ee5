"""What a client sends and what it gets back, as plain dataclasses; shared by the blocking client and the one for asyncio."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import msgpack  # type: ignore[import-untyped]

from ..kernels.sampling_mask import SamplingMask
from .engine.params import SAMPLING_NAMES, SamplingParams
from .errors import BadRequest, RollsyncError, ServerUnreachable, show
from .fields import is_message
from .wire import error_from_wire, is_array, is_mask, pack_array, unpack_array

T = TypeVar("T")
_ID_FIELDS = ("token_ids", "continue_from", "forced_token_ids")
Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | dict[str, Any]
"""text, token ids, a chat as a list of messages, or a whole prompt object of `POST /v1/rollouts` ({"messages": …, "seed": …})"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One finished sample. The columns have equal length; those not asked for are None."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_reason: int | str | None = None
    abort_reason: str | None = None
    error: str | None = None
    weight_versions: list[dict[str, int]] = field(default_factory=list)
    seed: int = 0
    cached_tokens: int = 0
    text: str | None = None
    temperature_logprobs: list[float] | None = None
    model_logprobs: list[float] | None = None
    entropy: list[float] | None = None
    top_token_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None
    sampling_mask: SamplingMask | None = None
    prompt_logprobs: list[float | None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptResult:
    """The samples of one prompt, by index, or the error that refused it."""

    prompt_index: int
    prompt_token_ids: list[int]
    samples: list[Sample]
    error: RollsyncError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResult:
    """The answer to one call."""

    id: str
    model: str
    results: list[PromptResult]
    usage: dict[str, int]
    fingerprint: str = ""
    """of the server's numerics; equal fingerprints mean equal bits for equal weights and dtype"""
    dtype: str = ""
    """bfloat16 or float32; empty from a server that does not say"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """New tokens of a running sample. `start` and the spans of `weight_versions` count from the sample's first token."""

    index: int
    start: int
    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[dict[str, int]] = field(default_factory=list)
    text: str | None = None
    temperature_logprobs: list[float] | None = None
    model_logprobs: list[float] | None = None
    entropy: list[float] | None = None
    top_token_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None
    sampling_mask: SamplingMask | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamItem:
    """One event of a stream: new tokens or a finished sample of a prompt, or the error that refused that prompt."""

    id: str
    """of the call, to re-attach by"""
    prompt_index: int
    delta: Delta | None = None
    sample: Sample | None = None
    error: RollsyncError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Log-probabilities of one given continuation, or the error that refused it."""

    item_index: int
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """the continuation"""
    model_logprobs: list[float] = field(default_factory=list)
    temperature_logprobs: list[float] | None = None
    finish_reason: str | None = None
    abort_reason: str | None = None
    weight_versions: list[dict[str, int]] = field(default_factory=list)
    cached_tokens: int = 0
    error: RollsyncError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A chat as the model's template writes it."""

    text: str
    token_ids: list[int]


def _read(cls: type[T], wire: dict[str, Any]) -> T:
    """A dataclass of what came; fields a newer server adds are passed over."""
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    return cls(**{k: _value(v) for k, v in wire.items() if k in names})


def _value(wire: Any) -> Any:
    if is_array(wire):
        return unpack_array(wire)
    return SamplingMask.from_wire(wire) if is_mask(wire) else wire


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request and how to read its reply."""

    method: str
    path: str
    body: dict[str, Any] | None
    parse: Callable[[Any], T]


def _plain(wire: Any) -> dict[str, Any]:
    answer: dict[str, Any] = wire
    return answer


def get(path: str) -> Call[dict[str, Any]]:
    return Call("GET", path, None, _plain)


def abort_call(which: dict[str, Any]) -> Call[dict[str, Any]]:
    return Call("POST", "/v1/engine/abort", which, _plain)


def rollouts_call(prompts: Any, n: int | None, params: Any, include: Sequence[str], options: dict[str, Any]) -> Call[RolloutResult]:
    body = rollouts_body(prompts, n, params, {"include": include, **options})
    if body.get("stream"):
        raise BadRequest("stream belongs to the method stream()", field="stream")
    return Call("POST", "/v1/rollouts", body, parse_result)


def stream_call(
    prompts: Any, n: int | None, params: Any, include: Sequence[str], tokens: bool, options: dict[str, Any]
) -> Call[None]:
    body = rollouts_body(prompts, n, params, {"include": include, **options, "stream": "tokens" if tokens else "samples"})
    return Call("POST", "/v1/rollouts", body, lambda _: None)


def reattach_call(request_id: str, stream: str = "false") -> Call[RolloutResult]:
    return Call("GET", f"/v1/rollouts/{quote(request_id, safe='')}?stream={stream}", None, parse_result)


def score_call(items: Sequence[tuple[Prompt, Prompt]], temperature: float | None, options: dict[str, Any]) -> Call[list[Score]]:
    wire = [
        {"prompt": _prompt(prompt, f"items[{i}].prompt"), "continuation": _prompt(continuation, f"items[{i}].continuation")}
        for i, (prompt, continuation) in enumerate(items)
    ]
    more = {k: v for k, v in {"temperature": temperature, **options}.items() if v is not None}
    return Call("POST", "/v1/logprobs", {"items": wire, **more}, lambda reply: [_score(r) for r in reply["results"]])


def _score(wire: dict[str, Any]) -> Score:
    if isinstance(wire.get("error"), dict):
        return Score(item_index=wire["item_index"], error=error_from_wire(wire["error"]))
    if "error" in wire:  # the engine could not finish it
        wire = {**wire, "error": RollsyncError(str(wire["error"]))}
    return _read(Score, wire)


def _items(path: str, items: list[dict[str, Any]], read: Callable[[dict[str, Any]], T]) -> Call[list[T]]:
    def parse(reply: Any) -> list[T]:
        for result in reply["results"]:
            if "error" in result:
                raise error_from_wire(result["error"])
        return [read(result) for result in reply["results"]]

    return Call("POST", path, {"items": items}, parse)


def tokenize_call(inputs: Sequence[str | list[dict[str, Any]]], add_special_tokens: bool) -> Call[list[list[int]]]:
    special = {"add_special_tokens": True} if add_special_tokens else {}
    items = [{"text": i, **special} if isinstance(i, str) else {"messages": i} for i in inputs]
    return _items("/v1/tokenize", items, lambda r: unpack_array(r["token_ids"]))


def detokenize_call(inputs: Sequence[Sequence[int]], options: dict[str, Any]) -> Call[list[str]]:
    return _items("/v1/detokenize", [{**_prompt(ids, f"items[{i}]"), **options} for i, ids in enumerate(inputs)], lambda r: str(r["text"]))


def render_call(chats: Sequence[list[dict[str, Any]]], variables: dict[str, Any] | None) -> Call[list[Rendered]]:
    kwargs = {"chat_template_kwargs": variables} if variables else {}
    return _items("/v1/render", [{"messages": messages, **kwargs} for messages in chats], lambda r: _read(Rendered, r))


def parse_result(wire: dict[str, Any]) -> RolloutResult:
    results = []
    for item in wire["results"]:
        error = error_from_wire(item["error"]) if "error" in item else None
        ids = unpack_array(item["prompt_token_ids"]) if error is None else []
        samples = [_read(Sample, s) for s in item.get("samples", ())]
        results.append(PromptResult(prompt_index=item["prompt_index"], prompt_token_ids=ids, samples=samples, error=error))
    said = {name: wire.get(name, "") for name in ("fingerprint", "dtype")}
    return RolloutResult(id=wire["id"], model=wire["model"], results=results, usage=wire["usage"], **said)


def _ids(ids: list[Any]) -> Any:
    """Ids of any integer type, packed; what is no id, as it came, for the server to name."""
    if not all(type(i) is int for i in ids):  # numpy's integers and the like
        ids = [operator.index(i) if hasattr(i, "__index__") and not isinstance(i, bool) else i for i in ids]
    fits = all(type(i) is int and -(1 << 31) <= i < 1 << 31 for i in ids)
    return pack_array("<i4", ids) if fits else ids


def _prompt(prompt: Prompt, where: str) -> dict[str, Any]:
    """What may be a prompt (or a continuation) in any call, as an object of the wire; errors call it `where`."""
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, dict):
        given = {name: prompt[name] for name in _ID_FIELDS if isinstance(prompt.get(name), Iterable)}
        return {**prompt, **{name: _ids(list(ids)) for name, ids in given.items() if not isinstance(ids, str | bytes | dict)}}
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        kinds = "a text, a list of token ids, a chat (a list of messages) or a dict"
        raise BadRequest(f"{where} must be {kinds}, got {show(prompt)}", field=where)
    items = list(prompt)
    return {"messages": items} if items and all(isinstance(item, dict) for item in items) else {"token_ids": _ids(items)}


def rollouts_body(
    prompts: Sequence[Prompt], n: int | None, sampling_params: SamplingParams | dict[str, Any] | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The body of `POST /v1/rollouts`. `n` wins over `sampling_params.n`."""
    if isinstance(prompts, str | bytes | dict) or not isinstance(prompts, Iterable):
        raise BadRequest(f"prompts must be a list of prompts, got {type(prompts).__name__}: put a single one into a list", field="prompts")
    prompts = list(prompts)
    if any(map(is_message, prompts)):
        raise BadRequest("prompts must be a list of prompts, got the messages of one chat: put the chat into a list", field="prompts")
    if isinstance(options.get("include"), str):
        raise BadRequest(f"include must be a list of names, got {options['include']!r}", field="include")
    if misplaced := [name for name in options if name in SAMPLING_NAMES]:
        raise BadRequest(f"{misplaced[0]} is not an argument: give {misplaced[0]} in sampling_params", field=misplaced[0])
    params = sampling_params.to_wire() if isinstance(sampling_params, SamplingParams) else dict(sampling_params or {})
    if isinstance(params.get("logit_bias"), Mapping):  # msgpack bodies, like JSON, have keys of text
        params["logit_bias"] = {str(token): bias for token, bias in params["logit_bias"].items()}
    own_n = params.pop("n", 1)
    wire = [_prompt(p, f"prompts[{i}]") for i, p in enumerate(prompts)]
    body = {"prompts": wire, "n": own_n if n is None else n, "sampling_params": params}
    return {**body, **{k: list(v) if k == "include" or isinstance(v, tuple) else v for k, v in options.items() if v is not None}}


class Frames:
    """Length-prefixed msgpack frames out of chunks of bytes, as stream items."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._id = ""
        self.started: dict[str, Any] = {}
        """the first event: id, model, fingerprint, prompts"""
        self.done = False

    def feed(self, chunk: bytes) -> Iterator[StreamItem]:
        self._buffer += chunk
        at = 0
        while len(self._buffer) - at >= 4:
            (length,) = struct.unpack_from("<I", self._buffer, at)
            if len(self._buffer) - at < 4 + length:
                break
            event = msgpack.unpackb(bytes(self._buffer[at + 4 : at + 4 + length]))
            at += 4 + length
            yield from self._item(event)
        del self._buffer[:at]

    def _item(self, event: dict[str, Any]) -> Iterator[StreamItem]:
        kind, index = event["event"], event.get("prompt_index", -1)
        if kind == "start":
            self._id, self.started = event["id"], event
        elif kind == "done":
            self.done = True
        elif kind == "delta":
            yield StreamItem(id=self._id, prompt_index=index, delta=_read(Delta, event["sample"]))
        elif kind == "sample":
            yield StreamItem(id=self._id, prompt_index=index, sample=_read(Sample, event["sample"]))
        elif kind == "error":
            error = error_from_wire(event["error"])
            if "prompt_index" not in event:
                raise error
            yield StreamItem(id=self._id, prompt_index=index, error=error)

    def finish(self) -> None:
        if not self.done:
            raise ServerUnreachable("the stream ended before its last event: the connection or the server was lost")
