"""Rollouts in any of the forms they come in, as samples to be computed again; and what keeps them from being compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import __version__
from ..kernels.sampling_mask import SamplingMask
from ..rollout.engine.params import SamplingParams
from .errors import ParityError

COLUMNS = ("model_logprobs", "temperature_logprobs", "entropy", "logprobs")


@dataclass(kw_only=True, slots=True)
class Sampled:
    """One sample, what it was drawn by, and what its engine said of its tokens."""

    where: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    columns: dict[str, npt.NDArray[np.float32]]
    """of COLUMNS, those to be compared"""
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    mask: SamplingMask | None
    fingerprint: str | None
    dtype: str | None
    no_logprobs: str = ""
    """why `logprobs` are not compared"""
    weights: dict[int, str | None] = field(default_factory=dict)
    """digest by version of the weights that gave it, where a trace says so"""

    @property
    def all_ids(self) -> list[int]:
        return self.prompt_token_ids + self.token_ids

    @property
    def length(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids)


def read_rollouts(
    rollouts: Any,
    params: Any,
    *,
    fingerprint: str | None,
    dtype: str | None,
    library_version: str | None,
    weight_version: int | None,
    vocab_size: int,
    trainer_fingerprint: str,
) -> list[Sampled]:
    """All samples that hold tokens.

    Raises:
        ParityError: two things differ that must agree, or there is nothing to compare.
    """
    fingerprint = fingerprint or getattr(rollouts, "fingerprint", None) or None
    dtype = dtype or getattr(rollouts, "dtype", None) or None
    found = []
    for where, prompt, sample, entry, own in _samples(getattr(rollouts, "results", rollouts), params):
        stated = fingerprint or getattr(entry, "fingerprint", None) or None
        _agree(where, "numerics", stated, trainer_fingerprint)
        _agree(where, "rollsync version", getattr(entry, "version", None) or library_version, __version__)
        _check_versions(where, sample, weight_version)
        if not prompt:
            raise ParityError(f"{where} has no prompt_token_ids: its first token was drawn from no logits")
        _check_ids(where, [*prompt, *sample.token_ids], vocab_size)
        if sample.token_ids:
            found.append(_sampled(where, prompt, sample, own, stated, dtype or getattr(entry, "dtype", None) or None))
            found[-1].weights = dict(getattr(entry, "weights", None) or {})
    if not found:
        raise ParityError("there is nothing to compare: no rollout holds a token")
    if not any(s.columns for s in found):
        raise ParityError(
            "there is nothing to compare: the rollouts hold no model_logprobs (ask for include=['model_logprobs']), and their "
            f"logprobs cannot be computed again: {found[0].no_logprobs}"
        )
    return found


def _samples(rollouts: Any, params: Any) -> Iterator[tuple[str, list[int], Any, Any, SamplingParams | None]]:
    """(where, prompt, sample, what it came in, params or None) of prompts with samples, or of lines of a trace."""
    if isinstance(rollouts, str | bytes | Mapping) or not isinstance(rollouts, Iterable):
        raise ParityError(f"rollouts must be a list of outputs, a RolloutResult or the records of a trace, got {type(rollouts).__name__}")
    entries = list(rollouts)
    given = list(params) if isinstance(params, Sequence) else [params] * len(entries)
    if len(given) != len(entries):
        raise ParityError(f"params must be one, or one for each of the {len(entries)} rollouts, got {len(given)}")
    for p, (entry, other) in enumerate(zip(entries, given, strict=True)):
        if not hasattr(entry, "prompt_token_ids"):
            raise ParityError(f"rollouts[{p}] is a {type(entry).__name__}, which holds no prompt_token_ids")
        own = _params(getattr(entry, "params", None) or other)
        prompt = list(entry.prompt_token_ids)
        if hasattr(entry, "samples"):
            for i, sample in enumerate(entry.samples):
                index = getattr(sample, "index", getattr(sample, "sample_index", i))
                yield f"prompt {p}, sample {index}", prompt, sample, entry, own
        elif hasattr(entry, "line"):
            yield f"line {entry.line} (sample {entry.sample_index})", prompt, entry, entry, own
        else:
            yield f"sample {p}", prompt, entry, entry, own


def _params(given: Any) -> SamplingParams | None:
    if given is None or isinstance(given, SamplingParams):
        return given
    if isinstance(given, Mapping):
        return SamplingParams.from_wire(dict(given))
    raise ParityError(f"params must be SamplingParams or a dict of its fields, got {type(given).__name__}")


def _agree(where: str, what: str, theirs: Any, ours: Any) -> None:
    if theirs is not None and theirs != ours:
        raise ParityError(f"{where} was made with {what} {theirs}, and this trainer has {ours}: bits cannot be expected to agree")


def _check_versions(where: str, sample: Any, weight_version: int | None) -> None:
    spans = getattr(sample, "weight_versions", None) or ()
    versions = sorted({span["version"] for span in spans})
    if len(versions) > 1:
        raise ParityError(f"{where} was made with weight versions {', '.join(map(str, versions))}: one forward pass has one version")
    if any(span.get("mixed_kv") for span in spans):
        raise ParityError(f"{where} was made in part on a KV cache of older weights: no one set of weights gives it again")
    if versions and weight_version is not None and versions[0] != weight_version:
        raise ParityError(f"{where} was made with weight version {versions[0]}, and this trainer has {weight_version}")


def _check_ids(where: str, ids: list[int], vocab_size: int) -> None:
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise ParityError(f"{where} holds token id {wrong}, and this model has {vocab_size} ids: the rollouts are another model's")


def _sampled(
    where: str, prompt: list[int], sample: Any, params: SamplingParams | None, fingerprint: str | None, dtype: str | None
) -> Sampled:
    columns = {}
    for name in COLUMNS:
        values = getattr(sample, name, None)
        if values is None:
            continue
        if len(values) != len(sample.token_ids):
            raise ParityError(f"{where}: {name} holds {len(values)} values for {len(sample.token_ids)} tokens")
        columns[name] = np.array([-np.inf if v is None else v for v in values], np.float32)
    mask = getattr(sample, "sampling_mask", None)
    no_logprobs = _objection(params, mask)
    if no_logprobs:
        columns.pop("logprobs", None)
    if params is None:
        for name in ("temperature_logprobs", "entropy"):
            columns.pop(name, None)
    drawn_by = params or SamplingParams()
    return Sampled(
        where=where, prompt_token_ids=prompt, token_ids=list(sample.token_ids), columns=columns, temperature=drawn_by.temperature,
        top_k=drawn_by.top_k, top_p=drawn_by.top_p, min_p=drawn_by.min_p, mask=mask, fingerprint=fingerprint, dtype=dtype,
        no_logprobs=no_logprobs,
    )  # fmt: skip


def _objection(params: SamplingParams | None, mask: SamplingMask | None) -> str:
    """Why the `logprobs` of a sample cannot be computed from the model's logits alone; empty if they can."""
    if params is None:
        return "params were not given"
    for name, off in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)):
        if getattr(params, name) != off:
            return f"{name} changed the logits"
    if params.logit_bias:
        return "logit_bias changed the logits"
    if mask is None and params.allowed_token_ids is not None:
        return "allowed_token_ids without sampling_mask"
    if mask is None and params.min_tokens > 0:
        return "min_tokens without sampling_mask"
    return ""
