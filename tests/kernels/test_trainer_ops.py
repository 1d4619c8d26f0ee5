"""The trainer's ops of every native build against the reference, in every bit, and their gradients against torch's."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rollsync.kernels import trainer
from rollsync.kernels.native_ops import NativeOps
from rollsync.kernels.segments import Segments
from rollsync.kernels.trainer_ops import NativeTrainerOps, ReferenceTrainerOps, trainer_ops
from torch import Tensor

Same = Callable[[Tensor, Tensor], None]
REFERENCE = ReferenceTrainerOps()
DTYPES = (torch.float32, torch.bfloat16)
SPANS = {
    "right": [(0, 0, 37), (1, 0, 5), (2, 0, 70)],
    "left": [(0, 33, 70), (1, 65, 70), (2, 0, 70)],
    "packed": [(0, 0, 1), (0, 1, 40), (0, 40, 69), (2, 3, 35), (2, 35, 68)],
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(ops: NativeOps, data: ModuleType, same: Same, dtype: torch.dtype) -> None:
    ours = NativeTrainerOps(ops.library)
    for m, k, n, shards in ((1, 32, 7, 1), (33, 100, 65, 1), (70, 256, 40, 4), (17, 64, 200, 4), (5, 6, 3, 2)):
        x, w = data.cancel_data(m, k, n, dtype, 2 * m + 1)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(m)).to(dtype)
        for b, wide in ((None, False), (bias, False), (None, True)):
            same(ours.linear(x, w, b, shards, wide), REFERENCE.linear(x, w, b, shards, wide))
        same(ours.linear(x.T.contiguous().T, w.T.contiguous().T, None, shards, False), REFERENCE.linear(x, w, None, shards, False))


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_ops(ops: NativeOps, same: Same, dtype: torch.dtype) -> None:
    ours, generator = NativeTrainerOps(ops.library), torch.Generator().manual_seed(0)
    for width in (1, 16, 100, 192):
        x = (4 * torch.randn(9, width, generator=generator)).to(dtype)
        weight = torch.randn(width, generator=generator).to(dtype)
        for one_plus in (False, True):
            same(ours.rmsnorm(x, weight, 1e-5, one_plus), REFERENCE.rmsnorm(x, weight, 1e-5, one_plus))
        for kind in ("silu", "gelu_tanh"):
            same(ours.activation(x.view(3, 3, width), kind), REFERENCE.activation(x.view(3, 3, width), kind))
        same(ours.softcap(x, 1.5), REFERENCE.softcap(x, 1.5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", SPANS)
def test_attention(ops: NativeOps, data: ModuleType, same: Same, once: Any, how: str, dtype: torch.dtype) -> None:
    """Padding holds infinities, which must reach no token."""
    ours, segments = NativeTrainerOps(ops.library), Segments(3, 70, SPANS[how])
    for head_size, window, cap in ((24, 0, 0.0), (32, 9, 0.0), (64, 0, 2.0)):
        q, k, v = data.cancel_attention(210, 210, 4, 2, head_size, dtype, 3)
        q, k, v = (t.view(3, 70, -1, head_size).clone() for t in (q, k, v))
        for t in (q, k, v):
            t[~torch.from_numpy(segments.real)] = torch.inf
        options = (segments, 0.2, window, cap)
        want = once((how, dtype, head_size), lambda q=q, k=k, v=v, o=options: REFERENCE.attention(q, k, v, *o))
        same(ours.attention(q, k, v, *options), want)
        assert not want[~torch.from_numpy(segments.real)].any()


def _check_gradients(ours: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], bound: float) -> None:
    grads = []
    for function in (ours, plain):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        out = function(*leaves)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        grads.append(torch.autograd.grad(out, leaves, weights))
    for got, want in zip(*grads, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert (got - want).norm() <= bound * want.norm()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_gradients_are_torchs(dtype: torch.dtype, bound: float) -> None:
    ops, generator = trainer_ops(), torch.Generator().manual_seed(4)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, w, b, d = randn(2, 5, 64), randn(40, 64), randn(40), randn(64)
    _check_gradients(lambda x, w, b: trainer.linear(ops, x, w, b), F.linear, [x, w, b], bound)
    _check_gradients(lambda x, d: trainer.rmsnorm(ops, x, d, 1e-5), lambda x, d: F.rms_norm(x, (64,), d, 1e-5), [x, d], bound)
    _check_gradients(
        lambda x, d: trainer.rmsnorm(ops, x, d, 1e-5, True), lambda x, d: F.rms_norm(x, (64,), d + 1, 1e-5), [x, d], bound
    )
    _check_gradients(lambda x: trainer.activation(ops, x, "silu"), F.silu, [x], bound)
    _check_gradients(lambda x: trainer.activation(ops, x, "gelu_tanh"), lambda x: F.gelu(x, approximate="tanh"), [x], bound)
    _check_gradients(lambda x: trainer.softcap(ops, x, 1.5), lambda x: 1.5 * torch.tanh(x.float() / 1.5).to(dtype), [x], bound)


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (9, 0.0), (0, 2.0), (9, 2.0)])
@pytest.mark.parametrize("how", SPANS)
def test_gradients_of_attention_are_those_of_the_plain_formula(how: str, window: int, cap: float) -> None:
    ops, segments, generator = trainer_ops(), Segments(3, 70, SPANS[how]), torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(3, 70, heads, 16, generator=generator) for heads in (4, 2, 2))

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        for row, begin, end in segments.spans:
            at = (row, slice(begin, end))
            keys, values = (t[at].repeat_interleave(2, dim=1) for t in (k, v))
            scores = torch.einsum("tnh,lnh->ntl", q[at], keys) * 0.3
            scores = cap * torch.tanh(scores / cap) if cap else scores
            distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            seen = (distance >= 0) & (distance < (window or end))
            out[at] = torch.einsum("ntl,lnh->tnh", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
        return out

    _check_gradients(lambda q, k, v: trainer.attention(ops, q, k, v, segments, 0.3, window, cap), plain, [q, k, v], 3e-6)
