from __future__ import annotations

import pytest
from rollsync.kernels import philox

ONES = 0xFFFFFFFF

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_published_vectors(counter: philox.Words, key: tuple[int, int], output: philox.Words) -> None:
    assert philox.philox4x32(key, counter) == output


def test_draw_uses_the_documented_key_and_counter() -> None:
    out = philox.philox4x32((0x89ABCDEF, 0x01234567), (77, 0, 5, 0))
    assert philox.draw64(0x0123456789ABCDEF, 5, 77) == out[0] + (out[1] << 32)


def test_streams_do_not_meet() -> None:
    draws = {philox.draw64(s, i, p) for s in (0, 1, 1 << 32) for i in range(8) for p in range(64)}
    assert len(draws) == 3 * 8 * 64


@pytest.mark.parametrize(("seed", "sample", "position"), [(-1, 0, 0), (1 << 64, 0, 0), (0, 1 << 32, 0), (0, 0, 1 << 32), (0, -1, 0)])
def test_out_of_range_is_named(seed: int, sample: int, position: int) -> None:
    with pytest.raises(ValueError, match=r"2\*\*"):
        philox.draw64(seed, sample, position)
