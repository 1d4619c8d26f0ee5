"""Which tokens of a trainer's batch belong to which sequence, and the work this makes for the attention of a native build.

A batch is B rows of T places. A segment is a run of places in one row that holds one sequence from its first token on; what no
segment covers is padding. So right- and left-padded batches and packed rows are one case.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .native_layout import ITEM_TOKENS
from .spec import K_BLOCK

PAGE_TOKENS = K_BLOCK
"""keys of one page, the layout that every build reads in place"""


class Segments:
    """The sequences of a batch.

    Args:
        rows, length: B and T.
        spans: (row, first place, place after the last) of each sequence, by row and place, without overlaps.
    """

    def __init__(self, rows: int, length: int, spans: Sequence[tuple[int, int, int]]) -> None:
        self.rows, self.length, self.spans = rows, length, tuple(spans)

    @property
    def right_padded(self) -> bool:
        """Whether every row holds one sequence that begins at its first place, so that plain causal attention over rows is right."""
        return len(self.spans) == self.rows and all(begin == 0 and row == i for i, (row, begin, _) in enumerate(self.spans))

    @property
    def full(self) -> bool:
        """Whether there is no padding."""
        return sum(end - begin for _, begin, end in self.spans) == self.rows * self.length

    @cached_property
    def real(self) -> npt.NDArray[np.bool_]:
        """[B, T]: which places hold a token."""
        real = np.zeros((self.rows, self.length), np.bool_)
        for row, begin, end in self.spans:
            real[row, begin:end] = True
        return real

    @cached_property
    def work(self) -> AttentionWork:
        """What a native build's attention needs beside the tensors."""
        return AttentionWork(self)


class AttentionWork:
    """Columns of `Step` (native/program.h) for attention of every sequence over itself, tokens counted over the flattened batch."""

    def __init__(self, segments: Segments) -> None:
        tokens, spans = segments.rows * segments.length, segments.spans
        blocks = [-(-(end - begin) // PAGE_TOKENS) for _, begin, end in spans]
        self.num_blocks = sum(blocks)
        self.num_keys = np.zeros(tokens + 1, np.int32)  # one more: who prefetches looks at the token after the last
        self.first_key = np.zeros(tokens + 1, np.int32)
        self.token_slot = np.zeros(tokens + 1, np.int32)
        self.tables = np.zeros((max(len(spans), 1), max(blocks, default=1)), np.int32)
        runs, items, base = [], [], 0
        for slot, ((row, begin, end), count) in enumerate(zip(spans, blocks, strict=True)):
            first, length = row * segments.length + begin, end - begin
            self.num_keys[first : first + length] = np.arange(1, length + 1)
            self.token_slot[first : first + length] = slot
            self.tables[slot, :count] = np.arange(base, base + count)
            runs += [(first + i, min(PAGE_TOKENS, length - i), base + i // PAGE_TOKENS, 0) for i in range(0, length, PAGE_TOKENS)]
            items += [_item(first, i, min(ITEM_TOKENS, length - i)) for i in range(0, length, ITEM_TOKENS)]
            base += count
        self.runs = np.array(runs, np.int32).reshape(-1, 4)
        self.items = np.array(items, np.int32).reshape(-1, 4)


def _item(first: int, offset: int, count: int) -> tuple[int, int, int, int]:
    """(first token, tokens, leading key blocks they share, most keys): tokens of one sequence share all their keys' blocks."""
    most = offset + count
    return first + offset, count, -(-most // K_BLOCK), most
