"""From a sequence to what the caller gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .sequence import Sequence
from .types import RolloutRequest, SampleOutput


def spans(seq: Sequence, start: int, end: int) -> list[dict[str, int]]:
    """Weight versions over output tokens [start, end), counted from `start`."""
    found = []
    all_spans = seq.columns.spans
    for i, (version, first, mixed) in enumerate(all_spans):
        last = all_spans[i + 1][1] if i + 1 < len(all_spans) else end
        low, high = max(first, start), min(last, end)
        if low < high:
            span = {"version": version, "start": low - start, "end": high - start}
            found.append({**span, "mixed_kv": 1} if mixed else span)
    return found


def bare_output(spec: RolloutRequest, sample_index: int, seed: int, error: str) -> SampleOutput:
    """The final output of a sample whose own could not be made: an error and no tokens, in the columns asked for."""
    columns = [name for name in spec.include if name in ("temperature_logprobs", "model_logprobs", "entropy")]
    if spec.params.top_logprobs:
        columns += ["top_token_ids", "top_logprobs"]
    ids: dict[str, Any] = {"request_id": spec.request_id, "sample_index": sample_index, "seed": seed}
    empty: dict[str, Any] = {name: [] for name in ("token_ids", "logprobs", *columns)}
    return SampleOutput(**ids, **empty, finish_reason="error", error=error)


def lost_output(output: SampleOutput, error: str) -> SampleOutput:
    """The same for a sample whose `output` could not be sent."""
    columns = ("token_ids", "logprobs", "temperature_logprobs", "model_logprobs", "entropy", "top_token_ids", "top_logprobs")
    empty: dict[str, Any] = {name: [] for name in columns if getattr(output, name) is not None}
    ends: dict[str, Any] = {"finish_reason": "error", "stop_reason": None, "abort_reason": None, "error": error}
    return replace(output, **empty, **ends, prompt_logprobs=None, weight_versions=[], cached_tokens=0)


def sample_output(seq: Sequence, start: int = 0) -> SampleOutput:
    """Output tokens from `start` on: the whole sample if it has ended (then `start` is 0), else a delta."""
    request, columns, end = seq.request, seq.columns, seq.end
    num_output = len(columns.logprobs)
    prompt_tokens = len(request.prompt)
    # A sample cut off before its given tokens were scored has none of them: columns have equal length always.
    token_ids = seq.tokens[prompt_tokens + start : prompt_tokens + num_output]
    output = SampleOutput(
        request_id=request.id,
        sample_index=request.spec.first_sample + seq.index,
        token_ids=token_ids,
        logprobs=columns.logprobs[start:],
        weight_versions=spans(seq, start, num_output),
        seed=request.seed,
        cached_tokens=seq.cached_tokens,
    )
    if request.wants_temperature:
        output.temperature_logprobs = columns.temperature[start:]
    if request.wants_model:
        output.model_logprobs = columns.model[start:]
    if request.wants_entropy:
        output.entropy = columns.entropy[start:]
    if request.wants_top:
        output.top_token_ids = columns.top_ids[start:]
        output.top_logprobs = columns.top_logprobs[start:]
    if end is not None:
        if request.prompt_logprobs is not None and request.num_prompt_scored >= prompt_tokens:
            output.prompt_logprobs = list(request.prompt_logprobs)
        output.finish_reason = end.reason
        output.stop_reason = end.stop_reason
        output.abort_reason = end.abort_reason
        output.error = end.error
    return output
