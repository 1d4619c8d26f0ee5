"""Row sums over a vocabulary that sampling and logprobs share, in integers: no order of adding shows in them.

A row is a pointer to its logits and `inv`, the factor 1 / temperature; z = logit * inv. Nothing is copied: each pass reads the logits.
"""

import triton
import triton.language as tl

from .arithmetic import exp32, log_mass, mass_of, rint64


@triton.jit
def z_at(row, at, inv, V: tl.constexpr):
    """z of some ids; -inf from V on."""
    return tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32) * inv


@triton.jit
def peak_of(row, inv, V: tl.constexpr, BLOCK: tl.constexpr):
    """(the largest z, how many are NaN)."""
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    broken = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = tl.where(at < V, z_at(row, at, inv, V), float("-inf"))
        top = tl.maximum(top, z)
        broken += (z != z).to(tl.int32)
    return tl.max(top, axis=0), tl.sum(broken, axis=0)


@triton.jit
def mass_sum(row, inv, peak, V: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the masses of all ids, int64."""
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.where(at < V, mass_of(exp32(z_at(row, at, inv, V) - peak)), 0)
    return tl.sum(total, axis=0)


@triton.jit
def entropy_of(row, inv, peak, total, V: tl.constexpr, BLOCK: tl.constexpr):
    """Entropy of the distribution with that sum of masses, float64."""
    weighted = tl.zeros((BLOCK,), dtype=tl.int64)
    for first in range(0, V, BLOCK):
        z = z_at(row, first + tl.arange(0, BLOCK), inv, V)
        counts = z > float("-inf")
        below = tl.where(counts, z, peak).to(tl.float64) - peak.to(tl.float64)
        term = (exp32(z - peak).to(tl.float64) * below) * 1099511627776.0
        weighted += tl.where(counts, rint64(term), 0)
    mean = tl.sum(weighted, axis=0).to(tl.float64) / total.to(tl.float64)
    return log_mass(total) - mean


@triton.jit
def logprob_of(z, peak, total):
    """float32 logprob; a zero is +0."""
    value = (z.to(tl.float64) - peak.to(tl.float64)) - log_mass(total)
    return tl.where(value == 0.0, 0.0, value).to(tl.float32)
