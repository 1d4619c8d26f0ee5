"""Arithmetic of the specification: the exactly rounded steps and the two functions (exp, ln) that the reference ops are made of.

All of it is float32 on CPU tensors, except `ln64`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import spec

LOW_BITS, MIDPOINT = (1 << 29) - 1, 1 << 28
"""what a float64 holds below a float32's last bit, and its value half way between two float32"""



def f32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _round_to_odd(product: Tensor, addend: Tensor, total: Tensor) -> Tensor:
    # Knuth's two-sum gives the error of `total`; an inexact total with an even last bit moves one step towards the exact sum.
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    move = (error != 0) & total.isfinite() & (bits & 1 == 0)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return (bits + move * step).view(torch.float64)


def fma32(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` of float32 tensors (broadcast), rounded once.

    The product is exact in float64. Rounding the sum to float64 and then to float32 errs only where the first lands half way
    between two float32; there the sum is rounded to odd instead (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums:
    proved algorithms using rounding to odd", 2008). Exact wherever the result is not subnormal.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    if (total.view(torch.int64) & LOW_BITS == MIDPOINT).any():
        total = _round_to_odd(product, addend, total)
    return total.float()


def round_to(x_f32: Tensor, dtype: torch.dtype) -> Tensor:
    """The specification's `round`: to nearest even in `dtype` (bfloat16 or float32), subnormals to zero."""
    return (x_f32 * (x_f32.abs() >= spec.MIN_NORMAL_F32)).to(dtype)


def hsum16(v: Tensor) -> Tensor:
    """Sum of the last dimension's 16 lanes by halving: [..., 16] float32 to [...]."""
    for width in (8, 4, 2, 1):
        v = v[..., :width] + v[..., width:]
    return v[..., 0]


def exp32(x: Tensor) -> Tensor:
    """exp of a float32 tensor, about 1 ulp; arguments are clamped to [-87, 88], NaN stays NaN."""
    x = x.clamp(spec.EXP_MIN, spec.EXP_MAX)
    n = (x * f32(spec.LOG2_E) + f32(spec.ROUND_MAGIC)) - f32(spec.ROUND_MAGIC)
    r = fma32(n, f32(spec.EXP_LN2_HIGH), x)
    r = fma32(n, f32(spec.EXP_LN2_LOW), r)
    p = f32(spec.EXP_POLY[0])
    for c in spec.EXP_POLY[1:]:
        p = fma32(p, r, f32(c))
    p = fma32(p, r * r, r + 1)
    return p * ((n.to(torch.int32) + 127) << 23).view(torch.float32)


def tanh32(x: Tensor) -> Tensor:
    """tanh of a float32 tensor, about 1 ulp; NaN stays NaN."""
    a, w = torch.where(x < 0, -x, x), x * x
    p = f32(spec.TANH_POLY[0])
    for c in spec.TANH_POLY[1:]:
        p = fma32(p, w, f32(c))
    far = 1 - 2 / (exp32(a + a) + 1)
    return torch.where(a < f32(spec.TANH_POLY_BELOW), fma32(p * w, x, x), torch.where(x < 0, -far, far))


def ln64(x: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Natural logarithm of positive numbers in float64, by the specification's series (about 1 ulp, the same on every machine)."""
    half, exponent = np.frexp(np.asarray(x, dtype=np.float64))
    f, k = half * 2.0, exponent - 1.0
    high = f > spec.SQRT2
    f, k = np.where(high, f * 0.5, f), np.where(high, k + 1.0, k)
    s = (f - 1.0) / (f + 1.0)
    w = s * s
    p = np.full_like(s, spec.LN_POLY[0])
    for c in spec.LN_POLY[1:]:
        p = p * w + c
    return np.asarray(k * spec.LN2 + (2.0 * s) * p)
