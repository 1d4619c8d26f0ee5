"""A decoder's forward pass on a GPU: the program of kernels/program.py over Triton's ops, recorded once and launched once per step.

Activations lie in buffers that are made as the program is recorded, one for each role, large enough for the largest step. T tokens, R
logits rows of a step; D width, N outputs, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..program import HeadNorm, Norm, RopeTables
from ..spec import effective_shards
from . import ops
from .arrays import DeviceArrays
from .attention import SPLIT
from .device_sampler import DeviceSampler
from .graphs import Graphs
from .pool import GpuKv
from .queue import Queue
from .tiles import TILES
from .weights import GpuWeights, give_back, memory_errors, take

LOGITS_BYTES = 1 << 30
"""of logits at once; more rows come in pieces"""

APART_PROGRAMS = 256
"""steps that only decode and have fewer (sequence, KV head) pairs compute a sequence's splits side by side"""


PARTS_WAVES = 2
"""row-parallel layers with fewer tiles than this for each processor compute their ranges of K side by side"""


class Shape(NamedTuple):
    """Of a step, padding included: nothing else of it that changes may reach a launch but through tensors."""

    tokens: int
    rows: int
    items: int
    apart: bool
    """whether splits of long contexts are work of their own"""


Call = Callable[[Shape], None]
"""launches one op"""


class GpuProgram:
    """Arguments as for `NativeProgram`.

    Args:
        queue: where everything is launched.
        graphs: of decode steps; empty ones capture nothing.
    """

    def __init__(
        self,
        weights: GpuWeights,
        arrays: DeviceArrays,
        kv: GpuKv,
        queue: Queue,
        graphs: Graphs,
        *,
        heads: int,
        ropes: Sequence[RopeTables],
        vocab_limit: int,
        k_shards: int,
    ) -> None:
        self._weights, self._a, self._kv, self._queue, self._graphs = weights, arrays, kv, queue, graphs
        self._w, self._columns = weights.tensors, arrays.on_device
        self._heads, self._k_shards = heads, k_shards
        self._dtype = kv.layout.dtype
        with memory_errors():
            self._ropes = [(cos.to(queue.device), sin.to(queue.device)) for cos, sin in ropes]
        self._calls: list[Call] = []
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._head: Callable[[int, int], None] | None = None
        """puts logits of rows [begin, end) of the normed hidden states into `_logits`"""
        self._logits = torch.empty(0)
        """[rows there is room for, V]"""
        self._samples = True
        self._sampler = DeviceSampler(arrays, queue, vocab_limit)
        self._piece = 0
        """rows of logits that there is room for"""
        layout = kv.layout
        self._places = min(-(-APART_PROGRAMS // layout.kv_heads), arrays.limits.slots)
        max_keys = arrays["tables"].shape[1] * layout.block_tokens
        with memory_errors():
            self._work = ops.attention_work(self._places, max_keys, heads, layout.head_dim, queue.device)

    def _buffer(self, role: str, width: int, dtype: torch.dtype | None = None, rows: int | None = None) -> Tensor:
        # Layers run one after another, so one buffer per role serves them all.
        key = (role, width)
        if key not in self._buffers:
            shape = (rows or self._a.limits.tokens, width)
            self._buffers[key] = take(self._queue.device, *shape, dtype=dtype or self._dtype)
        return self._buffers[key]

    def _shape(self, weight: str) -> tuple[int, int]:
        spec = self._weights.specs[weight]
        return spec.n, spec.k

    def embed(self, weight: str, scale: float = 1.0) -> Tensor:
        out, ids = self._buffer("residual", self._shape(weight)[1]), self._columns["ids"]
        self._calls.append(lambda s: _done(ops.embed(ids[: s.tokens], self._w[weight], scale, out=out[: s.tokens])))
        return out

    def rmsnorm(self, x: Tensor, weight: str, norm: Norm, *, logits_rows: bool = False) -> Tensor:
        width, rows = x.shape[1], self._columns["hidden_row"]
        if logits_rows:
            out = self._buffer("logits_norm", width, rows=self._a.limits.rows)

            def some(s: Shape) -> None:
                if s.rows:
                    ops.rmsnorm(x[: s.tokens], self._w[weight], *norm, rows=rows[: s.rows], out=out[: s.rows])

            self._calls.append(some)
        else:
            out = self._buffer("norm", width)
            self._calls.append(lambda s: _done(ops.rmsnorm(x[: s.tokens], self._w[weight], *norm, out=out[: s.tokens])))
        return out

    def add_rmsnorm(self, residual: Tensor, x: Tensor, weight: str, norm: Norm) -> None:
        self._calls.append(lambda s: _done(ops.add_rmsnorm(residual[: s.tokens], x[: s.tokens], self._w[weight], *norm)))

    def linear(self, x: Tensor, weight: str, bias: str | None = None, *, row_parallel: bool = False) -> Tensor:
        out = self._buffer("linear", self._shape(weight)[0])
        if row_parallel and bias is None:
            self._summed(x, weight, out, None)
            return out
        shards = effective_shards(self._shape(weight)[1], self._k_shards) if row_parallel else 1

        def call(s: Shape) -> None:
            ops.linear(x[: s.tokens], self._w[weight], None if bias is None else self._w[bias], shards=shards, out=out[: s.tokens])

        self._calls.append(call)
        return out

    def add_linear(self, residual: Tensor, x: Tensor, weight: str) -> None:
        self._summed(x, weight, residual, residual)

    def _summed(self, x: Tensor, weight: str, out: Tensor, residual: Tensor | None) -> None:
        """A row-parallel layer. In steps of few tokens its ranges of K are summed side by side: the same tree, so the same bits."""
        n, k = self._shape(weight)
        shards, most = effective_shards(k, self._k_shards), self._tokens_apart(n)
        room = self._buffer("parts", n, torch.float32, self._k_shards * most) if shards > 1 and most else None  # layers differ in shards

        def call(s: Shape) -> None:
            T = s.tokens
            before = None if residual is None else residual[:T]
            if room is None or most < T:
                ops.linear(x[:T], self._w[weight], residual_MN=before, shards=shards, out=out[:T])
            else:
                parts = ops.linear_parts(x[:T], self._w[weight], room[: shards * T].view(shards, T, n))
                ops.add_parts(parts, residual_MN=before, dtype=self._dtype, out=out[:T])

        self._calls.append(call)

    def _tokens_apart(self, n: int) -> int:
        """Of the largest step that leaves processors idle in a row-parallel layer of n outputs; 0: none does."""
        tile = TILES[self._dtype]
        if n % 4:  # rows of float32 sums begin at multiples of 16 bytes
            return 0
        tiles_m = (PARTS_WAVES * self._queue.processors - 1) // -(-n // tile.n)
        return min(tiles_m * tile.m, self._a.limits.tokens)

    def linear_gated(self, x: Tensor, weight: str, activation: str) -> Tensor:
        out = self._buffer("mlp", self._shape(weight)[0] // 2)
        self._calls.append(lambda s: _done(ops.linear_gated(x[: s.tokens], self._w[weight], activation, out=out[: s.tokens])))
        return out

    def rope_store(self, qkv: Tensor, layer: int, *, table: int = 0, head_norm: HeadNorm | None = None) -> None:
        columns, (cos, sin), layout = self._columns, self._ropes[table], self._kv.layout

        def call(s: Shape) -> None:
            if head_norm is not None:
                q, k = self._w[head_norm.q], self._w[head_norm.k]
                ops.head_norm(qkv[: s.tokens], q, k, *head_norm.kind, heads=self._heads, kv_heads=layout.kv_heads)
            where = (columns["positions"][: s.tokens], columns["token_slot"][: s.tokens], columns["tables"])
            ops.rope_store(qkv[: s.tokens], *where, cos, sin, self._kv.pages, layer, heads=self._heads)

        self._calls.append(call)

    def attention(self, qkv: Tensor, layer: int, scale: float, *, window: int = 0, softcap: float = 0.0) -> Tensor:
        out, columns = self._buffer("attention", self._heads * self._kv.layout.head_dim), self._columns

        def call(s: Shape) -> None:
            where = (columns["positions"][: s.tokens], columns["token_slot"][: s.tokens], columns["tables"], columns["items"][: s.items])
            work = self._work if s.apart else None
            fields: dict[str, Any] = {"heads": self._heads, "window": window, "softcap": softcap, "work": work, "out": out[: s.tokens]}
            ops.attention(qkv[: s.tokens], *where, self._kv.pages, layer, scale, **fields)

        self._calls.append(call)
        return out

    def logits_and_sample(self, x: Tensor, weight: str, *, softcap: float = 0.0, float32: bool = False) -> None:
        vocab, dtype = self._shape(weight)[0], torch.float32 if float32 else self._dtype
        self._piece = min(self._a.limits.rows, self._piece_rows(vocab * dtype.itemsize))
        out = self._logits = self._buffer("logits", -(-vocab // 32) * 32, dtype, self._piece)[:, :vocab]
        self._sampler.reserve(self._a.limits.rows, self._piece, vocab)

        def head(begin: int, end: int) -> None:
            logits = ops.linear(x[begin:end], self._w[weight], float32=float32, out=out[: end - begin])
            if softcap:
                ops.softcap(logits, softcap, out=logits)

        self._head = head

    @staticmethod
    def _piece_rows(row_bytes: int) -> int:
        return max(LOGITS_BYTES // row_bytes // DeviceSampler.ROWS, 1) * DeviceSampler.ROWS

    # Running

    def run(self) -> None:
        """Launch one step on what the arrays hold now. The host waits for nothing."""
        a = self._a
        shape, size = self._shape_of_step()
        a.pad(*shape[:3])
        # Not inference_mode: capturing would leave the generator's state among its tensors, which nobody may write to any more.
        with self._queue.scope(), torch.no_grad():
            a.send()
            if self._samples and a.num_rows:
                self._sampler.prepare()
            if a.num_copies:
                ops.copy_blocks(self._kv.pages, self._columns["copies"][: a.num_copies])
            if size is None:
                self._forward(shape)
            else:
                self._graphs.run(size, partial(self._forward, shape))
            self._sample_rows(a.num_rows)
            if self._samples and a.num_rows:
                self._sampler.fetch()
            self._queue.record()

    def wait(self) -> None:
        """Until what `run` launched is in the arrays."""
        self._queue.wait()
        if self._samples:
            self._sampler.finish()

    def _shape_of_step(self) -> tuple[Shape, int | None]:
        """The step's sizes, and that of the graph it is padded to, if it is one."""
        a = self._a
        T, R = a.num_tokens, a.num_rows
        first = np.flatnonzero(np.diff(a["token_slot"][:T], prepend=-1))  # every sequence has a slot of its own
        if not len(first) == T == R:
            items = ops.attention_items(np.diff(first, append=T).tolist(), self._heads // self._kv.layout.kv_heads, self._dtype)
            a.num_items = len(items)
            a["items"][: len(items)] = items
            return Shape(T, R, len(items), False), None
        size = self._graphs.size_for(T)
        tokens = T if size is None else size
        self._decode_items(T, tokens <= self._places)
        return Shape(tokens, tokens, tokens, tokens <= self._places), size

    def _decode_items(self, count: int, apart: bool) -> None:
        """One work item a token; with `apart` those with more keys than a split get a place to leave each split's result in."""
        self._a.num_items = count
        items = self._a["items"][:count]
        items[:, 0], items[:, 1:] = np.arange(count), (1, -1, 0)
        if apart:
            long = np.flatnonzero(self._a["positions"][:count] >= SPLIT)
            items[long, 2] = np.arange(len(long))

    def _forward(self, shape: Shape) -> None:
        """Everything up to the logits, if there is room for all of them. What a graph records."""
        for call in self._calls:
            call(shape)
        if 0 < shape.rows <= self._piece:
            assert self._head is not None
            self._head(0, shape.rows)

    def _sample_rows(self, rows: int) -> None:
        assert self._head is not None
        for begin in range(0, rows, max(self._piece, 1)):
            end = min(begin + self._piece, rows)
            if rows > self._piece:
                self._head(begin, end)
            if self._samples:
                self._sampler.launch(self._logits[: end - begin], begin)

    def close(self) -> None:
        """Free the activations."""
        self._graphs.release()
        self._calls.clear()
        self._buffers.clear()
        self._ropes.clear()
        self._head = None
        self._logits = torch.empty(0)
        self._work = (self._logits, self._logits)
        self._sampler.close()
        give_back(self._queue.device)


def _done(_: Tensor) -> None:
    """For calls whose result lies in a buffer."""
