"""One rank's end of weight updates: a manifest is opened, chunks come from any thread, and a commit flips what they wrote."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ...kernels.weights import Weights
from ...weight_sync.manifest import ChunkError, Manifest
from ...weight_sync.receiver import Receiver
from ..models.config import DecoderConfig
from .weight_target import ParamTarget, inspector, live_digests, manifest_problems, tie_problems


class WeightUpdates:
    """Updates of one rank's weights. `chunk` and `progress` may come from any thread, the rest from the engine's."""

    def __init__(self, cfg: DecoderConfig, weights: Weights) -> None:
        self._cfg, self._weights = cfg, weights
        self._inspect = inspector(weights)
        self._lock = threading.Lock()
        self._open: tuple[Receiver, ParamTarget] | None = None
        self.version = 0

    def open(self, manifest: Manifest, *, mode: str, staged: bool) -> list[str]:
        assert self._open is None, "the engine opens one update at a time"
        if problems := manifest_problems(self._cfg, manifest, mode):
            return problems
        if staged:
            self._weights.reserve_shadow()
        target = ParamTarget(self._cfg, self._weights, staged=staged)
        target.begin(manifest)
        self._open = Receiver(manifest, target, self._inspect), target
        return []

    def chunk(self, sender: int, sequence: int, data: Any) -> bool:
        with self._lock:  # an abort waits for the chunk at hand, so nothing is written once it is over
            if self._open is None:
                raise ChunkError("no update is open")
            return self._open[0].chunk(sender, sequence, data)

    def prepare(self, digests: Mapping[str, int] | None, *, refuse_nonfinite: bool) -> list[str]:
        assert self._open is not None
        receiver = self._open[0]
        return receiver.problems(digests, refuse_nonfinite=refuse_nonfinite) or tie_problems(self._cfg, receiver.digests())

    def commit(self, version: int) -> None:
        assert self._open is not None
        with self._lock:
            self._open[1].commit()
            self._open, self.version = None, version

    def abort(self) -> bool:
        with self._lock:
            touched = self._open is not None and self._open[0].touched
            self._open = None
        return touched

    def progress(self) -> dict[str, Any]:
        open_ = self._open
        if open_ is None:
            return {}
        return {"received_bytes": open_[0].received_bytes, "missing_chunks": len(open_[0].missing())}

    def digests(self) -> dict[str, int]:
        return live_digests(self._cfg, self._weights)
