"""The ops that a trainer's forward pass is made of, on ordinary tensors: by a native build, or by the reference where none runs.

Shape letters: M rows, D width, N outputs of a linear or query heads, K inputs of a linear or KV heads, B rows of a batch, T places in
each, H head size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from . import native_lib as nl
from . import reference as ref
from .kv import KvLayout
from .native_layout import Panels
from .native_ops import NativeOps
from .reference_math import exp32, f32, fma32, round_to
from .segments import PAGE_TOKENS, Segments
from .spec import GELU_CUBE, GELU_EXPONENT

ACTIVATIONS = ("silu", "gelu_tanh")


class TrainerOps(Protocol):
    """Forward passes. Tensors are bfloat16 or float32 on the CPU; a result has the input's dtype and any strides it likes."""

    build: str
    """amx, avx512, avx2 or reference"""

    def linear(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, shards: int, wide: bool) -> Tensor:
        """`x W^T + bias`: [M, N], `wide`: float32, not rounded to the dtype of `x_MK`."""

    def rmsnorm(self, x_MD: Tensor, weight_D: Tensor, eps: float, one_plus: bool) -> Tensor:
        """As `reference.rmsnorm`."""

    def activation(self, x: Tensor, kind: str) -> Tensor:
        """One of ACTIVATIONS, elementwise, rounded."""

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """As `reference.softcap`."""

    def attention(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, segments: Segments, scale: float, window: int, cap: float
    ) -> Tensor:
        """Causal attention of each sequence over itself: [B, T, N, H], zeros in padding. window and cap: 0 is none."""


class ReferenceTrainerOps:
    """The specification itself; slow."""

    build = "reference"

    def linear(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, shards: int, wide: bool) -> Tensor:
        acc = ref.linear_f32(x_MK, w_NK, shards)
        acc = acc if bias_N is None else acc + bias_N.float()
        return acc if wide else round_to(acc, x_MK.dtype)

    def rmsnorm(self, x_MD: Tensor, weight_D: Tensor, eps: float, one_plus: bool) -> Tensor:
        return ref.rmsnorm(x_MD, weight_D, eps, one_plus)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        g = x.float()
        exponent = -g if kind == "silu" else fma32(g * g * g, f32(GELU_CUBE), g) * f32(GELU_EXPONENT)
        return round_to(g / (1 + exp32(exponent)), x.dtype)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return ref.softcap(x, cap)

    def attention(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, segments: Segments, scale: float, window: int, cap: float
    ) -> Tensor:
        out = torch.zeros(q_BTNH.shape, dtype=q_BTNH.dtype)
        for row, begin, end in segments.spans:
            at = (row, slice(begin, end))
            seen = torch.arange(1, end - begin + 1)
            out[at] = ref.attention(q_BTNH[at], k_BTKH[at], v_BTKH[at], seen, scale, window or None, cap).view_as(out[at])
        return out


class NativeTrainerOps:
    """By a native build, on as many threads as torch has at the time of the call."""

    def __init__(self, library: nl.NativeLibrary) -> None:
        self.library, self.build = library, library.build

    def __deepcopy__(self, memo: Any) -> NativeTrainerOps:
        return self  # a model that is copied while it computes by these ops shares them

    @property
    def _ops(self) -> NativeOps:
        return NativeOps(self.library, torch.get_num_threads())

    def linear(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, shards: int, wide: bool) -> Tensor:
        ops = self._ops
        packed = ops.pack_linear(w_NK, bias_N, shards)
        return ops.linear_f32(x_MK, packed) if wide else ops.linear(x_MK, packed)

    def rmsnorm(self, x_MD: Tensor, weight_D: Tensor, eps: float, one_plus: bool) -> Tensor:
        return self._ops.rmsnorm(x_MD, weight_D, eps, one_plus)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return ReferenceTrainerOps().activation(x, kind)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return ref.softcap(x, cap)

    def attention(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, segments: Segments, scale: float, window: int, cap: float
    ) -> Tensor:
        (rows, length, heads, head_size), kv_heads, work = q_BTNH.shape, k_BTKH.shape[2], segments.work
        q_BTNH, kv = q_BTNH.contiguous(), torch.cat([k_BTKH, v_BTKH], dim=2)
        layout = KvLayout(
            num_blocks=work.num_blocks, block_tokens=PAGE_TOKENS, num_layers=1, kv_heads=kv_heads, head_dim=head_size, dtype=q_BTNH.dtype
        )
        # A sequence's first store clears what it does not fill, but for the padding of the head size, which must be finite.
        pages = (torch.zeros if head_size % 32 else torch.empty)(layout.nbytes, dtype=torch.uint8)
        out = Panels(rows * length, heads * head_size, q_BTNH.dtype)
        step = nl.Step(
            num_tokens=rows * length, kv=pages.data_ptr(), kv_block_bytes=layout.block_bytes, kv_layer_bytes=layout.layer_bytes,
            block_tokens=PAGE_TOKENS, num_layers=1, table_stride=work.tables.shape[1], num_runs=len(work.runs), num_items=len(work.items),
            **{name: getattr(work, name).ctypes.data for name in ("runs", "items", "num_keys", "first_key", "token_slot", "tables")},
        )  # fmt: skip
        ops, sizes = self._ops, {"kv_heads": kv_heads, "head_dim": head_size}
        ops._run(
            step,
            ops._op(nl.OP_ROPE_STORE, kv.dtype, w=-1, in_=kv.data_ptr(), ld_in=2 * kv_heads * head_size, heads=0, **sizes),
            ops._op(
                nl.OP_ATTENTION, kv.dtype, in_=q_BTNH.data_ptr(), ld_in=heads * head_size, out=out.tensor.data_ptr(), heads=heads,
                scale=scale, window=window, softcap=cap, **sizes,
            ),
        )  # fmt: skip
        return out.rows().view(q_BTNH.shape)


@lru_cache
def trainer_ops(build: str | None = None) -> TrainerOps:
    """The ops of a build by name ("reference" too), by default of the best that runs here.

    Raises:
        OSError: the build is not compiled, or does not run on this CPU.
    """
    available = nl.available_builds()
    if build == "reference" or (build is None and not available):
        return ReferenceTrainerOps()
    if build is not None and build not in available:
        here = ", ".join([*available, "reference"])
        raise OSError(f"kernels {build!r} are not compiled, or this CPU lacks their instructions; here there are {here}")
    return NativeTrainerOps(nl.load_build(build or available[0]))
