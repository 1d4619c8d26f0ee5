"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): random bits as a function of where they are used.

No state and no seeding: the bits of a token follow from (seed, sample index, position) alone, so they do not depend on the
batch, on preemption, or on which replica draws. Python integers alone.
"""

from __future__ import annotations

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_U32 = 0xFFFFFFFF

Words = tuple[int, int, int, int]


def philox4x32(key: tuple[int, int], counter: Words) -> Words:
    """Four 32-bit words from a 64-bit key and a 128-bit counter, both as 32-bit words, lowest first.

    Raises:
        ValueError: a word lies outside [0, 2**32).
    """
    if any(not 0 <= word <= _U32 for word in (*key, *counter)):
        raise ValueError(f"philox4x32 takes words in [0, 2**32), got key {key}, counter {counter}")
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _U32, (p0 >> 32) ^ c3 ^ k1, p0 & _U32
        k0, k1 = (k0 + _WEYL[0]) & _U32, (k1 + _WEYL[1]) & _U32
    return c0, c1, c2, c3


def draw64(seed: int, sample_index: int, position: int) -> int:
    """The 64 random bits of one token: an int in [0, 2**64).

    Args:
        seed: key of the stream, [0, 2**64).
        sample_index: which sample of the seed, [0, 2**32).
        position: of the token drawn, counted from the start of the prompt, [0, 2**32).
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")
    out = philox4x32((seed & _U32, seed >> 32), (position, 0, sample_index, 0))
    return out[0] | out[1] << 32
