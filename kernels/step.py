"""The arrays of one step, allocated once: what a batch writes, and a program (native or reference) reads.

T tokens fed, R logits rows. Names are those of `struct Step` in native/program.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


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
        ("want", "R", np.uint8),  # 1 model logprob, 2 entropy
        ("out_token", "R", np.int64),
        ("out_logprob", "R", np.float32),
        ("out_temperature_logprob", "R", np.float32),
        ("out_model_logprob", "R", np.float32),
        ("out_entropy", "R", np.float32),
        ("out_nonfinite", "R", np.uint8),
    )

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

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def banned_of(self, row: int) -> list[int]:
        """Banned ids of a logits row."""
        start, end = self["ban_offset"][row : row + 2].tolist()
        ids: list[int] = self["banned"][start:end].tolist()
        return ids
