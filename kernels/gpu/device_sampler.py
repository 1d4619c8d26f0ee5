"""A step's sampling on the device: logits stay there, and what was drawn comes back in one copy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..sampling_mask import ALL, BITS, bit_words
from ..step import Array
from . import ops
from .arrays import DeviceArrays
from .queue import Queue


class DeviceSampler:
    """Launches the sampler over pieces of a step's logits, each behind the last, and reads what came of it.

    Args:
        vocab_limit: ids that can be sampled.
    """

    ROWS = 16
    """a piece begins at a multiple of these, so that its columns lie aligned"""

    def __init__(self, arrays: DeviceArrays, queue: Queue, vocab_limit: int) -> None:
        self._a, self._queue, self._vocab_limit = arrays, queue, vocab_limit
        self._work = torch.empty(0, 0, device=queue.device)
        self._mask: Tensor | None = None
        self._host_mask = torch.empty(0)
        self._no_ids = torch.zeros(1, 4, dtype=torch.int32, device=queue.device)

    def launch(self, logits: Tensor, begin: int) -> None:
        """Rows from `begin` on, as many as `logits` [R, V] has, within the queue's scope."""
        there, end = self._a.on_device, begin + len(logits)
        columns = ops.SamplerColumns(*(there[name][begin:end] for name in ops.SamplerColumns._fields))
        out = ops.SamplerOut(*(there["out_" + name][begin:end] for name in ops.SamplerOut._fields))
        mask = self._room_for_masks(begin, end)
        ops.sample(logits, columns, vocab_limit=self._vocab_limit, changes=self._changes(logits, begin), mask=mask, out=out)

    def _changes(self, logits: Tensor, begin: int) -> ops.LogitChanges | None:
        """What rows change about their logits; None if no row of the step does."""
        a, R, there = self._a, self._a.num_rows, self._a.on_device
        has_allowed = bool((a["allowed_row"][:R] >= 0).any())
        if not (a["ban_offset"][R] or a["adjust_offset"][R] or has_allowed):
            return None
        rows, width = len(logits), -(-logits.shape[1] // 32) * 32
        if len(self._work) < rows:
            self._work = torch.empty(rows, width, device=self._queue.device)
        return ops.LogitChanges(
            ban_offset=there["ban_offset"][begin:],
            banned=a.list_on_device("banned"),
            adjust_offset=there["adjust_offset"][begin:],
            adjust=a.list_on_device("adjust"),
            allowed_row=there["allowed_row"][begin:],
            allowed=a.list_on_device("allowed") if has_allowed else self._no_ids,
            work=self._work,
        )

    def _room_for_masks(self, begin: int, end: int) -> Tensor | None:
        """Bits of the ids each row of a piece could be drawn from; None if no row of the step wants them."""
        a = self._a
        if not (a["want"][: a.num_rows] & 4).any():
            self._mask = None
            return None
        if begin == 0:
            shape = (a.num_rows, -(-max(self._vocab_limit, 1) // 32 // 4) * 4 + 4)
            self._mask = torch.zeros(shape, dtype=torch.int32, device=self._queue.device)
        assert self._mask is not None
        return self._mask[begin:end]

    def fetch(self) -> None:
        """Bring back what was drawn, within the queue's scope."""
        self._a.fetch()
        if self._mask is not None:
            self._host_mask = self._mask.to("cpu", non_blocking=False)

    def finish(self) -> None:
        """Once the queue has been waited for: the masks as rows of sampling_mask.py."""
        a = self._a
        if self._mask is None or not a.num_rows:
            return
        bits = self._host_mask.numpy()
        for row in (a["want"][: a.num_rows] & 4).nonzero()[0].tolist():
            words = np.zeros(1, np.int32) if a["out_nonfinite"][row] else encoded(bits[row], self._vocab_limit)
            a["out_mask"][row, : len(words)] = words


def encoded(words: Array, vocab_limit: int) -> Array:
    """Bits of ids as a row of sampling_mask.py, in its smallest form."""
    kept = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_limit]
    count, room = int(kept.sum()), bit_words(vocab_limit)
    rest = vocab_limit - count
    if rest == 0:
        return np.array([ALL], np.int32)
    if min(count, rest) > room:
        return np.concatenate([np.array([BITS], np.int32), words[:room]])
    head, ids = (count, kept.nonzero()[0]) if count <= rest else (-rest, (kept == 0).nonzero()[0])
    return np.concatenate([[head], ids]).astype(np.int32)
