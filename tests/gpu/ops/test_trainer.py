"""A trainer's ops launch the engine's kernels: the same bits for the same rows, with gradients."""

from __future__ import annotations

import pytest
import torch
from rollsync.kernels import reference as ref
from rollsync.kernels import trainer
from rollsync.kernels.gpu import ops
from rollsync.kernels.gpu.trainer import GpuTrainerOps
from torch import Tensor


def rows(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device).requires_grad_()


@pytest.mark.parametrize("n", [40, 13])
def test_linear(device: str, dtype: torch.dtype, n: int) -> None:
    x, w, b = (rows(shape, dtype, device, i) for i, shape in enumerate([(2, 3, 64), (n, 64), (n,)]))
    out = trainer.linear(GpuTrainerOps(), x, w, b, shards=4)
    room = torch.empty(6, 40, dtype=dtype, device=device)[:, :n]
    with torch.no_grad():
        assert torch.equal(out.reshape(6, n), ops.linear(x.view(6, 64), w, b, shards=2, out=room))  # K = 64 is two blocks
    (out.float() * torch.arange(n, device=device)).sum().backward()
    want = (torch.arange(n).double() @ w.detach().cpu().double()).expand(2, 3, 64)
    assert x.grad is not None and w.grad is not None and b.grad is not None
    assert (x.grad.cpu().double() - want).abs().max() < want.abs().max() * (2.0**-6 if dtype == torch.bfloat16 else 1e-5)


def test_norm_activation_and_softcap(device: str, dtype: torch.dtype) -> None:
    triton_ops = GpuTrainerOps()
    x, w = rows((3, 5, 72), dtype, device, 0), rows((72,), dtype, device, 1)
    with torch.no_grad():
        assert torch.equal(trainer.rmsnorm(triton_ops, x, w, 1e-6).view(15, 72), ops.rmsnorm(x.view(15, 72), w, 1e-6))
        one = torch.ones(3, 5, 72, dtype=dtype)
        assert torch.equal(trainer.activation(triton_ops, x, "silu").cpu(), ref.silu_mul(x.cpu(), one))
        assert torch.equal(trainer.activation(triton_ops, x, "gelu_tanh").cpu(), ref.gelu_mul(x.cpu(), one))
        odd = x[..., :7]  # rows that are not aligned
        assert torch.equal(trainer.softcap(triton_ops, odd, 2.0).cpu(), ref.softcap(odd.cpu(), 2.0))
    for fn in (lambda: trainer.rmsnorm(triton_ops, x, w, 1e-6), lambda: trainer.activation(triton_ops, x, "silu")):
        x.grad = None
        fn().sum().backward()
        assert x.grad is not None and x.grad.isfinite().all() and x.grad.any()
