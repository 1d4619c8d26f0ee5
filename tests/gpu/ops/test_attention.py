"""Paged attention: the numbers, and one result however tokens come: alone, in chunks, whole, with splits apart, by a trainer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from rollsync.kernels import reference as ref
from rollsync.kernels import trainer
from rollsync.kernels.gpu import attention as paged
from rollsync.kernels.gpu.ops import GpuKvLayout, attention, attention_items, attention_work
from rollsync.kernels.gpu.trainer import GpuTrainerOps
from rollsync.kernels.segments import Segments
from rollsync.kernels.trainer_ops import ReferenceTrainerOps
from torch import Tensor

PAGE = 16


class Sequence:
    """One sequence of cancelling keys and values in scattered pages, broken numbers in the others."""

    def __init__(self, data: ModuleType, device: str, dtype: torch.dtype, length: int, heads: int, kv_heads: int, h: int) -> None:
        self.heads, self.length, self.device, self.dtype = heads, length, device, dtype
        self.q, self.k, self.v = data.cancel_attention(length, length, heads, kv_heads, h, dtype, seed=1)
        blocks = -(-length // PAGE)
        order = torch.randperm(blocks + 2, generator=torch.Generator().manual_seed(length))
        self.tables = order[None, :blocks].int().contiguous().to(device)
        layout = GpuKvLayout(num_blocks=blocks + 2, block_tokens=PAGE, num_layers=2, kv_heads=kv_heads, head_dim=h, dtype=dtype)
        kv = torch.full(layout.shape, torch.nan, dtype=dtype)
        for part, x in enumerate((self.k, self.v)):
            padded = torch.cat([x, torch.full((blocks * PAGE - length, *x.shape[1:]), torch.nan, dtype=dtype)])
            kv[order[:blocks], 1, part] = padded.view(blocks, PAGE, kv_heads, h).transpose(1, 2)
        self.kv, self.group = kv.to(device), heads // kv_heads

    def attend(self, tokens: list[int], counts: list[int], places: int = 0, **options: Any) -> Tensor:
        """Of some tokens, fed as sequences of `counts` tokens each."""
        at = torch.tensor(tokens)
        positions = at.int().to(self.device)
        q = self.q[at].flatten(1).contiguous().to(self.device)
        ends = [tokens[sum(counts[: i + 1]) - 1] + 1 for i in range(len(counts))]
        items = attention_items(counts, self.group, self.dtype, num_keys=ends, places=places)
        work = attention_work(places, self.length, self.heads, self.kv.shape[-1], self.device) if places else None
        slots = torch.zeros_like(positions)
        on = torch.from_numpy(items).to(self.device)
        return attention(q, positions, slots, self.tables, on, self.kv, 1, 0.2, heads=self.heads, work=work, **options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [((3, 1, 64), {}), ((4, 2, 80), {}), ((3, 1, 64), {"window": 20}), ((2, 1, 32), {"softcap": 5.0})],
    ids=["plain", "padded head", "window", "softcap"],
)
def test_decoded_chunked_and_whole(
    data: ModuleType, device: str, dtype: torch.dtype, shape: tuple[int, int, int], options: dict[str, Any]
) -> None:
    heads, kv_heads, h = shape
    length = 70
    one = Sequence(data, device, dtype, length, heads, kv_heads, h)
    everything = list(range(length))
    whole = one.attend(everything, [length], **options)
    seen, cap = torch.arange(1, length + 1), options.get("softcap", 0.0)
    want = ref.attention(one.q, one.k, one.v, seen, 0.2, options.get("window"), cap)
    scale = one.v.double().abs().max() * (2.0**-6 if dtype == torch.bfloat16 else 1e-5)
    assert (whole.cpu().double() - want.double()).abs().max() < scale
    some = [0, 15, 16, 33, 64, 69]
    assert torch.equal(one.attend(some, [1] * len(some), **options), whole[some])
    tail = everything[29:]
    assert torch.equal(one.attend(tail, [11, 1, len(tail) - 12], **options), whole[29:])


@pytest.mark.parametrize("window", [0, 600])
def test_splits_apart_are_splits_in_one_program(
    data: ModuleType, device: str, dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 1100
    one = Sequence(data, device, dtype, length, 2, 1, 16)
    tokens = [length - 1, 511, 512, 300]
    together = one.attend(tokens, [1] * 4, window=window)
    assert together.abs().max() > 0
    for places in (1, 3):
        assert torch.equal(one.attend(tokens, [1] * 4, places=places, window=window), together)
    want = ref.attention(one.q[tokens], one.k, one.v, torch.tensor(tokens) + 1, 0.2, window or None)
    bound = one.v.double().abs().max() * (2.0**-6 if dtype == torch.bfloat16 else 1e-5)
    assert (together.cpu().double() - want.double()).abs().max() < bound


def test_a_trainer_gets_the_engines_bits(data: ModuleType, device: str, dtype: torch.dtype) -> None:
    length, heads, kv_heads, h = 40, 4, 2, 64
    one = Sequence(data, device, dtype, length, heads, kv_heads, h)
    engine = one.attend(list(range(length)), [length]).view(length, heads, h)
    batch = [torch.stack([torch.cat([x, x[:5] * 0]), torch.cat([x[:5] * 0, x])]).to(device) for x in (one.q, one.k, one.v)]
    leaves = [x.requires_grad_() for x in batch]
    segments = Segments(2, length + 5, [(0, 0, length), (1, 5, length + 5)])  # right- and left-padded
    out = trainer.attention(GpuTrainerOps(), *leaves, segments, 0.2)
    assert torch.equal(out[0, :length], engine) and torch.equal(out[1, 5:], engine)
    assert not out[0, length:].any() and not out[1, :5].any()
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    out.backward(slope.to(device))
    copies = [x.detach().cpu().requires_grad_() for x in batch]
    trainer.attention(ReferenceTrainerOps(), *copies, segments, 0.2).backward(slope)
    for leaf, copy in zip(leaves, copies, strict=True):
        assert leaf.grad is not None and copy.grad is not None
        bound = copy.grad.double().abs().max() * (2.0**-5 if dtype == torch.bfloat16 else 1e-5)
        assert (leaf.grad.cpu().double() - copy.grad.double()).abs().max() < bound


def test_mistakes_are_named(data: ModuleType, device: str) -> None:
    one = Sequence(data, device, torch.float32, 20, 2, 1, 32)
    with pytest.raises(ValueError, match="attention: window and softcap must not be negative"):
        one.attend([0], [1], window=-1)
    with pytest.raises(ValueError, match="query heads share a KV head"):
        paged.tokens_per_item(200, torch.bfloat16)
