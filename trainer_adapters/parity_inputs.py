"""What a batch's mask, positions and lengths say about its sequences. B rows of T places."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.segments import Segments
from .errors import ParityError


def by_name(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of `forward` (a bound method) as keywords."""
    names = [name for name, p in inspect.signature(forward).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def refuse_past(inputs: dict[str, Any]) -> None:
    for name in ("past_key_values", "cache"):
        past = inputs.get(name)
        if past is not None and (not hasattr(past, "get_seq_length") or int(past.get_seq_length()) > 0):
            raise ParityError(f"{name} holds tokens of an earlier call: parity computes whole sequences; pass them whole, without a cache")


def refuse_stretched(config: Any, segments: Segments) -> None:
    """Beyond a model's context `dynamic` angles depend on the longest sequence seen; the engine ends there."""
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = [ropes.get("rope_type"), *(part.get("rope_type") for part in ropes.values() if isinstance(part, dict))]
    longest, context = max((end - begin for _, begin, end in segments.spans), default=0), config.max_position_embeddings
    if "dynamic" in kinds and longest > context:
        raise ParityError(f"a sequence of {longest} tokens stretches a dynamic rotary embedding: max_position_embeddings is {context}")


def read_sequences(inputs: dict[str, Any]) -> tuple[Segments, Tensor]:
    """The sequences of a batch, and the position of every place, counted from its sequence's first token: [B, T] int64.

    Padding may stand on either side of a row, and is at position 0. Positions that begin at 0 again, or `cu_seq_lens_q`, start the next
    sequence of a packed row.

    Args:
        inputs: keywords of a backbone's forward.

    Raises:
        ParityError: a mask with holes or of another shape, positions that count otherwise, or lengths that do not fit.
    """
    first = inputs.get("input_ids")
    first = inputs["inputs_embeds"] if first is None else first
    rows, length = int(first.shape[0]), int(first.shape[1])
    if not rows or not length:
        raise ParityError(f"a batch must hold at least one place, got {rows} rows of {length}")
    begin, end = _real_span(inputs.get("attention_mask"), rows, length)
    starts = _starts_by_lengths(inputs, rows, length)
    given = inputs.get("position_ids")
    if given is not None:
        if given.ndim != 2 or given.shape[0] not in (1, rows) or given.shape[1] != length:
            raise ParityError(f"position_ids must be [{rows}, {length}] as the tokens are, got {[*given.shape]}")
        given = given.expand(rows, length).cpu().numpy()
        starts = starts if starts is not None else given == 0
    spans = []
    positions = np.zeros((rows, length), np.int64)
    for row in range(rows):
        a, b = int(begin[row]), int(end[row])
        cuts = [] if starts is None else (a + 1 + np.flatnonzero(starts[row, a + 1 : b])).tolist()
        edges = [a, *cuts, b]
        for i, j in pairwise(edges):
            if j > i:
                spans.append((row, i, j))
                positions[row, i:j] = np.arange(j - i)
    segments = Segments(rows, length, spans)
    if given is not None:
        _check_positions(given, positions, segments)
    return segments, torch.from_numpy(positions).to(first.device)


def _real_span(mask: Any, rows: int, length: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    if mask is None:
        return np.zeros(rows, np.int64), np.full(rows, length)
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        what = f"{[*mask.shape]}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ParityError(f"attention_mask must be [{rows}, {length}] with 1 for tokens and 0 for padding, got {what}")
    if tuple(mask.shape) != (rows, length):
        raise ParityError(f"attention_mask must be [{rows}, {length}] as the tokens are, got {[*mask.shape]}")
    real = mask.cpu().numpy() != 0
    if ((mask != 0) & (mask != 1)).any():
        raise ParityError("attention_mask holds numbers other than 0 and 1: mark packed sequences by position_ids or cu_seq_lens_q")
    count = real.sum(axis=1)
    begin = real.argmax(axis=1)
    inside = np.arange(length)
    whole = (inside >= begin[:, None]) & (inside < (begin + count)[:, None])
    if (whole != real).any():
        row = int((whole != real).any(axis=1).argmax())
        raise ParityError(f"attention_mask has a hole in row {row}: padding may stand before and after a row's tokens, not between them")
    return begin, begin + count


def _starts_by_lengths(inputs: dict[str, Any], rows: int, length: int) -> npt.NDArray[np.bool_] | None:
    ends = inputs.get("cu_seq_lens_q")
    if ends is None:
        return None
    keys = inputs.get("cu_seq_lens_k")
    if keys is not None and not torch.equal(ends, keys):
        raise ParityError("cu_seq_lens_q and cu_seq_lens_k differ: parity computes whole sequences, so keys are the queries' own")
    if rows != 1:
        raise ParityError(f"cu_seq_lens_q needs one packed row, got {rows} rows")
    bounds = ends.tolist()
    if bounds[:1] != [0] or bounds[-1] != length or any(b < a for a, b in pairwise(bounds)):
        raise ParityError(f"cu_seq_lens_q must rise from 0 to the {length} tokens of the row, got {bounds}")
    starts = np.zeros((1, length), np.bool_)
    starts[0, [b for b in bounds if b < length]] = True
    return starts


def _check_positions(given: npt.NDArray[Any], positions: npt.NDArray[np.int64], segments: Segments) -> None:
    wrong = (given != positions) & segments.real
    if wrong.any():
        row, place = (int(i) for i in np.argwhere(wrong)[0])
        raise ParityError(
            f"position_ids count otherwise than the engine: row {row}, place {place} says {int(given[row, place])}, but it is token "
            f"{int(positions[row, place])} of its sequence; leave position_ids out, or count from 0 at each sequence's first token"
        )
