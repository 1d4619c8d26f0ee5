"""Each native op's time against plain torch, at a model's shapes. Kernel time alone: inputs are packed before the clock starts.

T tokens of a step, D width, N outputs, K inputs, H head size, L keys, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import native_lib as nl
from ...kernels.native_ops import NativeOps
from ...kernels.reference_sampler import SamplerRows
from ..models.config import DecoderConfig

KEYS = 512
"""keys of each sequence in the attention's row"""
REPEATS, BUDGET_S = 15, 0.1
"""runs the fastest is taken of (others share the machine), fewer if they take longer than the budget"""
SMOLLM2_135M = DecoderConfig(
    family="llama", vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536,
    rms_norm_eps=1e-5, rope_theta=1e5, tie_word_embeddings=True, max_position_embeddings=8192,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one op."""

    op: str
    shape: str
    tokens: int
    native_s: float
    torch_s: float


def _fastest(fn: Callable[[], Any]) -> float:
    fn()
    times: list[float] = []
    while len(times) < REPEATS and (len(times) < 5 or sum(times) < BUDGET_S):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return min(times)


class _TimedOps(NativeOps):
    """Native ops that time the last op of their program: the one that is asked for, behind what lays out its inputs."""

    seconds = 0.0

    def _run(self, step: nl.Step, *ops: nl.Op) -> None:
        super()._run(step, *ops)
        last = (nl.Op * 1)(ops[-1])
        self.seconds = _fastest(lambda: self.library.run(last, 0, 1, step, self.threads))


class _Bench:
    def __init__(self, ops: _TimedOps, cfg: DecoderConfig, dtype: torch.dtype, tokens: int) -> None:
        self.ops, self.cfg, self.dtype, self.tokens = ops, cfg, dtype, tokens
        self._rng = torch.Generator().manual_seed(0)
        self.results: list[Timing] = []

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._rng).to(self.dtype)

    def _add(self, op: str, shape: str, native: Callable[[], Any], plain: Callable[[], Any]) -> None:
        native()
        seconds = self.ops.seconds
        self.results.append(Timing(op=op, shape=shape, tokens=self.tokens, native_s=seconds, torch_s=_fastest(plain)))

    def linear(self, name: str, n: int, k: int, shards: int = 1) -> None:
        x_TK, w_NK = self._randn(self.tokens, k), self._randn(n, k)
        packed = self.ops.pack_linear(w_NK, shards=shards)
        self._add(name, f"{n} x {k}", lambda: self.ops.linear(x_TK, packed), lambda: F.linear(x_TK, w_NK))

    def mlp(self) -> None:
        n, k = 2 * self.cfg.intermediate_size, self.cfg.hidden_size
        x_TK, w_NK = self._randn(self.tokens, k), self._randn(n, k)
        packed = self.ops.pack_linear(w_NK, gate_up=True)

        def plain() -> Tensor:
            gate, up = F.linear(x_TK, w_NK).chunk(2, dim=1)
            return F.silu(gate) * up

        self._add("gate, up, silu", f"{n} x {k}", lambda: self.ops.linear_silu_mul(x_TK, packed), plain)

    def rmsnorm(self) -> None:
        width = self.cfg.hidden_size
        x_TD, weight_D = self._randn(self.tokens, width), self._randn(width)
        self._add(
            "rmsnorm", f"{width}", lambda: self.ops.rmsnorm(x_TD, weight_D, 1e-5), lambda: F.rms_norm(x_TD, (width,), weight_D, 1e-5)
        )

    def attention(self) -> None:
        heads, kv_heads, size, tokens = self.cfg.num_heads, self.cfg.num_kv_heads, self.cfg.head_dim, self.tokens
        q_TNH, k, v = self._randn(tokens, heads, size), self._randn(tokens, KEYS, kv_heads, size), self._randn(tokens, KEYS, kv_heads, size)
        q_TN1H, k_TKLH, v_TKLH = q_TNH.unsqueeze(2), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        num_keys, sequences = torch.full((tokens,), KEYS), torch.arange(tokens)
        self._add(
            "attention",
            f"{heads}/{kv_heads} heads of {size}, {KEYS} keys",
            lambda: self.ops.attention(
                q_TNH, k.flatten(0, 1), v.flatten(0, 1), num_keys, size**-0.5,
                sequence_T=sequences, lengths=[KEYS] * tokens, item_tokens=[1] * tokens,
            ),
            lambda: F.scaled_dot_product_attention(q_TN1H, k_TKLH, v_TKLH, enable_gqa=True),
        )  # fmt: skip

    def sample(self) -> None:
        rows, vocab = self.tokens, self.cfg.vocab_size
        logits_RV = self._randn(rows, vocab) * 3
        off = np.zeros(rows, np.bool_)
        columns = SamplerRows(
            temperature=np.ones(rows), top_p=np.ones(rows), top_k=np.zeros(rows, np.int64), min_p=np.zeros(rows, np.float32),
            seed=np.arange(rows, dtype=np.uint64), sample_index=np.zeros(rows, np.uint32), position=np.ones(rows, np.uint32),
            forced=np.full(rows, -1), want_model=off, want_entropy=off, banned=[[]] * rows, vocab_limit=vocab,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)

        def plain() -> Tensor:
            logprobs = torch.log_softmax(logits_RV.float(), dim=-1)
            return logprobs.gather(1, torch.multinomial(logprobs.exp(), 1, generator=generator))

        self._add("sample, logprob", f"{vocab}", lambda: self.ops.sample(logits_RV, columns), plain)


def time_ops(library: nl.NativeLibrary, cfg: DecoderConfig, dtype: torch.dtype, tokens: int, threads: int, k_shards: int) -> list[Timing]:
    """Every op of a decode step with `tokens` sequences, each on `threads` threads, ours and torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            bench = _Bench(_TimedOps(library, threads), cfg, dtype, tokens)
            bench.rmsnorm()
            bench.linear("qkv", cfg.q_rows + 2 * cfg.kv_rows, cfg.hidden_size)
            bench.attention()
            bench.linear("attention out", cfg.hidden_size, cfg.q_rows, k_shards)
            bench.mlp()
            bench.linear("down", cfg.hidden_size, cfg.intermediate_size, k_shards)
            bench.linear("head", cfg.vocab_size, cfg.hidden_size)
            bench.sample()
    finally:
        torch.set_num_threads(before)
    return bench.results
