"""KV block accounting: reference counts, copy-on-write, prefix cache. Numbers only; the memory itself is the runner's.

A block is *free* (no owner, nothing remembered), *evictable* (no owner, contents still findable by hash) or *owned* by one or
more block tables. Every operation is O(1) per block, and one that cannot be done leaves everything as it was.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

_DIGEST_BYTES = 16


class BlockManager:
    """Who owns which KV block, and which full blocks can be found again by their contents.

    The key of a cached block chains over all tokens before it and starts from the commit epoch, so a new epoch (new weights)
    makes every older entry unreachable; those blocks age out like any other.
    """

    def __init__(self, num_blocks: int, block_tokens: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.prefix_cache = prefix_cache
        self.epoch = 0
        self._root = b""
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self.set_epoch(0)

    @property
    def num_free(self) -> int:
        """Blocks that an allocation can have: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks findable by hash (of any epoch, until evicted)."""
        return len(self._block_of)

    def set_epoch(self, epoch: int) -> None:
        """Start a new commit epoch; what was cached under another one cannot be hit any more."""
        self.epoch = epoch
        self._root = epoch.to_bytes(8, "little")

    def reset_cache(self) -> int:
        """Forget every cached block, owned ones too (their owners keep them). Returns how many."""
        dropped = len(self._block_of)
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._block_of.clear()
        self._digest_of.clear()
        return dropped

    # Allocation

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one owner each, or None (and nothing changed). Evicts the least recently used if it must."""
        free = self._free
        if count > len(free) + len(self._evictable):
            return None
        refs = self._refs
        blocks = []
        for _ in range(count):
            block = free.pop() if free else self._evict()
            refs[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        return block

    def take(self, hits: list[int], count: int, headroom: int = 0) -> list[int] | None:
        """A block table of shared `hits` and `count` new blocks, leaving `headroom` blocks free; None (nothing changed) if it cannot."""
        refs = self._refs
        revived = sum(1 for block in hits if refs[block] == 0)
        if count + headroom > self.num_free - revived:
            return None
        self.share(hits)
        fresh = self.allocate(count)
        assert fresh is not None, "room was checked"
        return hits + fresh

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each block (owned or evictable)."""
        refs = self._refs
        for block in blocks:
            if refs[block] == 0:
                del self._evictable[block]
            refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One owner less for each block of a table. The tail goes first, so a prefix outlives what follows it."""
        refs = self._refs
        for block in reversed(blocks):
            left = refs[block] - 1
            assert left >= 0, f"block {block} released without an owner"
            refs[block] = left
            if left == 0:
                if block in self._digest_of:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def is_shared(self, block: int) -> bool:
        """Whether a writer must copy it first."""
        return self._refs[block] > 1

    # Prefix cache

    def extend_digests(self, digests: list[bytes], token_ids: list[int], num_blocks: int, salt: bytes = b"") -> None:
        """Append to `digests` the chained keys of the first `num_blocks` full blocks of `token_ids` that it lacks.

        Who has another `salt` (of one fixed length, or none) has other keys.
        """
        size = self.block_tokens
        parent = digests[-1] if digests else self._root + salt
        for i in range(len(digests), num_blocks):
            parent = blake2b(parent + array("I", token_ids[i * size : (i + 1) * size]).tobytes(), digest_size=_DIGEST_BYTES).digest()
            digests.append(parent)

    def match(self, digests: list[bytes], limit_blocks: int) -> list[int]:
        """The longest run of cached blocks for a prefix, at most `limit_blocks`. Takes no ownership."""
        hits = []
        find = self._block_of.get
        for digest in digests[:limit_blocks]:
            block = find(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def register(self, block: int, digest: bytes) -> None:
        """Make an owned, full, computed block findable. The first block with some contents stays the one found."""
        assert self._refs[block] > 0, f"block {block} registered without an owner"
        if self.prefix_cache and digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop the cache entries of owned blocks whose contents are not to be trusted."""
        for block in blocks:
            digest = self._digest_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
                if self._refs[block] == 0:
                    del self._evictable[block]
                    self._free.append(block)

    def check_integrity(self, tables: Iterable[list[int]] | None = None) -> None:
        """Raise AssertionError if a count is off; with all live block `tables`, also if an owner is missing or invented."""
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & evictable, f"free and evictable at once: {free & evictable}"
        idle = {block for block, refs in enumerate(self._refs) if refs == 0}
        assert idle == free | evictable, f"unowned blocks and the free lists differ: {idle ^ (free | evictable)}"
        assert len(self._block_of) == len(self._digest_of), "cache maps differ in size"
        for digest, block in self._block_of.items():
            assert self._digest_of.get(block) == digest, f"cache maps disagree about block {block}"
        assert evictable <= self._digest_of.keys(), "an evictable block has no cache entry"
        assert not free & self._digest_of.keys(), "a free block has a cache entry"
        if tables is not None:
            owners = Counter(block for table in tables for block in table)
            wrong = {b: (refs, owners[b]) for b, refs in enumerate(self._refs) if refs != owners[b]}
            assert not wrong, f"(counted, real) owners differ: {wrong}"
