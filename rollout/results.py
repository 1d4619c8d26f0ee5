"""What a client sends to `POST /v1/rollouts` and what it gets back, as plain dataclasses."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgpack  # type: ignore[import-untyped]

from .engine.types import SamplingParams
from .errors import BadRequest, RollsyncError, ServerUnreachable
from .wire import error_from_wire, is_array, pack_array, unpack_array

Prompt = str | Sequence[int] | dict[str, Any]
"""text, token ids, or a whole prompt object of `POST /v1/rollouts` ({"messages": …}, {"token_ids": …, "seed": …})"""


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
    """of the server's numerics; equal fingerprints mean equal bits for equal weights"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamItem:
    """One event of a stream: a finished sample of a prompt, or the error that refused that prompt."""

    prompt_index: int
    sample: Sample | None = None
    error: RollsyncError | None = None


_SAMPLE_FIELDS = {f.name for f in fields(Sample)}


def _sample(wire: dict[str, Any]) -> Sample:
    """Fields a newer server adds are passed over."""
    values: dict[str, Any] = {k: unpack_array(v) if is_array(v) else v for k, v in wire.items() if k in _SAMPLE_FIELDS}
    return Sample(**values)


def parse_result(wire: dict[str, Any]) -> RolloutResult:
    results = []
    for item in wire["results"]:
        error = error_from_wire(item["error"]) if "error" in item else None
        ids = unpack_array(item["prompt_token_ids"]) if error is None else []
        samples = [_sample(s) for s in item.get("samples", ())]
        results.append(PromptResult(prompt_index=item["prompt_index"], prompt_token_ids=ids, samples=samples, error=error))
    return RolloutResult(id=wire["id"], model=wire["model"], results=results, usage=wire["usage"], fingerprint=wire.get("fingerprint", ""))


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, dict):
        return prompt
    if not isinstance(prompt, Iterable):
        raise BadRequest(f"prompts must be texts, lists of token ids or dicts, got {prompt!r}", field="prompts")
    ids = list(prompt)
    fits = all(type(i) is int and -(1 << 31) <= i < 1 << 31 for i in ids)
    return {"token_ids": pack_array("<i4", ids) if fits else ids}


def rollouts_body(
    prompts: Sequence[Prompt], n: int | None, sampling_params: SamplingParams | dict[str, Any] | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The body of `POST /v1/rollouts`. `n` wins over `sampling_params.n`."""
    if isinstance(prompts, str | bytes | dict) or not isinstance(prompts, Iterable):
        raise BadRequest(f"prompts must be a list of prompts, got {type(prompts).__name__}: put a single one into a list", field="prompts")
    if isinstance(options.get("include"), str):
        raise BadRequest(f"include must be a list of names, got {options['include']!r}", field="include")
    params = sampling_params.to_wire() if isinstance(sampling_params, SamplingParams) else dict(sampling_params or {})
    if isinstance(params.get("logit_bias"), Mapping):  # msgpack bodies, like JSON, have keys of text
        params["logit_bias"] = {str(token): bias for token, bias in params["logit_bias"].items()}
    own_n = params.pop("n", 1)
    body = {"prompts": [_prompt(p) for p in prompts], "n": own_n if n is None else n, "sampling_params": params}
    return {**body, **{k: list(v) if isinstance(v, tuple) else v for k, v in options.items() if v is not None}}


class Frames:
    """Length-prefixed msgpack frames out of chunks of bytes, as stream items."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.done = False

    def feed(self, chunk: bytes) -> Iterator[StreamItem]:
        self._buffer += chunk
        while len(self._buffer) >= 4:
            (length,) = struct.unpack_from("<I", self._buffer)
            if len(self._buffer) < 4 + length:
                return
            event = msgpack.unpackb(bytes(self._buffer[4 : 4 + length]))
            del self._buffer[: 4 + length]
            yield from self._item(event)

    def _item(self, event: dict[str, Any]) -> Iterator[StreamItem]:
        if event["event"] == "done":
            self.done = True
        elif event["event"] == "sample":
            yield StreamItem(prompt_index=event["prompt_index"], sample=_sample(event["sample"]))
        elif event["event"] == "error":
            error = error_from_wire(event["error"])
            if "prompt_index" not in event:
                raise error
            yield StreamItem(prompt_index=event["prompt_index"], error=error)

    def finish(self) -> None:
        if not self.done:
            raise ServerUnreachable("the stream ended before its last event: the connection or the server was lost")
