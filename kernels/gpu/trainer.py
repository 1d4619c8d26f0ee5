"""The ops of a trainer's forward pass on a GPU, to the protocol of trainer_ops.TrainerOps: kernels/trainer.py gives them gradients.

They launch the engine's own kernels, so their bits are its. Shape letters as there.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..segments import PAGE_TOKENS, Segments
from ..spec import effective_shards
from . import attention as paged
from .arithmetic import gate
from .kv import GpuKvLayout
from .launch import Variant, aligned_rows, cdiv, check, dtype_name, launch, pointer
from .linear import GATES, linear
from .rows import rmsnorm, softcap

_BLOCK = 1024
_PIECE = 1 << 30
"""entries of one launch"""


@triton.jit(do_not_specialize=["count"])
def activation_kernel(x, out, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, gate(g, tl.zeros_like(g) + 1.0, GELU, out.dtype.element_ty).to(out.dtype.element_ty), mask=at < count)


def activation_variant(dtype: torch.dtype, kind: str) -> Variant:
    return Variant(
        name=f"{kind}/{dtype_name(dtype)}",
        fn=activation_kernel,
        types={"x": pointer(dtype), "out": pointer(dtype), "count": "i32"},
        constants={"GELU": GATES[kind], "BLOCK": _BLOCK},
        num_warps=4,
    )


def _rows(x: Tensor) -> Tensor:
    """Contiguous, at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class GpuTrainerOps:
    """Forward passes on CUDA tensors, bfloat16 or float32."""

    build = "triton"

    def __deepcopy__(self, memo: Any) -> "GpuTrainerOps":
        return self

    def linear(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, shards: int, wide: bool) -> Tensor:
        """`x W^T + bias`: [M, N], `wide`: float32, not rounded to the dtype of `x_MK`."""
        bias = None if bias_N is None else _rows(bias_N)
        return linear(_rows(x_MK), _rows(w_NK), bias, shards=effective_shards(w_NK.shape[1], shards), float32=wide)

    def rmsnorm(self, x_MD: Tensor, weight_D: Tensor, eps: float, one_plus: bool) -> Tensor:
        """As `rows.rmsnorm`."""
        return rmsnorm(_rows(x_MD), _rows(weight_D), eps, one_plus)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        """silu or gelu_tanh of every element, rounded."""
        check("activation", kind in GATES, f"kind must be one of {', '.join(GATES)}, got {kind!r}")
        x = _rows(x)
        out = torch.empty_like(x)
        variant, (source, target) = activation_variant(x.dtype, kind), (x.view(-1), out.view(-1))
        for first in range(0, x.numel(), _PIECE):  # indices within a piece are 32 bits wide
            count = min(_PIECE, x.numel() - first)
            launch(variant, (cdiv(count, _BLOCK),), source[first:], target[first:], count)
        return out

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """As `rows.softcap`."""
        return softcap(aligned_rows(x.reshape(-1, x.shape[-1])), cap).reshape(x.shape)

    def attention(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, segments: Segments, scale: float, window: int, cap: float
    ) -> Tensor:
        """Causal attention of each sequence over itself: [B, T, N, H], zeros in padding. window and cap: 0 is none."""
        (rows, length, heads, h), kv_heads, device = q_BTNH.shape, k_BTKH.shape[2], q_BTNH.device
        pages = _Pages(segments, heads // kv_heads, q_BTNH.dtype)
        layout = GpuKvLayout(
            num_blocks=max(pages.num_blocks, 1), block_tokens=PAGE_TOKENS, num_layers=1, kv_heads=kv_heads, head_dim=h, dtype=q_BTNH.dtype
        )
        kv = layout.allocate(device)
        at, block, offset = (torch.from_numpy(x).to(device) for x in (pages.tokens, pages.blocks, pages.offsets))
        for part, x_BTKH in enumerate((k_BTKH, v_BTKH)):
            kv[block, 0, part, :, offset] = x_BTKH.reshape(-1, kv_heads, h)[at]
        places, slots, tables, items = (torch.from_numpy(x).to(device) for x in pages.columns)
        out = torch.zeros(rows * length, heads * h, dtype=q_BTNH.dtype, device=device)
        q = _rows(q_BTNH).view(rows * length, heads * h)
        paged.attention(q, places, slots, tables, items, kv, 0, scale, heads=heads, window=window, softcap=cap, out=out)
        return out.view(q_BTNH.shape)


class _Pages:
    """Where the tokens of a batch lie in pages of their own, tokens counted over the flattened batch."""

    def __init__(self, segments: Segments, group: int, dtype: torch.dtype) -> None:
        spans = segments.spans
        lengths = [end - begin for _, begin, end in spans]
        counts = [cdiv(length, PAGE_TOKENS) for length in lengths]
        self.num_blocks = sum(counts)
        first = np.cumsum([0, *counts])
        starts = [row * segments.length + begin for row, begin, _ in spans]
        self.positions = np.zeros(segments.rows * segments.length, np.int32)
        self.slots = np.zeros_like(self.positions)
        self.tables = np.zeros((max(len(spans), 1), max(counts, default=1)), np.int32)
        for slot, (start, length, count) in enumerate(zip(starts, lengths, counts, strict=True)):
            self.positions[start : start + length] = np.arange(length)
            self.slots[start : start + length] = slot
            self.tables[slot, :count] = np.arange(first[slot], first[slot] + count)
        self.tokens = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)] or [np.zeros(0, np.int64)])
        place = self.positions[self.tokens].astype(np.int64)
        self.blocks = first[self.slots[self.tokens]] + place // PAGE_TOKENS
        self.offsets = place % PAGE_TOKENS
        items = [np.zeros((0, 4), np.int32)]
        for start, length in zip(starts, lengths, strict=True):
            items.append(paged.attention_items([length], group, dtype) + np.array([start, 0, 0, 0], np.int32))
        self.columns = self.positions, self.slots, self.tables, np.concatenate(items)
