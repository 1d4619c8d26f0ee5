"""How large the KV pool gets, by what is free, what there is in all, and what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from rollsync import EngineConfig
from rollsync.rollout.engine.config import CacheConfig
from rollsync.rollout.errors import ConfigError

GIB = 1 << 30
BLOCK = 1 << 20


def resolved(*, apply: str = "staged", weights: int = 0, total: int | None = None, free: int = 0, **cache: Any) -> EngineConfig:
    config = EngineConfig(model="m", apply=apply, cache=CacheConfig(**cache))
    facts = {"checkpoint_dtype": "bfloat16", "model_context": 4096, "kv_bytes_per_block": BLOCK}
    return config.resolve(**facts, available_bytes=free, weight_bytes=weights, total_bytes=total)


@pytest.mark.parametrize(
    ("blocks", "case"),
    [
        (2048, {"free": 64 * GIB, "weights": GIB, "total": 64 * GIB}),
        (1024, {"free": 6 * GIB, "weights": GIB, "total": 8 * GIB}),
        (1280, {"free": 6 * GIB, "weights": GIB, "total": 8 * GIB, "apply": "in_place"}),
        (64, {"free": GIB, "weights": GIB, "total": 8 * GIB}),  # others hold the rest: their page cache will make room
        (64, {"free": GIB, "weights": 3 * GIB, "total": 8 * GIB}),
        (4096, {"free": 0, "weights": GIB, "total": 8 * GIB, "memory_bytes": 4 * GIB}),  # what was asked for wins
        (7, {"free": 0, "weights": GIB, "total": 8 * GIB, "num_blocks": 7}),
        (7, {"free": 64 * GIB, "num_blocks": 7, "memory_bytes": 4 * GIB}),
    ],
)
def test_the_pool_follows_what_is_free_and_an_absolute_size_wins(blocks: int, case: dict[str, Any]) -> None:
    cache = resolved(**case).cache
    assert (cache.num_blocks, cache.memory_bytes) == (blocks, blocks * BLOCK)


@pytest.mark.parametrize(
    ("words", "case"),
    [
        (r"the KV pool \(0 bytes\) holds no whole block of 1048576 bytes", {"free": 0, "total": 8 * GIB}),
        (r"holds no whole block", {"free": 64 * GIB, "memory_bytes": BLOCK - 1}),
        (r"2 x .* start with apply = in_place", {"free": 64 * GIB, "weights": 5 * GIB, "total": 8 * GIB}),
        (r"1 x .*lower cache\.memory_bytes", {"weights": 5 * GIB, "total": 8 * GIB, "memory_bytes": 4 * GIB, "apply": "in_place"}),
    ],
)
def test_what_cannot_be_is_said_with_numbers(words: str, case: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(**case)
