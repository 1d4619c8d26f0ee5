"""The numbers of docs/numerics.md that every implementation shares. No torch here: the build and the fingerprint read this too."""

from __future__ import annotations

SPEC_VERSION = 1
"""changes whenever a bit of any op's result may; part of the numerics fingerprint"""

K_BLOCK = 32
"""entries of K in one block of a bfloat16 linear (two chains of 16)"""
LANES = 16
"""lanes of every float32 row sum"""
MASS_BITS = 40
"""an id's probability mass is the integer rint(e * 2**MASS_BITS)"""

MIN_NORMAL_F32 = 2.0**-126

# exp, after Cephes' expf; each constant stands for the float32 nearest to it.
EXP_MIN, EXP_MAX = -87.0, 88.0
LOG2_E = 1.44269504
ROUND_MAGIC = 12582912.0
"""1.5 * 2**23: adding and subtracting it rounds a float32 to the nearest integer"""
EXP_LN2_HIGH, EXP_LN2_LOW = -0.693359375, 2.12194440e-4
EXP_POLY = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)

# tanh below TANH_POLY_BELOW, after Cephes' tanhf; and the tanh form of GELU.
TANH_POLY_BELOW = 0.625
TANH_POLY = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
GELU_CUBE, GELU_EXPONENT = 0.044715, -1.5957691216
"""the second is -2 sqrt(2 / pi)"""

# ln in float64: the atanh series on [sqrt(1/2), sqrt(2)).
SQRT2 = 1.4142135623730951
LN2 = 0.6931471805599453
LN_POLY = tuple(1.0 / c for c in range(21, 0, -2))
LN_MASS_UNIT = MASS_BITS * LN2
"""ln(2**MASS_BITS), the product rounded once"""


def effective_shards(k: int, k_shards: int) -> int:
    """In how many ranges of K a row-parallel layer sums: the largest power of two <= `k_shards` that cuts K into whole blocks.

    Args:
        k: input width of the layer, entries.
        k_shards: the engine's setting, >= 1.

    Returns:
        A power of two; 1 if no larger one fits.

    Raises:
        ValueError: either is below 1.
    """
    if k < 1 or k_shards < 1:
        raise ValueError(f"effective_shards needs k >= 1 and k_shards >= 1, got k = {k}, k_shards = {k_shards}")
    shards = 1 << (k_shards.bit_length() - 1)
    while shards > 1 and k % (K_BLOCK * shards):
        shards //= 2
    return shards


def vocab_rows(vocab_size: int, rank: int, size: int) -> tuple[int, int]:
    """(first id, number of ids) whose logits a rank computes: whole blocks of 32, as many on each rank but on the last ones."""
    width = vocab_width(vocab_size, size)
    first = min(rank * width, vocab_size)
    return first, min(width, vocab_size - first)


def vocab_width(vocab_size: int, size: int) -> int:
    """Ids of a full share."""
    return -(-vocab_size // (32 * size)) * 32
