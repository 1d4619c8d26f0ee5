"""How large the KV pool gets, by what is free, what there is in all, and what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rollsync import EngineConfig
from rollsync.rollout.engine.config import CacheConfig, make_config
from rollsync.rollout.engine.devices import open_device
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


@pytest.mark.parametrize(
    ("blocks", "case"),
    [
        (1024, {"free": 6 * GIB, "weights": GIB, "memory_fraction": 0.25}),
        (3072, {"free": 6 * GIB, "weights": 0, "memory_fraction": 0.5}),
        (64, {"free": 64 << 20, "memory_fraction": 0.5, "memory_bytes": 64 << 20}),
        (7, {"free": 64 * GIB, "num_blocks": 7, "memory_fraction": 0.5}),
    ],
)
def test_a_fraction_is_of_what_is_free_beside_the_weights(blocks: int, case: dict[str, Any]) -> None:
    assert resolved(**case).cache.num_blocks == blocks


def test_a_gpu_has_no_page_cache_that_would_make_room() -> None:
    facts: dict[str, Any] = {"checkpoint_dtype": "bfloat16", "model_context": 4096, "kv_bytes_per_block": BLOCK, "pool_fraction": 0.9}
    config = EngineConfig(model="m")
    pool = config.resolve(**facts, available_bytes=100 * GIB, weight_bytes=20 * GIB, total_bytes=140 * GIB).cache.memory_bytes
    assert pool == int(60 * GIB * 0.9) // BLOCK * BLOCK
    with pytest.raises(ConfigError, match=r"the KV pool \(0 bytes\) holds no whole block"):
        config.resolve(**facts, available_bytes=100 * GIB, weight_bytes=60 * GIB, total_bytes=140 * GIB)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (r"device must be cpu, cuda or cuda:N, got 'gpu'", {"device": "gpu"}),
        (r"numerics\.kernels = avx2 names a CPU build: leave it out with device = cuda", {"device": "cuda", "kernels": "avx2"}),
        (r"cache\.memory_fraction must be a part of the free memory, in \(0, 1\), got 90", {"memory_fraction": 90}),
        (r"numerics\.threads must be a whole number or left out, got 1\.5", {"threads": 1.5}),
        (r"numerics\.threads must be a whole number or left out, got '9{12}\.\.\.9+'$", {"threads": "9" * 5000}),
        (r"cache\.memory_bytes must be a whole number or left out, got inf", {"memory_bytes": float("inf")}),
        (r"cache\.num_blocks must be a whole number or left out, got True", {"num_blocks": True}),
        (r"^tp must be a whole number, got None", {"tp": None}),
        (r"cache\.prefix_cache must be true or false, got 'no'", {"prefix_cache": "no"}),
        (r"cache\.memory_fraction must be a number or left out, got 'half'", {"memory_fraction": "half"}),
        (r"device must be text or left out, got 3", {"device": 3}),
    ],
)
def test_kinds_and_ranges_are_checked_by_name(words: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config("m", fields)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"device 'cuda:1': torch .* finds no CUDA device here; device = cpu runs on the CPU"):
        open_device(EngineConfig(model="m", device="cuda:1"))
