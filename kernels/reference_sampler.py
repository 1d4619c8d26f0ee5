"""Logprobs, entropy and the draw of docs/numerics.md, one logits row after another.

An id's probability mass is a 40-bit integer, so every sum below is exact and has no order. R logits rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import spec
from .philox import draw64
from .reference_math import exp32, f32, ln64
from .sampling_mask import bit_words, encode_row
from .step import TOP_MAX

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerRows:
    """How to sample each of R rows. Columns are arrays of length R."""

    temperature: Array
    """float64; 0 is greedy"""
    top_p: Array
    """float64 in (0, 1]; 1 keeps all"""
    top_k: Array
    """int64; 0 keeps all"""
    min_p: Array
    """float32 in [0, 1]; 0 keeps all"""
    seed: Array
    """uint64"""
    sample_index: Array
    """uint32"""
    position: Array
    """uint32, of the token drawn"""
    forced: Array
    """int64; -1 draws, an id is taken and scored instead"""
    want_model: Array
    """bool: report the logprob at temperature 1"""
    want_entropy: Array
    """bool"""
    banned: Sequence[Sequence[int] | Array]
    """per row, ids that do not take part"""
    vocab_limit: int
    """ids from here on are padding of the head and do not take part"""
    adjust: Sequence[Sequence[tuple[int, float, float, float]]] | None = None
    """per row, (id, bias, factor, subtract) of the logits it changes, one per id"""
    allowed: Sequence[Sequence[int] | Array | None] | None = None
    """per row, the only ids that take part, or None for all"""
    top_n: Array | None = None
    """uint8: how many of the likeliest ids to report, at most 20"""
    want_mask: Array | None = None
    """bool: report which ids the row could be drawn from"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleResult:
    """One entry per row. In a row that is `nonfinite` the token is the forced one or 0, and the floats are NaN."""

    token: npt.NDArray[np.int64]
    logprob: npt.NDArray[np.float32]
    """in the distribution drawn from, after temperature and truncation"""
    temperature_logprob: npt.NDArray[np.float32]
    """after temperature, before truncation"""
    model_logprob: npt.NDArray[np.float32]
    """at temperature 1; NaN where not asked for, as is `entropy`"""
    entropy: npt.NDArray[np.float32]
    """nats, after temperature, before truncation"""
    top_id: npt.NDArray[np.int32]
    """[R, most `top_n`]: likeliest first; -1 where there are no more, or no more were asked for"""
    top_logprob: npt.NDArray[np.float32]
    """of `top_id`, as `logprob` (at temperature 0: at temperature 1, nothing truncated); -inf where there is none"""
    nonfinite: npt.NDArray[np.uint8]
    """0; 1 if the logits are broken (NaN, infinite); 2 if they are whole and nothing is left that may be drawn"""
    mask: npt.NDArray[np.int32]
    """[R, words]: a row of sampling_mask.py and zeros behind it; a 0 where not asked for, or if nonfinite. No words if no row asks"""


class _Masses(NamedTuple):
    z_V: Tensor
    peak: float
    e_V: Tensor
    q_V: Tensor
    """int64"""
    total: int


def _masses(z_V: Tensor) -> _Masses:
    peak = z_V.amax()
    e_V = exp32(z_V - peak)
    q_V = (e_V * 2.0**spec.MASS_BITS).round().to(torch.int64)
    return _Masses(z_V, peak.item(), e_V, q_V, int(q_V.sum()))


def _log_mass(total: int) -> float:
    return float(ln64(float(total))) - spec.LN_MASS_UNIT


def _logprob(masses: _Masses, token: int, total: int) -> float:
    return (masses.z_V[token].item() - masses.peak) - _log_mass(total) + 0.0  # a zero is +0


def _entropy(masses: _Masses) -> float:
    below = masses.z_V.double() - masses.peak
    terms = (masses.e_V.double() * below * 2.0**spec.MASS_BITS).round()
    weighted = int(terms.masked_fill(masses.z_V == -math.inf, 0.0).to(torch.int64).sum())
    return _log_mass(masses.total) - float(weighted) / float(masses.total)


def _keep(masses: _Masses, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which ids truncation keeps, [V] bool: top_k, then top_p of what it left, then min_p.

    The likeliest id is in: it has rank 0, mass > 0 and e = 1.
    """
    keep_V = torch.ones_like(masses.z_V, dtype=torch.bool)
    if 0 < top_k < len(keep_V) or top_p < 1.0:
        ranked = torch.sort(masses.z_V, descending=True, stable=True).indices
        running = masses.q_V[ranked].cumsum(0)
        if top_k > 0:
            running = running[:top_k]
        if top_p < 1.0:
            mass = int(running[-1])
            target = min(max(math.ceil(top_p * float(mass)), 1), mass)
            running = running[: int(torch.searchsorted(running, target)) + 1]
        keep_V[ranked[len(running) :]] = False
    if min_p > 0.0:
        keep_V &= masses.e_V >= f32(min_p)
    return keep_V


def kept_ids(logits_V: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Which of a row's ids truncation keeps, [V] bool. At temperature 0 it is the likeliest one.

    Args:
        logits_V: [V] float32, of ids that take part; not NaN, the largest finite.
    """
    if temperature == 0.0:
        return torch.arange(len(logits_V)) == (logits_V == logits_V.amax()).nonzero()[0]
    return _keep(_masses(logits_V * f32(1.0 / temperature)), top_k, top_p, min_p)


def _restricts(rows: SamplerRows, r: int) -> bool:
    """Whether a row truncates, or has a list of ids that do or do not take part."""
    truncates = 0 < rows.top_k[r] < rows.vocab_limit or rows.top_p[r] < 1.0 or rows.min_p[r] > 0.0
    return bool(truncates or len(rows.banned[r]) or (rows.allowed is not None and rows.allowed[r] is not None))


def _draw(masses: _Masses, keep_V: Tensor, random_bits: int) -> int:
    running = masses.q_V.where(keep_V, 0).cumsum(0)
    return int(torch.searchsorted(running, random_bits * int(running[-1]) >> 64, right=True))


def _greedy_row(logits_V: Tensor, forced: int) -> tuple[int, float, float, float]:
    best = int((logits_V == logits_V.amax()).nonzero()[0])  # argmax does not promise the lowest of equals
    token = best if forced < 0 else forced
    logprob = 0.0 if token == best else -math.inf
    return token, logprob, logprob, 0.0


def _adjusted(logits_V: Tensor, entries: Sequence[tuple[int, float, float, float]]) -> Tensor:
    if not entries:
        return logits_V
    ids, *columns = zip(*entries, strict=True)
    bias, factor, subtract = (torch.tensor(column, dtype=torch.float32) for column in columns)
    x = logits_V[list(ids)] + bias
    x = torch.where(x > 0, x / factor, x * factor) - subtract
    return logits_V.index_put((torch.tensor(ids),), x)


def _restricted(z_V: Tensor, rows: SamplerRows, r: int) -> Tensor:
    """`z_V` with the ids that do not take part at -inf: no mass, last in rank, never the likeliest."""
    z_V = z_V.clone()
    z_V[rows.vocab_limit :] = -math.inf
    z_V[[i for i in rows.banned[r] if i < len(z_V)]] = -math.inf
    allowed = None if rows.allowed is None else rows.allowed[r]
    if allowed is not None:
        keep_V = torch.zeros_like(z_V, dtype=torch.bool)
        keep_V[[i for i in allowed if i < len(z_V)]] = True
        z_V[~keep_V] = -math.inf
    return z_V


def _top(masses: _Masses, keep_V: Tensor, kept_mass: int, count: int) -> list[tuple[int, float]]:
    """(id, logprob) of those of the first `count` ranks that are kept and can be drawn at all."""
    ranked = torch.sort(masses.z_V, descending=True, stable=True).indices[:count].tolist()
    return [(i, _logprob(masses, i, kept_mass)) for i in ranked if keep_V[i] and masses.z_V[i] > -math.inf]


class _Row(NamedTuple):
    token: int
    logprob: float
    temperature_logprob: float
    model_logprob: float
    entropy: float
    top: list[tuple[int, float]]
    kept_V: Tensor | None
    """which ids it could be drawn from; None for all of them"""


def _sample_row(logits_V: Tensor, rows: SamplerRows, r: int) -> _Row | int:
    """What a row gives, or why it gives nothing (see SampleResult.nonfinite)."""
    temperature, forced, nan = float(rows.temperature[r]), int(rows.forced[r]), math.nan
    adjusted_V = logits_V if rows.adjust is None else _adjusted(logits_V, rows.adjust[r])
    inverse = f32(1.0) if temperature == 0.0 else f32(1.0 / temperature)
    z_V = logits_V * inverse
    restricted = _restricted(adjusted_V * inverse, rows, r)
    peak = restricted.amax().item()
    if z_V.isnan().any() or not math.isfinite(z_V.amax().item()) or not math.isfinite(peak):
        return 2 if peak == -math.inf and math.isfinite(z_V.amax().item()) else 1
    top_n, top = 0 if rows.top_n is None else int(rows.top_n[r]), []
    kept_V: Tensor | None = None
    if temperature == 0.0:
        token, logprob, temperature_logprob, entropy = _greedy_row(restricted, forced)
        kept_V = kept_ids(restricted, temperature)
        if top_n:
            masses = _masses(restricted)
            top = _top(masses, torch.ones_like(restricted, dtype=torch.bool), masses.total, top_n)
    else:
        whole = _masses(z_V)
        masses = whole if torch.equal(restricted, z_V) else _masses(restricted)
        keep_V = _keep(masses, int(rows.top_k[r]), float(rows.top_p[r]), float(rows.min_p[r]))
        token = forced
        if forced < 0:
            token = _draw(masses, keep_V, draw64(int(rows.seed[r]), int(rows.sample_index[r]), int(rows.position[r])))
        kept_mass = int(masses.q_V.where(keep_V, 0).sum())
        logprob = _logprob(masses, token, kept_mass) if keep_V[token] else -math.inf
        temperature_logprob = _logprob(whole, token, whole.total)
        entropy = _entropy(whole) if rows.want_entropy[r] else nan
        top = _top(masses, keep_V, kept_mass, top_n) if top_n else top
        if _restricts(rows, r):
            kept_V = keep_V & (restricted > -math.inf)
    model = nan
    if rows.want_model[r]:
        at_one = _masses(logits_V)
        model = _logprob(at_one, token, at_one.total)
    return _Row(token, logprob, temperature_logprob, model, entropy if rows.want_entropy[r] else nan, top, kept_V)


def check_rows(logits_RV: Tensor, rows: SamplerRows) -> None:
    """Raise the ValueError of `sample` if the columns do not fit the logits."""
    num_rows, vocab = logits_RV.shape
    columns = [getattr(rows, name) for name in SamplerRows.__slots__ if name != "vocab_limit"]
    lengths = {len(column) for column in columns if column is not None}
    if lengths != {num_rows}:
        raise ValueError(f"sample: {num_rows} logits rows need columns of that length, got lengths {sorted(lengths)}")
    if not 0 < rows.vocab_limit <= vocab:
        raise ValueError(f"sample: vocab_limit must be in [1, {vocab}], got {rows.vocab_limit}")
    if num_rows and not (int(rows.forced.min()) >= -1 and int(rows.forced.max()) < vocab):
        raise ValueError(f"sample: forced ids must be in [-1, {vocab}), got {int(rows.forced.min())} to {int(rows.forced.max())}")
    for entries in rows.adjust or ():
        ids = [entry[0] for entry in entries]
        if len(set(ids)) < len(ids) or any(not 0 <= i < vocab for i in ids):
            raise ValueError(f"sample: a row must adjust distinct ids in [0, {vocab}), got {sorted(ids)}")
    for allowed in rows.allowed or ():
        if allowed is not None and (len(allowed) == 0 or np.min(np.asarray(allowed)) < 0):
            raise ValueError("sample: a row must allow some ids, all >= 0, or None for all")
    if rows.top_n is not None and num_rows and int(rows.top_n.max()) > TOP_MAX:
        raise ValueError(f"sample: top_n must be in [0, {TOP_MAX}], got {int(rows.top_n.max())}")


def sample(logits_RV: Tensor, rows: SamplerRows) -> SampleResult:
    """Choose and score one token per row; a row's result depends on that row alone.

    Args:
        logits_RV: [R, V] bfloat16 or float32, V >= `rows.vocab_limit`.
        rows: R rows of sampling columns.

    Raises:
        ValueError: a column has another length, or a forced id lies outside the vocabulary.
    """
    check_rows(logits_RV, rows)
    num_rows = logits_RV.shape[0]
    token, nonfinite = np.maximum(rows.forced, 0).astype(np.int64), np.zeros(num_rows, dtype=np.uint8)
    floats = np.full((4, num_rows), np.nan, dtype=np.float32)
    width = int(rows.top_n.max(initial=0)) if rows.top_n is not None else 0
    top_id, top_logprob = np.full((num_rows, width), -1, np.int32), np.full((num_rows, width), -np.inf, np.float32)
    want_mask = np.zeros(num_rows, np.bool_) if rows.want_mask is None else rows.want_mask
    mask = np.zeros((num_rows, 1 + bit_words(rows.vocab_limit) if want_mask.any() else 0), np.int32)
    for r in range(num_rows):
        row = _sample_row(logits_RV[r].float(), rows, r)
        if isinstance(row, int):
            nonfinite[r] = row
        else:
            token[r], *floats[:, r], _, kept_V = row
            if want_mask[r] and kept_V is not None:
                words = encode_row(kept_V.nonzero()[:, 0].tolist(), rows.vocab_limit)
                mask[r, : len(words)] = words
            top_id[r, : len(row.top)] = [i for i, _ in row.top]
            top_logprob[r, : len(row.top)] = [logprob for _, logprob in row.top]
    return SampleResult(
        token=token, logprob=floats[0], temperature_logprob=floats[1], model_logprob=floats[2], entropy=floats[3], top_id=top_id,
        top_logprob=top_logprob, nonfinite=nonfinite, mask=mask,
    )  # fmt: skip
