"""Sampling on the host from logits that were computed on a device: the CPU's own sampler, with all it can do."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .. import native_lib as nl
from ..reference_program import sample_rows
from ..step import StepArrays
from ..weights import DTYPES
from .queue import Queue


class HostSampler:
    """Draws a step's rows into its `out_` columns.

    Args:
        vocab_limit: ids that can be sampled.
    """

    def __init__(self, arrays: StepArrays, queue: Queue, vocab_limit: int) -> None:
        self._a, self._queue, self._vocab_limit = arrays, queue, vocab_limit
        builds = nl.available_builds()
        self._library = nl.load_build(builds[0]) if builds else None
        self._threads = len(os.sched_getaffinity(0))
        self._step = nl.Step(vocab_limit=vocab_limit)
        self._logits = torch.empty(0, 0)
        for name, column in arrays.columns.items():
            setattr(self._step, name, column.ctypes.data)

    def fetch(self, logits: Tensor, begin: int) -> None:
        """Bring logits of rows from `begin` on, [R, V] on the device, within the queue's scope."""
        rows, vocab = self._a.num_rows, logits.shape[1]
        if len(self._logits) < rows or self._logits.dtype != logits.dtype:
            room = max(rows, min(2 * rows, self._a.limits.rows))
            self._logits = self._queue.host_buffer(room * vocab * logits.dtype.itemsize).view(logits.dtype).view(room, vocab)
        self._logits[begin : begin + len(logits)].copy_(logits, non_blocking=True)

    def sample(self) -> None:
        """All rows of the step, once their logits are here."""
        a, step = self._a, self._step
        if not a.num_rows:
            return
        if self._library is None:
            with torch.inference_mode():
                sample_rows(a, self._logits[: a.num_rows], self._vocab_limit)
            return
        while a.moved:
            name = a.moved.pop()
            setattr(step, name, a[name].ctypes.data)
        step.allowed_words, step.mask_words = a["allowed"].shape[1], a["out_mask"].shape[1]
        step.num_rows = step.piece_rows = a.num_rows
        step.logits, step.ld_logits = self._logits.data_ptr(), self._logits.stride(0)
        dtype = DTYPES[self._logits.dtype]
        op = nl.Op(kind=nl.OP_SAMPLE, dtype=dtype, out_dtype=dtype, w=0, bias=-1, w2=-1, shards=1, n=self._logits.shape[1])
        self._library.run((nl.Op * 1)(op), 0, 1, step, self._threads)
