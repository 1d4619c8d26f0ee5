"""Paged attention: one kernel and one configuration for decoding, chunks of prompts and trainers.

A program takes an item: up to ROWS / G tokens of one sequence, with the G query heads that share a KV head as rows of one tile. Keys
are walked in tiles, counted from the sequence's first; every SPLIT keys the running maximum, sum and weighted values begin anew, and
the splits' results are merged in order. So a split may be another program's work (an item with a place in `work`, for few sequences
with long contexts) and the bits are the same. What a row does not see adds exact zeros, so tiles of other rows do not show either.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..step import Array
from .arithmetic import tanh32
from .kv import block_units, check_pages
from .launch import Variant, cdiv, check, check_rows, check_vectors, dtype_name, launch, pointer, power_of_two, units
from .linear import _out, _unit

ROWS = {torch.bfloat16: 64, torch.float32: 16}
"""query rows of a tile: tokens of one sequence times the heads that share a KV head"""
SPLIT = 512
"""keys of one split"""
LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _merge(m, l, acc, m2, l2, acc2):
    # Two softmax states of disjoint keys, the earlier first. One that saw no key changes nothing, not even a bit.
    top = tl.maximum(m, m2)
    safe = tl.where(top == float("-inf"), 0.0, top)
    a, b = tl.exp2(m - safe), tl.exp2(m2 - safe)
    return top, l * a + l2 * b, acc * a[:, None] + acc2 * b[:, None]


@triton.jit
def _split(q, keys, values, table, base, first, last, low_M, high_M, scale, cap, ld_block, BLOCK_TOKENS: tl.constexpr, H: tl.constexpr,
           CAPPED: tl.constexpr, UNIT: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr, HP: tl.constexpr):  # fmt: skip
    # Online softmax over keys [first, last), of which row r sees [low_M[r], high_M[r]). Scores are in units of log 2.
    m = tl.full((TM,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((TM,), dtype=tl.float32)
    acc = tl.zeros((TM, HP), dtype=tl.float32)
    d = tl.arange(0, HP)
    for j in range(first, last, TK):
        key = j + tl.arange(0, TK)
        used = key < last
        block = tl.load(table + key // BLOCK_TOKENS, mask=used, other=0).to(tl.int64)
        at = block * ld_block * UNIT + (base + key % BLOCK_TOKENS) * H
        k = tl.load(keys + at[None, :] + d[:, None], mask=used[None, :] & (d < H)[:, None], other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            s = tanh32(tl.div_rn(s, tl.zeros_like(s) + cap)) * cap
        s = s * _LOG2_E
        seen = (key[None, :] >= low_M[:, None]) & (key[None, :] < high_M[:, None])
        s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(m, tl.max(s, axis=1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        shrink = tl.exp2(m - safe)
        p = tl.exp2(s - safe[:, None])
        l = l * shrink + tl.sum(p, axis=1)
        v = tl.load(values + at[:, None] + d[None, :], mask=used[:, None] & (d < H)[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        m = top
    return m, l, acc


@triton.jit(do_not_specialize=["ld_q", "ld_out", "table_stride", "ld_block", "window", "splits"])
def attention_kernel(q, keys, values, out, items, positions, token_slot, tables, sums, peaks, ld_q, ld_out, table_stride, ld_block,
                     window, splits, scale, cap, G: tl.constexpr, KV_HEADS: tl.constexpr, H: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
                     CAPPED: tl.constexpr, UNIT: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr, HP: tl.constexpr,
                     SPLIT: tl.constexpr):  # fmt: skip
    item, kv_head, part = items + 4 * tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t0, count, place = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if count > 0 and (part == 0 or place >= 0):
        r, d = tl.arange(0, TM), tl.arange(0, HP)
        t = t0 + r // G
        valid = r < count * G
        row = t.to(tl.int64) * (ld_q * UNIT) + (kv_head * G + r % G) * H
        q_MH = tl.load(q + row[:, None] + d[None, :], mask=valid[:, None] & (d < H)[None, :], other=0.0)
        high_M = tl.load(positions + t, mask=valid, other=-1) + 1
        low_M = tl.where(window > 0, tl.maximum(high_M - window, 0), 0)
        lowest = tl.load(positions + t0) + 1
        lowest = tl.where(window > 0, tl.maximum(lowest - window, 0), 0)
        highest = tl.load(positions + t0 + count - 1) + 1
        table = tables + tl.load(token_slot + t0).to(tl.int64) * table_stride
        base = kv_head * BLOCK_TOKENS
        if place < 0:
            m = tl.full((TM,), float("-inf"), dtype=tl.float32)
            l = tl.zeros((TM,), dtype=tl.float32)
            acc = tl.zeros((TM, HP), dtype=tl.float32)
            for i in range(lowest // SPLIT, tl.cdiv(highest, SPLIT)):
                first = tl.maximum(i * SPLIT, lowest // TK * TK)
                last = tl.minimum((i + 1) * SPLIT, highest)
                m2, l2, acc2 = _split(q_MH, keys, values, table, base, first, last, low_M, high_M, scale, cap, ld_block, BLOCK_TOKENS,
                                      H, CAPPED, UNIT, TM, TK, HP)  # fmt: skip
                m, l, acc = _merge(m, l, acc, m2, l2, acc2)
            y = tl.div_rn(acc, tl.broadcast_to(l[:, None], (TM, HP)))
            target = t.to(tl.int64) * (ld_out * UNIT) + (kv_head * G + r % G) * H
            tl.store(out + target[:, None] + d[None, :], y.to(out.dtype.element_ty), mask=valid[:, None] & (d < H)[None, :])
        elif part * SPLIT < highest and (part + 1) * SPLIT > lowest:
            first = tl.maximum(part * SPLIT, lowest // TK * TK)
            last = tl.minimum((part + 1) * SPLIT, highest)
            m2, l2, acc2 = _split(q_MH, keys, values, table, base, first, last, low_M, high_M, scale, cap, ld_block, BLOCK_TOKENS, H,
                                  CAPPED, UNIT, TM, TK, HP)  # fmt: skip
            cell = (place.to(tl.int64) * splits + part) * (KV_HEADS * G) + kv_head * G + r
            tl.store(sums + cell[:, None] * H + d[None, :], acc2, mask=(r < G)[:, None] & (d < H)[None, :])
            tl.store(peaks + 2 * cell, m2, mask=r < G)
            tl.store(peaks + 2 * cell + 1, l2, mask=r < G)


@triton.jit(do_not_specialize=["ld_out", "window", "splits"])
def merge_kernel(sums, peaks, out, items, positions, ld_out, window, splits, HEADS: tl.constexpr, H: tl.constexpr, UNIT: tl.constexpr,
                 HP: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    # One row: the splits of a token's head in order, by the arithmetic of `_merge`.
    item, head = items + 4 * tl.program_id(0), tl.program_id(1)
    t, count, place = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if count > 0 and place >= 0:
        d = tl.arange(0, HP)
        highest = tl.load(positions + t) + 1
        lowest = tl.where(window > 0, tl.maximum(highest - window, 0), 0)
        m = tl.full((1,), float("-inf"), dtype=tl.float32)
        l = tl.zeros((1,), dtype=tl.float32)
        acc = tl.zeros((1, HP), dtype=tl.float32)
        for i in range(lowest // SPLIT, tl.cdiv(highest, SPLIT)):
            cell = (place.to(tl.int64) * splits + i) * HEADS + head
            acc2 = tl.load(sums + cell * H + d, mask=d < H, other=0.0)[None, :]
            m2, l2 = tl.load(peaks + 2 * cell + tl.arange(0, 1)), tl.load(peaks + 2 * cell + 1 + tl.arange(0, 1))
            m, l, acc = _merge(m, l, acc, m2, l2, acc2)
        y = tl.div_rn(acc, tl.broadcast_to(l[:, None], (1, HP)))
        target = out + t.to(tl.int64) * (ld_out * UNIT) + head * H + d
        tl.store(target[None, :], y.to(out.dtype.element_ty), mask=(d < H)[None, :])


@cache
def attention_variant(group: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: torch.dtype, capped: bool) -> Variant:
    """The one binary of a head size, dtype and GQA ratio. Tiles depend on head size and dtype alone."""
    element, padded = pointer(dtype), power_of_two(head_dim, 16)
    names = ("q", "keys", "values", "out", "items", "positions", "token_slot", "tables", "sums", "peaks")
    types = dict.fromkeys(names, "*i32") | dict.fromkeys(("q", "keys", "values", "out"), element) | {"sums": "*fp32", "peaks": "*fp32"}
    integers = dict.fromkeys(("ld_q", "ld_out", "table_stride", "ld_block", "window", "splits"), "i32")
    return Variant(
        name=f"attention{'_capped' * capped}/{dtype_name(dtype)}/{group}:1x{kv_heads}/{head_dim}/{block_tokens}",
        fn=attention_kernel,
        types=types | integers | {"scale": "fp32", "cap": "fp32"},
        constants={
            "G": group, "KV_HEADS": kv_heads, "H": head_dim, "BLOCK_TOKENS": block_tokens, "CAPPED": capped, "UNIT": _unit(dtype),
            "TM": ROWS[dtype], "TK": 32 if dtype == torch.float32 or padded > 128 else 64, "HP": padded, "SPLIT": SPLIT,
        },
        num_warps=4 if dtype == torch.float32 else 8,
        num_stages=2,
    )  # fmt: skip


@cache
def merge_variant(heads: int, head_dim: int, dtype: torch.dtype) -> Variant:
    return Variant(
        name=f"attention_merge/{dtype_name(dtype)}/{heads}x{head_dim}",
        fn=merge_kernel,
        types={
            "sums": "*fp32", "peaks": "*fp32", "out": pointer(dtype), "items": "*i32", "positions": "*i32", "ld_out": "i32",
            "window": "i32", "splits": "i32",
        },
        constants={"HEADS": heads, "H": head_dim, "UNIT": _unit(dtype), "HP": power_of_two(head_dim, 16), "SPLIT": SPLIT},
        num_warps=1,
    )  # fmt: skip


def tokens_per_item(group: int, dtype: torch.dtype) -> int:
    """Tokens of a sequence that one item can hold."""
    if group > ROWS[dtype]:
        raise ValueError(f"attention: {group} query heads share a KV head; a tile of {dtype} has {ROWS[dtype]} rows")
    return ROWS[dtype] // group


def attention_items(counts: Sequence[int], group: int, dtype: torch.dtype, *, num_keys: Sequence[int] = (), places: int = 0) -> Array:
    """Items of packed sequences: [I, 4] int32 of (first token, tokens, place in `work` or -1, 0).

    Args:
        counts: tokens that each sequence feeds, in the order in which they are packed.
        group: query heads per KV head.
        num_keys: keys of each sequence, its fed ones included; needed with `places` alone.
        places: as many sequences that feed one token and see more than one split have their splits computed apart, longest first.
            Bits do not depend on it.
    """
    size, items, first = tokens_per_item(group, dtype), [], 0
    apart: dict[int, int] = {}
    if places:
        long = [i for i, (count, keys) in enumerate(zip(counts, num_keys, strict=True)) if count == 1 and keys > SPLIT]
        apart = {i: place for place, i in enumerate(sorted(long, key=lambda i: -num_keys[i])[:places])}
    for i, count in enumerate(counts):
        items += [(first + at, min(size, count - at), apart.get(i, -1), 0) for at in range(0, count, size)]
        first += count
    return np.array(items, np.int32).reshape(-1, 4)


def attention_work(places: int, max_keys: int, heads: int, head_dim: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Room for the splits of `places` sequences of up to `max_keys` keys: (weighted values, maxima and sums), both float32."""
    splits = cdiv(max_keys, SPLIT)
    shape = (places, splits, heads)
    return torch.empty(*shape, head_dim, device=device), torch.empty(*shape, 2, device=device)


def attention(
    q_TC: Tensor,
    positions_T: Tensor,
    token_slot_T: Tensor,
    tables: Tensor,
    items_I4: Tensor,
    kv: Tensor,
    layer: int,
    scale: float,
    *,
    heads: int,
    window: int = 0,
    softcap: float = 0.0,
    work: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Each token over the keys of its sequence up to its own, in the layer's pages.

    Args:
        q_TC: [T, C], whose first heads * H columns are query heads; a whole qkv will do.
        positions_T: [T] int32; a token sees keys 0 to its position, or the last `window` of them.
        token_slot_T: [T] int32, rows of `tables`.
        tables: [slots, blocks] int32.
        items_I4: [I, 4] int32 of `attention_items`, with rows of 0 tokens where there are fewer.
        kv, layer: the pool, of GpuKvLayout.shape, and which layer of it.
        scale: multiplies the scores.
        heads: query heads.
        window: keys a token sees; 0: all.
        softcap: scaled scores s become softcap * tanh(s / softcap), if it is not 0.
        work: of `attention_work`; needed if an item has a place in it.
        out: [T, heads * H].

    Returns:
        [T, heads * H], dtype of `q_TC`. Rows of tokens in no item are not written.
    """
    op = "attention"
    keys, values = check_pages(op, kv, layer)
    _, kv_heads, block_tokens, h = keys.shape
    dtype = q_TC.dtype
    check(op, heads % kv_heads == 0, f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    check(op, q_TC.shape[1] >= heads * h and dtype == kv.dtype, f"q is {[*q_TC.shape]} {dtype}; {heads} heads of {h} {kv.dtype} are needed")
    ints = {"positions": positions_T, "token_slot": token_slot_T, "tables": tables, "items": items_I4}
    check(op, all(x.dtype == torch.int32 for x in ints.values()), f"{', '.join(ints)} must be int32")
    check(op, items_I4.shape[1:] == (4,), f"items must be [I, 4], got {[*items_I4.shape]}")
    check(op, window >= 0 and softcap >= 0, f"window and softcap must not be negative, got {window}, {softcap}")
    group = heads // kv_heads
    tokens_per_item(group, dtype)
    out = _out(op, out, (len(q_TC), heads * h), dtype, q_TC)
    check_rows(op, q=q_TC)
    check_vectors(op, **ints)
    splits, (sums, peaks) = 1, (out, out) if work is None else work
    if work is not None:
        splits = sums.shape[1]
        fits = sums.shape[2:] == (heads, h) and peaks.shape == (*sums.shape[:3], 2) and sums.dtype == peaks.dtype == torch.float32
        check(op, fits, f"work must be of attention_work(heads={heads}, head_dim={h}), got {[*sums.shape]}, {[*peaks.shape]}")
        check_vectors(op, work_sums=sums, work_peaks=peaks)
    else:
        sums = peaks = _f32(out)
    variant = attention_variant(group, kv_heads, h, block_tokens, dtype, softcap > 0)
    args = (q_TC, keys, values, out, items_I4, positions_T, token_slot_T, tables, sums, peaks)
    numbers = (units(q_TC), units(out), tables.shape[1], block_units(kv), window, splits, scale, softcap)
    launch(variant, (len(items_I4), kv_heads, splits), *args, *numbers)
    if work is not None:
        merge = merge_variant(heads, h, dtype)
        launch(merge, (len(items_I4), heads), sums, peaks, out, items_I4, positions_T, units(out), window, splits)
    return out


def _f32(x: Tensor) -> Tensor:
    """A float32 argument that is not read."""
    return x if x.dtype == torch.float32 else x.view(torch.float32)
