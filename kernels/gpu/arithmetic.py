"""Arithmetic shared by kernels: the exactly rounded steps of docs/numerics.md in Triton.

Contraction is off, so a fused multiply-add is where one is written and nowhere else. Constants are spec.py's.
"""

import triton
import triton.language as tl

from .. import spec

_EXP0, _EXP1, _EXP2, _EXP3, _EXP4, _EXP5 = (tl.constexpr(c) for c in spec.EXP_POLY)
_TANH0, _TANH1, _TANH2, _TANH3, _TANH4 = (tl.constexpr(c) for c in spec.TANH_POLY)
_LOG2_E, _MAGIC = tl.constexpr(spec.LOG2_E), tl.constexpr(spec.ROUND_MAGIC)
_LN2_HIGH, _LN2_LOW = tl.constexpr(spec.EXP_LN2_HIGH), tl.constexpr(spec.EXP_LN2_LOW)
_EXP_MIN, _EXP_MAX = tl.constexpr(spec.EXP_MIN), tl.constexpr(spec.EXP_MAX)
_TANH_BELOW = tl.constexpr(spec.TANH_POLY_BELOW)
_GELU_CUBE, _GELU_EXPONENT = tl.constexpr(spec.GELU_CUBE), tl.constexpr(spec.GELU_EXPONENT)
_SQRT2, _LN2 = tl.constexpr(spec.SQRT2), tl.constexpr(spec.LN2)
_LN_UNIT = tl.constexpr(spec.LN_MASS_UNIT)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """The nearest value of `dtype`, as a float32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _step(p, r, c):
    return tl.fma(p, r, tl.zeros_like(r) + c)


@triton.jit
def exp32(x):
    """exp of float32 as specified; NaN stays NaN."""
    low = tl.where(x < _EXP_MIN, _EXP_MIN, x)
    x = tl.where(low > _EXP_MAX, _EXP_MAX, low)
    n = (x * _LOG2_E + _MAGIC) - _MAGIC
    r = _step(tl.zeros_like(x) + _LN2_HIGH, n, x)
    r = _step(tl.zeros_like(x) + _LN2_LOW, n, r)
    p = _step(tl.zeros_like(x) + _EXP0, r, _EXP1)
    p = _step(p, r, _EXP2)
    p = _step(p, r, _EXP3)
    p = _step(p, r, _EXP4)
    p = _step(p, r, _EXP5)
    p = tl.fma(p, r * r, r + 1.0)
    whole = tl.where(n == n, n, 0.0).to(tl.int32)
    return p * ((whole + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def tanh32(x):
    """tanh of float32 as specified; NaN stays NaN."""
    a = tl.abs(x)
    w = x * x
    p = _step(tl.zeros_like(x) + _TANH0, w, _TANH1)
    p = _step(p, w, _TANH2)
    p = _step(p, w, _TANH3)
    p = _step(p, w, _TANH4)
    far = 1.0 - tl.div_rn(tl.zeros_like(x) + 2.0, exp32(a + a) + 1.0)
    return tl.where(a < _TANH_BELOW, tl.fma(p * w, x, x), tl.where(x < 0, -far, far))


@triton.jit
def softcap_of(x, cap, dtype: tl.constexpr):
    """`cap * tanh(x / cap)`, each step rounded to `dtype`, as a float32."""
    scaled = round_to(tl.div_rn(x, tl.zeros_like(x) + cap), dtype)
    return round_to(round_to(tanh32(scaled), dtype) * cap, dtype)


@triton.jit
def gate(g, u, GELU: tl.constexpr, dtype: tl.constexpr):
    """activation(g) * u of float32 values that are rounded to `dtype`; rounded twice on the way."""
    if GELU:
        cube = (g * g) * g
        exponent = tl.fma(cube, tl.zeros_like(g) + _GELU_CUBE, g) * _GELU_EXPONENT
    else:
        exponent = -g
    s = round_to(tl.div_rn(g, 1.0 + exp32(exponent)), dtype)
    return round_to(s * u, dtype)


@triton.jit
def ln64(x):
    """Natural logarithm of a positive, normal float64 as specified."""
    bits = x.to(tl.int64, bitcast=True)
    k = ((bits >> 52) - 1023).to(tl.float64)
    f = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    high = f > (tl.zeros_like(f) + _SQRT2)  # a bare constant would be compared as a float32
    k = tl.where(high, k + 1.0, k)
    f = tl.where(high, f * 0.5, f)
    one = tl.zeros_like(f) + 1.0
    s = (f - one) / (f + one)
    w = s * s
    p = one / 21.0
    for odd in tl.static_range(19, 0, -2):
        p = p * w + one / odd
    return k * _LN2 + (2.0 * s) * p


@triton.jit
def log_mass(total):
    """Logarithm of a sum of masses (int64), in units of one: float64."""
    return ln64(total.to(tl.float64)) - _LN_UNIT


@triton.jit
def mass_of(e):
    """The integer mass rint(e * 2**40) of 0 <= e <= 1, nearest even: int64."""
    x = e * 1099511627776.0
    whole = tl.where(x < 8388608.0, (x + 8388608.0) - 8388608.0, x)
    return whole.to(tl.int64)


@triton.jit
def rint64(x):
    """Nearest integer, ties to even, of a float64 below 2**51: int64."""
    return ((x + 6755399441055744.0) - 6755399441055744.0).to(tl.int64)
