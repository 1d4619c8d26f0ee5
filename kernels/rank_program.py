"""A program of one of several ranks that share a model: heads, MLP columns and vocabulary are divided, the rest is whole on each.

Where a sum over K is divided (a row-parallel layer), every rank makes the float32 sums of its own range, which are a subtree of the
specification's tree; all gather them and add the rest of that tree. So any number of ranks gives the bits of one. Logits are gathered
on rank 0, which alone samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from . import native_lib as nl
from . import reference as ref
from .native_layout import round_up
from .program import NativeProgram, _Buffer
from .reference_program import ReferenceProgram, _Value
from .spec import effective_shards, vocab_rows, vocab_width
from .weights import DTYPES


class Group(Protocol):
    """The ranks, as a program needs them. Both calls are made by all ranks, in one order."""

    rank: int
    size: int

    def all_gather(self, parts: list[Tensor]) -> None:
        """Fill `parts`, one 1-D tensor per rank, of which this rank's own is there."""

    def gather(self, parts: list[Tensor]) -> None:
        """The same on rank 0; other ranks only give their own."""

    def finish(self, wait: Callable[[float | None], None]) -> None:
        """`wait(seconds)` for gathers that a device does later; it raises TimeoutError if they take longer."""


class _Parts:
    """Room for one part per rank; `views` cuts each to what a step uses of it."""

    def __init__(self, size: int, elements: int, dtype: torch.dtype) -> None:
        self.tensor = torch.zeros(size, elements, dtype=dtype)
        self.stride = elements
        self._views: list[Tensor] = []

    def address(self, rank: int = 0) -> int:
        return self.tensor[rank].data_ptr()

    def views(self, elements: int) -> list[Tensor]:
        if not self._views or self._views[0].shape[0] != elements:
            self._views = list(self.tensor[:, :elements].unbind(0))
        return self._views


class NativeRankProgram(NativeProgram):
    """`NativeProgram` of one rank: `weights`, `kv` and `heads` are the rank's own shares, `vocab_size` is the whole model's."""

    def __init__(self, *args: Any, group: Group, vocab_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group, self._vocab_size = group, vocab_size
        self._stops: list[int] = []
        """ops before which partial sums are gathered"""
        self._sums: _Parts | None = None
        self._logits: _Parts | None = None

    def linear(self, x: _Buffer, weight: str, bias: str | None = None, *, row_parallel: bool = False) -> _Buffer:
        if not row_parallel:
            return super().linear(x, weight, bias)
        assert bias is None, "a row-parallel layer has no bias here"
        out = self._buffer("linear", self._shape(weight)[0], panels=False)
        self._row_parallel(x, weight, out, nl.EP_STORE)
        return out

    def add_linear(self, residual: _Buffer, x: _Buffer, weight: str) -> None:
        self._row_parallel(x, weight, residual, nl.EP_RESIDUAL)

    def _row_parallel(self, x: _Buffer, weight: str, out: _Buffer, epilogue: int) -> None:
        group, (n, k) = self._group, self._shape(weight)
        shards = effective_shards(k * group.size, self._k_shards) // group.size
        ld = round_up(n, 16)
        if self._sums is None:  # every such layer has the model's width
            self._sums = _Parts(group.size, self._arrays.limits.tokens * ld, torch.float32)
        sums = self._sums
        assert sums.stride == self._arrays.limits.tokens * ld
        self._linear(x, weight, shards=shards, out=sums.address(group.rank), ld_out=ld, out_dtype=DTYPES[torch.float32])
        self._stops.append(len(self._ops))
        fields = {"in_": sums.address(), "ld_in": ld, "parts": group.size, "part_stride": sums.stride}
        self._op(nl.OP_ADD_PARTS, n=n, epilogue=epilogue, out=out.address, ld_out=out.ld, **fields)

    def logits_and_sample(self, x: _Buffer, weight: str, *, softcap: float = 0.0, float32: bool = False) -> None:
        group, (rows, k) = self._group, self._shape(weight)
        dtype = torch.float32 if float32 else self._dtype
        first, n = vocab_rows(self._vocab_size, group.rank, group.size)
        width = vocab_width(self._vocab_size, group.size)
        ld = round_up(self._vocab_size, 32)
        piece = min(max(self.LOGITS_BYTES // (ld * dtype.itemsize) // 32 * 32, 32), round_up(self._arrays.limits.rows, 32))
        whole = self._buffer("logits", ld, panels=False, rows=piece, dtype=dtype)
        self.step.logits, self.step.ld_logits, self.step.piece_rows = whole.address, whole.ld, piece
        parts = self._logits = _Parts(group.size, piece * width, dtype)
        fields = {"out_dtype": DTYPES[dtype], "softcap": softcap, "rows_mode": 1, "ld_out": width, "out": parts.address(group.rank)}
        first_block = 0 if rows == n else first // 32  # a tied head is the whole embedding
        self._op(nl.OP_LOGITS_PART, w=self._weights.index[weight], n=n, k=k, in_=x.address, first_block=first_block, **fields)
        fields = {"in_": parts.address(), "ld_in": width, "parts": group.size, "part_stride": parts.stride, "k": width}
        self._op(nl.OP_SAMPLE_PARTS, n=self._vocab_size, out_dtype=DTYPES[dtype], **fields)

    def run(self) -> None:  # type: ignore[override]
        """One step on what the arrays hold now, together with the other ranks."""
        group, begin, head = self._group, 0, len(self._ops) - 2
        assert self._logits is not None
        if self._sums is not None:
            sums = self._sums.views(self._arrays.num_tokens * self._sums.stride // self._arrays.limits.tokens)
            for stop in self._stops:
                super().run(begin, stop)
                group.all_gather(sums)
                begin = stop
        super().run(begin, head)
        for rows in self._pieces():
            super().run(head, head + 1)
            group.gather(self._logits.views(rows * self._logits.stride // self.step.piece_rows))
            if group.rank == 0:
                super().run(head + 1, head + 2)

    def _pieces(self) -> Iterator[int]:
        """Set the step to one piece of logits rows after the other; their number."""
        total, step = self._arrays.num_rows, self.step
        for begin in range(0, total, step.piece_rows):
            step.row_begin, step.row_end = begin, min(begin + step.piece_rows, total)
            yield step.row_end - step.row_begin


class ReferenceRankProgram(ReferenceProgram):
    """`ReferenceProgram` of one rank. Arguments as for `NativeRankProgram`."""

    def __init__(self, *args: Any, group: Group, vocab_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group, self._vocab_size = group, vocab_size

    def _row_sums(self, x: Tensor, weight: str) -> Tensor:
        """Sums over the whole K: float32 [T, N]."""
        group, w = self._group, self._w[weight]
        own = ref.linear_f32(x, w, effective_shards(w.shape[1] * group.size, self._k_shards) // group.size)
        sums = torch.empty(group.size, *own.shape)
        sums[group.rank] = own
        group.all_gather(list(sums.flatten(1).unbind(0)))
        parts = list(sums.unbind(0))
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def linear(self, x: _Value, weight: str, bias: str | None = None, *, row_parallel: bool = False) -> _Value:
        if not row_parallel:
            return super().linear(x, weight, bias)
        assert bias is None, "a row-parallel layer has no bias here"
        return self._record(lambda: ref.round_to(self._row_sums(x.tensor, weight), x.tensor.dtype))

    def add_linear(self, residual: _Value, x: _Value, weight: str) -> None:
        def add() -> None:
            dtype = x.tensor.dtype
            branch = ref.round_to(self._row_sums(x.tensor, weight), dtype)
            residual.tensor = ref.round_to(residual.tensor.float() + branch.float(), dtype)

        self._calls.append(add)

    def _logits(self, x: Tensor, weight: str, softcap: float, float32: bool) -> Tensor:
        group, w = self._group, self._w[weight]
        first, n = vocab_rows(self._vocab_size, group.rank, group.size)
        own = (ref.linear_f32 if float32 else ref.linear)(x, w if w.shape[0] == n else w[first : first + n])
        width = vocab_width(self._vocab_size, group.size)
        parts = torch.zeros(group.size, x.shape[0], width, dtype=own.dtype)
        parts[group.rank, :, :n] = ref.softcap(own, softcap) if softcap else own
        group.gather(list(parts.flatten(1).unbind(0)))
        return parts.transpose(0, 1).reshape(x.shape[0], -1)[:, : self._vocab_size].contiguous()

    def _sample(self, logits: Tensor) -> None:
        if self._group.rank == 0:
            super()._sample(logits)
