"""Rows, pages and pieces of attention work as the native ops read them, for tensors that come from outside an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch
from torch import Tensor

ITEM_TOKENS = 16
"""tokens of a sequence walked together, unless a caller says otherwise"""


def round_up(count: int, multiple: int) -> int:
    """The least multiple that is not below `count`."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLinear:
    """A linear layer in the layout of one native build's kernels."""

    data: Tensor
    bias: Tensor | None
    """float32, padded to whole blocks of outputs"""
    n: int
    k: int
    shards: int
    """partial sums over K taken, after `effective_shards`"""
    gate_up: bool


class Panels:
    """Rows as the input of a linear (native/layout.h)."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype) -> None:
        self.num_rows, self.width = num_rows, width
        self.tensor = torch.zeros(round_up(num_rows, 32), round_up(width, 32), dtype=dtype)

    def rows(self) -> Tensor:
        tensor = self.tensor
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(-1, tensor.shape[1] // 32, 16, 32).transpose(1, 2).reshape(tensor.shape)
        return tensor[: self.num_rows, : self.width].contiguous()


class Pages:
    """Where contiguous key rows go: `shared_tokens` leading keys of every sequence, then each sequence's own keys."""

    def __init__(self, shared_tokens: int, lengths: Sequence[int], block_tokens: int) -> None:
        counts = [shared_tokens // block_tokens, *(-(-length // block_tokens) for length in lengths)]
        ends = list(accumulate(counts))
        self.num_blocks = ends[-1]
        ids = np.random.default_rng(0).permutation(self.num_blocks)  # no result may hang on their order
        parts = np.split(ids, ends[:-1])
        self.tables = np.zeros((len(lengths), max(counts[0] + max(counts[1:]), 1)), np.int32)
        for row, part in zip(self.tables, parts[1:], strict=True):
            row[: counts[0] + len(part)] = [*parts[0], *part]
        unit, runs, row0 = min(32, block_tokens), [], 0
        for blocks, length in zip(parts, [shared_tokens, *lengths], strict=True):
            runs += [(row0 + i, min(unit, length - i), blocks[i // block_tokens], i % block_tokens) for i in range(0, length, unit)]
            row0 += length
        self.runs = np.array(runs, np.int32).reshape(-1, 4)


def attention_items(
    sequences: list[int], num_keys: list[int], shared_tokens: int, counts: Sequence[int] | None
) -> list[tuple[int, int, int, int]]:
    """(first token, tokens, leading key blocks they share, most keys) of each piece of attention work."""
    if counts is None:
        lengths = [len(list(group)) for _, group in groupby(sequences)]
        counts = [min(ITEM_TOKENS, length - i) for length in lengths for i in range(0, length, ITEM_TOKENS)]
    items = []
    for a, b in pairwise(accumulate(counts, initial=0)):
        most = max(num_keys[a:b])
        shared = -(-most // 32) if len(set(sequences[a:b])) == 1 else min(shared_tokens, most) // 32
        items.append((a, b - a, shared, most))
    return items
