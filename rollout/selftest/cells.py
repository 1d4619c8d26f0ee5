"""The cells of the guarantee: every combination of conditions under which a sample may come about, and of ways to compute it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

PATHS = ("sampled", "re-prefilled", "trainer", "checkpointed")
"""sampled by the engine; most of the output fed in again instead; computed by a stock Hugging Face model under parity; likewise, with
gradient checkpointing and a backward pass"""
ENGINE_PATHS = PATHS[:2]
TPS = (1, 2, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One combination. The defaults are the baseline's."""

    path: str = "sampled"
    cached: bool = False
    preempted: bool = False
    batch: bool = False
    """a trainer's rows too: one by one, or padded (on the right where prompts are whole, on the left where they are chunked)"""
    chunked: bool = False
    synced: bool = False
    """the engine got its weights by an update"""
    tp: int = 1

    @property
    def num_blocks(self) -> int:
        """A pool that two to four requests outgrow, or one that holds all."""
        if not self.preempted:
            return 64
        return 10 if self.cached and self.path == "re-prefilled" else 9

    @property
    def engine(self) -> tuple[int, bool, bool, int]:
        """What an engine has to be opened with: cells that agree in it can share one."""
        return self.tp, self.chunked, self.cached, self.num_blocks

    def __str__(self) -> str:
        flags = [name for name in _FLAGS if getattr(self, name)]
        return ", ".join([self.path] * (self.path != "sampled") + flags + [f"tp {self.tp}"] * (self.tp > 1)) or "plain"


_FLAGS = ("cached", "preempted", "batch", "chunked", "synced")


def cells(paths: Sequence[str] = ENGINE_PATHS, synced: Sequence[bool] = (False,), tps: Sequence[int] = (1,)) -> Iterator[Cell]:
    """The product; by default of what one engine can tell."""
    flag = (False, True)
    for path, cached, preempted, batch, chunked, after, tp in product(paths, flag, flag, flag, flag, synced, tps):
        yield Cell(path=path, cached=cached, preempted=preempted, batch=batch, chunked=chunked, synced=after, tp=tp)


def pairwise(dtypes: Sequence[str], tps: Sequence[int] = TPS) -> dict[str, list[Cell]]:
    """Cells by dtype in which every two conditions meet in every combination, over few engines.

    Engines are chosen greedily until any two of (dtype, tp, cached, preempted, chunked) have met; each then runs all of its cells.
    """
    keys: list[dict[str, Any]] = [
        {"dtype": dtype, "tp": tp, "cached": cached, "preempted": preempted, "chunked": chunked}
        for dtype, tp, cached, preempted, chunked in product(dtypes, tps, *[(False, True)] * 3)
    ]
    open_pairs = {pair for key in keys for pair in _pairs(key)}
    chosen: dict[str, list[Cell]] = {dtype: [] for dtype in dtypes}
    while open_pairs:
        key = max(keys, key=lambda key: len(open_pairs & _pairs(key)))
        open_pairs -= _pairs(key)
        options = {k: v for k, v in key.items() if k != "dtype"}
        chosen[key["dtype"]] += [
            Cell(path=path, batch=batch, synced=synced, **options)
            for path, batch, synced in product(PATHS, (False, True), (False, True))
        ]
    return chosen


def _pairs(key: dict[str, Any]) -> set[Any]:
    return set(combinations(sorted(key.items()), 2))


def by_engine(cells: Iterable[Cell]) -> dict[tuple[int, bool, bool, int], list[Cell]]:
    groups: dict[tuple[int, bool, bool, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.engine, []).append(cell)
    return groups
