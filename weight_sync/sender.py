"""The trainer's end: one call moves all weights into every engine, as one transaction per engine.

Every rank of the trainer calls `sync`. The ranks agree on one manifest; each sends the slices it holds; all of them return the same
report or raise the same error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .control import HttpControl, UpdateControl, UpdateError
from .digest import combine
from .fill import Fill, fill
from .manifest import DEFAULT_BUCKET_BYTES, Bucket, Manifest, plan
from .ranks import Alone, Ranks, agree, together
from .ranks import DistRanks as DistRanks
from .receiver import TORCH_DTYPES
from .sources import WeightSource
from .transports.base import HttpTransport, Transport
from .transports.broadcast import Broadcast
from .transports.disk import DiskTransport
from .transports.ipc import SharedBuffers
from .transports.shards import Reshard, Submit

TRANSPORTS: dict[str, Callable[[], Transport]] = {"http": HttpTransport, "ipc": SharedBuffers, "collective": Broadcast, "reshard": Reshard}


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
        transport: "ipc" (same host), "collective" or "reshard" (gloo, NCCL), "http", "disk" (with `folder`, see `DiskTransport`),
            or an object.
        bucket_bytes: size of one message; a rank holds two.
        token: bearer token of the control routes.
        options: passed to every open: mode, apply, kv_policy, deadline_s, refuse_nonfinite, ...
        fill: copies and digests a piece; where the engine's kernels are compiled, `rollout.engine.weight_digest.fast_fill()` is faster.
        folder: where "disk" writes: a folder that engines see under the same name.
    """

    def __init__(
        self,
        engines: str | Sequence[str | UpdateControl],
        source: WeightSource,
        *,
        transport: str | Transport | DiskTransport = "ipc",
        ranks: Ranks | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        token: str | None = None,
        timeout_s: float = 60.0,
        fill: Fill = fill,
        folder: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if (folder is not None) != (transport == "disk"):
            raise ValueError(f"folder must be given with transport disk, and only then; got {folder!r} with {transport!r}")
        self._disk = transport if isinstance(transport, DiskTransport) else DiskTransport(folder) if folder is not None else None
        transport = HttpTransport() if self._disk is not None or isinstance(transport, DiskTransport) else transport  # then idle
        if isinstance(transport, str) and transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, disk, got {transport!r}")
        given = [engines] if isinstance(engines, str) else list(engines)
        self._engines = [HttpControl(e, token, timeout_s) if isinstance(e, str) else e for e in given]
        self._source, self._ranks = source, ranks or Alone()
        self._transport = TRANSPORTS[transport]() if isinstance(transport, str) else transport
        self._bucket_bytes, self._fill, self._options = bucket_bytes, fill, options
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
        if self._disk is not None:
            return self._sync_folder(self._disk, version, {**self._options, **options}, began)
        manifest = self._agree()
        buckets = manifest.buckets_of(self._ranks.rank)
        options = {**self._options, **options}
        if isinstance(self._transport, Reshard):
            self._transport.arrange(self._engines, self._ranks)
        else:
            self._transport.prepare(max((b.nbytes for b in buckets), default=1))
        self._together("connect", lambda: self._each(lambda engine: self._meet(engine, options)))
        offers = self._ranks.gather(self._transport.offer())
        told = {"name": self._transport.name, "offers": offers}
        body = {"manifest": manifest.to_wire(), "version": version, "transport": told, **options}
        ids = self._together("open", lambda: self._open(body), lead=True)
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

    def _sync_folder(self, disk: DiskTransport, version: int | None, options: dict[str, Any], began: float) -> SyncReport:
        """Write once, and have every engine read that."""
        self._together("connect", lambda: self._each(lambda engine: self._meet(engine, options)), lead=True)
        written = disk.write(self._source, self._ranks, version)
        wrote = time.perf_counter()
        body = {"version": version, "transport": disk.told(written), **options}
        ids: dict[str, str] = {}
        try:
            ids = self._together("open", lambda: self._open(body), lead=True)
            opened = time.perf_counter()
            self._together("read", lambda: self._each(lambda engine: _until_read(engine, ids[engine.address])), lead=True)
            read = time.perf_counter()
            replies = self._together("commit", lambda: self._commit(ids, None), lead=True)
        except UpdateError as error:
            if self._ranks.rank == 0:
                self._abandon(ids, str(error))
                disk.remove(written)
            raise
        finally:
            for engine in self._engines:
                engine.release(ids.get(engine.address, ""))
        done = time.perf_counter()
        if self._ranks.rank == 0:
            disk.tidy(written)
        reply = replies[self._engines[0].address]
        seconds = {"write": wrote - began, "open": opened - wrote, "read": read - opened, "commit": done - read, "total": done - began}
        return SyncReport(version=reply["version"], nbytes=reply["bytes"], seconds=seconds, engines=replies)

    def _agree(self) -> Manifest:
        """One manifest out of what every rank holds."""
        return plan(agree(self._ranks, self._source), self._bucket_bytes)

    def _together(self, phase: str, work: Callable[[], Any], lead: bool = False) -> Any:
        return together(self._ranks, phase, work, lead)

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
        engine.require(["weights.updates.hold", f"weights.transport.{(self._disk or self._transport).name}", *apply])
        self._transport.connect(engine, self._ranks.rank)

    def _open(self, body: dict[str, Any]) -> dict[str, str]:
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
        if isinstance(transport := self._transport, Reshard):
            submit: Submit = lambda engine, made, index: self._lanes[engine.address].submit(  # noqa: E731
                transport.send, engine, ids[engine.address], made.buckets[0], index
            )
            return transport.stream(manifest, self._source, self._engines, submit, self._fill)
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
                part = self._fill(target, values, piece.box, tensor.shape)
                parts[tensor.name] = combine([parts.get(tensor.name, 0), part])
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

    def _commit(self, ids: dict[str, str], digests: dict[str, int] | None) -> dict[str, Any]:
        return self._each(lambda engine: engine.commit(ids[engine.address], digests))

    def _abandon(self, ids: dict[str, str], reason: str) -> None:
        """Let go of updates that were opened; an engine that does not answer drops its own at the deadline."""

        def abort(engine: UpdateControl) -> None:
            if engine.address in ids:
                engine.abort(ids[engine.address], f"the sender gave up: {reason}")

        futures = [self._lanes[engine.address].submit(abort, engine) for engine in self._engines]
        for future in futures:
            future.exception()


def _until_read(engine: UpdateControl, update_id: str) -> None:
    """Wait until an engine has read its folder. It ends the update itself if that goes wrong, or at the update's deadline."""
    wait_s = 0.005
    while (status := engine.status(update_id))["state"] == "open" and status.get("missing_chunks", 1):
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.2)
    if status["state"] != "open":
        raise UpdateError(f"{engine.address}: the update was {status['state']}: {status['reason']}")
