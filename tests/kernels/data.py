"""Inputs that show a change of summation order.

Random data hides it: most reorderings of a bfloat16 sum round to the same output. Here the exact result is 0, so what
comes out is rounding noise alone, and every reordering changes it. All values stay far from the subnormal range.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _cancelling(rows: int, width: int, permutation: Tensor, sign: float, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    # Magnitudes over nine binades: narrower, and half of the bfloat16 sums are exact in any order.
    spread = torch.randint(-4, 5, (rows, width // 2), generator=generator)
    half = torch.ldexp(torch.randn(rows, width // 2, generator=generator), spread)
    half = half.to(dtype) if generator.initial_seed() % 2 else half.bfloat16().to(dtype)
    return torch.cat([half, sign * half[:, permutation], torch.zeros(rows, width % 2, dtype=dtype)], dim=1)


def cancel_data(m: int, k: int, n: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """x [m, k] and w [n, k] of `dtype` with x = [u, Pu], w = [v, -Pv], P a permutation: every exact product is 0.

    An odd seed fills float32 mantissas; an even one leaves them as short as bfloat16's, so that sums meet exact ties.
    """
    generator = _generator(seed)
    permutation = torch.randperm(k // 2, generator=generator)
    return _cancelling(m, k, permutation, 1.0, dtype, generator), _cancelling(n, k, permutation, -1.0, dtype, generator)


def wide_data(m: int, k: int, n: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """x [m, k] and w [n, k] of `dtype` with magnitudes spread evenly over 2**-20 to 2**20 and random signs."""
    generator = _generator(seed)

    def wide(rows: int) -> Tensor:
        exponent = torch.randint(-20, 21, (rows, k), generator=generator)
        return torch.ldexp(torch.randn(rows, k, generator=generator), exponent).to(dtype)

    return wide(m), wide(n)


def cancel_attention(
    tokens: int, length: int, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [tokens, heads, head_size] and k, v [length, kv_heads, head_size]: exact scores 0, keys in pairs of opposite values."""
    generator = _generator(seed)
    q, k = cancel_data(tokens * heads, head_size, length * kv_heads, dtype, seed)
    v = torch.randn(length // 2, kv_heads, head_size, generator=generator)
    v = torch.cat([v, -v[torch.randperm(length // 2, generator=generator)], torch.zeros(length % 2, kv_heads, head_size)])
    return q.view(tokens, heads, head_size), k.view(length, kv_heads, head_size), v.to(dtype)
