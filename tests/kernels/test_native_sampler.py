"""The sampler of every native build against the reference: every number of every row, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from rollsync.kernels import reference as ref
from rollsync.kernels.native_lib import load_build
from rollsync.kernels.native_ops import NativeOps
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32
INF, NAN = math.inf, math.nan
Once = Callable[[Any, Callable[[], Any]], Any]
DTYPES = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
KINDS: dict[str, Any] = {
    "temperature": np.float64, "top_p": np.float64, "top_k": np.int64, "min_p": np.float32, "seed": np.uint64,
    "sample_index": np.uint32, "position": np.uint32, "forced": np.int64, "want_model": np.bool_, "want_entropy": np.bool_,
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 7, "sample_index": 0, "forced": -1,
    "want_model": True, "want_entropy": True,
}  # fmt: skip

def make_rows(num_rows: int, vocab: int, **columns: Any) -> ref.SamplerRows:
    values = {**DEFAULTS, "position": np.arange(num_rows), **columns}
    arrays: Any = {name: np.broadcast_to(np.asarray(values[name], dtype=kind), (num_rows,)) for name, kind in KINDS.items()}
    changes = {name: columns[name] for name in ("adjust", "allowed", "top_n", "want_mask") if name in columns}
    banned, limit = columns.get("banned", [[]] * num_rows), columns.get("vocab_limit", vocab)
    return ref.SamplerRows(**arrays, **changes, banned=banned, vocab_limit=limit)


def same_result(got: ref.SampleResult, want: ref.SampleResult) -> None:
    for name in ref.SampleResult.__slots__:
        a, b = getattr(got, name), getattr(want, name)
        assert a.dtype == b.dtype
        if a.dtype == np.float32:
            differ = (a.view(np.int32) != b.view(np.int32)) & ~(np.isnan(a) & np.isnan(b))
        else:
            differ = a != b
        at = np.flatnonzero(differ)
        assert not len(at), f"{name}: rows {at[:8].tolist()} have {a[at[:8]].tolist()} for {b[at[:8]].tolist()}"


def random_columns(num_rows: int, vocab: int, limit: int, seed: int) -> dict[str, Any]:
    """Every parameter off in some rows and on in others, alone and with the rest."""
    g = np.random.default_rng(seed)

    def some(*values: Any) -> Any:
        return g.choice(np.array(values), num_rows)

    return {
        "temperature": some(0.0, 1e-6, 0.7, 1.0, 1.0, 2.0),
        "top_p": some(1.0, 1.0, 0.9, 0.5, 1e-9, 0.999999),
        "top_k": some(0, 0, 1, 3, 20, limit - 1, limit, vocab + 5),
        "min_p": some(0.0, 0.0, 0.05, 1e-4, 1.0),
        "seed": g.integers(0, 2**64, num_rows, dtype=np.uint64),
        "sample_index": g.integers(0, 2**32, num_rows, dtype=np.uint32),
        "position": g.integers(0, 2**32, num_rows, dtype=np.uint32),
        "forced": np.where(g.random(num_rows) < 0.25, g.integers(0, vocab, num_rows), -1),
        "want_model": some(True, False),
        "want_entropy": some(True, False),
        "want_mask": some(True, True, False),
        "banned": [g.integers(0, vocab + 9, g.choice([0, 0, 1, 5, 40])).tolist() for _ in range(num_rows)],
        "vocab_limit": limit,
    }


def random_changes(num_rows: int, vocab: int, limit: int, seed: int) -> dict[str, Any]:
    """Bias, penalties, allowed ids and reported ids: off in some rows, on in others, and such that nothing or one id is left."""
    g = np.random.default_rng(seed)

    def adjust() -> list[tuple[int, float, float, float]]:
        ids = g.choice(vocab, g.choice([0, 0, 1, 7, vocab]), replace=False).tolist()
        bias, factor = g.choice([0.0, 100.0, -100.0, 0.3], len(ids)), g.choice([1.0, 1.3, 0.01, 100.0], len(ids))
        return list(zip(ids, bias.tolist(), factor.tolist(), g.normal(size=len(ids)).tolist(), strict=True))

    def allowed() -> list[int] | None:
        size = g.choice([0, 0, 0, 1, 3, limit])
        return g.integers(0, limit, size).tolist() if size else None

    return {
        "adjust": [adjust() for _ in range(num_rows)],
        "allowed": [allowed() for _ in range(num_rows)],
        "banned": [g.choice(limit, g.choice([0, 0, 2, limit - 1]), replace=False).tolist() for _ in range(num_rows)],
        "top_n": g.choice([0, 1, 5, 20], num_rows).astype(np.uint8),
    }


def adversarial_logits(num_rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """Rows in turn: smooth, all ties, few values, peaked, wide, mostly -inf, signed zeros, one id above the rest, and broken ones."""
    generator = torch.Generator().manual_seed(1)
    rows = 3 * torch.randn(num_rows, vocab, generator=generator)
    uniform = torch.rand(num_rows, vocab, generator=generator)
    for r in range(num_rows):
        row, u = rows[r], uniform[r]
        match r % 12:
            case 1:
                row[:] = row[0]
            case 2:
                row[:] = (u * 4).floor() - 2
            case 3:
                row[:] = row * 0.01
                row[(7 * r) % vocab] = 30.0
            case 4:
                row[:] = row * 100
            case 5:
                row[u < 0.9] = -INF
            case 6:
                row[:] = torch.where(u < 0.4, torch.tensor(-0.0), torch.where(u < 0.8, torch.tensor(0.0), torch.tensor(-1.0)))
            case 7:
                row[:] = -INF
                row[r % vocab] = -2.5
            case 8:
                row[:] = row * 1e33
            case 9:
                row[(5 * r) % vocab] = (NAN, INF)[r // 12 % 2]
            case 10 if r % 5 == 0:
                row[:] = -INF
    return rows.to(dtype)


@DTYPES
@pytest.mark.parametrize(("vocab", "limit"), [(50, 50), (512, 500), (1000, 1000), (1537, 1530)])
def test_rows_of_every_kind(ops: NativeOps, once: Once, vocab: int, limit: int, dtype: torch.dtype) -> None:
    logits = adversarial_logits(240, vocab, dtype)
    rows = make_rows(240, vocab, **random_columns(240, vocab, limit, seed=vocab))
    want = once((vocab, dtype), lambda: ref.sample(logits, rows))
    assert 20 < (want.nonfinite > 0).sum() < 120
    same_result(ops.sample(logits, rows), want)
    same_result(NativeOps(load_build(ops.library.build), 3).sample(logits, rows), want)


@DTYPES
@pytest.mark.parametrize(("vocab", "limit"), [(40, 33), (600, 600)])
def test_rows_that_change_their_logits(ops: NativeOps, once: Once, vocab: int, limit: int, dtype: torch.dtype) -> None:
    logits = adversarial_logits(120, vocab, dtype)
    rows = make_rows(120, vocab, **{**random_columns(120, vocab, limit, seed=vocab), **random_changes(120, vocab, limit, seed=vocab)})
    want = once(("changes", vocab, dtype), lambda: ref.sample(logits, rows))
    assert 10 < (want.nonfinite > 0).sum() < 90 and 2 in want.nonfinite and (want.top_id[want.nonfinite == 0] >= 0).any(axis=0).all()
    got = ops.sample(logits, rows)
    same_result(got, want)
    same_result(NativeOps(load_build(ops.library.build), 3).sample(logits, rows), want)


def test_a_real_vocabulary(ops: NativeOps, once: Once) -> None:
    logits = (3 * torch.randn(8, 49152, generator=torch.Generator().manual_seed(0))).bfloat16()
    rows = make_rows(
        8, 49152, temperature=[0, 0.7, 1, 1, 1, 1, 2, 1e-6], top_k=[0, 0, 0, 50, 0, 1000, 0, 0], top_p=[1, 1, 1, 1, 0.95, 0.9, 1, 1],
        min_p=[0, 0, 0, 0, 0, 0.01, 0.02, 0], banned=[[1, 2]] * 8, vocab_limit=49100, want_mask=np.ones(8, np.bool_),
    )  # fmt: skip
    want = once("real", lambda: ref.sample(logits, rows))
    same_result(ops.sample(logits, rows), want)


@DTYPES
def test_the_draw_over_many_positions(ops: NativeOps, once: Once, dtype: torch.dtype) -> None:
    logits = (2 * torch.randn(1, 700, generator=torch.Generator().manual_seed(4))).to(dtype).expand(150, -1)
    for options in ({}, {"top_k": 9}, {"top_p": 0.8, "temperature": 0.7}, {"min_p": 0.1, "temperature": 2.0}):
        rows = make_rows(150, 700, want_model=False, want_entropy=False, **options)
        want = once(("draw", str(options), dtype), partial(ref.sample, logits, rows))
        assert len(set(want.token.tolist())) > 5
        same_result(ops.sample(logits, rows), want)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.0}, {"temperature": 0.5, "top_k": 6}]
)
def test_every_id_forced(ops: NativeOps, once: Once, options: dict[str, Any]) -> None:
    logits = adversarial_logits(12, 40, F32)[[0, 1, 2, 5, 6, 7]].repeat_interleave(40, dim=0)
    rows = make_rows(240, 40, forced=np.tile(np.arange(40), 6), banned=[[3, 8]] * 240, vocab_limit=37, **options)
    same_result(ops.sample(logits, rows), once(("forced", str(options)), lambda: ref.sample(logits, rows)))


def test_mistakes_are_named_and_no_rows_are_fine(ops: NativeOps) -> None:
    assert len(ops.sample(torch.empty(0, 10), make_rows(0, 10)).token) == 0
    cases = (
        (make_rows(3, 10), "2 logits rows"),
        (make_rows(2, 11), "vocab_limit"),
        (make_rows(2, 10, forced=10), "forced ids"),
        (make_rows(2, 10, adjust=[[], [(10, 0.0, 1.0, 0.0)]]), "distinct ids"),
        (make_rows(2, 10, adjust=[[(3, 0.0, 1.0, 0.0)] * 2, []]), "distinct ids"),
        (make_rows(2, 10, allowed=[None, []]), "allow some ids"),
        (make_rows(2, 10, top_n=np.array([0, 21])), "top_n"),
    )
    for rows, message in cases:
        with pytest.raises(ValueError, match=message):
            ops.sample(torch.zeros(2, 10), rows)
