"""One rank's end of weight updates: a manifest is opened, chunks come from any thread, and a commit flips what they wrote."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.weights import Weights
from ...weight_sync.boxes import Box
from ...weight_sync.manifest import ChunkError, Manifest, ManifestError, TensorEntry
from ...weight_sync.receiver import Receiver
from ...weight_sync.reshard import received_by
from ...weight_sync.transports.groups import Groups
from ...weight_sync.transports.links import Link, make_link
from ...weight_sync.transports.runs import TakingRun
from ..models.config import DecoderConfig
from .runner_info import ChunkRun
from .weight_target import (
    ParamTarget,
    live_digests,
    live_values,
    lone_heads,
    manifest_problems,
    missing_tensors,
    tie_problems,
    wanted_boxes,
)


@dataclass(slots=True)
class _Open:
    """The update that is open on this rank."""

    id: str
    receiver: Receiver
    target: ParamTarget
    link: Link
    shared_out: frozenset[str]
    """tensors of which only parts come to this rank, so that its digests are parts as well"""
    sealed: bool = False
    """prepared: what was checked is what commits, so nothing more is taken in"""


class _Run:
    """A call for several chunks of a sender: nothing is waited for that is there already."""

    def __init__(self, receiver: Receiver, sender: int, coming: TakingRun) -> None:
        self._receiver, self._sender, self._coming = receiver, sender, coming

    def next(self, sequence: int, patience_s: float) -> Mapping[str, Any] | None:
        bucket = self._receiver.bucket(self._sender, sequence)
        return {} if self._receiver.has(self._sender, sequence) else self._coming.next(bucket, patience_s)

    def taken(self, sequence: int) -> None:
        self._coming.taken(self._receiver.bucket(self._sender, sequence))

    def close(self) -> None:
        self._coming.close()


class WeightUpdates:
    """Updates of one rank's weights. `extend`, `chunk`, `progress` and `digests` may come from any thread, the rest from the engine's."""

    def __init__(
        self, cfg: DecoderConfig, weights: Weights, tp_rank: int = 0, tp_size: int = 1, device: torch.device | None = None
    ) -> None:
        self._cfg, self._weights = cfg, weights
        self._rank, self._size = tp_rank, tp_size
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        """of the live weights, beside the steps"""
        self._closed = False
        self._open: _Open | None = None
        self.groups = Groups(device)
        self.version = 0

    def open(self, update_id: str, manifest: Manifest | None, *, mode: str | None, staged: bool, transport: Any) -> list[str]:
        assert self._open is None, "the engine opens one update at a time"
        first = manifest or Manifest(())
        problems = manifest_problems(self._cfg, first, mode if manifest is not None else "partial")
        if mode == "partial":
            problems += lone_heads(self._cfg, (t.name for t in first.tensors))
        if problems:
            return problems
        target = ParamTarget(self._cfg, self._weights, staged=staged, tp_rank=self._rank, tp_size=self._size)
        reshards = isinstance(transport, Mapping) and transport.get("name") == "reshard"
        receiver = Receiver(received_by(first, self.wanted(), self._rank) if reshards else first, target)
        link = make_link(transport, self.groups, receiver.bucket, self._rank)
        target.cover(first.tensors)
        self._open = _Open(update_id, receiver, target, link, self._shared_out(first) if reshards else frozenset())
        return []

    def extend(self, update_id: str, tensors: Sequence[TensorEntry], layout: Mapping[str, Any]) -> list[tuple[int, int]]:
        open_ = self._opened(update_id)
        grown = open_.receiver.manifest.grown(tensors, layout)
        if problems := manifest_problems(self._cfg, Manifest(tuple(tensors)), "partial"):
            raise ManifestError(problems)
        with self._lock:
            self._check_still(open_)
            open_.target.cover(tensors)
            return open_.receiver.grow(grown)

    def chunk(self, update_id: str, sender: int, sequence: int, where: Mapping[str, Any]) -> bool:
        open_ = self._opened(update_id)
        bucket = open_.receiver.bucket(sender, sequence)
        if "data" not in where and open_.receiver.has(sender, sequence):  # a retry: it is not on its way again
            return False
        data = open_.link.view(bucket, where)  # may block for as long as its transport waits for the sender
        try:
            with self._lock:  # an abort waits for the chunk at hand, so nothing is written once it is over
                self._check_still(open_)
                return open_.receiver.chunk(sender, sequence, data)
        finally:
            data.release()

    def run(self, update_id: str, sender: int, where: Mapping[str, Any]) -> ChunkRun:
        open_ = self._opened(update_id)
        return _Run(open_.receiver, sender, open_.link.run(sender, where))

    def _opened(self, update_id: str) -> _Open:
        open_ = self._open
        if open_ is None or open_.id != update_id:
            raise ChunkError(f"weight update {update_id} is not open")
        return open_

    def _check_still(self, open_: _Open) -> None:
        if self._open is not open_:
            raise ChunkError(f"weight update {open_.id} ended while more of it came in")
        if open_.sealed:
            raise ChunkError(f"weight update {open_.id} is being committed: nothing more is taken in")

    def missing(self) -> list[str]:
        assert self._open is not None
        return missing_tensors(self._cfg, self._open.receiver.manifest)

    def prepare(self, digests: Mapping[str, int] | None, *, refuse_nonfinite: bool) -> list[str]:
        assert self._open is not None
        with self._lock:
            self._open.sealed = not (problems := self._problems(self._open, digests, refuse_nonfinite))
        return problems

    def _problems(self, open_: _Open, digests: Mapping[str, int] | None, refuse_nonfinite: bool) -> list[str]:
        receiver, shared_out = open_.receiver, open_.shared_out
        expected = None if digests is None else {name: value for name, value in digests.items() if name not in shared_out}
        found = {name: value for name, value in receiver.digests().items() if name not in shared_out}
        if shared_out and digests is not None:  # a tied head that the trainer has but nobody here wants
            found |= digests
        problems = receiver.problems(expected, refuse_nonfinite=refuse_nonfinite) or tie_problems(self._cfg, found)
        return problems or lone_heads(self._cfg, (t.name for t in receiver.manifest.tensors))

    def unseal(self) -> None:
        """Go on taking in: another rank could not prepare."""
        if self._open is not None:
            self._open.sealed = False

    def wanted(self) -> list[dict[str, list[Box]]]:
        """What each rank of the engine keeps, by checkpoint name."""
        return [wanted_boxes(self._cfg, rank, self._size) for rank in range(self._size)]

    def _shared_out(self, manifest: Manifest) -> frozenset[str]:
        """Tensors that do not come to this rank whole."""
        mine = self.wanted()[self._rank]
        return frozenset(t.name for t in manifest.tensors if mine.get(t.name) != [Box.whole(t.shape)])

    def shares(self) -> dict[str, int]:
        """Digests of what came of the tensors that are shared out among the ranks: they add up to those of whole tensors."""
        assert self._open is not None
        wanted, mine = self._open.shared_out, self.wanted()[self._rank]
        return {name: value for name, value in self._open.receiver.digests().items() if name in wanted and name in mine}

    def commit(self, version: int) -> None:
        assert self._open is not None
        with self._lock:
            open_, self._open = self._open, None
            open_.target.commit()
            self.version = version
        open_.link.close()

    def abort(self) -> bool:
        open_ = self._open
        if open_ is None:
            return False
        open_.link.close()  # ends a receive that is blocked
        with self._lock:
            self._open = None
        return open_.receiver.touched

    def lost(self) -> str | None:
        open_ = self._open
        return None if open_ is None else open_.link.lost()

    def progress(self) -> dict[str, Any]:
        open_ = self._open
        if open_ is None:
            return {}
        receiver = open_.receiver
        return {
            "bytes": receiver.total_bytes,
            "received_bytes": receiver.received_bytes,
            "missing_chunks": receiver.num_missing,
        }

    def digests(self) -> dict[str, int]:
        with self._reading:
            self._check_not_closed()
            return live_digests(self._cfg, self._weights, self._rank, self._size)

    def values(self, name: str, rows: int) -> dict[str, Any]:
        with self._reading:
            self._check_not_closed()
            return live_values(self._cfg, self._weights, name, rows, self._rank, self._size)

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ValueError("the engine is closing")

    def close(self) -> None:
        """Whoever is at the weights on another thread is waited for, and nobody gets at them any more."""
        self.abort()
        self.groups.close()
        with self._reading:
            self._closed = True
