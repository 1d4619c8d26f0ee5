"""docs/numerics.md in plain torch: what every op computes, bit for bit, and the engine's fallback where no compiler exists.

Shape letters: T packed tokens, D width, N outputs of a linear or query heads, K inputs of a linear or KV heads, H head size, L keys
of one sequence, B blocks of K, R logits rows, V vocabulary. All tensors live on the CPU, in bfloat16 or float32.

Speed comes from running the specification's chains side by side, never from reordering one. Subnormal numbers: the results every
op rounds are flushed to zero as specified; a subnormal operand, or one in the middle of a sum, is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from . import spec
from .reference_math import LOW_BITS, MIDPOINT, exp32, f32, fma32, hsum16, ln64, round_to, tanh32
from .reference_sampler import SampleResult, SamplerRows, sample

__all__ = [
    "SampleResult", "SamplerRows", "attention", "exp32", "fma32", "gelu_mul", "hsum16", "linear", "linear_f32", "linear_residual", "ln64",
    "rmsnorm", "rope", "round_to", "sample", "silu_mul", "softcap", "tanh32",
]  # fmt: skip

_CHUNK = 1 << 18
"""elements of one temporary, so that it stays in the cache"""


def _check(name: str, ok: bool, problem: str) -> None:
    if not ok:
        raise ValueError(f"{name}: {problem}")


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, total)) for i in range(0, total, max(size, 1)))


# Linear


def _blocks_bf16(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    # Every block's even and odd chain at once: 16 steps over [T, B, 2, N]. A bfloat16 product is exact in float32, so addcmul gives
    # the same bits whether torch fuses it or not.
    pad = -x_TK.shape[1] % spec.K_BLOCK
    x_TB = F.pad(x_TK, (0, pad)).float().unflatten(1, (-1, spec.K_BLOCK // 2, 2)).unsqueeze(-1)
    num_tokens, num_blocks = x_TB.shape[:2]
    out_TN = torch.empty(num_tokens, w_NK.shape[0])
    for columns in _chunks(w_NK.shape[0], max(_CHUNK // (num_blocks * spec.K_BLOCK), 64)):
        w_KN = F.pad(w_NK[columns], (0, pad)).T.contiguous().float()
        w_BN = w_KN.unflatten(0, (num_blocks, spec.K_BLOCK // 2, 2))
        for rows in _chunks(num_tokens, _CHUNK // (num_blocks * 2 * w_KN.shape[1])):
            chains = torch.zeros(rows.stop - rows.start, num_blocks, 2, w_KN.shape[1])
            for step in range(spec.K_BLOCK // 2):
                chains.addcmul_(x_TB[rows, :, step], w_BN[:, step])
            pairs_TBN = chains[:, :, 0] + chains[:, :, 1]
            acc = torch.zeros(pairs_TBN.shape[0], pairs_TBN.shape[2])
            for block in range(num_blocks):
                acc += pairs_TBN[:, block]
            out_TN[rows, columns] = acc
    return out_TN


def _chain_exact(x_MK: Tensor, w_MK: Tensor) -> Tensor:
    acc_M = torch.zeros(x_MK.shape[0])
    for x_M, w_M in zip(x_MK.unbind(1), w_MK.unbind(1), strict=True):
        acc_M = fma32(x_M, w_M, acc_M)
    return acc_M


def _chain_f32(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    out_TN = torch.empty(x_TK.shape[0], w_NK.shape[0])
    for columns in _chunks(w_NK.shape[0], 1 << 12):
        w_KN = w_NK[columns].double().T.contiguous()
        for rows in _chunks(x_TK.shape[0], _CHUNK // w_KN.shape[1]):
            out_TN[rows, columns] = _chain_f32_part(x_TK[rows], w_NK[columns], w_KN)
    return out_TN


def _chain_f32_part(x_TK: Tensor, w_NK: Tensor, w_KN: Tensor) -> Tensor:
    # As `fma32`, but steps that may have rounded twice are only noted, and those outputs computed again.
    acc = torch.zeros(x_TK.shape[0], w_NK.shape[0], dtype=torch.float64)
    low, narrow = torch.empty_like(acc, dtype=torch.int64), torch.empty_like(acc, dtype=torch.float32)
    doubt = torch.zeros_like(acc, dtype=torch.bool)
    for x_T, w_N in zip(x_TK.double().T.contiguous().unbind(0), w_KN.unbind(0), strict=True):
        acc.addcmul_(x_T.unsqueeze(1), w_N)
        torch.bitwise_and(acc.view(torch.int64), LOW_BITS, out=low)
        doubt |= low == MIDPOINT
        acc.copy_(narrow.copy_(acc))
    tokens, columns = doubt.nonzero(as_tuple=True)
    for part in _chunks(len(tokens), _CHUNK // x_TK.shape[1]):
        narrow[tokens[part], columns[part]] = _chain_exact(x_TK[tokens[part]], w_NK[columns[part]])
    return narrow


def linear_f32(x_TK: Tensor, w_NK: Tensor, shards: int = 1) -> Tensor:
    """`x W^T` before its rounding; the accumulators of `linear`.

    Args:
        x_TK: [T, K] bfloat16 or float32, any strides.
        w_NK: [N, K], dtype of `x_TK`.
        shards: the `k_shards` setting for a row-parallel layer (`spec.effective_shards` says how many are taken), 1 for any other.

    Returns:
        [T, N] float32.

    Raises:
        ValueError: K or the dtypes differ, or the dtype is another.
    """
    _check("linear", x_TK.ndim == 2 == w_NK.ndim and x_TK.shape[1:] == w_NK.shape[1:], f"{[*x_TK.shape]} does not meet {[*w_NK.shape]}")
    _check("linear", x_TK.dtype == w_NK.dtype, f"x is {x_TK.dtype} and w is {w_NK.dtype}; they must agree")
    _check("linear", x_TK.dtype in (torch.bfloat16, torch.float32), f"{x_TK.dtype} is not bfloat16 or float32")
    partial = _blocks_bf16 if x_TK.dtype == torch.bfloat16 else _chain_f32
    width = x_TK.shape[1] // (count := spec.effective_shards(x_TK.shape[1], shards))
    sums = [partial(x, w) for x, w in zip(x_TK.split(width, 1), w_NK.split(width, 1), strict=True)]
    while count > 1:
        count //= 2
        sums = [sums[2 * i] + sums[2 * i + 1] for i in range(count)]
    return sums[0]


def linear(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, shards: int = 1) -> Tensor:
    """`x W^T + bias`, rounded once to the dtype of `x_TK`: [T, N]. Arguments and errors as for `linear_f32`."""
    acc_TN = linear_f32(x_TK, w_NK, shards)
    return round_to(acc_TN if bias_N is None else acc_TN + bias_N.float(), x_TK.dtype)


def linear_residual(x_TK: Tensor, w_NK: Tensor, residual_TN: Tensor, shards: int = 1) -> Tensor:
    """`residual + linear(x, w)`, each rounded to the dtype of `x_TK`: [T, N]."""
    return round_to(residual_TN.float() + linear(x_TK, w_NK, shards=shards).float(), x_TK.dtype)


# Row ops


def rmsnorm(x_TD: Tensor, weight_D: Tensor, eps: float, one_plus: bool = False) -> Tensor:
    """Scale each row of `x_TD` to unit RMS, then by `weight_D` (Zhang and Sennrich 2019, eq. 4).

    With `one_plus` (Gemma) the factor is 1 + weight, and all is float32 up to one rounding at the end.

    Args:
        x_TD: [T, D] bfloat16 or float32.
        weight_D: [D], dtype of `x_TD`.
        eps: added to the mean square, same unit as x**2.

    Returns:
        [T, D], dtype of `x_TD`. Sums run in float32.

    Raises:
        ValueError: D differs.
    """
    _check("rmsnorm", x_TD.shape[-1:] == weight_D.shape, f"rows of {x_TD.shape[-1]} do not meet a weight of {[*weight_D.shape]}")
    x, width = x_TD.float(), x_TD.shape[-1]
    parts = F.pad(x, (0, -width % (4 * spec.LANES))).unflatten(-1, (-1, 4, spec.LANES))
    a = torch.zeros_like(parts[:, 0])
    for part in parts.unbind(1):
        a = a + part * part if x_TD.dtype == torch.bfloat16 else fma32(part, part, a)
    v = hsum16((a[:, 0] + a[:, 1]) + (a[:, 2] + a[:, 3]))
    mean = v / torch.full_like(v, width) + f32(eps)
    r = torch.ones_like(v) / mean.double().sqrt().float()  # torch.sqrt of float32 may be MKL's, which is an ulp off now and then
    scaled = x * r.unsqueeze(-1)
    if one_plus:
        return round_to(scaled * (1 + weight_D.float()), x_TD.dtype)
    return round_to(round_to(scaled, x_TD.dtype).float() * weight_D.float(), x_TD.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, each rounded to the dtype of `gate`; same shape and dtype."""
    g = gate.float()
    s = round_to(g / (1 + exp32(-g)), gate.dtype)
    return round_to(s.float() * up.float(), gate.dtype)


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`gelu(gate) * up` with GELU in its tanh form, each rounded to the dtype of `gate`; same shape and dtype."""
    g = gate.float()
    exponent = fma32(g * g * g, f32(spec.GELU_CUBE), g) * f32(spec.GELU_EXPONENT)
    s = round_to(g / (1 + exp32(exponent)), gate.dtype)
    return round_to(s.float() * up.float(), gate.dtype)


def softcap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`, each step rounded to the dtype of `x`; same shape and dtype."""
    t = round_to(tanh32(round_to(x.float() / f32(cap), x.dtype).float()), x.dtype)
    return round_to(t.float() * f32(cap), x.dtype)


def rope(
    x_TNH: Tensor, cos_TH2: Tensor, sin_TH2: Tensor, norm_H: Tensor | None = None, eps: float = 0.0, one_plus: bool = False
) -> Tensor:
    """Rotate the halves of each head by its token's angles (Su et al. 2021, in the rotate-half layout of transformers).

    Args:
        x_TNH: [T, N, H] bfloat16 or float32.
        cos_TH2, sin_TH2: [T, H/2], the tables' rows at the tokens' positions, dtype of `x_TNH`.
        norm_H: [H], dtype of `x_TNH`; every head first goes through `rmsnorm` with this weight, `eps` and `one_plus`.

    Returns:
        [T, N, H], dtype of `x_TNH`.

    Raises:
        ValueError: the shape of the tables or of `norm_H` does not fit.
    """
    if norm_H is not None:
        x_TNH = rmsnorm(x_TNH.flatten(0, 1), norm_H, eps, one_plus).view_as(x_TNH)
    want = (x_TNH.shape[0], x_TNH.shape[2] // 2)
    _check("rope", cos_TH2.shape == sin_TH2.shape == want, f"tables must be {[*want]}, got {[*cos_TH2.shape]}, {[*sin_TH2.shape]}")
    a, b = x_TNH.float().chunk(2, dim=-1)
    cos, sin = cos_TH2.float().unsqueeze(1), sin_TH2.float().unsqueeze(1)

    def mul(x: Tensor, y: Tensor) -> Tensor:
        return round_to(x * y, x_TNH.dtype).float()

    return torch.cat([round_to(mul(a, cos) + mul(-b, sin), x_TNH.dtype), round_to(mul(b, cos) + mul(a, sin), x_TNH.dtype)], dim=-1)


def _softmax(z_ML: Tensor, seen_ML: Tensor, dtype: torch.dtype) -> Tensor:
    z_ML = z_ML.masked_fill(~seen_ML, -math.inf)
    e_ML = exp32(z_ML - z_ML.amax(dim=-1, keepdim=True)).masked_fill(~seen_ML, 0.0)
    lanes = torch.zeros(e_ML.shape[0], spec.LANES)
    for part in F.pad(e_ML, (0, -e_ML.shape[1] % spec.LANES)).unflatten(-1, (-1, spec.LANES)).unbind(1):
        lanes = lanes + part
    total_M = hsum16(lanes)
    return round_to(e_ML * (torch.ones_like(total_M) / total_M).unsqueeze(-1), dtype)


def attention(
    q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, num_keys_T: Tensor, scale: float, window: int | None = None, cap: float = 0.0
) -> Tensor:
    """Attention of one sequence's tokens over its own keys; N / K query heads share each KV head (GQA).

    Token t sees the keys j < `num_keys_T[t]`, and of them only the last `window` if given. j counts from the sequence's first token.

    Args:
        q_TNH: [T, N, H] bfloat16 or float32.
        k_LKH, v_LKH: [L, K, H], dtype of `q_TNH`; N is a multiple of K.
        num_keys_T: [T] integers in [1, L].
        scale: multiplies the scores; used as a float32.
        window: keys, >= 1.
        cap: scaled scores go through `softcap` with it, if it is not 0.

    Returns:
        [T, N * H], dtype of `q_TNH`.

    Raises:
        ValueError: the shapes do not fit, or a token sees no key or more than L.
    """
    (num_tokens, num_heads, head_size), (length, kv_heads, _) = q_TNH.shape, k_LKH.shape
    _check("attention", k_LKH.shape == v_LKH.shape and k_LKH.shape[2] == head_size, "k and v must both be [L, K, H]")
    _check("attention", num_heads % kv_heads == 0, f"{num_heads} query heads cannot share {kv_heads} KV heads evenly")
    _check("attention", num_keys_T.shape == (num_tokens,), f"num_keys must be [{num_tokens}], got {[*num_keys_T.shape]}")
    _check("attention", bool(((num_keys_T > 0) & (num_keys_T <= length)).all()), f"each token must see 1 to {length} keys")
    _check("attention", window is None or window > 0, f"window must be at least 1 key, got {window}")
    if num_tokens > 1 and not v_LKH.isfinite().all():  # 0 * inf is NaN: a key one token does not see must not reach it
        ones = (slice(t, t + 1) for t in range(num_tokens))
        return torch.cat([attention(q_TNH[t], k_LKH, v_LKH, num_keys_T[t], scale, window, cap) for t in ones])
    keys_L, limit_T = torch.arange(length), num_keys_T.unsqueeze(1)
    seen_TL = (keys_L < limit_T) & (keys_L >= limit_T - (window or length))
    v_LKH = torch.where(seen_TL.any(dim=0)[:, None, None], v_LKH, 0)
    groups = num_heads // kv_heads
    seen_ML = seen_TL.repeat_interleave(groups, dim=0)
    out = torch.empty(num_tokens, kv_heads, groups, head_size, dtype=q_TNH.dtype)
    for head in range(kv_heads):
        q_MH = q_TNH[:, head * groups : (head + 1) * groups].reshape(-1, head_size)
        z_ML = linear_f32(q_MH, k_LKH[:, head]) * f32(scale)
        p_ML = _softmax(softcap(z_ML, cap) if cap else z_ML, seen_ML, q_TNH.dtype)
        out[:, head] = linear(p_ML, v_LKH[:, head].T).view(num_tokens, groups, head_size)
    return out.view(num_tokens, num_heads * head_size)
