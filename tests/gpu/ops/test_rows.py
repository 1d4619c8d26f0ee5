"""Norms, embedding rows, caps, rotation and pages."""

from __future__ import annotations

import pytest
import torch
from rollsync.kernels import reference as ref
from rollsync.kernels.gpu.ops import GpuKvLayout, add_rmsnorm, copy_blocks, embed, head_norm, rmsnorm, rope_store, softcap
from torch import Tensor


def close(got: Tensor, want: Tensor) -> bool:
    """To one step of the dtype: sums have an order of their own."""
    step = 2.0**-7 if got.dtype == torch.bfloat16 else 1e-6
    return bool(((got.cpu().double() - want.double()).abs() <= want.double().abs() * step + 1e-30).all())


@pytest.mark.parametrize("width", [72, 5000])
@pytest.mark.parametrize("one_plus", [False, True])
def test_rmsnorm(device: str, dtype: torch.dtype, width: int, one_plus: bool) -> None:
    g = torch.Generator().manual_seed(width)
    x, weight = torch.randn(6, width, generator=g).to(dtype), torch.randn(width, generator=g).to(dtype)
    x_on, weight_on = x.to(device), weight.to(device)
    whole = rmsnorm(x_on, weight_on, 1e-5, one_plus)
    assert close(whole, ref.rmsnorm(x, weight, 1e-5, one_plus))
    assert torch.equal(rmsnorm(x_on[3:4], weight_on, 1e-5, one_plus), whole[3:4])
    chosen = torch.tensor([4, 0, 4], dtype=torch.int32, device=device)
    assert torch.equal(rmsnorm(x_on, weight_on, 1e-5, one_plus, rows=chosen), whole[[4, 0, 4]])
    residual = torch.randn(6, width, generator=g).to(dtype)
    added = add_rmsnorm(residual.clone().to(device), x_on, weight_on, 1e-5, one_plus)
    assert torch.equal(added.cpu(), ref.round_to(residual.float() + whole.cpu().float(), dtype))


def test_head_norm_is_rmsnorm_of_every_head(device: str, dtype: torch.dtype) -> None:
    heads, kv_heads, h = 4, 2, 48
    g = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, (heads + 2 * kv_heads) * h, generator=g).to(dtype).to(device)
    wq, wk = (torch.randn(h, generator=g).to(dtype).to(device) for _ in range(2))
    before = qkv.clone().view(3, -1, h)
    after = head_norm(qkv, wq, wk, 1e-6, heads=heads, kv_heads=kv_heads).view(3, -1, h)
    for at, weight in ((slice(0, heads), wq), (slice(heads, heads + kv_heads), wk)):
        rows = before[:, at].reshape(-1, h)
        assert torch.equal(after[:, at].reshape(-1, h), rmsnorm(rows, weight, 1e-6))
    assert torch.equal(after[:, heads + kv_heads :], before[:, heads + kv_heads :])


@pytest.mark.parametrize("h", [64, 80])
def test_rope_store(device: str, dtype: torch.dtype, h: int) -> None:
    heads, kv_heads, size = 3, 1, 16
    g = torch.Generator().manual_seed(h)
    kv = GpuKvLayout(num_blocks=6, block_tokens=size, num_layers=2, kv_heads=kv_heads, head_dim=h, dtype=dtype).allocate(device)
    qkv = torch.randn(5, (heads + 2 * kv_heads) * h, generator=g).to(dtype)
    cos, sin = (torch.randn(40, h // 2, generator=g).to(dtype) for _ in range(2))
    positions = torch.tensor([0, 1, 33, 15, 16], dtype=torch.int32)
    slots = torch.tensor([0, 0, 1, 0, -1], dtype=torch.int32)  # the last is padding
    tables = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32)
    on = [t.to(device) for t in (positions, slots, tables, cos, sin)]
    out = rope_store(qkv.clone().to(device), *on, kv, 1, heads=heads).cpu().view(5, -1, h)
    x = qkv.view(5, -1, h)
    at = positions.long()
    assert torch.equal(out[:, : heads + kv_heads], ref.rope(x[:, : heads + kv_heads], cos[at], sin[at]))
    assert torch.equal(out[:, heads + kv_heads :], x[:, heads + kv_heads :])
    stored = torch.zeros(6, 2, 2, kv_heads, size, h, dtype=dtype)
    for t in range(4):
        block = tables[slots[t], positions[t] // size]
        stored[block, 1, 0, :, positions[t] % size] = out[t, heads : heads + kv_heads]
        stored[block, 1, 1, :, positions[t] % size] = x[t, heads + kv_heads :]
    assert torch.equal(kv.cpu(), stored)
    copy_blocks(kv, torch.tensor([[4, 2], [-1, 0], [2, 5]][:2], dtype=torch.int32, device=device))
    stored[2] = stored[4]
    assert torch.equal(kv.cpu(), stored)


def test_embed_and_softcap(device: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(2)
    weight = torch.randn(9, 88, generator=g).to(dtype)
    ids = torch.tensor([8, 0, 8], dtype=torch.int32, device=device)
    want = ref.round_to(weight[[8, 0, 8]].float() * torch.tensor(1.7, dtype=dtype).float(), dtype)
    assert torch.equal(embed(ids, weight.to(device), 1.7).cpu(), want)
    x = 30 * weight
    assert torch.equal(softcap(x.to(device), 7.0).cpu(), ref.softcap(x, 7.0))


def test_a_layout_that_kernels_cannot_read_is_refused() -> None:
    sizes = {"num_blocks": 1, "num_layers": 1, "kv_heads": 1, "dtype": torch.bfloat16}
    with pytest.raises(ValueError, match="block_tokens must be a power of two >= 16"):
        GpuKvLayout(block_tokens=8, head_dim=64, **sizes)
    with pytest.raises(ValueError, match="a head must be a multiple of 16 entries"):
        GpuKvLayout(block_tokens=16, head_dim=24, **sizes)
