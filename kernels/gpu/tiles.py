"""The tiles of linear layers: what one program computes, and in which steps."""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Rows, columns and steps of K of one program."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


TILES = {torch.bfloat16: Tile(64, 64, 64, 4, 5), torch.float32: Tile(32, 32, 32, 4, 3)}
"""the one configuration of each dtype; a change of `k` or of the instruction it leads to changes bits"""
LARGE_TILES = {torch.bfloat16: (Tile(128, 128, 64, 8, 4), Tile(128, 64, 64, 8, 4))}
"""for many rows: where a program keeps one sum per output, and where it keeps several (gates, shards)"""
LARGE_FROM: int | None = None
"""rows from which a layer takes LARGE_TILES; None: never. As this lets the batch choose a tile, set it only where the tiles section of
benchmarks/gpu_check.py counted no call whose bits differ."""


def takes_large(m: int, dtype: torch.dtype) -> bool:
    """Whether a layer of `m` rows takes its large tile."""
    return LARGE_FROM is not None and m >= LARGE_FROM and dtype in LARGE_TILES


def tile_for(dtype: torch.dtype, large: bool, several: bool) -> Tile:
    """`several`: sums per output that a program keeps side by side."""
    return LARGE_TILES[dtype][several] if large else TILES[dtype]
