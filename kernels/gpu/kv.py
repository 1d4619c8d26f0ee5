"""KV pages on a GPU: their layout, the rotation that fills them, copies of blocks."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import round_to
from .launch import Variant, cdiv, check, check_rows, check_vectors, dtype_name, launch, pointer, power_of_two, units
from .linear import _unit

HEADS_PER_PROGRAM = 8
COPY_BLOCK = 4096
"""32-bit words that a program copies"""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuKvLayout:
    """One tensor [blocks, layers, 2, KV heads, block_tokens, head size]; 0 of the third is K, 1 is V.

    A block's bytes lie together, so it is copied as a whole; the keys of one head in a block lie together, so attention reads them
    in one stretch.

    Raises:
        ValueError: `block_tokens` is no power of two >= 16, or a head is no multiple of 16 bytes.
    """

    num_blocks: int
    block_tokens: int
    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        size = self.block_tokens
        check("kv", size >= 16 and size & (size - 1) == 0, f"cache.block_tokens must be a power of two >= 16 on a GPU, got {size}")
        multiple = 32 // self.dtype.itemsize  # halves of a head are read apart
        check("kv", self.head_dim % multiple == 0, f"a head must be a multiple of {multiple} entries on a GPU, got {self.head_dim}")
        dtype_name(self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.num_blocks, self.num_layers, 2, self.kv_heads, self.block_tokens, self.head_dim

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return 2 * self.kv_heads * self.block_tokens * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.layer_bytes * self.num_layers

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.num_blocks

    def allocate(self, device: torch.device | str) -> Tensor:
        """Zeroed pages."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


@triton.jit(do_not_specialize=["T", "ld_qkv", "table_stride", "ld_block"])
def rope_store_kernel(qkv, positions, token_slot, tables, cos, sin, keys, values, T, ld_qkv, table_stride, ld_block, HEADS: tl.constexpr,
                      KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_TOKENS: tl.constexpr, UNIT: tl.constexpr, NH: tl.constexpr,
                      NHALF: tl.constexpr):  # fmt: skip
    # One token, NH heads of it. Elementwise, so bits know nothing of how the work is cut.
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * NH + tl.arange(0, NH)
    d = tl.arange(0, NHALF)
    slot, position = tl.load(token_slot + t), tl.load(positions + t)
    ok = (head < HEADS + 2 * KV_HEADS)[:, None] & (d < HALF)[None, :]
    at = qkv + t * (ld_qkv * UNIT) + head[:, None] * (2 * HALF) + d[None, :]
    dtype: tl.constexpr = qkv.dtype.element_ty
    a, b = tl.load(at, mask=ok, other=0.0).to(tl.float32), tl.load(at + HALF, mask=ok, other=0.0).to(tl.float32)
    angle = position.to(tl.int64) * HALF + d
    c = tl.load(cos + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    low = round_to(round_to(a * c, dtype) + round_to(-b * s, dtype), dtype)
    high = round_to(round_to(b * c, dtype) + round_to(a * s, dtype), dtype)
    rotated = (head < HEADS + KV_HEADS)[:, None]
    low, high = tl.where(rotated, low, a).to(dtype), tl.where(rotated, high, b).to(dtype)
    tl.store(at, low, mask=ok & rotated)
    tl.store(at + HALF, high, mask=ok & rotated)
    block = tl.load(tables + tl.maximum(slot, 0).to(tl.int64) * table_stride + position // BLOCK_TOKENS).to(tl.int64)
    is_value = head >= HEADS + KV_HEADS
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
    inside = block * ld_block * UNIT + (kv_head * BLOCK_TOKENS + position % BLOCK_TOKENS)[:, None] * (2 * HALF) + d[None, :]
    kept = ok & (tl.where(slot >= 0, head, -1) >= HEADS)[:, None]
    key = kept & (is_value == 0)[:, None]
    tl.store(keys + inside, low, mask=key)
    tl.store(keys + inside + HALF, high, mask=key)
    value = kept & is_value[:, None]
    tl.store(values + inside, low, mask=value)
    tl.store(values + inside + HALF, high, mask=value)


@triton.jit(do_not_specialize=["block_words"])
def copy_blocks_kernel(kv, copies, block_words, BLOCK: tl.constexpr):
    source, target = tl.load(copies + 2 * tl.program_id(0)), tl.load(copies + 2 * tl.program_id(0) + 1)
    if source >= 0:
        words = block_words.to(tl.int64) * 4
        at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(kv + source.to(tl.int64) * words + at, mask=at < words)
        tl.store(kv + target.to(tl.int64) * words + at, value, mask=at < words)


@cache
def rope_store_variant(heads: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: torch.dtype) -> Variant:
    element = pointer(dtype)
    names = ("qkv", "positions", "token_slot", "tables", "cos", "sin", "keys", "values")
    types = {name: "*i32" if name in ("positions", "token_slot", "tables") else element for name in names}
    return Variant(
        name=f"rope_store/{dtype_name(dtype)}/{heads}+{kv_heads}x{head_dim}/{block_tokens}",
        fn=rope_store_kernel,
        types=types | {"T": "i32", "ld_qkv": "i32", "table_stride": "i32", "ld_block": "i32"},
        constants={
            "HEADS": heads, "KV_HEADS": kv_heads, "HALF": head_dim // 2, "BLOCK_TOKENS": block_tokens, "UNIT": _unit(dtype),
            "NH": HEADS_PER_PROGRAM, "NHALF": power_of_two(head_dim // 2),
        },
        num_warps=4,
    )  # fmt: skip


@cache
def copy_blocks_variant() -> Variant:
    types = {"kv": "*i32", "copies": "*i32", "block_words": "i32"}
    return Variant(name="copy_blocks", fn=copy_blocks_kernel, types=types, constants={"BLOCK": COPY_BLOCK}, num_warps=4)


def check_pages(op: str, kv: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """K and V of a layer as views of a pool, [blocks, KV heads, block_tokens, H] each, with the pool's strides."""
    check(op, kv.ndim == 6 and kv.shape[2] == 2 and kv.is_contiguous(), f"kv must be a contiguous GpuKvLayout tensor, got {[*kv.shape]}")
    check(op, 0 <= layer < kv.shape[1], f"layer must be in [0, {kv.shape[1]}), got {layer}")
    check_rows(op, kv=kv)
    return kv[:, layer, 0], kv[:, layer, 1]


def block_units(kv: Tensor) -> int:
    """Entries of a block over all layers, in units of 16 bytes."""
    return kv[0].numel() * kv.element_size() // 16


def rope_store(
    qkv_TC: Tensor,
    positions_T: Tensor,
    token_slot_T: Tensor,
    tables: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    layer: int,
    *,
    heads: int,
) -> Tensor:
    """Rotate query and key heads in place by their token's angles; store keys and values in the layer's pages.

    Args:
        qkv_TC: [T, (heads + 2 K) * H]: query, key and value heads.
        positions_T: [T] int32, from 0.
        token_slot_T: [T] int32: row of `tables`, or -1 for padding, which is not stored.
        tables: [slots, blocks] int32: the block of each `block_tokens` positions.
        cos, sin: [P, H / 2] contiguous, dtype of `qkv_TC`.
        kv: the pool, of GpuKvLayout.shape.
        layer: index into it.
        heads: query heads.

    Returns:
        `qkv_TC`.
    """
    keys, values = check_pages("rope_store", kv, layer)
    _, kv_heads, block_tokens, h = keys.shape
    op, width = "rope_store", (heads + 2 * kv_heads) * h
    check(op, qkv_TC.shape[1] == width, f"qkv has {qkv_TC.shape[1]} columns, not ({heads} + 2 * {kv_heads}) * {h}")
    fits = cos.shape == sin.shape and cos.shape[1:] == (h // 2,)
    check(op, fits, f"tables must be [P, {h // 2}], got {[*cos.shape]}, {[*sin.shape]}")
    same = all(x.dtype == kv.dtype for x in (qkv_TC, cos, sin))
    check(op, same, f"qkv is {qkv_TC.dtype}, cos {cos.dtype}, sin {sin.dtype}, kv {kv.dtype}; they must agree")
    check(op, all(x.dtype == torch.int32 for x in (positions_T, token_slot_T, tables)), "positions, slots and tables must be int32")
    check_rows(op, qkv=qkv_TC)
    check_vectors(op, cos=cos, sin=sin, positions=positions_T, token_slot=token_slot_T, tables=tables)
    variant = rope_store_variant(heads, kv_heads, h, block_tokens, qkv_TC.dtype)
    grid = (len(qkv_TC), cdiv(heads + 2 * kv_heads, HEADS_PER_PROGRAM))
    args = (qkv_TC, positions_T, token_slot_T, tables, cos, sin, keys, values, len(qkv_TC), units(qkv_TC), tables.shape[1], block_units(kv))
    launch(variant, grid, *args)
    return qkv_TC


def copy_blocks(kv: Tensor, copies_C2: Tensor) -> None:
    """Copy whole blocks, all layers: [C, 2] int32 of (from, to); nothing where `from` is -1. No block may be in both columns."""
    check("copy_blocks", kv.is_contiguous() and kv.ndim == 6, f"kv must be a contiguous GpuKvLayout tensor, got {[*kv.shape]}")
    fits = copies_C2.dtype == torch.int32 and copies_C2.shape[1:] == (2,)
    check("copy_blocks", fits, f"copies must be [C, 2] int32, got {[*copies_C2.shape]} {copies_C2.dtype}")
    check_rows("copy_blocks", kv=kv)
    check_vectors("copy_blocks", copies=copies_C2)
    words = block_units(kv)
    launch(copy_blocks_variant(), (len(copies_C2), cdiv(words * 4, COPY_BLOCK)), kv.view(torch.int32), copies_C2, words)
