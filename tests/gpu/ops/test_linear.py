"""Linear layers: the numbers, and that neither batch, shards' programs nor ranks show in a bit."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from rollsync.kernels import reference as ref
from rollsync.kernels.gpu import tiles
from rollsync.kernels.gpu.ops import add_parts, gated, linear, linear_gated, linear_parts
from torch import Tensor

K, N = 200, 72  # neither a multiple of a tile


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    scale = want.double().abs().max()
    return bool((got.cpu().double() - want.double()).abs().max() <= scale * (2.0**-7 if dtype == torch.bfloat16 else 1e-5))


def test_numbers(device: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, K, generator=g).to(dtype) for n in (5, N))
    bias, residual = torch.randn(N, generator=g).to(dtype), torch.randn(5, N, generator=g).to(dtype)
    on = [t.to(device) for t in (x, w, bias, residual)]
    want = x.double() @ w.double().T
    assert near(linear(on[0], on[1], on[2]), want + bias.double(), dtype)
    assert near(linear(on[0], on[1], residual_MN=on[3]), want + residual.double(), dtype)
    whole = linear(on[0], on[1], float32=True)
    assert whole.dtype == torch.float32 and near(whole, want, torch.float32)
    assert torch.equal(ref.round_to(whole.cpu(), dtype), linear(on[0], on[1]).cpu())


def test_a_row_is_the_same_in_any_batch(data: ModuleType, device: str, dtype: torch.dtype) -> None:
    x, w = (t.to(device) for t in data.cancel_data(67, K, N, dtype, seed=1))
    whole = linear(x, w)
    assert whole.abs().max() > 0
    for rows in (slice(0, 1), slice(66, 67), slice(3, 20), slice(32, 66)):
        assert torch.equal(linear(x[rows], w), whole[rows]), rows
    # Nor do neighbours among the weights: fused rows, and a rank's share of them, give the same.
    assert torch.equal(linear(x, w[8:40].contiguous()), whole[:, 8:40])


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_shards_are_one_tree_however_they_are_divided(data: ModuleType, device: str, dtype: torch.dtype, shards: int) -> None:
    k = 1024
    x, w = (t.to(device) for t in data.cancel_data(3, k, N, dtype, seed=3))
    residual = torch.ones(3, N, dtype=dtype, device=device)
    want = linear(x, w, residual_MN=residual, shards=shards)
    parts = linear_parts(x, w, torch.empty(shards, 3, N, device=device))
    assert torch.equal(add_parts(parts, residual_MN=residual, dtype=dtype), want)
    if shards == 4:
        assert not torch.equal(linear(x, w, shards=1), linear(x, w, shards=4)), "the data shows no order"
    ranks = 2
    if shards >= ranks:
        width = k // ranks
        own = [slice(i * width, (i + 1) * width) for i in range(ranks)]
        roots = torch.stack([linear(x[:, at].contiguous(), w[:, at].contiguous(), shards=shards // ranks, float32=True) for at in own])
        assert torch.equal(add_parts(roots, residual_MN=residual, dtype=dtype), want)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(data: ModuleType, device: str, dtype: torch.dtype, activation: str) -> None:
    x, w = data.cancel_data(4, K, 2 * N, dtype, seed=5)
    x = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = linear(x.to(device), w.to(device))
    halves = rows[:, :N].contiguous(), rows[:, N:].contiguous()
    assert torch.equal(linear_gated(x.to(device), w.to(device), activation), gated(*halves, activation))
    small = [t * 0.05 for t in halves]  # larger gates give subnormal numbers, which a GPU keeps and the reference does not
    want = (ref.silu_mul if activation == "silu" else ref.gelu_mul)(*(t.cpu() for t in small))
    assert torch.equal(gated(*small, activation).cpu(), want)


def test_rows_of_any_length_can_come_out(data: ModuleType, device: str, dtype: torch.dtype) -> None:
    n = 70
    # Which are no multiple of 16 bytes, and the ends of rows must not run into one another.
    x, w = (t.to(device) for t in data.cancel_data(5, 128, N, dtype, seed=7))
    some = torch.cat([w[:n], w[:n]])
    for wide in (False, True):
        assert torch.equal(linear(x, w[:n], float32=wide), linear(x, w, float32=wide)[:, :n])
    assert torch.equal(linear_gated(x, some, "silu"), linear_gated(x, torch.cat([w, w]), "silu")[:, :n])
    parts = linear_parts(x, w, torch.empty(2, 5, N, device=device))
    assert torch.equal(add_parts(parts[:, :, :n], dtype=dtype), linear(x, w, shards=2)[:, :n])


def test_larger_tiles(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # That the numbers are right; whether the bits are, too, is measured by gpu_check.py.
    monkeypatch.setitem(tiles.LARGE_TILES, torch.float32, (tiles.Tile(64, 64, 32, 8, 3), tiles.Tile(64, 32, 32, 8, 3)))
    g = torch.Generator().manual_seed(4)
    x, w = (torch.randn(n, 128, generator=g).to(dtype).to(device) for n in (70, 2 * N))
    calls = (lambda: linear(x, w), lambda: linear(x, w, shards=4), lambda: linear_gated(x, w, "silu"))
    before = [call() for call in calls]
    monkeypatch.setattr(tiles, "LARGE_FROM", 71)
    assert not tiles.takes_large(70, dtype)
    monkeypatch.setattr(tiles, "LARGE_FROM", 70)
    assert tiles.takes_large(70, dtype)
    for call, want in zip(calls, before, strict=True):
        assert near(call(), want.cpu(), dtype)


def test_mistakes_are_named(device: str) -> None:
    x, w = torch.zeros(4, 16, device=device), torch.zeros(8, 16, device=device)
    with pytest.raises(ValueError, match=r"linear: a row of K = 15 .* entries has 60 bytes"):
        linear(torch.zeros(4, 15, device=device), torch.zeros(8, 15, device=device))
    with pytest.raises(ValueError, match="linear: x begins at address"):
        linear(torch.zeros(65, device=device)[1:].view(4, 16), w)
    with pytest.raises(ValueError, match="linear: shards must be a power of two"):
        linear(x, w, shards=3)
    with pytest.raises(ValueError, match="linear: out must be"):
        linear(x, w, out=torch.zeros(4, 9, device=device))
