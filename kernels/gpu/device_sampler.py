"""A step's sampling on the device: logits stay there, and what was drawn comes back in one copy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..sampling_mask import ALL, BITS, bit_words
from ..step import Array
from . import ops
from .arrays import DeviceArrays
from .queue import Queue
from .weights import take


class Lists(NamedTuple):
    """What a step's rows change about their logits, as `DeviceArrays.send_list` gives it."""

    banned: Tensor
    adjust: Tensor
    allowed: Tensor


class DeviceSampler:
    """Launches the sampler over pieces of a step's logits, each behind the last, and reads what came of it.

    Args:
        vocab_limit: ids that can be sampled.
    """

    ROWS = 16
    """a piece begins at a multiple of these, so that its columns lie aligned"""

    def __init__(self, arrays: DeviceArrays, queue: Queue, vocab_limit: int) -> None:
        self._a, self._queue, self._vocab_limit = arrays, queue, vocab_limit
        self._work = torch.empty(0, 0)
        self._mask = torch.empty(0, 0)
        """bits of the ids each row could be drawn from, [rows, words]"""
        self._host_mask: Tensor | None = None
        self._no_ids = torch.zeros(1, 4, dtype=torch.int32, device=queue.device)
        self._lists: Lists | None = None
        self._wants_masks = False

    def reserve(self, rows: int, piece: int, vocab: int) -> None:
        """Room for steps of so many rows in pieces, V logits each: nothing is taken once steps run."""
        device = self._queue.device
        self._work = take(device, piece, -(-vocab // 32) * 32, dtype=torch.float32)
        self._mask = take(device, rows, -(-vocab // 128) * 4, dtype=torch.int32)  # the kernel writes every word of V bits

    def prepare(self) -> None:
        """Send what the step's rows change, within the queue's scope and before anything that takes time."""
        a, R = self._a, self._a.num_rows
        has_allowed = bool((a["allowed_row"][:R] >= 0).any())
        self._wants_masks = bool((a["want"][:R] & 4).any())
        self._lists = None
        if a["ban_offset"][R] or a["adjust_offset"][R] or has_allowed:
            allowed = a.send_list("allowed") if has_allowed else self._no_ids
            self._lists = Lists(a.send_list("banned"), a.send_list("adjust"), allowed)
        if self._wants_masks:
            self._mask[:R].zero_()

    def launch(self, logits: Tensor, begin: int) -> None:
        """Rows from `begin` on, as many as `logits` [R, V] has, within the queue's scope, once the step is prepared."""
        there, end = self._a.on_device, begin + len(logits)
        columns = ops.SamplerColumns(*(there[name][begin:end] for name in ops.SamplerColumns._fields))
        out = ops.SamplerOut(*(there["out_" + name][begin:end] for name in ops.SamplerOut._fields))
        mask = self._mask[begin:end] if self._wants_masks else None
        ops.sample(logits, columns, vocab_limit=self._vocab_limit, changes=self._changes(begin), mask=mask, out=out)

    def _changes(self, begin: int) -> ops.LogitChanges | None:
        """What rows change about their logits; None if no row of the step does."""
        lists, there = self._lists, self._a.on_device
        if lists is None:
            return None
        return ops.LogitChanges(
            ban_offset=there["ban_offset"][begin:],
            banned=lists.banned,
            adjust_offset=there["adjust_offset"][begin:],
            adjust=lists.adjust,
            allowed_row=there["allowed_row"][begin:],
            allowed=lists.allowed,
            work=self._work,
        )

    def fetch(self) -> None:
        """Bring back what was drawn, within the queue's scope."""
        self._a.fetch()
        if self._wants_masks:
            if self._host_mask is None:
                self._host_mask = self._queue.host_buffer(self._mask.nbytes).view(torch.int32).view(self._mask.shape)
            rows = self._a.num_rows
            self._host_mask[:rows].copy_(self._mask[:rows], non_blocking=True)

    def finish(self) -> None:
        """Once the queue has been waited for: the masks as rows of sampling_mask.py."""
        a = self._a
        if not self._wants_masks or not a.num_rows:
            return
        assert self._host_mask is not None
        bits = self._host_mask.numpy()
        for row in (a["want"][: a.num_rows] & 4).nonzero()[0].tolist():
            words = np.zeros(1, np.int32) if a["out_nonfinite"][row] else encoded(bits[row], self._vocab_limit)
            a["out_mask"][row, : len(words)] = words

    def close(self) -> None:
        self._work = self._mask = self._no_ids = torch.empty(0, 0)
        self._lists = self._host_mask = None


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
