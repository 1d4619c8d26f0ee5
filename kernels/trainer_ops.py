"""The ops that a trainer's forward pass is made of, on ordinary tensors: by a native build, or by the reference where none runs.

Shape letters: M rows, D width, N outputs of a linear or query heads, K inputs of a linear or KV heads, B rows of a batch, T places in
each, H head size.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from . import native_lib as nl
from . import reference as ref
from .kv import KvLayout
from .native_layout import Panels, round_up
from .program import ACTIVATIONS
from .reference_math import exp32, f32, fma32, round_to
from .segments import PAGE_TOKENS, Segments
from .spec import GELU_CUBE, GELU_EXPONENT, K_BLOCK, effective_shards
from .weights import DTYPES


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

    # A model that is copied or saved while it computes by these ops brings no library of its own.
    def __deepcopy__(self, memo: Any) -> NativeTrainerOps:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return trainer_ops, (self.build,)

    def _run(self, step: nl.Step, *ops: nl.Op) -> None:
        self.library.run((nl.Op * len(ops))(*ops), 0, len(ops), step, torch.get_num_threads())

    @staticmethod
    def _op(kind: int, dtype: torch.dtype, **fields: Any) -> nl.Op:
        code = DTYPES[dtype]
        return nl.Op(**{"kind": kind, "dtype": code, "out_dtype": code, "w": 0, "bias": -1, "w2": -1, "shards": 1, **fields})

    def linear(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, shards: int, wide: bool) -> Tensor:
        x_MK, w_NK, (n, k), dtype = x_MK.contiguous(), w_NK.contiguous(), w_NK.shape, x_MK.dtype
        out = torch.empty(x_MK.shape[0], n, dtype=torch.float32 if wide else dtype)
        # float32 rows, and bfloat16 rows of whole blocks, are read where they lie.
        panels = Panels(x_MK.shape[0], k, dtype) if dtype == torch.bfloat16 and k % K_BLOCK else None
        at, ld = (x_MK.data_ptr(), k) if panels is None else (panels.tensor.data_ptr(), 0)
        bias = None
        if bias_N is not None:
            bias = torch.zeros(round_up(n, 32))
            bias[:n] = bias_N
        table = (ctypes.c_void_p * 2)(w_NK.data_ptr(), None if bias is None else bias.data_ptr())
        ops = [
            self._op(
                nl.OP_LINEAR_PLAIN, dtype, bias=-1 if bias is None else 1, n=n, k=k, shards=effective_shards(k, shards), in_=at, ld_in=ld,
                out=out.data_ptr(), ld_out=n, out_dtype=DTYPES[out.dtype],
            )
        ]  # fmt: skip
        if panels is not None:
            ops.insert(0, self._op(nl.OP_PANELS, dtype, k=k, in_=x_MK.data_ptr(), ld_in=k, out=at))
        self._run(nl.Step(num_tokens=x_MK.shape[0], weights=ctypes.addressof(table)), *ops)
        return out

    def rmsnorm(self, x_MD: Tensor, weight_D: Tensor, eps: float, one_plus: bool) -> Tensor:
        x_MD, weight_D, (rows, width) = x_MD.contiguous(), weight_D.contiguous(), x_MD.shape
        out, table = torch.empty_like(x_MD), (ctypes.c_void_p * 1)(weight_D.data_ptr())
        op = self._op(
            nl.OP_RMSNORM, x_MD.dtype, k=width, eps=eps, one_plus=one_plus, in_=x_MD.data_ptr(), ld_in=width, out=out.data_ptr(),
            ld_out=width, epilogue=nl.EP_ROWS,
        )  # fmt: skip
        self._run(nl.Step(num_tokens=rows, weights=ctypes.addressof(table)), op)
        return out

    def _elementwise(self, x: Tensor, **fields: Any) -> Tensor:
        x = x.contiguous()
        out, width = torch.empty_like(x), x.shape[-1]
        op = self._op(nl.OP_ACTIVATION, x.dtype, k=width, in_=x.data_ptr(), ld_in=width, out=out.data_ptr(), ld_out=width, **fields)
        self._run(nl.Step(num_tokens=x.numel() // width), op)
        return out

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return self._elementwise(x, epilogue=ACTIVATIONS[kind])

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return self._elementwise(x, epilogue=nl.EP_STORE, softcap=cap)

    def attention(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, segments: Segments, scale: float, window: int, cap: float
    ) -> Tensor:
        (rows, length, heads, head_size), kv_heads, work = q_BTNH.shape, k_BTKH.shape[2], segments.work
        q_BTNH, kv, dtype = q_BTNH.contiguous(), torch.cat([k_BTKH, v_BTKH], dim=2), q_BTNH.dtype
        layout = KvLayout(
            num_blocks=work.num_blocks, block_tokens=PAGE_TOKENS, num_layers=1, kv_heads=kv_heads, head_dim=head_size, dtype=dtype
        )
        # A sequence's first store clears what it does not fill, but for the padding of the head size, which must be finite.
        pages = (torch.zeros if head_size % 32 else torch.empty)(layout.nbytes, dtype=torch.uint8)
        out = (torch.empty_like if segments.full else torch.zeros_like)(q_BTNH)
        step = nl.Step(
            num_tokens=rows * length, kv=pages.data_ptr(), kv_block_bytes=layout.block_bytes, kv_layer_bytes=layout.layer_bytes,
            block_tokens=PAGE_TOKENS, num_layers=1, table_stride=work.tables.shape[1], num_runs=len(work.runs), num_items=len(work.items),
            **{name: getattr(work, name).ctypes.data for name in ("runs", "items", "num_keys", "first_key", "token_slot", "tables")},
        )  # fmt: skip
        sizes, width = {"kv_heads": kv_heads, "head_dim": head_size}, heads * head_size
        self._run(
            step,
            self._op(nl.OP_ROPE_STORE, dtype, w=-1, in_=kv.data_ptr(), ld_in=2 * kv_heads * head_size, heads=0, **sizes),
            self._op(
                nl.OP_ATTENTION, dtype, in_=q_BTNH.data_ptr(), ld_in=width, out=out.data_ptr(), ld_out=width, epilogue=nl.EP_ROWS,
                heads=heads, scale=scale, window=window, softcap=cap, **sizes,
            ),
        )  # fmt: skip
        return out


def trainer_ops(build: str | None = None) -> TrainerOps:
    """The ops of a build by name ("reference" too), by default of the best that runs here. One object for each build.

    Raises:
        OSError: the build is not compiled, or does not run on this CPU.
    """
    available = nl.available_builds()
    if build is None:
        for best in available:
            try:
                return _ops_of(best)
            except OSError:  # the system refuses its instructions
                continue
        build = "reference"
    if build not in (*available, "reference"):
        here = ", ".join([*available, "reference"])
        raise OSError(f"kernels {build!r} are not compiled, or this CPU lacks their instructions; here there are {here}")
    return _ops_of(build)


@lru_cache
def _ops_of(build: str) -> TrainerOps:
    return ReferenceTrainerOps() if build == "reference" else NativeTrainerOps(nl.load_build(build))
