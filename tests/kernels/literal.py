"""docs/numerics.md word by word: one scalar after another, fma by exact rational arithmetic. Slow, and nothing clever."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

F32 = np.float32
Row = Any
"""a sequence of np.float32"""


def f32_of(value: Fraction) -> np.float32:
    """The float32 nearest to a rational, ties to even."""
    if value == 0:
        return F32(0.0)
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    steps = round(size / unit)  # Fraction rounds half to even
    return F32(math.copysign(float(steps * unit), 1 if value > 0 else -1))


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    return f32_of(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def rnd(x: np.float32, bf16: bool) -> np.float32:
    """The specification's `round`."""
    if abs(x) < 2.0**-126:
        return F32(0) * x
    if not bf16:
        return F32(x)
    bits = int(np.asarray(x, dtype=F32).view(np.uint32))
    return F32(np.array((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000, dtype=np.uint32).view(F32))


def dot(x: Row, w: Row, bf16: bool) -> np.float32:
    acc = F32(0)
    if not bf16:
        for a, b in zip(x, w, strict=True):
            acc = fma(a, b, acc)
        return acc
    for block in range(0, len(x), 32):
        even = odd = F32(0)
        for k in range(block, min(block + 32, len(x)), 2):
            even = fma(x[k], w[k], even)
        for k in range(block + 1, min(block + 32, len(x)), 2):
            odd = fma(x[k], w[k], odd)
        acc = acc + (even + odd)
    return acc


def dot_sharded(x: Row, w: Row, bf16: bool, k_shards: int) -> np.float32:
    k, s = len(x), 1
    while 2 * s <= k_shards and k % (32 * 2 * s) == 0:
        s *= 2
    parts = [dot(x[i * k // s : (i + 1) * k // s], w[i * k // s : (i + 1) * k // s], bf16) for i in range(s)]
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


def hsum(v: list[np.float32]) -> np.float32:
    v = list(v)
    for w in (8, 4, 2, 1):
        for i in range(w):
            v[i] = v[i] + v[i + w]
    return v[0]


def rmsnorm(x: Row, weight: Row, eps: float, bf16: bool, one_plus: bool = False) -> list[np.float32]:
    a = [[F32(0)] * 16 for _ in range(4)]
    for j, value in enumerate(x):
        a[j // 16 % 4][j % 16] = fma(value, value, a[j // 16 % 4][j % 16])
    v = hsum([(a[0][i] + a[1][i]) + (a[2][i] + a[3][i]) for i in range(16)])
    r = F32(1) / np.sqrt(v / F32(len(x)) + F32(eps))
    if one_plus:
        return [rnd(value * r * (F32(1) + g), bf16) for value, g in zip(x, weight, strict=True)]
    return [rnd(rnd(value * r, bf16) * g, bf16) for value, g in zip(x, weight, strict=True)]


def exp(x: np.float32) -> np.float32:
    x = min(max(F32(x), F32(-87)), F32(88))
    n = (x * F32(1.44269504) + F32(12582912)) - F32(12582912)
    r = fma(n, F32(-0.693359375), x)
    r = fma(n, F32(2.12194440e-4), r)
    p = F32(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, F32(c))
    p = fma(p, r * r, r + F32(1))
    return F32(math.ldexp(float(p), int(n)))


def tanh(x: np.float32) -> np.float32:
    a, w = abs(x), x * x
    if a < F32(0.625):
        p = F32(-5.70498872745e-3)
        for c in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
            p = fma(p, w, F32(c))
        return fma(p * w, x, x)
    far = F32(1) - F32(2) / (exp(a + a) + F32(1))
    return -far if x < 0 else far


def softcap(x: np.float32, cap: float, bf16: bool) -> np.float32:
    return rnd(rnd(tanh(rnd(x / F32(cap), bf16)), bf16) * F32(cap), bf16)


def gelu_mul(g: np.float32, u: np.float32, bf16: bool) -> np.float32:
    exponent = fma(g * g * g, F32(0.044715), g) * F32(-1.5957691216)
    return rnd(rnd(g / (F32(1) + exp(exponent)), bf16) * u, bf16)


def silu_mul(g: np.float32, u: np.float32, bf16: bool) -> np.float32:
    return rnd(rnd(g / (F32(1) + exp(-g)), bf16) * u, bf16)


def rope(head: Row, cos: Row, sin: Row, bf16: bool) -> list[np.float32]:
    half = len(head) // 2
    a, b = head[:half], head[half:]
    first = [rnd(rnd(a[i] * cos[i], bf16) + rnd(-b[i] * sin[i], bf16), bf16) for i in range(half)]
    return first + [rnd(rnd(b[i] * cos[i], bf16) + rnd(a[i] * sin[i], bf16), bf16) for i in range(half)]


def attend(
    q: Row, keys: Sequence[Row], values: Sequence[Row], scale: float, bf16: bool, first: int = 0, cap: float = 0.0
) -> list[np.float32]:
    """One query head; keys before `first` are outside its window."""
    z = [dot(q, k, bf16) * F32(scale) for k in keys]
    z = [softcap(value, cap, False) for value in z] if cap else z
    m = max(z[first:])
    e = [exp(score - m) if j >= first else F32(0) for j, score in enumerate(z)]
    lanes = [F32(0)] * 16
    for j, value in enumerate(e):
        lanes[j % 16] = lanes[j % 16] + value
    inv = F32(1) / hsum(lanes)
    p = [rnd(value * inv, bf16) for value in e]
    return [rnd(dot(p, [v[d] for v in values], bf16), bf16) for d in range(len(q))]


def ln(x: float) -> float:
    f, k = math.frexp(x)
    f, k = f * 2, k - 1
    if f > 1.4142135623730951:
        f, k = f / 2, k + 1
    s = (f - 1) / (f + 1)
    w = s * s
    p = 1 / 21
    for c in range(19, 0, -2):
        p = p * w + 1 / c
    return k * 0.6931471805599453 + (2 * s) * p


def log_mass(total: int) -> float:
    return ln(float(total)) - 40 * 0.6931471805599453


def kept_ids(z: Row, top_k: int, top_p: float, min_p: float) -> tuple[list[int], list[int]]:
    """The ids truncation keeps, ascending, and every id's mass."""
    m = max(z)
    e = [exp(value - m) for value in z]
    q = [round(Fraction(float(value)) * 2**40) for value in e]
    ranked = sorted(range(len(z)), key=lambda i: (-float(z[i]), i))
    ranked = ranked[:top_k] if top_k else ranked
    if top_p < 1:
        mass = sum(q[i] for i in ranked)
        target = min(max(math.ceil(top_p * float(mass)), 1), mass)
        length, running = 0, 0
        while running < target:
            running += q[ranked[length]]
            length += 1
        ranked = ranked[:length]
    if min_p > 0:
        ranked = [i for i in ranked if e[i] >= F32(min_p)]
    return sorted(ranked), q


def entropy(z: Row) -> np.float32:
    m = max(z)
    e = [exp(value - m) for value in z]
    total = sum(round(Fraction(float(value)) * 2**40) for value in e)
    terms = [round(float(a) * (float(b) - float(m)) * 2.0**40) for a, b in zip(e, z, strict=True) if b != -math.inf]
    return F32(log_mass(total) - float(sum(terms)) / float(total))
