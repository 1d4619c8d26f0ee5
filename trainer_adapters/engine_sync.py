"""Weights into an engine of this process: each tensor is read where it lies, with no buffer in between."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..rollout.errors import describe
from ..weight_sync.control import UpdateError
from ..weight_sync.manifest import DTYPE_BYTES, bad_dtype
from ..weight_sync.ranks import Ranks, together
from ..weight_sync.receiver import TORCH_DTYPES
from ..weight_sync.sender import SyncReport
from ..weight_sync.sources import TensorMeta, WeightSource

ADDRESS = "engine"
"""what reports call it"""


class EngineUpdate:
    """One update of the engine that this rank has. Ranks commit once all have taken everything in.

    Args:
        control: `engine.control`; nobody else drives the engine meanwhile.
        force: whether the version may go back.
    """

    def __init__(self, control: Any, *, force: bool) -> None:
        self._control, self._force = control, force
        self._id: str | None = None

    def run(self, weights: WeightSource, version: int, ranks: Ranks) -> SyncReport:
        """See `Target.sync`."""
        began = time.perf_counter()
        try:
            told = together(ranks, "send", lambda: (self._send(weights, version, drain=ranks.size > 1), version))
            nbytes = told[0][0]
            if len({version for _, version in told}) > 1:
                raise UpdateError(f"trainer ranks give these weights different versions: {[version for _, version in told]}, by rank")
            sent = time.perf_counter()
            status = together(ranks, "commit", lambda: self._control.commit_update(self._id))[ranks.rank]
        except BaseException as error:
            self._abandon(describe(error))
            raise
        ended = time.perf_counter()
        seconds = {"send": sent - began, "commit": ended - sent, "total": ended - began}
        return SyncReport(version=version, nbytes=nbytes, seconds=seconds, engines={ADDRESS: status})

    def _send(self, weights: WeightSource, version: int, *, drain: bool) -> int:
        """Open the update and take everything in; how many bytes that was. The source is read to its end, as other ranks are in it too."""
        stream = iter(weights)
        try:
            metas = weights.metadata()
            return self._take(metas, stream, version)
        finally:
            if drain:
                for _ in stream:
                    pass

    def _take(self, metas: Sequence[TensorMeta], stream: Iterator[tuple[str, Tensor]], version: int) -> int:
        if wrong := [bad_dtype(m.name, m.dtype) for m in metas if m.dtype not in DTYPE_BYTES]:
            raise UpdateError(f"these weights cannot be sent: {'; '.join(wrong)}")
        self._id = self._control.open_update(version=version, mode="full", force=self._force).id
        tensors = [{"name": m.name, "dtype": m.dtype, "shape": list(m.shape)} for m in metas]
        chunks = self._control.extend_update(self._id, tensors, {"kind": "tensors"})["chunks"]
        nbytes = 0
        for meta, (sender, sequence) in zip(metas, chunks, strict=True):
            name, values = next(stream, (None, None))
            if name != meta.name or values is None or tuple(values.shape) != meta.shape:
                came = "nothing" if values is None else f"{name} {list(values.shape)}"
                raise UpdateError(f"{came} came from the source where it announced {meta.name} {list(meta.shape)}")
            data = _bytes(values, TORCH_DTYPES[meta.dtype])
            nbytes += data.nbytes
            self._control.take_chunk(self._id, sender, sequence, {"data": data})
        return nbytes

    def _abandon(self, reason: str) -> None:
        if self._id is not None and self._control.find_update(self._id).state == "open":
            self._control.abort_update(self._id, f"the trainer gave up: {reason}", "failure")


def _bytes(values: Tensor, dtype: torch.dtype) -> memoryview:
    """The elements of a tensor; a copy only if it has another dtype or device, or strides."""
    flat: Any = values.detach().to("cpu", dtype).contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
