"""The arrays of one step, allocated once: what a batch writes, and a program (native or reference) reads.

T tokens fed, R logits rows. Names are those of `struct Step` in native/program.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .sampling_mask import bit_words, row_words

Array = npt.NDArray[Any]

TOP_MAX = 20
"""likeliest ids a row can report"""
ADJUST = np.dtype([("id", np.int32), ("bias", np.float32), ("factor", np.float32), ("subtract", np.float32)])
"""what a request changes about the logit of one id (docs/numerics.md)"""
RAW_ADJUST = np.dtype((np.void, ADJUST.itemsize))
"""the same as bare bytes, which numpy copies many times faster than a record"""


def allowed_words(ids: Sequence[int] | Array) -> Array:
    """Bits of some ids, [max id // 32 + 1] uint32: bit i % 32 of word i // 32."""
    bits = np.zeros((int(np.max(ids)) // 32 + 1) * 32, np.uint8)
    bits[np.asarray(ids)] = 1
    words: Array = np.packbits(bits, bitorder="little").view(np.uint32)
    return words


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """The largest step."""

    tokens: int
    rows: int
    slots: int
    table_blocks: int
    """blocks of the longest sequence"""
    banned: int
    """banned ids over all rows"""
    vocab: int = 0
    """ids that can be drawn; only masks need it"""


class StepArrays:
    """Preallocated columns; only the first `num_…` entries count."""

    COLUMNS = (
        ("ids", "T", np.int32),
        ("positions", "T", np.int32),
        ("num_keys", "T", np.int32),  # keys a token sees
        ("first_key", "T", np.int32),
        ("token_slot", "T", np.int32),  # row of `tables`
        ("hidden_row", "R", np.int32),  # token whose hidden state a logits row reads
        ("temperature", "R", np.float64),
        ("top_p", "R", np.float64),
        ("min_p", "R", np.float32),
        ("top_k", "R", np.int64),
        ("seed", "R", np.uint64),
        ("sample_index", "R", np.uint32),
        ("row_position", "R", np.uint32),
        ("forced", "R", np.int64),
        ("want", "R", np.uint8),  # 1 model logprob, 2 entropy, 4 mask
        ("top_n", "R", np.uint8),  # likeliest ids to report
        ("allowed_row", "R", np.int32),  # row of `allowed`; -1 allows all ids
        ("out_token", "R", np.int64),
        ("out_logprob", "R", np.float32),
        ("out_temperature_logprob", "R", np.float32),
        ("out_model_logprob", "R", np.float32),
        ("out_entropy", "R", np.float32),
        ("out_nonfinite", "R", np.uint8),
    )

    grouped = True
    """whether `runs` and `items` count, and tokens that share pages stand side by side"""

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self.num_tokens = self.num_rows = self.num_runs = self.num_items = self.num_copies = 0
        self.columns: dict[str, Array] = {
            name: np.zeros(limits.tokens if axis == "T" else limits.rows, dtype) for name, axis, dtype in self.COLUMNS
        }
        self.columns["runs"] = np.zeros((limits.tokens, 4), np.int32)  # first token, tokens, block, offset
        self.columns["items"] = np.zeros((limits.tokens, 4), np.int32)  # first token, tokens, shared key blocks, most keys
        self.columns["tables"] = np.zeros((limits.slots, limits.table_blocks), np.int32)
        self.columns["copies"] = np.zeros((max(limits.slots, 1), 2), np.int32)
        self.columns["ban_offset"] = np.zeros(limits.rows + 1, np.int32)
        self.columns["banned"] = np.zeros(max(limits.banned, 1), np.int32)
        self.columns["adjust_offset"] = np.zeros(limits.rows + 1, np.int32)
        self.columns["adjust"] = np.zeros(1, ADJUST)
        self.columns["allowed"] = np.zeros((max(limits.slots, 1), 0), np.uint32)  # bits of the ids each slot allows
        for name, dtype in (("out_top_id", np.int32), ("out_top_logprob", np.float32)):
            self.columns[name] = np.zeros((limits.rows, TOP_MAX), dtype)
        self.columns["out_mask"] = np.zeros((limits.rows, 0), np.int32)  # as sampling_mask.py has a row
        self.columns["allowed_row"][:] = -1
        self.tables_changed = True
        """whether a block table was written since a program last looked"""
        self.allowed_changed = True
        """the same of `allowed`"""
        self.moved: list[str] = []
        """columns that got new memory since a program last looked"""

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def put_adjust(self, start: int, entries: Array) -> int:
        """Write a row's adjustments behind those of the rows before it, which end at `start`. Returns where they end."""
        old, end = self["adjust"], start + len(entries)
        if end > len(old):
            self.columns["adjust"] = np.zeros(end * 5 // 4, ADJUST)
            self["adjust"][:start] = old[:start]
            self.moved.append("adjust")
        self["adjust"].view(RAW_ADJUST)[start:end] = entries.view(RAW_ADJUST)
        return end

    def reserve_allowed(self, words: int) -> None:
        """Make room for `words` * 32 allowed ids per slot; nothing of it is spent before somebody asks."""
        old = self["allowed"]
        if words > old.shape[1]:
            self.columns["allowed"] = np.zeros((old.shape[0], words), np.uint32)
            self.columns["allowed"][:, : old.shape[1]] = old
            self.allowed_changed = True
            self.moved.append("allowed")

    def reserve_masks(self) -> None:
        """Make room for the rows' masks; nothing of it is spent before a row asks, and then no more than its mask takes."""
        words = 1 + bit_words(self.limits.vocab)
        if words > self["out_mask"].shape[1]:
            self.columns["out_mask"] = np.zeros((self.limits.rows, words), np.int32)
            self.moved.append("out_mask")

    def masks(self) -> list[bytes]:
        """The words of each row's mask, none of a row that does not report it; an empty list if no row does."""
        wanted = self["want"][: self.num_rows] & 4
        if not wanted.any():
            return []
        rows, vocab = self["out_mask"].astype("<i4", copy=False), self.limits.vocab
        heads = rows[: self.num_rows, 0].tolist()
        return [
            rows[r, : 1 + row_words(head, vocab)].tobytes() if want else b""
            for r, (want, head) in enumerate(zip(wanted.tolist(), heads, strict=True))
        ]

    def adjust_of(self, row: int) -> list[tuple[int, float, float, float]]:
        """(id, bias, factor, subtract) of a logits row's changed logits."""
        start, end = self["adjust_offset"][row : row + 2].tolist()
        entries: list[tuple[int, float, float, float]] = self["adjust"][start:end].tolist()
        return entries

    def allowed_of(self, row: int) -> list[int] | None:
        """Ids a logits row allows; None for all."""
        at = int(self["allowed_row"][row])
        if at < 0:
            return None
        ids: list[int] = np.unpackbits(self["allowed"][at].view(np.uint8), bitorder="little").nonzero()[0].tolist()
        return ids

    def banned_of(self, row: int) -> list[int]:
        """Banned ids of a logits row."""
        start, end = self["ban_offset"][row : row + 2].tolist()
        ids: list[int] = self["banned"][start:end].tolist()
        return ids
