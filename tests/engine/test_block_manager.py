"""KV block accounting by tables and a random walk; integrity checked after every move."""

import random

import pytest
from rollsync.rollout.engine.block_manager import BlockManager


def digests(manager: BlockManager, tokens: list[int]) -> list[bytes]:
    found: list[bytes] = []
    manager.extend_digests(found, tokens, len(tokens) // manager.block_tokens)
    return found


def cached_prefix(manager: BlockManager, tokens: list[int]) -> list[int]:
    """Blocks holding `tokens`, registered; owned by the caller."""
    table = manager.allocate(len(tokens) // manager.block_tokens)
    assert table is not None
    for block, digest in zip(table, digests(manager, tokens), strict=True):
        manager.register(block, digest)
    return table


def test_another_salt_is_another_prefix() -> None:
    manager = BlockManager(8, 4)
    cached_prefix(manager, list(range(8)))
    keys = {}
    for salt in (b"", b"a" * 16, b"b" * 16):
        manager.extend_digests(keys.setdefault(salt, []), list(range(8)), 2, salt)
    assert len({key for found in keys.values() for key in found}) == 6
    assert [len(manager.match(found, 2)) for found in keys.values()] == [2, 0, 0]


@pytest.mark.parametrize(("count", "fits"), [(0, True), (1, True), (8, True), (9, False)])
def test_allocation_is_all_or_nothing(count: int, fits: bool) -> None:
    manager = BlockManager(8, 4)
    table = manager.allocate(count)
    assert (table is not None) == fits
    assert manager.num_free == 8 - (count if fits else 0)
    manager.check_integrity([table or []])


def test_released_prefix_is_found_again_until_evicted() -> None:
    manager = BlockManager(4, 4)
    tokens = list(range(12))
    table = cached_prefix(manager, tokens)
    manager.release(table)
    assert manager.num_free == 4
    assert manager.match(digests(manager, tokens), 3) == table
    assert manager.match(digests(manager, tokens), 2) == table[:2]
    assert manager.match(digests(manager, [*tokens[:4], 99, *tokens[5:]]), 3) == table[:1]
    # Two blocks are wanted: the one never used goes first, then the tail of the prefix.
    other = manager.allocate(2)
    assert other is not None
    assert manager.match(digests(manager, tokens), 3) == table[:2]
    manager.check_integrity([other])


def test_take_shares_hits_and_keeps_headroom() -> None:
    manager = BlockManager(6, 2)
    tokens = [1, 2, 3, 4]
    table = cached_prefix(manager, tokens)
    manager.release(table)
    hits = manager.match(digests(manager, tokens), 2)
    assert manager.take(hits, 4, headroom=1) is None
    manager.check_integrity([])
    first = manager.take(hits, 2, headroom=2)
    assert first is not None and first[:2] == hits
    second = manager.take(hits, 2)
    assert second is not None and manager.is_shared(hits[0]) and not manager.is_shared(second[-1])
    assert manager.take(hits, 1) is None
    manager.check_integrity([first, second])
    manager.release(first)
    manager.release(second)
    assert manager.num_free == 6
    manager.check_integrity([])


def test_new_epoch_hides_old_entries_and_never_collides() -> None:
    manager = BlockManager(8, 4)
    tokens = list(range(8))
    old = digests(manager, tokens)
    manager.release(cached_prefix(manager, tokens))
    manager.set_epoch(1)
    assert manager.match(digests(manager, tokens), 2) == []
    assert not set(old) & set(digests(manager, tokens))
    table = cached_prefix(manager, tokens)
    assert manager.match(digests(manager, tokens), 2) == table
    manager.release(table)
    everything = manager.allocate(8)
    assert everything is not None and manager.num_cached == 0
    manager.check_integrity([everything])


def test_first_block_with_some_contents_stays_the_one_found() -> None:
    manager = BlockManager(4, 2)
    one, two = cached_prefix(manager, [1, 2]), cached_prefix(manager, [1, 2])
    assert manager.match(digests(manager, [1, 2]), 1) == one
    manager.release(two)
    manager.check_integrity([one])
    manager.release(one)
    assert manager.num_cached == 1 and manager.num_free == 4


def test_forgotten_blocks_are_not_found() -> None:
    manager = BlockManager(4, 2)
    table = cached_prefix(manager, [1, 2, 3, 4])
    manager.forget(table[1:])
    assert manager.match(digests(manager, [1, 2, 3, 4]), 2) == table[:1]
    manager.release(table)
    assert manager.reset_cache() == 1
    assert manager.match(digests(manager, [1, 2]), 1) == []
    manager.check_integrity([])


def test_disabled_prefix_cache_finds_nothing() -> None:
    manager = BlockManager(4, 2, prefix_cache=False)
    manager.release(cached_prefix(manager, [1, 2]))
    assert manager.num_cached == 0 and manager.match(digests(manager, [1, 2]), 1) == []


def test_integrity_check_finds_a_lost_and_an_invented_owner() -> None:
    manager = BlockManager(4, 2)
    table = manager.allocate(2)
    assert table is not None
    for wrong in ([], [table, table]):
        with pytest.raises(AssertionError, match="owners differ"):
            manager.check_integrity(wrong)


@pytest.mark.parametrize("seed", range(4))
def test_random_walk(seed: int) -> None:
    rng = random.Random(seed)
    manager = BlockManager(12, 2)
    tables: list[list[int]] = []
    for _ in range(1500):
        move = rng.randrange(6)
        if move <= 1:
            tokens = [rng.randrange(2) for _ in range(2 * rng.randrange(1, 6))]
            keys = digests(manager, tokens)
            hits = manager.match(keys, rng.randrange(len(keys) + 1))
            before = manager.num_free
            table = manager.take(hits, len(keys) - len(hits), headroom=rng.randrange(3))
            if table is None:
                assert manager.num_free == before
            else:
                for block, key in zip(table, keys, strict=True):
                    manager.register(block, key)
                tables.append(table)
        elif move == 2 and tables:
            fork = rng.choice(tables).copy()
            manager.share(fork)
            tables.append(fork)
        elif move <= 4 and tables:
            manager.release(tables.pop(rng.randrange(len(tables))))
        elif rng.random() < 0.1:
            manager.set_epoch(manager.epoch + 1)
        elif rng.random() < 0.1:
            manager.reset_cache()
        elif tables:
            manager.forget(rng.choice(tables))
        manager.check_integrity(tables)
    for table in tables:
        manager.release(table)
    assert manager.num_free == 12
