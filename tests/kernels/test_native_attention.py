"""Attention of every native build against the reference: head sizes, shared pages, windows, and what pages held before."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from rollsync.kernels import reference as ref
from rollsync.kernels.kv import KvLayout
from rollsync.kernels.native_lib import load_build
from rollsync.kernels.native_ops import NativeOps
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32
Same = Callable[[Tensor, Tensor], None]
Once = Callable[[Any, Callable[[], Any]], Any]
DTYPES = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
BLOCKS = (4, 16, 32, 64)

@DTYPES
@pytest.mark.parametrize("head_size", [16, 64, 80, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 20])
def test_chunk_and_decode_rows(
    ops: NativeOps, once: Once, data: ModuleType, same: Same, head_size: int, group: int, dtype: torch.dtype
) -> None:
    kv_heads = 1 if group == 20 else 2
    q, k, v = data.cancel_attention(7, 75, group * kv_heads, kv_heads, head_size, dtype, seed=1)
    num_keys = torch.tensor([1, 31, 32, 33, 73, 74, 75])  # page and lane edges, then a chunk
    want = once((head_size, group, dtype), lambda: ref.attention(q, k, v, num_keys, 0.3))
    for block_tokens in BLOCKS:
        same(ops.attention(q, k, v, num_keys, 0.3, block_tokens=block_tokens), want)
    for item_tokens in ([1] * 7, [3, 4]):
        same(ops.attention(q, k, v, num_keys, 0.3, item_tokens=item_tokens), want)
    same(ops.attention(q[6:], k, v, num_keys[6:], 0.3), want[6:])


@DTYPES
def test_a_long_chunk_and_scores_far_apart(ops: NativeOps, once: Once, same: Same, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = ((4 * torch.randn(shape, generator=generator)).to(dtype) for shape in ((40, 3, 32), (137, 1, 32), (137, 1, 32)))
    num_keys = torch.arange(98, 138)
    want = once(("long", dtype), lambda: ref.attention(q, k, v, num_keys, 1.0))
    for block_tokens in BLOCKS:
        same(ops.attention(q, k, v, num_keys, 1.0, block_tokens=block_tokens), want)
    same(ops.attention(q, k, v, num_keys, 1.0, item_tokens=[33, 7]), want)
    want = once(("capped", dtype), lambda: ref.attention(q, k, v, num_keys, 1.0, 77, 20.0))
    for block_tokens in BLOCKS:
        same(ops.attention(q, k, v, num_keys, 1.0, 77, 20.0, block_tokens=block_tokens), want)


def group_case(data: ModuleType, dtype: torch.dtype, shared: int) -> tuple[Any, ...]:
    """Two tokens of each of five sequences that open with the same keys; the first token of the first sees only those."""
    lengths = [1, 7, 32, 33, 70]
    q, k, v = data.cancel_attention(10, shared + sum(lengths), 6, 2, 64, dtype, seed=3)
    num_keys = torch.tensor([n for length in lengths for n in (shared + length - 1, shared + length)])
    num_keys[0] = shared - 3
    want, at = [], shared
    for s, length in enumerate(lengths):
        rows = [*range(shared), *range(at, at + length)]
        at += length
        want.append(ref.attention(q[2 * s : 2 * s + 2], k[rows], v[rows], num_keys[2 * s : 2 * s + 2], 0.25))
    return lengths, q, k, v, num_keys, torch.cat(want)


@DTYPES
@pytest.mark.parametrize(("shared", "sizes"), [(64, BLOCKS), (48, (4, 16))])
def test_sequences_that_share_pages(
    ops: NativeOps, once: Once, data: ModuleType, same: Same, shared: int, sizes: Any, dtype: torch.dtype
) -> None:
    lengths, q, k, v, num_keys, want = once(("group", shared, dtype), lambda: group_case(data, dtype, shared))
    slots = torch.arange(5).repeat_interleave(2)
    for block_tokens in sizes:
        for item_tokens in ([10], [1] * 10, [3, 7], [2] * 5, [9, 1]):
            got = ops.attention(
                q, k, v, num_keys, 0.25, sequence_T=slots, lengths=lengths, shared_tokens=shared,
                block_tokens=block_tokens, item_tokens=item_tokens,
            )  # fmt: skip
            same(got, want)


@DTYPES
@pytest.mark.parametrize("window", [1, 24, 40])
def test_windows(ops: NativeOps, once: Once, data: ModuleType, same: Same, window: int, dtype: torch.dtype) -> None:
    q, k, v = data.cancel_attention(12, 150, 3, 1, 64, dtype, seed=1)
    num_keys = torch.tensor([5, 24, 25, 64, 65, 96, 104, 146, 147, 148, 149, 150])
    first = (num_keys - window).clamp(min=0)
    want = once(("window", window, dtype), lambda: ref.attention(q, k, v, num_keys, 0.2, window))
    for block_tokens in BLOCKS:
        for item_tokens in (None, [1] * 12, [5, 7]):
            options: dict[str, Any] = {"block_tokens": block_tokens, "item_tokens": item_tokens}
            same(ops.attention(q, k, v, num_keys, 0.2, first_key_T=first, **options), want)
            same(ops.attention(q, k, v, num_keys, 0.2, window, **options), want)


@DTYPES
def test_key_blocks_outside_the_window_are_not_read(ops: NativeOps, data: ModuleType, same: Same, dtype: torch.dtype) -> None:
    q, k, v = data.cancel_attention(3, 96 + 3 * 54, 6, 2, 64, dtype, seed=1)
    options: dict[str, Any] = {"sequence_T": torch.arange(3), "lengths": [54] * 3, "shared_tokens": 96}
    want = ops.attention(q, k, v, torch.tensor([150] * 3), 0.2, 40, **options)
    assert want.isfinite().all()
    k[:96], v[:96] = math.nan, math.nan
    for block_tokens in BLOCKS[:3]:
        for item_tokens in ([3], [1, 2]):
            got = ops.attention(
                q, k, v, torch.tensor([150] * 3), 0.2, 40, block_tokens=block_tokens, item_tokens=item_tokens, **options
            )
            same(got, want)


@DTYPES
def test_windows_over_shared_pages(ops: NativeOps, data: ModuleType, same: Same, dtype: torch.dtype) -> None:
    q, k, v = data.cancel_attention(2, 64 + 40 + 70, 6, 2, 64, dtype, seed=1)
    num_keys, first = torch.tensor([104, 134]), torch.tensor([40, 100])
    got = ops.attention(
        q, k, v, num_keys, 0.2, first_key_T=first, sequence_T=torch.tensor([0, 1]), lengths=[40, 70], shared_tokens=64, item_tokens=[2]
    )
    own = [*range(64), *range(104, 174)]
    same(got[:1], ref.attention(q[:1], k[:104], v[:104], num_keys[:1], 0.2, 64))
    same(got[1:], ref.attention(q[1:], k[own], v[own], num_keys[1:], 0.2, 34))


class StalePages(NativeOps):
    """Pages come full of what other sequences left there."""

    stale = math.nan

    def _page_memory(self, layout: KvLayout) -> Tensor:
        return torch.full((layout.nbytes // layout.dtype.itemsize,), self.stale, dtype=layout.dtype)


@DTYPES
@pytest.mark.parametrize("stale", [math.nan, math.inf, -math.inf, 3e38])
def test_what_pages_held_before_never_shows(
    ops: NativeOps, once: Once, data: ModuleType, same: Same, stale: float, dtype: torch.dtype
) -> None:
    poisoned = StalePages(ops.library)
    poisoned.stale = stale
    for length in (1, 30, 33, 75, 96):
        q, k, v = data.cancel_attention(1, length, 4, 2, 64, dtype, seed=1)
        num_keys = torch.tensor([length])
        want = once(("stale", length, dtype), partial(ref.attention, q, k, v, num_keys, 0.3))
        for block_tokens in BLOCKS:
            same(poisoned.attention(q, k, v, num_keys, 0.3, block_tokens=block_tokens), want)


@DTYPES
def test_another_sequence_never_shows(ops: NativeOps, data: ModuleType, same: Same, dtype: torch.dtype) -> None:
    q, k, v = data.cancel_attention(3, 64 + 3 * 40, 6, 2, 64, dtype, seed=1)
    num_keys, slots = torch.tensor([104, 90, 104]), torch.tensor([0, 1, 2])
    options: dict[str, Any] = {"sequence_T": slots, "lengths": [40] * 3, "shared_tokens": 64, "item_tokens": [3]}
    for block_tokens in BLOCKS:
        want = ops.attention(q, k, v, num_keys, 0.3, block_tokens=block_tokens, **options)
        assert want.isfinite().all()
        for bad in (math.nan, math.inf):
            k2, v2 = k.clone(), v.clone()
            k2[104:144], v2[104:144] = bad, bad
            got = ops.attention(q, k2, v2, num_keys, 0.3, block_tokens=block_tokens, **options)
            same(got[[0, 2]], want[[0, 2]])
            assert got[1].isnan().all()


@DTYPES
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_thread_count_changes_no_bit(ops: NativeOps, data: ModuleType, same: Same, threads: int, dtype: torch.dtype) -> None:
    q, k, v = data.cancel_attention(50, 200, 9, 3, 64, dtype, seed=1)
    many, num_keys = NativeOps(load_build(ops.library.build), threads), torch.arange(151, 201)
    for block_tokens in (4, 32):
        same(
            many.attention(q, k, v, num_keys, 0.2, block_tokens=block_tokens, item_tokens=[1] * 50),
            ops.attention(q, k, v, num_keys, 0.2, block_tokens=block_tokens),
        )


def test_mistakes_are_named(ops: NativeOps) -> None:
    def attend(tokens: int = 1, heads: int = 2, keys: int = 3, num_keys: int = 3, **options: Any) -> None:
        q, kv = torch.ones(tokens, heads, 16), torch.ones(keys, 2, 16)
        ops.attention(q, kv, kv, torch.full((tokens,), num_keys), 1.0, **options)

    attend()
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("share 2 KV heads", {"heads": 3}),
        ("at least one key", {"num_keys": 4}),
        ("at least one key", {"first_key_T": torch.tensor([3])}),
        ("no power of two", {"block_tokens": 12}),
        ("are not 3 rows", {"lengths": [2]}),
        ("do not fill blocks", {"shared_tokens": 2}),
        ("add up to 1", {"item_tokens": [2]}),
        ("sequences must be", {"sequence_T": torch.tensor([1])}),
    )
    for message, options in cases:
        with pytest.raises(ValueError, match=message):
            attend(**options)
