"""From a sequence to what the caller gets."""

from __future__ import annotations

from typing import Any

from ...kernels.sampling_mask import SamplingMask
from ..wire import COLUMNS, pack_array
from .sequence import Sequence
from .types import SampleOutput


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
        **{name: getattr(columns, name)[start:] for name in request.columns if name != "sampling_mask"},
        weight_versions=spans(seq, start, num_output),
        seed=request.seed,
        cached_tokens=seq.cached_tokens,
    )
    if "sampling_mask" in request.columns:
        output.sampling_mask = SamplingMask.of_rows(request.vocab_size, columns.sampling_mask[start:])
    if end is not None:
        failed_early = end.reason == "error" and num_output == 0  # see Sequence.trim
        if request.prompt_logprobs is not None and request.num_prompt_scored >= prompt_tokens and not failed_early:
            output.prompt_logprobs = list(request.prompt_logprobs)
        output.finish_reason = end.reason
        output.stop_reason = end.stop_reason
        output.abort_reason = end.abort_reason
        output.error = end.error
    return output


def output_to_wire(output: SampleOutput) -> dict[str, Any]:
    """`SampleOutput.to_wire` with its columns as wire arrays, packed here so that the front can pass them on untouched."""
    wire = output.to_wire()
    for name, dtype in COLUMNS.items():
        if name in wire and name != "sampling_mask":
            wire[name] = pack_array(dtype, wire[name])
    return wire
