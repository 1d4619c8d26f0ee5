"""The reference ops against float64, and bit by bit against the specification spelled out in literal.py."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from rollsync.kernels import reference as ref
from rollsync.kernels import spec
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, F32])
EPS = {BF16: 2.0**-8, F32: 2.0**-23}


def rows(x: Tensor) -> Any:
    return x.float().numpy()


def same_bits(got: Tensor, want: Any) -> None:
    want = torch.as_tensor(np.asarray(want, dtype=np.float32)).reshape(got.shape)
    bad = (got.float().view(torch.int32) != want.view(torch.int32)).nonzero()
    assert not len(bad), f"{len(bad)} of {got.numel()} differ, first at {bad[0].tolist()}"


def rand(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Arithmetic


def fma_cases() -> list[tuple[float, float, float]]:
    one_up, tiny = 1 + 2.0**-23, 2.0**-60
    cases = [
        (1.0, 1 + 2.0**-23, 2.0**-24),  # exact tie, to even
        (2.0**-24, 1 - tiny, 1.0),
        (one_up, one_up, 2.0**-24),
        (1.0, 2.0**-24, 1.0),
        # float64 lands on a float32 midpoint that the exact sum misses by a little, from above and below
        (one_up, 2.0**-24 * (1 + 2.0**-22), 1.0),
        (2.0**-30, 2.0**-30 * one_up, 1 + 2.0**-23),
        (1 + 2.0**-12, 1 + 2.0**-12, -tiny),
        (1 + 2.0**-12, 1 + 2.0**-12, tiny),
        (-(1 + 2.0**-12), 1 + 2.0**-12, tiny),
        (-(1 + 2.0**-12), 1 + 2.0**-12, -tiny),
        (3.0, 5.0, -15.0),
        (0.0, 5.0, -0.0),
    ]
    rng = random.Random(1)
    for _ in range(1500):  # a * b half way between two float32, plus something far below or just around
        a, b = 1 + rng.getrandbits(11) * 2.0**-11 + 2.0**-12, 1 + 2.0**-12
        c = rng.choice((-1, 1)) * (1 + rng.getrandbits(23) * 2.0**-23) * 2.0 ** rng.randint(-70, 3)
        cases.append((a * rng.choice((-1, 1)), b, c))
        values = [rng.choice((-1, 1)) * (1 + rng.getrandbits(23) * 2.0**-23) * 2.0 ** rng.randint(-15, 15) for _ in range(3)]
        cases.append((values[0], values[1], values[2]))
    return [tuple(float(np.float32(v)) for v in case) for case in cases]  # type: ignore[misc]


def test_fma_is_exactly_rounded(literal: ModuleType) -> None:
    cases = fma_cases()
    a, b, c = torch.tensor(cases).unbind(1)
    exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in cases]
    same_bits(ref.fma32(a, b, c), [literal.f32_of(v) for v in exact])
    twice = (a.double() * b.double() + c.double()).float()
    assert (twice != ref.fma32(a, b, c)).sum() > 100, "the cases must hold sums that rounding twice gets wrong"


def test_fma_keeps_infinities_and_nan() -> None:
    inf, nan = float("inf"), float("nan")
    got = ref.fma32(torch.tensor([inf, inf, 3e38, nan, 0.0]), torch.tensor([1.0, 0.0, 3e38, 1.0, inf]), torch.tensor([1.0, 1, 1, 1, 1]))
    assert got.isinf().tolist() == [True, False, True, False, False]
    assert got.isnan().tolist() == [False, True, False, True, True]


def test_round_is_to_nearest_even_and_flushes_subnormals(literal: ModuleType) -> None:
    bits = torch.arange(0x3F800000, 0x3F800000 + (1 << 18), 997, dtype=torch.int32)
    x = torch.cat([bits.view(F32), torch.tensor([1.00390625, 1.01171875, -1.00390625])])
    same_bits(ref.round_to(x, BF16), [literal.rnd(v, True) for v in rows(x)])
    assert ref.round_to(torch.tensor([1e-39, -1e-39, 2.0**-126]), F32).tolist() == [0.0, 0.0, 2.0**-126]
    assert ref.round_to(torch.tensor([float("nan"), float("inf")]), F32).isfinite().sum() == 0


def test_exp(literal: ModuleType) -> None:
    x = torch.cat([torch.linspace(-90, 90, 700), rand(200), torch.tensor([0.0, -0.0, -87.0, 88.0, -1e30, 1e30])])
    got = ref.exp32(x)
    same_bits(got, [literal.exp(v) for v in rows(x)])
    true = x.double().clamp(-87, 88).exp()
    assert ((got.double() - true).abs() / true).max() < 2**-22
    assert got[-6] == 1 and ref.exp32(torch.tensor(float("nan"))).isnan()
    assert ref.exp32(torch.tensor(-float("inf"))) == got[-4]


def test_tanh(literal: ModuleType) -> None:
    x = torch.cat([torch.linspace(-12, 12, 500), torch.linspace(-0.7, 0.7, 300), torch.tensor([0.0, -0.0, 0.625, 1e15, -1e15])])
    got = ref.tanh32(x)
    same_bits(got, [literal.tanh(v) for v in rows(x)])
    true = x.double().tanh()
    assert ((got.double() - true).abs() <= 2**-22 * true.abs()).all()
    assert ref.tanh32(torch.tensor(float("nan"))).isnan()


def test_ln() -> None:
    x = np.concatenate([2.0 ** np.linspace(-5, 60, 5000), np.linspace(0.7, 1.42, 5000), [1.0]])
    got = ref.ln64(x)
    assert got[-1] == 0 and np.abs(got - np.log(x)).max() < 1e-14


def test_ln_and_hsum_are_literal(literal: ModuleType) -> None:
    x = [float(v) for v in np.random.default_rng(0).integers(1, 2**57, 500)]
    assert ref.ln64(x).tolist() == [literal.ln(v) for v in x]
    v = rand(8, 16)
    same_bits(ref.hsum16(v), [literal.hsum(list(row)) for row in rows(v)])


# Linear


@DTYPES
@pytest.mark.parametrize("make", ["cancel_data", "wide_data"])
@pytest.mark.parametrize(("k", "k_shards"), [(7, 1), (70, 1), (70, 4), (128, 2), (192, 4), (256, 8), (256, 3)])
def test_linear_is_literal(data: ModuleType, literal: ModuleType, dtype: torch.dtype, make: str, k: int, k_shards: int) -> None:
    for seed in (0, 1):
        x, w = getattr(data, make)(2, k, 3, dtype, seed)
        want = [literal.dot_sharded(a, b, dtype == BF16, k_shards) for a in rows(x) for b in rows(w)]
        same_bits(ref.linear_f32(x, w, k_shards), want)


def test_cancelling_data_tells_shards_apart(data: ModuleType) -> None:
    for dtype in (BF16, F32):
        x, w = data.cancel_data(8, 256, 64, dtype, seed=1)
        assert (x.double() @ w.double().T).abs().max() < 1e-9
        one, four = ref.linear_f32(x, w), ref.linear_f32(x, w, 4)
        assert one.abs().max() < 0.1 and (one != four).float().mean() > 0.6


@DTYPES
def test_linear_against_float64(data: ModuleType, dtype: torch.dtype) -> None:
    x, w = rand(5, 200, dtype=dtype), rand(33, 200, dtype=dtype, seed=1)
    bias, residual = rand(33, dtype=dtype, seed=2), rand(5, 33, dtype=dtype, seed=3)
    exact = x.double() @ w.double().T
    bound = 4 * EPS[F32] * (x.double().abs() @ w.double().abs().T)
    assert ((ref.linear_f32(x, w).double() - exact).abs() <= bound).all()
    for got, want in ((ref.linear(x, w, bias), exact + bias.double()), (ref.linear_residual(x, w, residual, 1), exact + residual.double())):
        assert got.dtype == dtype and ((got.double() - want).abs() <= bound + 2 * EPS[dtype] * (exact.abs() + want.abs())).all()


@DTYPES
def test_linear_bits_do_not_depend_on_the_other_rows_or_columns(data: ModuleType, dtype: torch.dtype) -> None:
    x, w = data.cancel_data(37, 96, 5000, dtype, seed=1)
    whole = ref.linear(x, w)
    for t in (0, 17, 36):
        same_bits(ref.linear(x[t : t + 1], w), whole[t].float())
    same_bits(ref.linear(x, w[4090:4100]), whole[:, 4090:4100].float())
    same_bits(ref.linear(x.T.contiguous().T, w), whole.float())


def test_effective_shards() -> None:
    assert [spec.effective_shards(k, s) for k, s in [(576, 8), (1536, 8), (576, 2), (48, 4), (128, 3), (64, 1), (4096, 8)]] == [
        2, 8, 2, 1, 2, 1, 8,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="k_shards = 0"):
        spec.effective_shards(64, 0)


# Row ops


@DTYPES
@pytest.mark.parametrize("width", [5, 64, 100])
def test_rmsnorm(data: ModuleType, literal: ModuleType, dtype: torch.dtype, width: int) -> None:
    weight = rand(width, dtype=dtype, seed=4)
    for x in (data.wide_data(3, width, 1, dtype, 0)[0], rand(3, width, dtype=dtype)):
        got = ref.rmsnorm(x, weight, 1e-5)
        same_bits(got, [literal.rmsnorm(r, rows(weight), 1e-5, dtype == BF16) for r in rows(x)])
        same_bits(ref.rmsnorm(x[1:2], weight, 1e-5), got[1].float())
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        assert ((got.double() - exact).abs() <= 4 * EPS[dtype] * exact.abs()).all()
        one_plus = ref.rmsnorm(x, weight, 1e-5, True)
        same_bits(one_plus, [literal.rmsnorm(r, rows(weight), 1e-5, dtype == BF16, True) for r in rows(x)])
        assert (one_plus.double() - exact * (1 + 1 / weight.double())).abs().max() <= 8 * EPS[dtype] * exact.abs().max()


@DTYPES
def test_gated_activations(literal: ModuleType, dtype: torch.dtype) -> None:
    gate, up = 5 * rand(40, 3, dtype=dtype), rand(40, 3, dtype=dtype, seed=1)
    pairs = list(zip(rows(gate).ravel(), rows(up).ravel(), strict=True))
    g = gate.double()
    gelu = g * (2 * (2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)).sigmoid()  # torch's, without its cancellation at -5 and below
    assert (gelu - torch.nn.functional.gelu(g, approximate="tanh")).abs().max() < 1e-12
    for name, act in (("silu_mul", torch.nn.functional.silu(g)), ("gelu_mul", gelu)):
        got, exact = getattr(ref, name)(gate, up), act * up.double()
        same_bits(got, [getattr(literal, name)(*pair, dtype == BF16) for pair in pairs])
        assert ((got.double() - exact).abs() <= max(4 * EPS[dtype], 2**-16) * exact.abs() + 1e-36).all(), name


@DTYPES
def test_softcap(literal: ModuleType, dtype: torch.dtype) -> None:
    x = 20 * rand(100, dtype=dtype)
    got = ref.softcap(x, 30.0)
    same_bits(got, [literal.softcap(v, 30.0, dtype == BF16) for v in rows(x)])
    assert (got.double() - 30 * (x.double() / 30).tanh()).abs().max() <= 4 * EPS[dtype] * 30


@DTYPES
def test_rope(literal: ModuleType, dtype: torch.dtype) -> None:
    x, angle = rand(4, 3, 16, dtype=dtype), 10 * rand(4, 8)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    got = ref.rope(x, cos, sin)
    want = [literal.rope(rows(x)[t, n], rows(cos)[t], rows(sin)[t], dtype == BF16) for t in range(4) for n in range(3)]
    same_bits(got, want)
    a, b = x.double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    assert (got.double() - torch.cat([a * c - b * s, b * c + a * s], -1)).abs().max() < 8 * EPS[dtype]


# Attention


@DTYPES
@pytest.mark.parametrize("cancelling", [True, False])
@pytest.mark.parametrize(("length", "window"), [(1, None), (20, None), (70, None), (70, 33), (70, 1)])
def test_attention_is_literal(
    data: ModuleType, literal: ModuleType, dtype: torch.dtype, length: int, window: int | None, cancelling: bool
) -> None:
    q, k, v = data.cancel_attention(2, length, 4, 2, 8, dtype, seed=1)
    if not cancelling:  # scores over a wide range, so that some e * inv fall among the subnormals
        q, k = 30 * rand(2, 4, 8, dtype=dtype), rand(length, 2, 8, dtype=dtype, seed=1)
    num_keys = torch.tensor([max(1, length - 5), length])
    want, cap = [], 2.0 if length == 20 else 0.0
    for t, n in itertools.product(range(2), range(4)):
        seen = int(num_keys[t])
        keys, values = rows(k)[:seen, n // 2], rows(v)[:seen, n // 2]
        want.append(literal.attend(rows(q)[t, n], keys, values, 0.3, dtype == BF16, max(0, seen - (window or seen)), cap))
    same_bits(ref.attention(q, k, v, num_keys, 0.3, window, cap), want)


@DTYPES
@pytest.mark.parametrize("window", [None, 24])
def test_attention_against_float64(dtype: torch.dtype, window: int | None) -> None:
    q, k, v = rand(9, 6, 32, dtype=dtype), rand(50, 2, 32, dtype=dtype, seed=1), rand(50, 2, 32, dtype=dtype, seed=2)
    num_keys = torch.arange(42, 51)
    got = ref.attention(q, k, v, num_keys, 32**-0.5, window).view(9, 6, 32)
    j = torch.arange(50)
    seen = (j < num_keys[:, None]) & (j >= num_keys[:, None] - (window or 50))
    scores = torch.einsum("tnh,lnh->ntl", q.double(), k.double().repeat_interleave(3, 1)) * 32**-0.5
    p = scores.masked_fill(~seen, -float("inf")).softmax(-1)
    exact = torch.einsum("ntl,lnh->tnh", p, v.double().repeat_interleave(3, 1))
    assert (got.double() - exact).abs().max() < 8 * EPS[dtype]


@DTYPES
def test_attention_bits_do_not_depend_on_chunks_or_unseen_keys(data: ModuleType, dtype: torch.dtype) -> None:
    q, k, v = data.cancel_attention(6, 80, 6, 2, 16, dtype, seed=1)
    num_keys = torch.arange(60, 66)
    whole = ref.attention(q, k, v, num_keys, 0.25, 40)
    assert whole.isfinite().all() and whole.abs().max() > 0
    poisoned = v.clone()
    poisoned[65:], poisoned[:5] = float("nan"), float("inf")
    same_bits(ref.attention(q, k, poisoned, num_keys, 0.25, 40), whole.float())
    for t in range(6):
        seen = int(num_keys[t])
        same_bits(ref.attention(q[t : t + 1], k[:seen], v[:seen], num_keys[t : t + 1], 0.25, 40), whole[t].float())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ref.linear(rand(2, 4), rand(3, 5)), r"\[2, 4\] does not meet \[3, 5\]"),
        (lambda: ref.linear(rand(2, 4), rand(3, 4, dtype=BF16)), "must agree"),
        (lambda: ref.linear(rand(2, 4).half(), rand(3, 4).half()), "float16 is not"),
        (lambda: ref.rmsnorm(rand(2, 4), rand(5), 1e-5), "rows of 4"),
        (lambda: ref.rope(rand(2, 1, 4), rand(2, 4), rand(2, 4)), r"must be \[2, 2\]"),
        (lambda: ref.attention(rand(1, 2, 4), rand(3, 2, 4), rand(3, 2, 4), torch.tensor([4]), 1.0), "1 to 3 keys"),
        (lambda: ref.attention(rand(1, 3, 4), rand(3, 2, 4), rand(3, 2, 4), torch.tensor([3]), 1.0), "share 2 KV heads"),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
