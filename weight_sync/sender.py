"""The trainer's end: one call moves all weights into every engine, as one transaction per engine.

Every rank of the trainer calls `sync`. The ranks agree on one manifest; each sends the slices it holds; all of them return the same
report or raise the same error.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .control import EngineLost, HttpControl, UpdateControl, UpdateError
from .digest import combine
from .fill import Fill, fill
from .manifest import Manifest, ManifestError, plan
from .packing import stream
from .ranks import Alone, Ranks, agree, together
from .ranks import DistRanks as DistRanks
from .replicas import LOOK_S, Failure, Flights, Replica, Round
from .sources import SharedSource, WeightSource, share_of
from .transports.base import HttpTransport, Transport
from .transports.broadcast import Broadcast
from .transports.disk import DiskTransport, until_read
from .transports.ipc import SharedBuffers
from .transports.shards import Reshard

TRANSPORTS: dict[str, Callable[[], Transport]] = {"http": HttpTransport, "ipc": SharedBuffers, "collective": Broadcast, "reshard": Reshard}


@dataclass(kw_only=True)
class SyncReport:
    """What one sync did."""

    version: int
    nbytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    """by phase: open (disk: the writing too), send (disk: until all is read), commit, total"""
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """by address: the engine's own words on its commit"""
    failed: dict[str, Failure] = field(default_factory=dict)
    """by address: engines that did not commit, and why"""
    folder: Path | None = None
    """of the transport disk: what was written"""
    digests: dict[str, int] | None = field(default=None, repr=False)
    """by tensor, as this side computed them; None for the transport disk"""


@dataclass(kw_only=True)
class _Last:
    """The last version that engines committed."""

    version: int
    options: dict[str, Any]
    digests: dict[str, int] | None
    folder: Path | None
    """of the transport disk: where it still is"""
    holders: dict[str, tuple[Any, Any]]
    """by address: instance and epoch, which together name an engine's weights"""


class WeightSender:
    """Moves a source's weights into engines.

    Args:
        engines: URLs, or objects with the calls of `UpdateControl`.
        source: this rank's weights: `weights_from(model)`, or another source.
        transport: "ipc" (same host), "collective" or "reshard" (gloo, NCCL), "http", "disk" (with `folder`, see `DiskTransport`),
            or an object.
        bucket_bytes: size of one message; a rank holds two. None takes what suits the transport.
        token: bearer token of the control routes.
        options: passed to every open: mode, apply, kv_policy, deadline_s, refuse_nonfinite, ...
        fill: copies and digests a piece; where the engine's kernels are compiled, `rollout.engine.weight_digest.fast_fill()` is faster.
        folder: where "disk" writes: a folder that engines see under the same name.
    """

    def __init__(
        self,
        engines: str | Sequence[str | UpdateControl],
        source: WeightSource | SharedSource,
        *,
        transport: str | Transport | DiskTransport = "ipc",
        ranks: Ranks | None = None,
        bucket_bytes: int | None = None,
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
        self._token, self._timeout_s = token, timeout_s
        self._replicas: dict[str, Replica] = {}
        for engine in given:
            self.add(engine)
        self._ranks = ranks or Alone()
        self._source = share_of(source, self._ranks)
        self._transport = TRANSPORTS[transport]() if isinstance(transport, str) else transport
        self._bucket_bytes = self._transport.bucket_bytes if bucket_bytes is None else bucket_bytes
        self._fill, self._options = fill, options
        self._last: _Last | None = None

    def close(self) -> None:
        for replica in self._replicas.values():
            replica.close()
        self._transport.close()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def add(self, engine: str | UpdateControl) -> None:
        """One more engine from the next sync on, or at once by `catch_up`. On every rank alike; one that is there is left as it is."""
        control = HttpControl(engine, self._token, self._timeout_s) if isinstance(engine, str) else engine
        if control.address not in self._replicas:
            self._replicas[control.address] = Replica(control)

    def remove(self, address: str) -> None:
        """Send no more to this engine. On every rank alike. KeyError for one that is not there."""
        replica = self._replicas.pop(address.rstrip("/"))
        replica.close()
        self._transport.reset(replica.control)

    def sync(
        self,
        version: int | None = None,
        *,
        required: int | Literal["all"] = 1,
        source: WeightSource | SharedSource | None = None,
        **options: Any,
    ) -> SyncReport:
        """Make the source's weights current on every engine. One that fails, or is down, does not keep the others from committing.

        Args:
            version: None takes the highest that an engine has, plus 1.
            required: so many engines must have taken everything in before one commits; with fewer, none does.
            source: these weights, from now on, instead of those the sender had.
            options: for this update, over those of the sender.

        Raises:
            UpdateError: on every rank alike, if not all engines committed: each with its own words. `.report` is the SyncReport:
                its `engines` committed, its `failed` did not: they keep their old weights (in_place: none, once a byte was written),
                but of one that was lost while it committed, nobody can tell.
        """
        count = len(self._replicas) if required == "all" else required
        if not self._replicas or not 1 <= count <= len(self._replicas):
            raise ValueError(f"required must be all or from 1 to the number of engines, {len(self._replicas)}, got {required!r}")
        if source is not None:
            self._source = share_of(source, self._ranks)
        return self._update(list(self._replicas.values()), version, count, {**self._options, **options})

    def catch_up(self) -> SyncReport:
        """Send the version last committed again, to those engines that do not hold it: they came late, or were restarted.

        Whatever number they claim: what is compared is which commit of which start of the server their weights are.

        Raises:
            UpdateError: as of `sync`; nothing was committed yet, or only in part (`mode`); the source has changed since.
        """
        last = self._last
        if last is None or last.options.get("mode") == "partial":
            raise UpdateError(f"there is nothing to catch up with: {'no' if last is None else 'a partial'} update was committed last")

        def holds(replica: Replica) -> bool:
            found = replica.look()
            return bool(found["valid"]) and (found["instance"], found["epoch"]) == last.holders.get(replica.address)

        replicas = list(self._replicas.values())
        current = Round(self._ranks, replicas, 0).each("connect", holds, lead=True)
        behind = [replica for replica in replicas if not current.get(replica.address)]
        if not behind:
            return SyncReport(version=last.version, nbytes=0)
        return self._update(behind, last.version, 1, {**last.options, "force": True}, last)

    def _update(
        self, replicas: list[Replica], version: int | None, required: int, options: dict[str, Any], again: _Last | None = None
    ) -> SyncReport:
        """One transaction per engine. `again`: what is sent must be what was sent then."""
        now = Round(self._ranks, replicas, required)
        report = SyncReport(version=version or 0, nbytes=0, failed=now.failed)
        trouble: UpdateError | None = None
        reason = "it was interrupted"
        try:
            try:
                self._transact(now, version, options, again, report)
            except UpdateError as error:
                trouble = error
            if trouble is None and now.failed:
                trouble = UpdateError(now.message())
            reason = str(trouble)
        finally:
            self._abandon([r for r in replicas if r.address not in report.engines], now.ids, reason)
            for replica in replicas:
                replica.control.release(now.ids.get(replica.address, ""))
        if self._disk is not None and report.folder is not None and again is None and not report.engines and self._ranks.rank == 0:
            self._disk.remove(report.folder)
        if trouble is not None:
            trouble.report = report
            raise trouble
        return report

    def _transact(
        self, now: Round, version: int | None, options: dict[str, Any], again: _Last | None, report: SyncReport
    ) -> None:
        """From connect to commit. Fills `report`."""
        marks = [time.perf_counter()]
        manifest = self._agree() if self._disk is None else None
        met = now.each("connect", lambda replica: self._meet(replica, options), lead=manifest is None)
        if manifest is not None:
            self._connect(now)
        newest = max(facts["version"] for facts in met.values())
        if version is None:
            version = report.version = 1 + max(newest, self._last.version if self._last is not None else 0)
        if options.get("mode") == "partial":
            options = {"base_version": newest, **options}  # one that was restarted must not build on other weights
        told, report.folder = self._payload(manifest, version, again)
        body = {**told, "version": version, **options}
        now.ids |= now.each("open", lambda replica: _open(replica, body, now.ids), lead=True)
        marks.append(time.perf_counter())
        digests = self._move(now, manifest)
        if again is not None and digests != again.digests:
            raise UpdateError(f"the source has changed since version {version} was committed: sync a new version")
        marks.append(time.perf_counter())
        now.required = 1  # each commits or not by itself from here on
        report.engines = now.each("commit", lambda replica: _commit(replica, now.ids[replica.address], digests), lead=True)
        marks.append(time.perf_counter())
        report.seconds = {name: marks[i + 1] - marks[i] for i, name in enumerate(("open", "send", "commit"))}
        report.seconds["total"] = marks[-1] - marks[0]
        report.digests = digests
        report.nbytes = next(iter(report.engines.values()))["bytes"]
        holders = {address: (met[address].get("instance"), reply.get("epoch")) for address, reply in report.engines.items()}
        if again is not None:
            again.holders |= holders
        else:
            self._last = _Last(version=version, options=options, digests=digests, folder=report.folder, holders=holders)
            if report.folder is not None and self._disk is not None and self._ranks.rank == 0:
                self._disk.tidy(report.folder)

    def _agree(self) -> Manifest:
        """One manifest out of what every rank holds."""
        try:
            return plan(agree(self._ranks, self._source), self._bucket_bytes)
        except ManifestError as error:
            raise UpdateError(f"these weights cannot be sent: {error}") from None

    def _payload(self, manifest: Manifest | None, version: int, again: _Last | None) -> tuple[dict[str, Any], Path | None]:
        """What the open call says of the bytes: where they will come from; the folder that holds them, if one does."""
        if manifest is not None:
            return {"manifest": manifest.to_wire(), "transport": self._offer(manifest)}, None
        assert self._disk is not None
        folder = again.folder if again is not None else self._disk.write(self._source, self._ranks, version)
        assert folder is not None
        return {"transport": self._disk.told(folder)}, folder

    def _offer(self, manifest: Manifest) -> dict[str, Any]:
        """Have buffers on every rank; what the open call says of them."""

        def own() -> dict[str, Any]:
            if not isinstance(self._transport, Reshard):
                self._transport.prepare(max((b.nbytes for b in manifest.buckets_of(self._ranks.rank)), default=1))
            return self._transport.offer()

        return {"name": self._transport.name, "offers": together(self._ranks, "open", own)}

    def _meet(self, replica: Replica, options: dict[str, Any]) -> dict[str, Any]:
        """What the engine holds, once it is sure that it can what this sender will ask."""
        found = replica.look()
        apply = [f"weights.apply.{options['apply']}"] if "apply" in options else []
        transport = f"weights.transport.{(self._disk or self._transport).name}"
        replica.control.require(["weights.updates.hold", transport, *self._transport.needs, *apply])
        return found

    def _connect(self, now: Round) -> None:
        if isinstance(transport := self._transport, Reshard):
            now.agree("connect", lambda failed: transport.arrange(now.live, self._ranks, failed))
        now.each("connect", lambda replica: self._transport.connect(replica.control, self._ranks.rank))

    def _move(self, now: Round, manifest: Manifest | None) -> dict[str, int] | None:
        """Have the bytes reach every engine; digests by name, if they were taken here."""
        if manifest is None:
            now.each("read", lambda replica: until_read(replica.control, now.ids[replica.address]), lead=True)
            return None
        parts = now.agree("send", lambda failed: self._send(manifest, now.live, now.ids, failed))
        return {name: combine([p[name] for p in parts if name in p]) for name in {n for p in parts for n in p}}

    def _send(self, manifest: Manifest, replicas: Sequence[Replica], ids: dict[str, str], failed: dict[str, str]) -> dict[str, int]:
        """Pack and hand over this rank's share to those that have not `failed`; digest parts by name."""
        flights = Flights(replicas, failed, self._transport.num_buffers)
        if self._ranks.rank > 0:  # rank 0 holds what it opened: whichever rank dies, no engine waits for it
            flights.launch(0, lambda replica: replica.submit(replica.control.hold, ids[replica.address]).result)
            flights.land(0)
        if isinstance(self._transport, Reshard):
            return self._transport.stream(manifest, self._source, flights, ids, self._fill)
        rank, everywhere = self._ranks.rank, self._ranks.size > 1
        return stream(manifest, self._source, self._transport, flights, ids, self._fill, rank=rank, drain=everywhere)

    def _abandon(self, replicas: Sequence[Replica], ids: dict[str, str], reason: str) -> None:
        """Let go of what these engines have of an update; one that does not answer drops it by itself, as nobody holds it any more."""
        lead = self._ranks.rank == 0
        told = [r for r in replicas if lead and r.address in ids and not r.is_lost]
        futures = [r.submit(r.control.abort, ids[r.address], f"the sender gave up: {reason}") for r in told]
        for replica in replicas:
            self._transport.reset(replica.control)
        for future in futures:
            future.exception()


def _open(replica: Replica, body: dict[str, Any], ids: dict[str, str]) -> str:
    """Begin an update; its id is noted at once, whatever becomes of the others."""
    ids[replica.address] = str(replica.control.open(body)["id"])
    return ids[replica.address]


def _commit(replica: Replica, update_id: str, digests: dict[str, int] | None) -> dict[str, Any]:
    """Commit; the engine's words. If its reply was lost, ask it what became of the update."""
    try:
        return replica.control.commit(update_id, digests)
    except EngineLost:
        if (found := _committed(replica, update_id)) is None:
            raise
        return found


def _committed(replica: Replica, update_id: str) -> dict[str, Any] | None:
    """An update as its engine has it, if it says within LOOK_S that it is committed."""
    until = time.monotonic() + LOOK_S
    with contextlib.suppress(UpdateError):
        while (found := replica.control.status(update_id))["state"] == "open" and time.monotonic() < until:
            time.sleep(0.1)
        return found if found["state"] == "committed" else None
    return None
