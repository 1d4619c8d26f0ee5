"""A decoder's forward pass as a program: recorded once by a model definition, run once per step.

The model definition (rollout/models/decoder.py) calls the methods of `Program` in order; `NativeProgram` turns each into an op
of the native library, `ReferenceProgram` into a call of reference.py. Both read the same `StepArrays`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import native_lib as nl
from .kv import NativeKv
from .memory import Region
from .spec import effective_shards
from .step import StepArrays
from .weights import DTYPES, NativeWeights

ACTIVATIONS = {"silu": nl.EP_SILU_MUL, "gelu_tanh": nl.EP_GELU_MUL}
"""of a gated MLP, and the native epilogues that compute them"""

RopeTables = tuple[Tensor, Tensor]
"""cos and sin, each [P, H/2] in the model's dtype"""


class Norm(NamedTuple):
    """A model's kind of RMSNorm: epsilon, and whether it multiplies by 1 + weight in float32 (Gemma)."""

    eps: float
    one_plus: bool


class HeadNorm(NamedTuple):
    """RMSNorm of every query and key head before the rotation: names of the two weights [H], and the kind."""

    q: str
    k: str
    kind: Norm


class Program(Protocol):
    """Records a forward pass. Handles name activations; weights are named as in the weight table."""

    def embed(self, weight: str, scale: float = 1.0) -> Any:
        """The residual stream: one row of `weight` per fed token, times `scale` as rounded to the model's dtype."""

    def rmsnorm(self, x: Any, weight: str, norm: Norm, *, logits_rows: bool = False) -> Any:
        """Normed rows of every token, or of the tokens that logits rows read."""

    def add_rmsnorm(self, residual: Any, x: Any, weight: str, norm: Norm) -> None:
        """residual += rmsnorm(x)."""

    def linear(self, x: Any, weight: str, bias: str | None = None, *, row_parallel: bool = False) -> Any:
        """`row_parallel`: the sum is taken in `k_shards` parts."""

    def add_linear(self, residual: Any, x: Any, weight: str) -> None:
        """residual += linear(x), a row-parallel layer."""

    def linear_gated(self, x: Any, weight: str, activation: str) -> Any:
        """activation(gate) * up of a fused gate_up weight; one of ACTIVATIONS."""

    def rope_store(self, qkv: Any, layer: int, *, table: int = 0, head_norm: HeadNorm | None = None) -> None:
        """Norm (if asked for) and rotate q and k in place, by the rotary table of that index; store k and v in the layer's pages."""

    def attention(self, qkv: Any, layer: int, scale: float, *, window: int = 0, softcap: float = 0.0) -> Any:
        """Each token over the keys up to its own, or the last `window` of them if that is not 0; `softcap` of the scores likewise."""

    def logits_and_sample(self, x: Any, weight: str, *, softcap: float = 0.0, float32: bool = False) -> None:
        """Logits of every row of `x`, one token drawn and scored per row. With `float32` logits are not rounded to the model's dtype."""

    def run(self) -> None:
        """One step on what the arrays hold now. It may only be under way when this returns; then the arrays must stay as they are."""

    def wait(self) -> None:
        """Until the step's results are in the arrays."""

    def close(self) -> None:
        """Free the activations. Nothing runs after this."""


class _Buffer:
    """Rows in panels (see native/layout.h), or row-major."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, panels: bool) -> None:
        padded = -(-width // 32) * 32
        self.width, self.panels = width, panels
        self.ld = padded if panels else -(-width // 16) * 16
        self._region = Region(-(-rows // 32) * 32 * self.ld * dtype.itemsize)  # huge pages: rows of a block lie in as many small ones
        self.address = self._region.address

    def close(self) -> None:
        self._region.close()


class NativeProgram:
    """Ops with fixed buffers, run in one native call per step.

    Args:
        weights: where ops read weights from, by index.
        arrays: the step's columns; their addresses are bound here.
        kv: pages of every layer.
        heads: query heads; `head_dim` and KV heads are those of `kv`.
        ropes: rotary tables, which `rope_store` chooses from.
        vocab_limit: ids that can be sampled.
        k_shards: partial sums of row-parallel layers.
    """

    LOGITS_BYTES = 16 << 20

    def __init__(
        self,
        library: nl.NativeLibrary,
        weights: NativeWeights,
        arrays: StepArrays,
        kv: NativeKv,
        *,
        heads: int,
        ropes: Sequence[RopeTables],
        vocab_limit: int,
        k_shards: int,
        threads: int,
    ) -> None:
        self._library, self._weights, self._arrays, self._kv = library, weights, arrays, kv
        self._heads, self._k_shards, self._threads = heads, k_shards, threads
        self._dtype = kv.layout.dtype
        self._ropes = ropes
        self._ops: list[nl.Op] = []
        self._buffers: dict[tuple[str, int], _Buffer] = {}
        self._compiled: Any = None
        layout = kv.layout
        self.step = nl.Step(
            kv=kv.address,
            kv_block_bytes=layout.block_bytes,
            kv_layer_bytes=layout.layer_bytes,
            block_tokens=layout.block_tokens,
            num_layers=layout.num_layers,
            table_stride=arrays["tables"].shape[1],
            weights=ctypes.addressof(weights.table),
            vocab_limit=vocab_limit,
        )
        for name, column in arrays.columns.items():
            setattr(self.step, name, column.ctypes.data)
        self._op(nl.OP_COPY_BLOCKS)

    def _op(self, kind: int, **fields: Any) -> None:
        dtype = DTYPES[self._dtype]
        op = nl.Op(kind=kind, dtype=dtype, out_dtype=dtype, w=-1, bias=-1, w2=-1, shards=1)
        for name, value in fields.items():
            setattr(op, name, value)
        self._ops.append(op)

    def _buffer(self, role: str, width: int, panels: bool, rows: int | None = None, dtype: torch.dtype | None = None) -> _Buffer:
        # Layers run one after another, so one buffer per role serves them all.
        key = (role, width)
        if key not in self._buffers:
            self._buffers[key] = _Buffer(rows or self._arrays.limits.tokens, width, dtype or self._dtype, panels)
        return self._buffers[key]

    def _shape(self, weight: str) -> tuple[int, int]:
        spec = self._weights.specs[weight]
        return spec.n, spec.k

    def embed(self, weight: str, scale: float = 1.0) -> _Buffer:
        n, k = self._shape(weight)
        out = self._buffer("residual", k, panels=False)
        packed = self._weights.specs[weight].layout == "linear"
        scale = torch.tensor(scale, dtype=self._dtype).item()
        self._op(nl.OP_EMBED, w=self._weights.index[weight], n=n, k=k, packed=packed, scale=scale, out=out.address, ld_out=out.ld)
        return out

    def rmsnorm(self, x: _Buffer, weight: str, norm: Norm, *, logits_rows: bool = False) -> _Buffer:
        rows = self._arrays.limits.rows if logits_rows else None
        out = self._buffer("logits_norm" if logits_rows else "norm", x.width, panels=True, rows=rows)
        self._rmsnorm(x, weight, norm, out=out.address, rows_mode=int(logits_rows))
        return out

    def add_rmsnorm(self, residual: _Buffer, x: _Buffer, weight: str, norm: Norm) -> None:
        self._rmsnorm(x, weight, norm, out=residual.address, ld_out=residual.ld, epilogue=nl.EP_RESIDUAL)

    def _rmsnorm(self, x: _Buffer, weight: str, norm: Norm, **fields: Any) -> None:
        w = self._weights.index[weight]
        self._op(nl.OP_RMSNORM, w=w, k=x.width, eps=norm.eps, one_plus=norm.one_plus, in_=x.address, ld_in=x.ld, **fields)

    def linear(self, x: _Buffer, weight: str, bias: str | None = None, *, row_parallel: bool = False) -> _Buffer:
        n, k = self._shape(weight)
        out, shards = self._buffer("linear", n, panels=False), effective_shards(k, self._k_shards) if row_parallel else 1
        self._linear(x, weight, bias=-1 if bias is None else self._weights.index[bias], shards=shards, out=out.address, ld_out=out.ld)
        return out

    def add_linear(self, residual: _Buffer, x: _Buffer, weight: str) -> None:
        shards = effective_shards(self._shape(weight)[1], self._k_shards)
        self._linear(x, weight, shards=shards, epilogue=nl.EP_RESIDUAL, out=residual.address, ld_out=residual.ld)

    def linear_gated(self, x: _Buffer, weight: str, activation: str) -> _Buffer:
        out = self._buffer("mlp", self._shape(weight)[0] // 2, panels=True)
        self._linear(x, weight, epilogue=ACTIVATIONS[activation], out=out.address)
        return out

    def _linear(self, x: _Buffer, weight: str, **fields: Any) -> None:
        n, k = self._shape(weight)
        self._op(nl.OP_LINEAR, w=self._weights.index[weight], n=n, k=k, in_=x.address, **fields)

    def rope_store(self, qkv: _Buffer, layer: int, *, table: int = 0, head_norm: HeadNorm | None = None) -> None:
        index, fields = self._weights.index, self._head_fields()
        if head_norm is not None:
            fields |= {"w": index[head_norm.q], "w2": index[head_norm.k], **head_norm.kind._asdict()}
        cos, sin = (column.data_ptr() for column in self._ropes[table])
        self._op(nl.OP_ROPE_STORE, in_=qkv.address, ld_in=qkv.ld, cos=cos, sin=sin, layer=layer, **fields)

    def attention(self, qkv: _Buffer, layer: int, scale: float, *, window: int = 0, softcap: float = 0.0) -> _Buffer:
        out = self._buffer("attention", self._heads * self._kv.layout.head_dim, panels=True)
        fields = {"layer": layer, "scale": scale, "window": window, "softcap": softcap, **self._head_fields()}
        self._op(nl.OP_ATTENTION, in_=qkv.address, ld_in=qkv.ld, out=out.address, **fields)
        return out

    def _head_fields(self) -> dict[str, Any]:
        return {"heads": self._heads, "kv_heads": self._kv.layout.kv_heads, "head_dim": self._kv.layout.head_dim}

    def logits_and_sample(self, x: _Buffer, weight: str, *, softcap: float = 0.0, float32: bool = False) -> None:
        n, k = self._shape(weight)
        dtype = torch.float32 if float32 else self._dtype
        # An odd number of cache lines per row: columns of a power-of-two stride would all fall into the same few cache sets.
        line = 64 // dtype.itemsize
        ld = (-(-n // 32) * 32 // line | 1) * line
        piece = min(max(self.LOGITS_BYTES // (ld * dtype.itemsize) // 32 * 32, 32), -(-self._arrays.limits.rows // 32) * 32)
        out = self._buffer("logits", max(ld, -(-n // 32) * 32), panels=False, rows=piece, dtype=dtype)
        self.step.logits, self.step.ld_logits, self.step.piece_rows = out.address, out.ld, piece
        fields = {"out": out.address, "ld_out": out.ld, "out_dtype": DTYPES[dtype], "softcap": softcap}
        self._op(nl.OP_LOGITS, w=self._weights.index[weight], n=n, k=k, in_=x.address, rows_mode=1, **fields)

    def wait(self) -> None:
        """`run` returns when all is done."""

    def close(self) -> None:
        """Free the activations."""
        for buffer in self._buffers.values():
            buffer.close()

    def run(self, begin: int = 0, end: int | None = None) -> None:
        """Ops [begin, end): all of them, or the stretch between two points where ranks exchange partial sums."""
        if self._compiled is None or len(self._compiled) != len(self._ops):
            self._compiled = (nl.Op * len(self._ops))(*self._ops)
        a, step = self._arrays, self.step
        step.num_tokens, step.num_rows, step.num_runs = a.num_tokens, a.num_rows, a.num_runs
        step.num_items, step.num_copies = a.num_items, a.num_copies
        while a.moved:
            name = a.moved.pop()
            setattr(step, name, a[name].ctypes.data)
            step.allowed_words, step.mask_words = a["allowed"].shape[1], a["out_mask"].shape[1]
        self._library.run(self._compiled, begin, len(self._ops) if end is None else end, step, self._threads)
