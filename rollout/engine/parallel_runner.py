"""The runner of an engine with several ranks: rank 0 in this process, the others as children, all as one."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...weight_sync.boxes import Box
from ...weight_sync.digest import combine
from ...weight_sync.manifest import Manifest, TensorEntry
from ...weight_sync.transports.groups import Groups
from ..errors import EngineDead, RollsyncError
from .config import EngineConfig
from .devices import open_device
from .model_runner import ModelRunner, Progress, find_model, ignore_progress
from .rank_processes import CALL_TIMEOUT_S, WEIGHTS_TIMEOUT_S, RankProcesses
from .rank_wire import plan_to_wire
from .runner_info import ChunkRun, Runner
from .tensor_parallel import RankLost, TPGroup
from .types import StepPlan, StepResult
from .worker import SharedBytes


def make_runner(config: EngineConfig, *, progress: Progress = ignore_progress, ranks: RankProcesses | None = None) -> Runner:
    """What executes the steps of `config`, with the other ranks if they are started already.

    Raises:
        ConfigError: the model, or a setting for it, cannot be used here.
    """
    return ModelRunner(config, progress=progress) if config.tp == 1 else TensorParallelRunner(config, progress=progress, ranks=ranks)


class TensorParallelRunner:
    """`config.tp` ranks behind the interface of one. Every bit is that of one rank.

    Raises:
        ConfigError: as for ModelRunner, on any rank. EngineDead: a rank ended while it loaded.
    """

    def __init__(
        self, config: EngineConfig, *, progress: Progress = ignore_progress, ranks: RankProcesses | None = None
    ) -> None:
        self._asleep: dict[str, set[int]] = {}
        """ranks whose memory of a tag is away"""
        self._cleanup = contextlib.ExitStack()
        try:
            if ranks is not None:
                self._cleanup.callback(ranks.close)
            model = find_model(config, progress).model
            self._device = open_device(config)
            config = ModelRunner.resolve(config, model, self._device)
            self._start(config, progress, ranks or RankProcesses(config.tp))
        except BaseException:
            self._cleanup.close()
            raise

    def _start(self, config: EngineConfig, progress: Progress, ranks: RankProcesses) -> None:
        self._ranks = ranks
        self._cleanup.callback(ranks.close)
        try:
            ranks.begin(config.to_flat())
            group = self._group = TPGroup(0, config.tp, ranks.store_fd, device=self._device.name)
            self._cleanup.callback(group.close)
            self._own = ModelRunner(config, progress=progress, group=group, device=self._device)
            self._cleanup.callback(self._own.close)
            others = [info for (info,) in ranks.wait_said("ready")]
        except RollsyncError:
            raise
        except Exception:  # it may only show here that another rank failed
            raise ranks.why_lost() or sys.exc_info()[1] from None  # type: ignore[misc]
        own = self._own.info
        self.info = replace(own, **{name: getattr(own, name) + sum(o[name] for o in others) for name in ("weight_bytes", "kv_bytes")})
        self.updates = RankUpdates(self._own, ranks, SharedBytes(ranks.bytes_fd))

    @property
    def rank_pids(self) -> list[int]:
        """Processes of ranks 1 and up."""
        return self._ranks.pids

    def execute(self, plan: StepPlan) -> StepResult:
        """One forward pass of all ranks. Raises EngineDead with the words of a rank that ended or failed."""
        self._ranks.post("step", plan_to_wire(plan))
        try:
            return self._own.execute(plan)
        except RankLost as error:
            raise self._ranks.why_lost() or EngineDead(str(error)) from None

    def check(self) -> None:
        """Raise EngineDead if a rank is gone."""
        self._ranks.check()

    def sleep(self, tag: str, keep: bool) -> int:
        """Give memory to the system on all ranks; bytes freed by all, each as measured there."""
        own = self._own
        try:
            freed: list[int] = self._ranks.call("sleep", [tag, keep], lambda: own.sleep(tag, keep), timeout_s=WEIGHTS_TIMEOUT_S)
        except (OSError, MemoryError):  # one cannot: those that could are as before
            self._ranks.call("wake", [tag], lambda: own.wake(tag), timeout_s=WEIGHTS_TIMEOUT_S)
            raise
        self._asleep[tag] = set(range(self.info.config.tp))
        return sum(freed)

    def wake(self, tag: str) -> None:
        """Have it back on all ranks. If one cannot, only those still without are asked the next time."""
        asleep = self._asleep.get(tag, set())
        for rank in sorted(asleep):
            self._ranks.call_one(rank, "wake", [tag], lambda: self._own.wake(tag), timeout_s=WEIGHTS_TIMEOUT_S)
            asleep.discard(rank)

    def close(self) -> None:
        """End all ranks and free everything."""
        self._cleanup.close()


class RankGroups:
    """A trainer's groups, which every rank joins: rank r of the engine as r more than its first."""

    def __init__(self, own: Groups, ranks: RankProcesses) -> None:
        self._own, self._ranks = own, ranks
        self.num_ranks = ranks.size

    @property
    def backend(self) -> str:
        return self._own.backend

    def bind(self, name: str, host: str, port: int) -> tuple[str, int]:
        self._ranks.call("leave_group", [name], lambda: self._own.leave(name))  # nobody is in an older one any more
        return self._own.bind(name, host, port)

    def join(self, name: str, *, port: int, rank: int, timeout_s: float, **facts: Any) -> None:
        """Raises the first rank's error; then none is in it. One of that name that was bound meanwhile is left alone."""
        own = lambda: self._own.join(name, port=port, rank=rank, timeout_s=timeout_s, **facts)  # noqa: E731
        try:
            self._ranks.call("join_group", [name, rank, timeout_s, {"port": port, **facts}], own, timeout_s=timeout_s + CALL_TIMEOUT_S)
        except Exception:
            self.leave(name, port)
            raise

    def leave(self, name: str, port: int | None = None) -> bool:
        return any(self._ranks.call("leave_group", [name, port], lambda: self._own.leave(name, port)))

    def status(self) -> dict[str, dict[str, Any]]:
        return self._own.status()


class RankUpdates:
    """`UpdatesLike` over all ranks: every rank takes in its own slices, all are prepared, then all switch at the same step boundary."""

    def __init__(self, own: ModelRunner, ranks: RankProcesses, shared: SharedBytes) -> None:
        self._own, self._ranks, self._shared = own.updates, ranks, shared
        self.groups = RankGroups(own.updates.groups, ranks)
        self._lock = threading.Lock()
        """of the shared memory"""
        self._counting = threading.Lock()
        self._coming = 0
        """chunks that some rank has yet to take in"""

    @property
    def version(self) -> int:
        return self._own.version

    def open(self, update_id: str, manifest: Manifest | None, *, mode: str | None, staged: bool, transport: Any) -> list[str]:
        wire = None if manifest is None else manifest.to_wire()
        own = lambda: self._own.open(update_id, manifest, mode=mode, staged=staged, transport=transport)  # noqa: E731
        try:
            found = self._ranks.call("open", [update_id, wire, mode, staged, transport], own)
        except BaseException:
            self.abort()
            raise
        if problems := _joined(found):
            self.abort()  # on those that had none
        return problems

    def extend(self, update_id: str, tensors: Sequence[TensorEntry], layout: Mapping[str, Any]) -> list[tuple[int, int]]:
        wire = Manifest(tuple(tensors)).to_wire()["tensors"]
        own = lambda: self._own.extend(update_id, tensors, layout)  # noqa: E731
        chunks: list[tuple[int, int]] = self._ranks.call("extend", [update_id, wire, dict(layout)], own)[0]
        return chunks

    def chunk(self, update_id: str, sender: int, sequence: int, where: Mapping[str, Any]) -> bool:
        data = where.get("data")
        if not isinstance(data, bytes | bytearray | memoryview):
            return self._chunk(update_id, sender, sequence, where, None)
        raw = memoryview(data).cast("B")
        with self._lock:  # until all have read it
            self._shared.view(raw.nbytes)[:] = raw
            return self._chunk(update_id, sender, sequence, where, raw.nbytes)

    def _chunk(self, update_id: str, sender: int, sequence: int, where: Mapping[str, Any], nbytes: int | None) -> bool:
        own = lambda: self._own.chunk(update_id, sender, sequence, where)  # noqa: E731
        others = {name: value for name, value in where.items() if name != "data"}
        args = [update_id, sender, sequence, others, nbytes]
        with self._counting:
            self._coming += 1
        try:
            return any(self._ranks.call("chunk", args, own, timeout_s=WEIGHTS_TIMEOUT_S))
        finally:
            with self._counting:
                self._coming -= 1

    def run(self, update_id: str, sender: int, where: Mapping[str, Any]) -> ChunkRun:
        return self._own.run(update_id, sender, where)  # what is there for this rank is there for all, or soon

    def missing(self) -> list[str]:
        return self._own.missing()

    def prepare(self, digests: Mapping[str, int] | None, *, refuse_nonfinite: bool) -> list[str]:
        own = lambda: self._own.prepare(digests, refuse_nonfinite=refuse_nonfinite)  # noqa: E731
        given = None if digests is None else dict(digests)
        prepared = False
        try:
            problems = _joined(self._ranks.call("prepare", [given, refuse_nonfinite], own, timeout_s=WEIGHTS_TIMEOUT_S))
            problems = problems or self._shares_that_differ(digests or {})
            prepared = not problems
        finally:
            if not prepared:
                self._ranks.call("unseal", [], self._own.unseal)
        return problems

    def _shares_that_differ(self, digests: Mapping[str, int]) -> list[str]:
        """Of tensors that came to the ranks in shares: those whose shares do not add up to what the sender says."""
        found = _added(self._ranks.call("shares", [], self._own.shares, timeout_s=WEIGHTS_TIMEOUT_S))
        return [
            f"{name}: digest {value:016x} arrived, the sender says {digests[name]:016x}"
            for name, value in found.items()
            if name in digests and digests[name] != value
        ]

    def wanted(self) -> list[dict[str, list[Box]]]:
        return self._own.wanted()

    def commit(self, version: int) -> None:
        self._ranks.call("commit", [version], lambda: self._own.commit(version))

    def abort(self) -> bool:
        return any(self._ranks.call("abort", [], self._own.abort))

    def lost(self) -> str | None:
        return self._own.lost()

    def progress(self) -> dict[str, Any]:
        coming = self._coming  # before what is missing here: a chunk is there once every rank has it
        own = self._own.progress()
        return {**own, "missing_chunks": max(own["missing_chunks"], coming)} if own else own

    def digests(self) -> dict[str, int]:
        return _added(self._ranks.call("digests", [], self._own.digests, timeout_s=WEIGHTS_TIMEOUT_S))

    def values(self, name: str, rows: int) -> dict[str, Any]:
        found = self._ranks.call("values", [name, rows], lambda: self._own.values(name, rows), timeout_s=WEIGHTS_TIMEOUT_S)
        return {"shape": found[0]["shape"], "pieces": [piece for one in found for piece in one["pieces"]]}


def _added(found: list[dict[str, int]]) -> dict[str, int]:
    """Digests by name out of every rank's share of them."""
    parts: dict[str, list[int]] = {}
    for own in found:
        for name, digest in own.items():
            parts.setdefault(name, []).append(digest)
    return {name: combine(values) for name, values in parts.items()}


def _joined(found: list[list[str]]) -> list[str]:
    """Problems of all ranks, those of several once; those of some only with the rank in front."""
    everywhere = [problem for problem in found[0] if all(problem in other for other in found[1:])]
    rest = [f"rank {rank}: {problem}" for rank, own in enumerate(found) for problem in own if problem not in everywhere]
    return everywhere + rest
