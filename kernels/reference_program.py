"""The program in plain torch: the fallback where no native build runs, and the oracle the native builds are held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import reference as ref
from .kv import ReferenceKv
from .program import HeadNorm, Norm, RopeTables
from .reference_sampler import SamplerRows
from .step import StepArrays
from .weights import ReferenceWeights

_GATES = {"silu": ref.silu_mul, "gelu_tanh": ref.gelu_mul}


class _Value:
    """An activation; its tensor changes with every step."""

    tensor: Tensor


class ReferenceProgram:
    """Records calls and replays them on each step. Arguments as for `NativeProgram`."""

    def __init__(
        self,
        weights: ReferenceWeights,
        arrays: StepArrays,
        kv: ReferenceKv,
        *,
        heads: int,
        ropes: Sequence[RopeTables],
        vocab_limit: int,
        k_shards: int,
    ) -> None:
        self._w, self._a, self._kv = weights.tensors, arrays, kv
        self._heads, self._ropes, self._vocab_limit, self._k_shards = heads, ropes, vocab_limit, k_shards
        self._calls: list[Callable[[], None]] = [self._copy_blocks]

    def _record(self, fn: Callable[[], Tensor]) -> _Value:
        out = _Value()

        def call() -> None:
            out.tensor = fn()

        self._calls.append(call)
        return out

    def _column(self, name: str, count: int) -> Tensor:
        return torch.from_numpy(self._a[name][:count]).long()

    def _tokens(self, name: str) -> Tensor:
        return self._column(name, self._a.num_tokens)

    def _copy_blocks(self) -> None:
        for source, destination in self._a["copies"][: self._a.num_copies].tolist():
            self._kv.k[destination] = self._kv.k[source]
            self._kv.v[destination] = self._kv.v[source]

    def embed(self, weight: str, scale: float = 1.0) -> _Value:
        dtype = self._kv.layout.dtype
        factor = torch.tensor(scale, dtype=dtype).float()
        return self._record(lambda: ref.round_to(self._w[weight][self._tokens("ids")].float() * factor, dtype))

    def rmsnorm(self, x: _Value, weight: str, norm: Norm, *, logits_rows: bool = False) -> _Value:
        def normed() -> Tensor:
            rows = x.tensor[self._column("hidden_row", self._a.num_rows)] if logits_rows else x.tensor
            return ref.rmsnorm(rows, self._w[weight], norm.eps, norm.one_plus)

        return self._record(normed)

    def add_rmsnorm(self, residual: _Value, x: _Value, weight: str, norm: Norm) -> None:
        def add() -> None:
            branch = ref.rmsnorm(x.tensor, self._w[weight], norm.eps, norm.one_plus)
            residual.tensor = ref.round_to(residual.tensor.float() + branch.float(), branch.dtype)

        self._calls.append(add)

    def linear(self, x: _Value, weight: str, bias: str | None = None, *, row_parallel: bool = False) -> _Value:
        shards = self._k_shards if row_parallel else 1
        return self._record(lambda: ref.linear(x.tensor, self._w[weight], None if bias is None else self._w[bias], shards))

    def add_linear(self, residual: _Value, x: _Value, weight: str) -> None:
        def add() -> None:
            residual.tensor = ref.linear_residual(x.tensor, self._w[weight], residual.tensor, self._k_shards)

        self._calls.append(add)

    def linear_gated(self, x: _Value, weight: str, activation: str) -> _Value:
        return self._record(lambda: _GATES[activation](*ref.linear(x.tensor, self._w[weight]).chunk(2, dim=1)))

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layout = self._kv.layout
        heads = qkv.view(qkv.shape[0], -1, layout.head_dim)
        q, k, v = heads.split([self._heads, layout.kv_heads, layout.kv_heads], dim=1)
        return q, k, v

    def _cells(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        size = self._kv.layout.block_tokens
        return torch.from_numpy(self._a["tables"])[slots, positions // size].long(), positions % size

    def rope_store(self, qkv: _Value, layer: int, *, table: int = 0, head_norm: HeadNorm | None = None) -> None:
        def store() -> None:
            q, k, v = self._split(qkv.tensor)
            positions = self._tokens("positions")
            cos, sin = (column[positions] for column in self._ropes[table])
            if head_norm is None:
                q, k = ref.rope(q, cos, sin), ref.rope(k, cos, sin)
            else:
                q, k = (ref.rope(x, cos, sin, self._w[w], *head_norm.kind) for x, w in ((q, head_norm.q), (k, head_norm.k)))
            qkv.tensor = torch.cat([q, k, v], dim=1).flatten(1)
            blocks, offsets = self._cells(self._tokens("token_slot"), positions)
            self._kv.k[blocks, layer, offsets] = k
            self._kv.v[blocks, layer, offsets] = v

        self._calls.append(store)

    def attention(self, qkv: _Value, layer: int, scale: float, *, window: int = 0, softcap: float = 0.0) -> _Value:
        def attend() -> Tensor:
            q = self._split(qkv.tensor)[0]
            slots, num_keys = self._tokens("token_slot"), self._tokens("num_keys")
            out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
            for slot in slots.unique():
                rows = (slots == slot).nonzero()[:, 0]
                length = int(num_keys[rows].max())
                blocks, offsets = self._cells(slot.expand(length), torch.arange(length))
                k, v = self._kv.k[blocks, layer, offsets], self._kv.v[blocks, layer, offsets]
                out[rows] = ref.attention(q[rows], k, v, num_keys[rows], scale, window or None, softcap)
            return out

        return self._record(attend)

    def logits_and_sample(self, x: _Value, weight: str, *, softcap: float = 0.0, float32: bool = False) -> None:
        def call() -> None:
            if self._a.num_rows:
                self._sample(self._logits(x.tensor, weight, softcap, float32))

        self._calls.append(call)

    def _logits(self, x: Tensor, weight: str, softcap: float, float32: bool) -> Tensor:
        """[R, V]"""
        found = (ref.linear_f32 if float32 else ref.linear)(x, self._w[weight])
        return ref.softcap(found, softcap) if softcap else found

    def _sample(self, logits: Tensor) -> None:
        sample_rows(self._a, logits, self._vocab_limit)

    def run(self) -> None:
        """One step on what the arrays hold now."""
        with torch.inference_mode():
            for call in self._calls:
                call()

    def wait(self) -> None:
        """`run` returns when all is done."""

    def close(self) -> None:
        """Nothing of its own to free: activations are temporary tensors."""
        self._calls.clear()


def sample_rows(arrays: StepArrays, logits: Tensor, vocab_limit: int) -> None:
    """Draw and score the step's rows, `logits` [R, V] on the CPU, into its `out_` columns."""
    count = len(logits)
    result = ref.sample(logits, _sampler_rows(arrays, count, vocab_limit))
    for name in ("token", "logprob", "temperature_logprob", "model_logprob", "entropy", "nonfinite"):
        arrays["out_" + name][:count] = getattr(result, name)
    for name in ("top_id", "top_logprob", "mask"):
        values = getattr(result, name)
        arrays["out_" + name][:count, : values.shape[1]] = values


def _sampler_rows(arrays: StepArrays, count: int, vocab_limit: int) -> SamplerRows:
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "sample_index", "forced", "top_n")
    columns: dict[str, Any] = {name: arrays[name][:count] for name in names}
    want = arrays["want"][:count]
    return SamplerRows(
        **columns,
        position=arrays["row_position"][:count],
        want_model=(want & 1) > 0,
        want_entropy=(want & 2) > 0,
        want_mask=(want & 4) > 0,
        banned=[arrays.banned_of(r) for r in range(count)],
        adjust=[arrays.adjust_of(r) for r in range(count)],
        allowed=[arrays.allowed_of(r) for r in range(count)],
        vocab_limit=vocab_limit,
    )
