"""Every native build against the reference, bit by bit: linear layers and row ops. Attention and sampler have files of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from rollsync.kernels import reference as ref
from rollsync.kernels.native_lib import load_build
from rollsync.kernels.native_ops import NativeOps
from rollsync.kernels.weights import NativeWeights, WeightSpec
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32
Same = Callable[[Tensor, Tensor], None]
Once = Callable[[Any, Callable[[], Any]], Any]
DTYPES = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
KINDS = pytest.mark.parametrize("kind", ["cancel", "wide"])
ROWS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 64, 100, 255, 256, 300)
BITS = {BF16: torch.int16, F32: torch.int32}

def inputs(data: ModuleType, kind: str, m: int, k: int, n: int, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor]:
    make = data.cancel_data if kind == "cancel" else data.wide_data
    x, w = make(m, k, n, dtype, seed)
    return x, w


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bit pattern, NaN and subnormal ones too."""
    limits = torch.iinfo(BITS[dtype])
    return torch.randint(limits.min, limits.max + 1, shape, generator=torch.Generator().manual_seed(seed)).to(BITS[dtype]).view(dtype)


@DTYPES
@KINDS
@pytest.mark.parametrize(("k", "n"), [(40, 24), (40, 960), (576, 50)])
def test_linear(ops: NativeOps, once: Once, data: ModuleType, same: Same, kind: str, k: int, n: int, dtype: torch.dtype) -> None:
    x, w = inputs(data, kind, max(ROWS), k, n, dtype)
    want = once(("linear", kind, k, n, dtype), lambda: ref.linear(x, w))
    packed = ops.pack_linear(w)
    for m in ROWS:
        same(ops.linear(x[:m], packed), want[:m])
    assert ops.linear(x[:0], packed).shape == (0, n)
    same(ops.linear_f32(x[:33], packed), once(("linear_f32", kind, k, n, dtype), lambda: ref.linear_f32(x[:33], w)))


@DTYPES
@KINDS
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_linear_with_bias_residual_and_shards(
    ops: NativeOps, once: Once, data: ModuleType, same: Same, kind: str, shards: int, dtype: torch.dtype
) -> None:
    x, w = inputs(data, kind, 33, 512, 40, dtype, seed=2)
    plain, biased = once(
        ("shards", kind, shards, dtype), lambda: (ref.linear(x, w, shards=shards), ref.linear(x, w, rand(40, dtype=dtype), shards))
    )
    same(ops.linear(x, ops.pack_linear(w, shards=shards)), plain)
    packed = ops.pack_linear(w, rand(40, dtype=dtype), shards)
    residual = rand(33, 40, dtype=dtype, seed=1)
    before = residual.clone()
    for m in (1, 16, 17, 33):
        same(ops.linear(x[:m], packed), biased[:m])
        same(ops.linear(x[:m], packed, residual_TN=residual[:m]), ref.round_to(residual[:m].float() + biased[:m].float(), dtype))
    same(residual, before)


def test_shards_that_do_not_divide_k(ops: NativeOps, data: ModuleType, same: Same) -> None:
    x, w = data.cancel_data(5, 576, 24, BF16, 1)  # 18 blocks: two shards, whatever was asked for
    packed = ops.pack_linear(w, shards=8)
    assert packed.shards == 2
    same(ops.linear(x, packed), ref.linear(x, w, shards=8))
    assert not torch.equal(ops.linear(x, packed), ref.linear(x, w))


@DTYPES
def test_linear_bits_at_every_row_count(ops: NativeOps, once: Once, data: ModuleType, same: Same, dtype: torch.dtype) -> None:
    x, w = data.cancel_data(256, 192, 50, dtype, 3)
    packed = ops.pack_linear(w)
    whole = ops.linear(x, packed)
    same(whole, once(("every", dtype), lambda: ref.linear(x, w)))
    for m in range(1, 256):
        same(ops.linear(x[256 - m :], packed), whole[256 - m :])


@DTYPES
@KINDS
@pytest.mark.parametrize("half", [24, 40, 64])
def test_linear_silu_mul(ops: NativeOps, once: Once, data: ModuleType, same: Same, kind: str, half: int, dtype: torch.dtype) -> None:
    x, w = inputs(data, kind, 100, 72, 2 * half, dtype)
    want = once(("silu", kind, half, dtype), lambda: ref.silu_mul(*ref.linear(x, w).chunk(2, dim=1)))
    packed = ops.pack_linear(w, gate_up=True)
    for m in (1, 16, 17, 33, 100):
        same(ops.linear_silu_mul(x[:m], packed), want[:m])


@DTYPES
def test_activations_and_softcap_over_all_values(ops: NativeOps, once: Once, same: Same, dtype: torch.dtype) -> None:
    if dtype == BF16:
        x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(BF16)
    else:
        x = torch.cat([random_bits(4000, dtype=F32), torch.linspace(-104, 104, 4001)])
    w = torch.ones(2, 1, dtype=dtype)
    want = once(("all", dtype), lambda: ref.silu_mul(*ref.linear(x[:, None], w).chunk(2, dim=1)))
    same(ops.linear_silu_mul(x[:, None], ops.pack_linear(w, gate_up=True)), want)
    want = once(("gelu", dtype), lambda: ref.gelu_mul(*ref.linear(x[:, None], w).chunk(2, dim=1)))
    same(ops.linear_gelu_mul(x[:, None], ops.pack_linear(w, gate_up=True)), want)
    want = once(("softcap", dtype), lambda: ref.softcap(ref.linear(x[:, None], w[:1]), 0.3))
    same(ops.linear_softcap(x[:, None], ops.pack_linear(w[:1]), 0.3), want)


@DTYPES
@KINDS
@pytest.mark.parametrize("width", [16, 40, 64, 576, 1000])
def test_rmsnorm(ops: NativeOps, once: Once, data: ModuleType, same: Same, kind: str, width: int, dtype: torch.dtype) -> None:
    x = inputs(data, kind, 37, width, 1, dtype)[0]
    x[3], x[4, 5], x[5, 6] = 0, float("nan"), float("inf")
    weight = rand(width, dtype=dtype)
    for one_plus in (False, True):
        want = once(("norm", kind, width, dtype, one_plus), partial(ref.rmsnorm, x, weight, 1e-5, one_plus))
        same(ops.rmsnorm(x, weight, 1e-5, one_plus), want)


@DTYPES
@pytest.mark.parametrize("head_size", [16, 64, 80, 128])
def test_rope(ops: NativeOps, data: ModuleType, same: Same, head_size: int, dtype: torch.dtype) -> None:
    x = data.wide_data(70 * 3, head_size, 1, dtype, 1)[0].view(70, 3, head_size)
    angle = torch.arange(70.0)[:, None] * 10000 ** -torch.linspace(0, 1, head_size // 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    want = ref.rope(x, cos, sin)
    same(ops.rope(x, cos, sin), want)
    same(ops.rope(x[69:], cos[69:], sin[69:]), want[69:])
    norm = rand(head_size, dtype=dtype)
    for one_plus in (False, True):
        same(ops.rope(x, cos, sin, norm, 1e-6, one_plus), ref.rope(x, cos, sin, norm, 1e-6, one_plus))


@pytest.mark.parametrize("threads", [2, 3, 8])
@DTYPES
def test_thread_count_changes_no_bit(ops: NativeOps, data: ModuleType, same: Same, dtype: torch.dtype, threads: int) -> None:
    many = NativeOps(load_build(ops.library.build), threads)
    for m in (1, 33, 100):
        x, w = data.cancel_data(m, 512, 480, dtype, 1)
        for shards in (1, 8):
            packed = ops.pack_linear(w, shards=shards)
            same(many.linear(x, packed), ops.linear(x, packed))
        packed = ops.pack_linear(w, gate_up=True)
        same(many.linear_silu_mul(x, packed), ops.linear_silu_mul(x, packed))
        same(many.rmsnorm(x, w[0], 1e-6), ops.rmsnorm(x, w[0], 1e-6))


@DTYPES
@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize(("n", "k"), [(50, 40), (96, 33), (24, 576)])
def test_packing_is_undone_bit_for_bit(ops: NativeOps, n: int, k: int, gate_up: bool, dtype: torch.dtype) -> None:
    w = random_bits(n, k, dtype=dtype)
    assert torch.equal(ops.unpack_linear(ops.pack_linear(w, gate_up=gate_up)).view(BITS[dtype]), w.view(BITS[dtype]))
    tall = rand(k, n, dtype=dtype)
    assert torch.equal(ops.unpack_linear(ops.pack_linear(tall.T, gate_up=gate_up)), tall.T)


@DTYPES
@pytest.mark.parametrize("layout", ["linear", "gate_up"])
def test_weights_written_slice_by_slice(ops: NativeOps, layout: str, dtype: torch.dtype) -> None:
    n, k = 70, 45
    weights = NativeWeights(ops.library, {"before": WeightSpec(n, k, "linear"), "w": WeightSpec(n, k, layout)}, dtype)
    w = random_bits(n, k, dtype=dtype)
    row_cuts, col_cuts = [0, 1, 17, 34, 35, 36, 70], [0, 2, 5, 32, 33, 44, 45]
    pieces = [(r0, r1, c0, c1) for r0, r1 in pairwise(row_cuts) for c0, c1 in pairwise(col_cuts)]
    for i in torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist():
        r0, r1, c0, c1 = pieces[i]
        weights.write("w", r0, c0, w[r0:r1, c0:c1])
    assert torch.equal(weights.read("w").view(BITS[dtype]), w.view(BITS[dtype]))
    assert not weights.read("before").any()
    weights.write("w", 20, 8, torch.zeros(30, 9, dtype=dtype))
    w[20:50, 8:17] = 0
    assert torch.equal(weights.read("w").view(BITS[dtype]), w.view(BITS[dtype]))


@DTYPES
@pytest.mark.parametrize("sent", [torch.float32, None])
@pytest.mark.parametrize("layout", ["linear", "gate_up", "rows"])
def test_weights_taken_in_with_their_digest(ops: NativeOps, layout: str, sent: torch.dtype | None, dtype: torch.dtype) -> None:
    """One pass: what is written, the digest of what came, and how much of it is not finite."""
    n, k = 140, 77
    weights = NativeWeights(ops.library, {"w": WeightSpec(n, k, layout)}, dtype)
    x = rand(n, k, dtype=sent or dtype)
    x[3, 5], x[139, 76], x[70, 0] = float("nan"), float("inf"), -float("inf")
    x[0, 0], x[139, 0] = 3e-39, 1e-40  # below the normal numbers
    digest = broken = 0
    for r0, r1 in pairwise([0, 3, 19, 70, 71, 140]):
        for c0, c1 in pairwise([0, 32, 77]):
            part = x[r0:r1, c0:c1].contiguous()
            assert weights.takes(part)
            found = weights.take("w", r0, c0, part, r0 * k + c0, k)
            digest, broken = digest + found[0], broken + found[1]
    found_bits, wanted_bits = (t.nan_to_num(7).view(BITS[dtype]) for t in (weights.read("w"), x.to(dtype)))
    assert torch.equal(found_bits, wanted_bits)
    assert (digest % 2**64, broken) == ops.library.digest(x, 0, k) and broken == 3
    with pytest.raises(ValueError, match="cannot write"):
        weights.take("w", 139, 0, x[:2].contiguous(), 0, k)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: o.pack_linear(rand(4, 4, dtype=torch.float16)), "no bfloat16 or float32 matrix"),
        (lambda o: o.pack_linear(rand(4, 1024, dtype=F32), shards=32), "at most 16 partial sums"),
        (lambda o: o.pack_linear(rand(3, 4, dtype=F32), gate_up=True), "even N"),
        (lambda o: o.pack_linear(rand(3, 4, dtype=F32), rand(4, dtype=F32)), r"must be \[3\]"),
        (lambda o: o.linear(rand(2, 4, dtype=F32), o.pack_linear(rand(3, 5, dtype=F32))), r"\[2, 4\] does not meet"),
        (lambda o: o.linear(rand(2, 4, dtype=BF16), o.pack_linear(rand(3, 4, dtype=F32))), "bfloat16"),
        (lambda o: o.linear_silu_mul(rand(2, 4, dtype=F32), o.pack_linear(rand(4, 4, dtype=F32))), "gate_up=False"),
        (lambda o: o.linear(*(rand(4, 4, dtype=F32), o.pack_linear(rand(4, 4, dtype=F32))), residual_TN=rand(4, 3, dtype=F32)), "residual"),
        (lambda o: o.rmsnorm(rand(2, 4, dtype=F32), rand(5, dtype=F32), 1e-5), "does not meet a weight"),
        (lambda o: o.rope(rand(2, 1, 4, dtype=F32), rand(2, 4, dtype=F32), rand(2, 4, dtype=F32)), r"must be \[2, 2\]"),
        (lambda o: o.rope(*(rand(2, *s, dtype=F32) for s in ((1, 4), (2,), (2,))), rand(2, dtype=F32)), r"must be \[4\]"),
    ],
)
def test_mistakes_are_named(ops: NativeOps, call: Callable[[NativeOps], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(ops)
