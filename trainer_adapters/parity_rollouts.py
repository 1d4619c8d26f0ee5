"""Rollouts in any of the forms they come in, as samples to be computed again; and what keeps them from being compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import __version__
from ..kernels.sampling_mask import SamplingMask
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
    found = []
    for where, prompt, sample, own in _samples(getattr(rollouts, "results", rollouts), params):
        stated = getattr(sample, "fingerprint", None) or fingerprint
        _agree(where, "numerics", stated, trainer_fingerprint)
        _agree(where, "rollsync version", getattr(sample, "version", None) or library_version, __version__)
        _check_versions(where, sample, weight_version)
        _check_ids(where, [*prompt, *sample.token_ids], vocab_size)
        if sample.token_ids:
            found.append(_sampled(where, prompt, sample, own, stated, getattr(sample, "dtype", None) or dtype))
    if not found:
        raise ParityError("there is nothing to compare: no rollout holds a token")
    if not any(s.columns for s in found):
        raise ParityError(
            "there is nothing to compare: the rollouts hold no model_logprobs (ask for include=['model_logprobs']), and their "
            f"logprobs cannot be computed again: {found[0].no_logprobs}"
        )
    return found


def _samples(rollouts: Any, params: Any) -> Iterator[tuple[str, list[int], Any, Any]]:
    """(where, prompt, sample, params or None) of prompts with samples, or of lines of a trace."""
    for p, entry in enumerate(rollouts):
        own = params[p] if isinstance(params, Sequence) else params
        own = getattr(entry, "params", None) or own
        prompt = list(entry.prompt_token_ids)
        if hasattr(entry, "samples"):
            for i, sample in enumerate(entry.samples):
                index = getattr(sample, "index", getattr(sample, "sample_index", i))
                yield f"prompt {p}, sample {index}", prompt, sample, own
        elif hasattr(entry, "line"):
            yield f"line {entry.line} (sample {entry.sample_index})", prompt, entry, own
        else:
            yield f"sample {p}", prompt, entry, own


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


def _sampled(where: str, prompt: list[int], sample: Any, params: Any, fingerprint: str | None, dtype: str | None) -> Sampled:
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
    return Sampled(
        where=where, prompt_token_ids=prompt, token_ids=list(sample.token_ids), columns=columns,
        temperature=float(getattr(params, "temperature", 1.0)), top_k=int(getattr(params, "top_k", 0)),
        top_p=float(getattr(params, "top_p", 1.0)), min_p=float(getattr(params, "min_p", 0.0)), mask=mask, fingerprint=fingerprint,
        dtype=dtype, no_logprobs=no_logprobs,
    )  # fmt: skip


def _objection(params: Any, mask: SamplingMask | None) -> str:
    """Why the `logprobs` of a sample cannot be computed from the model's logits alone; empty if they can."""
    if params is None:
        return "params were not given"
    changed: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    for name, off in changed.items():
        if getattr(params, name, off) != off:
            return f"{name} changed the logits"
    if getattr(params, "logit_bias", None):
        return "logit_bias changed the logits"
    if mask is None and getattr(params, "allowed_token_ids", None) is not None:
        return "allowed_token_ids without sampling_mask"
    if mask is None and int(getattr(params, "min_tokens", 0)) > 0:
        return "min_tokens without sampling_mask"
    return ""
