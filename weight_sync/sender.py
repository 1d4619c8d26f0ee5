"""The trainer's end: one call moves all weights into every engine, as one transaction per engine.

Every rank of the trainer calls `sync`. The ranks agree on one manifest; each sends the slices it holds; all of them return the same
report or raise the same error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .boxes import Box
from .control import HttpControl, UpdateControl, UpdateError
from .digest import box_digest, combine
from .manifest import DEFAULT_BUCKET_BYTES, Bucket, Manifest, TensorEntry, TensorSlice, plan
from .receiver import TORCH_DTYPES
from .sources import TensorMeta, WeightSource
from .transports.base import HttpTransport, Transport
from .transports.broadcast import Broadcast
from .transports.ipc import SharedBuffers

TRANSPORTS: dict[str, Callable[[], Transport]] = {"http": HttpTransport, "ipc": SharedBuffers, "collective": Broadcast}


class Ranks(Protocol):
    """The trainer's ranks, as far as a sender needs them. `torch.distributed` behind `DistRanks`; alone by default."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""


class Alone:
    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


class DistRanks:
    """Ranks of an initialised torch.distributed group; `group` must be able to carry objects (gloo)."""

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self._dist.all_gather_object(values, value, group=self._group)
        return values


def _typed(buffer: memoryview | Tensor, dtype: torch.dtype, start: int, count: int) -> Tensor:
    """`count` elements of a buffer from byte `start` on."""
    if isinstance(buffer, Tensor):
        return buffer[start : start + count * dtype.itemsize].view(dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=start)


@dataclass(kw_only=True)
class SyncReport:
    """What one sync did."""

    version: int
    nbytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    """by phase: open, send, commit, total"""
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """by address: the engine's own words on its commit"""


class WeightSender:
    """Moves a source's weights into engines.

    Args:
        engines: URLs, or objects with the calls of `UpdateControl`.
        source: this rank's weights.
        transport: "ipc" (same host), "collective" (gloo, NCCL), "http", or an object.
        bucket_bytes: size of one message; a rank holds two.
        token: bearer token of the control routes.
        options: passed to every open: mode, apply, kv_policy, deadline_s, refuse_nonfinite, ...
        digest: digest of a box; a faster one than plain torch may be given.
    """

    def __init__(
        self,
        engines: str | Sequence[str | UpdateControl],
        source: WeightSource,
        *,
        transport: str | Transport = "ipc",
        ranks: Ranks | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        token: str | None = None,
        timeout_s: float = 60.0,
        digest: Callable[[Tensor, Box, tuple[int, ...]], int] = box_digest,
        **options: Any,
    ) -> None:
        if isinstance(transport, str) and transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
        given = [engines] if isinstance(engines, str) else list(engines)
        self._engines = [HttpControl(e, token, timeout_s) if isinstance(e, str) else e for e in given]
        self._source, self._ranks = source, ranks or Alone()
        self._transport = TRANSPORTS[transport]() if isinstance(transport, str) else transport
        self._bucket_bytes, self._digest, self._options = bucket_bytes, digest, options
        # One thread per engine: its calls keep their order, and no engine waits for another.
        self._lanes = {e.address: ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollsync-send") for e in self._engines}

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.shutdown()
        self._transport.close()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def sync(self, version: int | None = None, **options: Any) -> SyncReport:
        """Make the source's weights current on every engine.

        Raises:
            UpdateError: on every rank alike; engines that had not committed keep their old weights.
        """
        began = time.perf_counter()
        manifest = self._agree()
        buckets = manifest.buckets_of(self._ranks.rank)
        self._transport.prepare(max((b.nbytes for b in buckets), default=1))
        options = {**self._options, **options}
        self._together("connect", lambda: self._each(lambda engine: self._meet(engine, options)))
        offers = self._ranks.gather(self._transport.offer())
        ids = self._together("open", lambda: self._open(manifest, offers, options, version), lead=True)
        opened = time.perf_counter()
        try:
            parts = self._together("send", lambda: self._send(manifest, buckets, ids))
            sent = time.perf_counter()
            digests = {name: combine([p[name] for p in parts if name in p]) for name in {n for p in parts for n in p}}
            replies = self._together("commit", lambda: self._commit(ids, digests), lead=True)
        except UpdateError as error:
            self._transport.reset()
            if self._ranks.rank == 0:
                self._abandon(ids, str(error))
            raise
        finally:
            for engine in self._engines:
                engine.release(ids[engine.address])
        done = time.perf_counter()
        return SyncReport(
            version=replies[self._engines[0].address]["version"],
            nbytes=manifest.nbytes,
            seconds={"open": opened - began, "send": sent - opened, "commit": done - sent, "total": done - began},
            engines=replies,
        )

    def _agree(self) -> Manifest:
        """One manifest out of what every rank holds."""
        per_rank: list[list[TensorMeta]] = self._ranks.gather(self._source.metadata())
        first = per_rank[0]
        for rank, metas in enumerate(per_rank):
            if [(m.name, m.dtype, m.shape) for m in metas] != [(m.name, m.dtype, m.shape) for m in first]:
                raise UpdateError(f"trainer ranks 0 and {rank} name different tensors: a source must list the same on every rank")
        entries = []
        for i, meta in enumerate(first):
            slices = tuple(TensorSlice(rank, box) for rank, metas in enumerate(per_rank) for box in metas[i].boxes)
            entries.append(TensorEntry(meta.name, meta.dtype, meta.shape, slices))
        return plan(entries, self._bucket_bytes)

    def _together(self, phase: str, work: Callable[[], Any], lead: bool = False) -> Any:
        """Run `work` on every rank (`lead`: on rank 0); all raise if one failed. Every rank's value, or the leader's."""
        outcome: tuple[bool, Any] = (True, None)
        if not lead or self._ranks.rank == 0:
            try:
                outcome = (True, work())
            except Exception as error:  # reported on every rank below
                outcome = (False, f"{error}" if isinstance(error, UpdateError) else f"{type(error).__name__}: {error}")
        outcomes = self._ranks.gather(outcome)
        for rank, (ok, value) in enumerate(outcomes):
            if not ok:
                where = f" on trainer rank {rank}" if self._ranks.size > 1 else ""
                raise UpdateError(f"weight update failed in {phase}{where}: {value}")
        return outcomes[0][1] if lead else [value for _, value in outcomes]

    def _each(self, call: Callable[[UpdateControl], Any]) -> dict[str, Any]:
        """`call` on every engine at once; raises the first error once all have answered."""
        futures = {e.address: self._lanes[e.address].submit(call, e) for e in self._engines}
        errors = [f.exception() for f in futures.values()]
        for error in errors:
            if error is not None:
                raise error
        return {address: f.result() for address, f in futures.items()}

    def _meet(self, engine: UpdateControl, options: dict[str, Any]) -> None:
        """Make sure that the engine can what this sender will ask, and connect to it."""
        apply = [f"weights.apply.{options['apply']}"] if "apply" in options else []
        engine.require(["weights.updates.hold", f"weights.transport.{self._transport.name}", *apply])
        self._transport.connect(engine, self._ranks.rank)

    def _open(self, manifest: Manifest, offers: list[Any], options: dict[str, Any], version: int | None) -> dict[str, str]:
        transport = {"name": self._transport.name, "offers": offers}
        body = {"manifest": manifest.to_wire(), "version": version, "transport": transport, **options}
        opened: dict[str, str] = {}

        def open_one(engine: UpdateControl) -> None:
            opened[engine.address] = engine.open(body)["id"]

        try:
            self._each(open_one)
        except Exception as error:
            self._abandon(opened, str(error))
            raise
        return opened

    def _send(self, manifest: Manifest, buckets: Sequence[Bucket], ids: dict[str, str]) -> dict[str, int]:
        """Pack and hand over this rank's buckets; digest parts by name."""
        if self._ranks.rank > 0:  # rank 0 holds what it opened: whichever rank dies, no engine waits for it
            self._each(lambda engine: engine.hold(ids[engine.address]))
        parts: dict[str, int] = {}
        flying: list[list[Future[None]]] = [[] for _ in range(self._transport.num_buffers)]
        pieces = self._pieces(manifest, buckets)
        for number, bucket in enumerate(buckets):
            index = number % self._transport.num_buffers
            for future in flying[index]:
                future.result()  # the buffer is free again
            buffer = self._transport.buffer(index)
            for piece in bucket.pieces:
                tensor = manifest.tensors[piece.tensor]
                values = next(pieces)
                dtype = TORCH_DTYPES[tensor.dtype]
                target = _typed(buffer, dtype, piece.start, piece.box.elements).view(piece.box.length)
                target.copy_(values)
                parts[tensor.name] = combine([parts.get(tensor.name, 0), self._digest(target, piece.box, tensor.shape)])
            for engine in self._engines:
                self._transport.start(engine, bucket, index)
            flying[index] = [
                self._lanes[engine.address].submit(self._transport.send, engine, ids[engine.address], bucket, index)
                for engine in self._engines
            ]
        for futures in flying:
            for future in futures:
                future.result()
        for _ in pieces:  # a collective source must be drained on every rank
            pass
        return parts

    def _pieces(self, manifest: Manifest, buckets: Sequence[Bucket]) -> Iterator[Tensor]:
        """Values of every piece of this rank's buckets, in order, out of the source's boxes."""
        rank, wanted = self._ranks.rank, [p for b in buckets for p in b.pieces]
        at = 0
        for name, values in self._source:
            while at < len(wanted) and manifest.tensors[wanted[at].tensor].name == name:
                piece = wanted[at]
                mine = (s.box for s in manifest.tensors[piece.tensor].slices if s.sender == rank)
                held = next(box for box in mine if box.intersect(piece.box) is not None)
                yield values[piece.box.within(held).slices()]
                at += 1
                if held.end == piece.box.end:
                    break  # this box is through; the source goes on with the next
        if at < len(wanted):
            raise UpdateError(f"the source ended before {manifest.tensors[wanted[at].tensor].name}")

    def _commit(self, ids: dict[str, str], digests: dict[str, int]) -> dict[str, Any]:
        return self._each(lambda engine: engine.commit(ids[engine.address], digests))

    def _abandon(self, ids: dict[str, str], reason: str) -> None:
        """Let go of updates that were opened; an engine that does not answer drops its own at the deadline."""

        def abort(engine: UpdateControl) -> None:
            if engine.address in ids:
                engine.abort(ids[engine.address], f"the sender gave up: {reason}")

        futures = [self._lanes[engine.address].submit(abort, engine) for engine in self._engines]
        for future in futures:
            future.exception()
