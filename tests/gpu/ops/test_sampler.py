"""The sampler against the reference: given the same logits, every number of every row, bit by bit."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from rollsync.kernels import reference as ref
from rollsync.kernels.gpu.ops import LogitChanges, SamplerColumns, SamplerOut, sample
from rollsync.kernels.sampling_mask import SamplingMask, row_words
from rollsync.kernels.step import ADJUST, allowed_words
from torch import Tensor


def columns_of(rows: ref.SamplerRows, device: str) -> SamplerColumns:
    want = rows.want_model.astype(np.uint8) | rows.want_entropy.astype(np.uint8) << 1
    if rows.want_mask is not None:
        want |= rows.want_mask.astype(np.uint8) << 2
    top_n = np.zeros(len(want), np.uint8) if rows.top_n is None else rows.top_n
    signed = {"seed": rows.seed.view(np.int64), "sample_index": rows.sample_index.view(np.int32)}
    signed |= {"row_position": rows.position.view(np.int32)}
    same = {name: getattr(rows, name) for name in ("temperature", "top_p", "min_p", "top_k", "forced")}
    arrays = {**same, **signed, "want": want, "top_n": top_n}
    return SamplerColumns(**{name: torch.from_numpy(np.array(array)).to(device) for name, array in arrays.items()})


def changes_of(rows: ref.SamplerRows, vocab: int, device: str) -> LogitChanges:
    count = len(rows.banned)
    adjust = rows.adjust or [[]] * count
    masks = np.zeros((count, -(-vocab // 32)), np.uint32)
    allowed = rows.allowed or [None] * count
    for r, ids in enumerate(allowed):
        if ids:
            words = allowed_words(ids)
            masks[r, : len(words)] = words

    def packed(lists: Any, dtype: Any) -> tuple[Tensor, Tensor]:
        offsets = np.cumsum([0, *(len(one) for one in lists)], dtype=np.int32)
        flat = np.array([entry for one in lists for entry in one], dtype)
        flat = np.resize(flat, len(flat)) if len(flat) else np.zeros(1, dtype)
        return torch.from_numpy(offsets).to(device), torch.from_numpy(flat.view(np.int32)).to(device)

    ban_offset, banned = packed(rows.banned, np.int32)
    adjust_offset, entries = packed([[tuple(e) for e in one] for one in adjust], ADJUST)
    return LogitChanges(
        ban_offset=ban_offset,
        banned=banned,
        adjust_offset=adjust_offset,
        adjust=entries.view(-1, 4),
        allowed_row=torch.tensor([-1 if ids is None else r for r, ids in enumerate(allowed)], dtype=torch.int32).to(device),
        allowed=torch.from_numpy(masks.view(np.int32)).to(device),
        work=torch.full((count, -(-vocab // 4) * 4), torch.nan).to(device),
    )


def padded(logits: Tensor, device: str) -> Tensor:
    """The same rows, each at a multiple of 16 bytes."""
    room = torch.zeros(len(logits), -(-logits.shape[1] // 8) * 8, dtype=logits.dtype, device=device)[:, : logits.shape[1]]
    return room.copy_(logits)


def same_result(got: SamplerOut, want: ref.SampleResult, top_n: Any) -> None:
    for name in ("nonfinite", "token", "logprob", "temperature_logprob", "model_logprob", "entropy"):
        a, b = getattr(got, name).cpu().numpy(), getattr(want, name)
        differ = a.view(np.int32) != b.view(np.int32) if a.dtype == np.float32 else a != b
        at = np.flatnonzero(differ & ~(np.isnan(a) & np.isnan(b)) if a.dtype == np.float32 else differ)
        assert not len(at), f"{name}: rows {at[:8].tolist()} have {a[at[:8]].tolist()} for {b[at[:8]].tolist()}"
    for r, n in enumerate(np.zeros(len(want.token), int) if top_n is None else top_n):
        assert got.top_id[r, :n].tolist() == want.top_id[r, :n].tolist(), f"row {r}"
        assert got.top_logprob[r, :n].tolist() == want.top_logprob[r, :n].tolist(), f"row {r}"


def check(sampling: ModuleType, logits: Tensor, rows: ref.SamplerRows, device: str, changes: bool = True) -> None:
    """Draw, and compare all that comes out, the ids a row could be drawn from included."""
    (count, vocab), limit = logits.shape, rows.vocab_limit
    mask = torch.zeros(count, -(-vocab // 32), dtype=torch.int32, device=device)
    found = changes_of(rows, vocab, device) if changes else None
    got = sample(padded(logits, device), columns_of(rows, device), vocab_limit=limit, changes=found, mask=mask)
    want = ref.sample(logits, rows)
    same_result(got, want, rows.top_n)
    if not want.mask.shape[1]:
        return
    restricted = SamplingMask.of_rows(limit, [row[: 1 + row_words(int(row[0]), limit)].tobytes() for row in want.mask])
    for r in np.flatnonzero(want.mask[:, 0]):
        bits = np.unpackbits(mask[r].cpu().numpy().view(np.uint8), bitorder="little").nonzero()[0]
        assert bits.tolist() == restricted[int(r)], f"row {r}"


def test_rows_of_every_kind(sampling: ModuleType, device: str, dtype: torch.dtype) -> None:
    vocab, limit = 517, 500
    logits = sampling.adversarial_logits(14 if device == "cpu" else 240, vocab, dtype)
    rows = sampling.make_rows(len(logits), vocab, **sampling.random_columns(len(logits), vocab, limit, seed=vocab))
    check(sampling, logits, rows, device)


def test_rows_that_change_their_logits(sampling: ModuleType, device: str, dtype: torch.dtype) -> None:
    vocab, limit = 90, 80
    logits = sampling.adversarial_logits(12 if device == "cpu" else 240, vocab, dtype)
    columns = sampling.random_columns(len(logits), vocab, limit, seed=3) | sampling.random_changes(len(logits), vocab, limit, seed=4)
    check(sampling, logits, sampling.make_rows(len(logits), vocab, **columns), device)


def test_several_blocks_of_a_vocabulary_without_changes(sampling: ModuleType, device: str, dtype: torch.dtype) -> None:
    vocab, count = 9001, 3 if device == "cpu" else 48
    logits = sampling.adversarial_logits(count, vocab, dtype)
    columns = sampling.random_columns(count, vocab, vocab, seed=9) | {"banned": [[]] * count, "temperature": 0.8}
    columns |= {"want_mask": np.zeros(count, np.bool_)}
    check(sampling, logits, sampling.make_rows(count, vocab, **columns), device, changes=False)


def test_a_misaligned_tensor_is_named(device: str) -> None:
    with pytest.raises(ValueError, match="sample: rows of logits"):
        sample(torch.zeros(2, 7, device=device), None, vocab_limit=7)  # type: ignore[arg-type]
