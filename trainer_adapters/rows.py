"""Rows of a rollout: the requests that make them, each row a sample of its own, and the checks before anybody trains on them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..rollout.engine.params import MAX_SAMPLES
from .errors import TargetError

ROUNDING = 1e-6
"""by so much a logprob may exceed 0"""


class Row(Protocol):
    """One sample, as `Sample` and `SampleOutput` have it: columns of one length, the EOS or stop id that ended it among them."""

    token_ids: list[int]
    logprobs: list[float]
    """of the distribution drawn from: after temperature, penalties and truncation"""
    finish_reason: str
    weight_versions: list[dict[str, int]]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a prompt and the rows that want a sample of it."""

    prompt: dict[str, Any]
    rows: list[int]


def asks_of(prompts: Sequence[Sequence[int]], seed: int) -> list[Ask]:
    """Requests that give every row a sample of its own: equal rows together, each distinct prompt under a seed of its own."""
    places: dict[tuple[int, ...], list[int]] = {}
    for row, ids in enumerate(prompts):
        places.setdefault(tuple(ids), []).append(row)
    asks = []
    for number, (ids, rows) in enumerate(places.items()):
        own = derived_seed(seed, number)
        for first in range(0, len(rows), MAX_SAMPLES):
            asks.append(Ask({"token_ids": list(ids), "seed": own, "first_sample": first}, rows[first : first + MAX_SAMPLES]))
    return asks


def derived_seed(*parts: Any) -> int:
    """64 bits that follow from `parts` alone, and differ if one of them does."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def check_rows(
    rows: Sequence[Any], count: int, vocab_size: int, *, column: str = "logprobs", version: int | None = None, allow_empty: bool = False
) -> None:
    """TargetError listing all rows that cannot be trained on.

    Args:
        count: so many rows must be there.
        column: the one that will be used: "logprobs", "temperature_logprobs" or "model_logprobs".
        version: the weights that every token must come from; None: any.
        allow_empty: rows without tokens pass.
    """
    problems = [] if len(rows) == count else [f"{len(rows)} rows came for {count} prompts"]
    for i, row in enumerate(rows):
        problems += [f"row {i} {problem}" for problem in _row_problems(row, vocab_size, column, version, allow_empty)]
    if problems:
        raise TargetError(problems)


def _row_problems(row: Any, vocab_size: int, column: str, version: int | None, allow_empty: bool) -> list[str]:
    if row is None:
        return ["did not come"]
    if row.finish_reason not in ("stop", "length"):
        why = getattr(row, "error", None) or getattr(row, "abort_reason", None)
        return [f"ended by {row.finish_reason}: {why}"]
    ids, logprobs = row.token_ids, getattr(row, column) or []
    problems = []
    if not ids and not allow_empty:
        problems.append("has no token")
    if len(logprobs) != len(ids):
        problems.append(f"has {len(logprobs)} {column} for {len(ids)} tokens")
    if not (set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < vocab_size))):
        wrong = next(t for t in ids if type(t) is not int or not 0 <= t < vocab_size)
        problems.append(f"has the token id {wrong!r}, outside the vocabulary of {vocab_size}")
    if not (set(map(type, logprobs)) <= {float} and all(map(ROUNDING.__ge__, logprobs)) and all(map(math.isfinite, logprobs))):
        wrong = next(p for p in logprobs if type(p) is not float or not p <= ROUNDING or not math.isfinite(p))
        problems.append(f"has {wrong!r} among its {column}")
    found = sorted({span["version"] for span in row.weight_versions})
    if version is not None and found and found != [version]:
        shown = ", ".join(map(str, found))
        problems.append(f"was drawn by weights of version {shown}, not {version}: does somebody else update this engine?")
    return problems


def dealt(count: int, asks: Sequence[Ask], found: Sequence[Any]) -> list[Any]:
    """Samples by row. TargetError naming the rows of prompts that were refused, or that got too few or too many."""
    rows: list[Any] = [None] * count
    problems = []
    if len(found) != len(asks):
        raise TargetError([f"{len(found)} results came for {len(asks)} prompts"])
    for ask, samples in zip(asks, found, strict=True):
        where = f"row {ask.rows[0]}" if len(ask.rows) == 1 else f"rows {', '.join(map(str, ask.rows))}"
        if isinstance(samples, Exception):
            problems.append(f"{where}: the prompt of {len(ask.prompt['token_ids'])} tokens was refused: {samples}")
        elif len(samples) != len(ask.rows):
            problems.append(f"{where}: {len(samples)} samples came for {len(ask.rows)}")
        else:
            for row, sample in zip(ask.rows, samples, strict=True):
                rows[row] = sample
    if problems:
        raise TargetError(problems)
    return rows
