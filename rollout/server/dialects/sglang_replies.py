"""From samples to what SGLang's `/generate` replies, whole or so far.

Logprobs are what that engine computes: log_softmax(logits / temperature), before penalties and truncation; at temperature 0, of
temperature 1. With custom_params.return_top_p_token_ids they are renormalised over the ids kept. The alternatives of
`top_logprobs_num` are the likeliest of the distribution drawn from. A value that is not finite is null.
"""

from __future__ import annotations

import base64
import math
import time
from array import array
from collections.abc import Callable, Iterable
from itertools import accumulate, chain
from typing import Any

from ....kernels.sampling_mask import SamplingMask
from ...errors import RollsyncError
from ...wire import unpack_array
from ..mailbox import join_spans
from ..sample_text import SampleText
from ..token_names import TokenNames
from .sglang_protocol import Asked, GenerateRequest

Row = list[Any]
"""[logprob, id, text or null]"""
VersionText = Callable[[int], str]
"""what a version of the weights is called"""


def _int32(values: Iterable[int]) -> str:
    """In base64, as slime reads arrays."""
    return base64.b64encode(array("i", values).tobytes()).decode()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class Sample:
    """One sample as its tokens come."""

    def __init__(self, asked: Asked, prompt_ids: tuple[int, ...], rid: str, text: SampleText | None, names: TokenNames | None) -> None:
        self.asked, self._prompt_ids, self._rid = asked, prompt_ids, rid
        self._text, self._names = text, names
        self._shown = ""
        self._ids: list[int] = []
        self._rows: list[Row] = []
        self._tops: list[list[Row]] = []
        self._spans: list[dict[str, Any]] = []
        self._masks: list[list[int]] = []
        self._drawn: list[float | None] = []
        """logprobs of the tokens, renormalised over their masks"""

    def take(self, sample: dict[str, Any]) -> None:
        """Add the tokens of a delta, or those of the whole sample that no delta brought. Raises the sample's error."""
        if sample["finish_reason"] == "error":
            raise RollsyncError(sample.get("error") or "the sample ended with an error")
        whole = sample["finish_reason"] is not None
        skip = len(self._ids) if whole else 0
        ids = unpack_array(sample["token_ids"])[skip:]
        self._ids += ids
        if self._text is not None:
            self._shown += self._text.finish(ids, sample["stop_reason"]) if whole else self._text.push(ids)
        if self.asked.logprobs:
            self._take_logprobs(sample, ids, skip)
        if self.asked.mask or self.asked.kept:
            mask = SamplingMask.from_wire(sample["sampling_mask"])[skip:]
            self._masks += [list(range(mask.vocab_size)) if row is None else row for row in mask]
            self._drawn += map(_finite, unpack_array(sample["logprobs"])[skip:])
        if whole:
            self._spans = sample["weight_versions"]
        else:
            join_spans(self._spans, sample["weight_versions"], 0)

    def _take_logprobs(self, sample: dict[str, Any], ids: list[int], skip: int) -> None:
        column = "logprobs" if self.asked.kept else "temperature_logprobs"
        column = "model_logprobs" if self.asked.params.temperature == 0 else column
        self._rows += (self._row(t, v) for t, v in zip(ids, unpack_array(sample[column])[skip:], strict=True))
        if self.asked.top:
            tables = [unpack_array(sample[name])[skip:] for name in ("top_token_ids", "top_logprobs")]
            for likeliest in zip(*tables, strict=True):
                rows = [self._row(t, v) for t, v in zip(*likeliest, strict=True) if t >= 0 and _finite(v) is not None]
                self._tops.append(rows)

    def _row(self, token: int, logprob: float | None) -> Row:
        return [_finite(logprob), token, self._names(token)[0] if self._names else None]

    def _prompt_rows(self, values: Iterable[float | None]) -> list[Row]:
        """Of the prompt's tokens from the start that was asked for: the first has none, as there."""
        rows = [self._row(t, v) for t, v in zip(self._prompt_ids[self.asked.start :], values, strict=False)]
        return [[None, *rows[0][1:]], *rows[1:]] if rows else rows

    def show(self, sample: dict[str, Any], version: VersionText, current: int, age_s: float, prompt_ids: bool) -> dict[str, Any]:
        """All there is so far. `current` is the version served, for a sample without a token."""
        last = self._spans[-1]["version"] if self._spans else current
        meta: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": finish_reason(sample),
            "prompt_tokens": len(self._prompt_ids),
            "completion_tokens": len(self._ids),
            "cached_tokens": sample.get("cached_tokens") or 0,
            "reasoning_tokens": 0,
            "weight_version": version(last),
            "weight_versions": [{**span, "version": version(span["version"])} for span in self._spans],
            "e2e_latency": age_s,
        }
        if "seed" in sample:
            meta["seed"] = sample["seed"]
        if self.asked.logprobs:
            given = unpack_array(sample["prompt_logprobs"]) if "prompt_logprobs" in sample else []
            meta["input_token_logprobs"] = self._prompt_rows(given)
            meta["output_token_logprobs"] = self._rows
            meta["output_token_logprobs_length"] = len(self._rows)
            if self.asked.top:
                meta["output_top_logprobs"] = self._tops
        if self.asked.mask:
            meta["output_token_sampling_mask"] = self._masks
            meta["output_token_sampling_mask_length"] = len(self._masks)
            meta["output_token_sampling_logprobs"] = self._drawn
        if self.asked.kept and meta["finish_reason"] is not None:
            meta["top_p_token_ids"] = _int32(chain.from_iterable(self._masks))
            meta["top_p_token_offsets"] = _int32(accumulate(map(len, self._masks), initial=0))
        shown: dict[str, Any] = {} if self._text is None else {"text": self._shown}
        shown |= {"output_ids": self._ids, "meta_info": meta}
        return {**shown, "prompt_token_ids": list(self._prompt_ids)} if prompt_ids else shown


def finish_reason(sample: dict[str, Any]) -> dict[str, Any] | None:
    """{"type", "matched" | "length" | "message"}; None while it runs."""
    kind = sample["finish_reason"]
    if kind is None:
        return None
    if kind == "stop":
        return {"type": "stop", "matched": sample["stop_reason"]}
    if kind == "length":
        return {"type": "length", "length": sample["token_ids"]["shape"][0]}
    return {"type": "abort", "message": sample["abort_reason"] or "aborted"}


class Samples:
    """The samples of one body, by their place in the reply.

    Args:
        tokenizer: None if the model has none: then no text is shown.
        eos_ids: the model's.
        rids: the names of the prompts' calls.
    """

    def __init__(self, request: GenerateRequest, tokenizer: Any, eos_ids: Iterable[int], rids: list[str]) -> None:
        self.request, self._rids = request, rids
        self._begun_at = time.monotonic()
        self._tokenizer, self._eos = tokenizer, frozenset(eos_ids)
        self._names = TokenNames(tokenizer, as_ids=False) if tokenizer is not None and request.token_texts else None
        self._found: dict[int, Sample] = {}

    def place(self, i: int, sample: dict[str, Any]) -> int:
        """Where a sample of prompt `i` stands in the reply."""
        return i * self.request.asked[i].params.n + int(sample["index"])

    def _of(self, i: int, sample: dict[str, Any], prompt_ids: tuple[int, ...]) -> Sample:
        """The sample that a delta, or a finished sample, of prompt `i` belongs to."""
        place = self.place(i, sample)
        if place not in self._found:
            asked = self.request.asked[i]
            rid = self._rids[i] if asked.params.n == 1 else f"{self._rids[i]}_{sample['index']}"
            self._found[place] = Sample(asked, prompt_ids, rid, self._new_text(asked), self._names)
        return self._found[place]

    def take(self, i: int, item: dict[str, Any], prompt_ids: tuple[int, ...], version: VersionText, current: int) -> dict[str, Any]:
        """Take in a delta or a finished sample; all there is of that sample then."""
        sample = self._of(i, item, prompt_ids)
        sample.take(item)
        return sample.show(item, version, current, time.monotonic() - self._begun_at, self.request.prompt_ids)

    def _new_text(self, asked: Asked) -> SampleText | None:
        if self._tokenizer is None:
            return None
        params = asked.params
        return SampleText(
            self._tokenizer,
            skip_special_tokens=asked.call.skip_special_tokens,
            spaces=asked.call.spaces_between_special_tokens,
            stop=params.stop,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos),
            include_stop=params.include_stop_str_in_output,
        )
