"""vLLM's sampling parameters read into an engine's, and an engine's samples told as vLLM tells them: what executors send and read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...rollout.engine.params import SamplingParams
from ...rollout.engine.types import SampleOutput
from ...rollout.errors import BadRequest
from ...rollout.models.detokenizer import end_at_stop
from ...rollout.models.tokenizer import Tokenizer
from ..errors import TargetError

PLAIN = (
    "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "include_stop_str_in_output", "ignore_eos",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""fields that mean the same on both sides"""
IF_GIVEN = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids")
"""likewise, where None leaves them out"""
REFUSED = ("prompt_logprobs", "bad_words", "structured_outputs", "guided_decoding", "logits_processors")
"""vLLM's fields that change the outcome, and that Rollsync has not"""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one id at one place."""

    logprob: float
    rank: int | None
    """1 is the likeliest id; None: not among those that were asked for"""
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample."""

    index: int
    text: str
    token_ids: list[int]
    """the EOS or stop id that ended it among them"""
    logprobs: list[dict[int, Logprob]] | None
    """per token: the token itself, and as many of the likeliest ids as were asked for"""
    finish_reason: str
    stop_reason: int | str | None
    weight_versions: list[dict[str, int]]
    """spans of `token_ids` by the weights that made them; not of vLLM"""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The samples of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


def read_params(given: Any) -> SamplingParams:
    """The engine's parameters for vLLM's, or for those of the stand-in.

    Raises:
        BadRequest: naming the field that has no counterpart, or whose value is out of range.
    """
    for name in REFUSED:
        if getattr(given, name, None):
            raise BadRequest(f"sampling_params.{name} is not supported, got {getattr(given, name)!r:.200}", field=name)
    missing = object()
    fields: dict[str, Any] = {name: value for name in PLAIN if (value := getattr(given, name, missing)) is not missing}
    fields |= {name: value for name in IF_GIVEN if (value := getattr(given, name, None)) is not None}
    if isinstance(fields.get("stop"), list):
        fields["stop"] = tuple(fields["stop"])
    logprobs = getattr(given, "logprobs", None)
    try:
        return SamplingParams(**fields, top_logprobs=logprobs or 0)
    except BadRequest as error:
        words = str(error).replace("top_logprobs", "logprobs", 1) if error.field == "top_logprobs" else str(error)
        raise BadRequest(f"sampling_params.{words}", field=error.field) from None


def told(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    samples: Sequence[SampleOutput],
    tokenizer: Tokenizer,
    num_ids: int,
    *,
    want_logprobs: bool,
    skip_special_tokens: bool,
) -> RequestOutput:
    """An engine's samples as vLLM would give them.

    Raises:
        TargetError: a sample failed, was aborted before its first token, or is not as it must be; all problems of all samples.
    """
    problems = [problem for sample in samples for problem in _faults(sample, num_ids)]
    if len(samples) != params.n:
        problems.insert(0, f"{params.n} samples were asked for, {len(samples)} came")
    if problems:
        raise TargetError(problems)
    outputs = [
        CompletionOutput(
            index=index,
            text=_text(tokenizer, sample, params, skip_special_tokens),
            token_ids=list(sample.token_ids),
            logprobs=_logprobs(sample) if want_logprobs else None,
            finish_reason=str(sample.finish_reason),
            stop_reason=sample.stop_reason,
            weight_versions=sample.weight_versions,
        )
        for index, sample in enumerate(samples)
    ]
    return RequestOutput(request_id, list(prompt), outputs)


def _faults(sample: SampleOutput, num_ids: int) -> list[str]:
    """Why a trainer must not have this sample."""
    where = f"sample {sample.sample_index} of request {sample.request_id}"
    if sample.finish_reason == "error":
        return [f"{where} failed: {sample.error}"]
    if not sample.token_ids:
        return [f"{where} has no token: finish_reason {sample.finish_reason} ({sample.abort_reason})"]
    found = []
    if len(sample.logprobs) != len(sample.token_ids):
        found.append(f"{where} has {len(sample.token_ids)} ids and {len(sample.logprobs)} logprobs")
    if outside := [i for i in sample.token_ids if not 0 <= i < num_ids]:
        found.append(f"{where} holds id {outside[0]}, ids end at {num_ids - 1}")
    return found


def _logprobs(sample: SampleOutput) -> list[dict[int, Logprob]]:
    rows = []
    for place, (token, value) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        ids = sample.top_token_ids[place] if sample.top_token_ids is not None else []
        values = sample.top_logprobs[place] if sample.top_logprobs is not None else []
        row = {id: Logprob(v, rank) for rank, (id, v) in enumerate(zip(ids, values, strict=True), 1) if id >= 0}
        rows.append({**row, token: row.get(token, Logprob(value, None))})
    return rows


def _text(tokenizer: Tokenizer, sample: SampleOutput, params: SamplingParams, skip: bool) -> str:
    ids, stop = sample.token_ids, sample.stop_reason
    text = tokenizer.decode(ids, skip)
    if not isinstance(stop, str):
        return text
    return end_at_stop(text, tokenizer.decode(ids[:-1], skip), stop, include=params.include_stop_str_in_output)
