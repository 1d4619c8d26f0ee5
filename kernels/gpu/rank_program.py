"""The GPU program of one of several ranks; kernels/rank_program.py says how they share a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..rank_program import Group
from ..spec import effective_shards, vocab_rows, vocab_width
from . import ops
from .program import GpuProgram, Shape
from .weights import take


class GpuRankProgram(GpuProgram):
    """`GpuProgram` of one rank: `weights`, `kv` and `heads` are the rank's own shares, `vocab_size` is the whole model's.

    Gathers run in the queue's order (NCCL waits on the stream, not on the host). Nothing is captured.
    """

    def __init__(self, *args: Any, group: Group, vocab_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group, self._vocab_size = group, vocab_size
        self._samples = group.rank == 0

    def wait(self) -> None:
        self._group.finish(self._queue.wait)
        if self._samples:
            self._sampler.finish()

    def linear(self, x: Tensor, weight: str, bias: str | None = None, *, row_parallel: bool = False) -> Tensor:
        if not row_parallel:
            return super().linear(x, weight, bias)
        assert bias is None, "a row-parallel layer has no bias here"
        out = self._buffer("linear", self._shape(weight)[0])
        self._row_parallel(x, weight, out, None)
        return out

    def add_linear(self, residual: Tensor, x: Tensor, weight: str) -> None:
        self._row_parallel(x, weight, residual, residual)

    def _row_parallel(self, x: Tensor, weight: str, out: Tensor, residual: Tensor | None) -> None:
        group, (n, k) = self._group, self._shape(weight)
        shards = effective_shards(k * group.size, self._k_shards) // group.size
        room = self._buffer("sums", n, torch.float32, group.size * self._a.limits.tokens)

        def call(s: Shape) -> None:
            T = s.tokens
            parts = room[: group.size * T].view(group.size, T, n)
            ops.linear(x[:T], self._w[weight], shards=shards, float32=True, out=parts[group.rank])
            group.all_gather([part.view(-1) for part in parts.unbind(0)])
            before = None if residual is None else residual[:T]
            ops.add_parts(parts, residual_MN=before, dtype=self._dtype, out=out[:T])

        self._calls.append(call)

    def logits_and_sample(self, x: Tensor, weight: str, *, softcap: float = 0.0, float32: bool = False) -> None:
        group, rows = self._group, self._shape(weight)[0]
        dtype = torch.float32 if float32 else self._dtype
        first, n = vocab_rows(self._vocab_size, group.rank, group.size)
        width, size = vocab_width(self._vocab_size, group.size), group.size
        self._piece = min(self._a.limits.rows, self._piece_rows(size * width * dtype.itemsize))
        room = take(self._queue.device, size, self._piece, width, dtype=dtype)
        whole = take(self._queue.device, self._piece, size * width, dtype=dtype)
        self._logits = whole[:, : self._vocab_size]
        if self._samples:
            self._sampler.reserve(self._a.limits.rows, self._piece, self._vocab_size)

        def head(begin: int, end: int) -> None:
            count = end - begin
            parts = room.view(-1)[: size * count * width].view(size, count, width)
            w = self._w[weight]
            own = parts[group.rank, :, :n]
            if n:
                ops.linear(x[begin:end], w if rows == n else w[first : first + n], float32=float32, out=own)
                if softcap:
                    ops.softcap(own, softcap, out=own)
            group.gather([part.view(-1) for part in parts.unbind(0)])
            whole[:count].view(count, size, width).copy_(parts.transpose(0, 1))

        self._head = head
