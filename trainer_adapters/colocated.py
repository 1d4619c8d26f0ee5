"""An engine inside the trainer: it has memory while it generates and gives it back while the trainer trains.

    engine = ColocatedEngine(model)  # plain, DDP, FSDP2, ...: on every rank
    for step in range(steps):
        with engine.generating(version=step):  # takes memory, and the model's weights as they are now
            outputs = engine.generate(prompts, SamplingParams(n=8, max_tokens=64, seed=step))
        ...  # a training step: the engine holds neither weights nor KV

Every rank has an engine of the whole model and serves its own rows.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..rollout.engine.engine import Engine
from ..rollout.engine.generate import RolloutOutput
from ..rollout.engine.host_memory import resident_bytes
from ..rollout.engine.params import SamplingParams
from ..rollout.errors import IllegalState, describe
from ..weight_sync.ranks import Ranks
from ..weight_sync.sender import SyncReport
from ..weight_sync.sources import WeightSource, weights_from
from .colocated_parts import PhaseReport, aside, make_engine, model_reader
from .engine_sync import EngineUpdate
from .errors import TargetError
from .lockstep import LEAVING, Lockstep, PatientRanks, ranks_here
from .rows import check_rows
from .sharing import share as share_weights
from .targets import EngineTarget, Facts

BETWEEN = ("discard", "keep")
TAGS = ("weights", "kv_cache")


class ColocatedEngine:
    """An engine of this process's own for a model that trains here. It takes its configuration from the model; no checkpoint is read.

    With several ranks, making it, entering and leaving a phase, and `generate` are collectives: all ranks call them in the same
    order, each with its own prompts (none is fine), and what fails on one raises on all. Generation and syncs leave the trainer's random
    state, gradient mode, default dtype, autocast, threads and the model's mode as they are.

    Args:
        trained: the model, as the trainer calls it (plain, DDP, FSDP, compiled, LoRA, ...), an Accelerator that has prepared one, a
            Trainer of transformers or TRL, or a function that gives the model at each sync, for wrappers that come and go.
        dtype: bfloat16 or float32; None: what the model computes in, by the Accelerator, FSDP2's policy or its parameters.
        tokenizer: for texts and stop strings, and so that ids it does not know are never drawn: a transformers tokenizer, or the name of a
            folder, .gguf file or hub id. Ids alone need none.
        between: what becomes of the weights while the trainer trains: "discard" gives their memory back, "keep" keeps it, so that a phase
            may begin without a sync.
        share: have the model's parameters lie where the engine reads them, as far as its layout allows (see `sharing.share`): they are then
            never copied, and never given back. For a model that stands whole in this process, plain or in DDP.
        timeout_s: longest wait for the other ranks, so at least as long as the slowest rank's generation takes.
        options: of the engine, e.g. memory_bytes (of the KV pool), max_model_len, max_num_seqs, threads, k_shards. Ranks of one host share
            its cores, and the default pool.

    Raises:
        TypeError, ValueError: no such model, or its dtype. ConfigError: an option, or the model is none we compute. TargetError: on all
            ranks, if one of several fails.
    """

    def __init__(
        self, trained: Any, *, dtype: str | None = None, tokenizer: Any = None, between: str = "discard", share: bool = False,
        timeout_s: float = 1800.0, **options: Any,
    ) -> None:  # fmt: skip
        if between not in BETWEEN:
            raise ValueError(f"between must be {' or '.join(BETWEEN)}, got {between!r}")
        if share and between == "keep":
            raise ValueError("share goes with between=\"discard\": weights that train in place are not those of the last sync")
        self._model, self._between = model_reader(trained), between
        self._ranks: Ranks = ranks_here(timeout_s)
        self._lockstep = Lockstep(self._ranks)
        self.awake = self._closed = False
        self._synced = False
        self.begin_report()
        self.version: int | None = None
        """of the weights that the engine holds; None while it holds none"""
        self.last_phase: PhaseReport | None = None
        """of the phase that ended last"""

        made: list[Engine] = []
        try:
            hosts = self._ranks.gather(socket.gethostname())
            sharing = hosts.count(hosts[self._ranks.rank])
            with aside():
                self._lockstep.together("making the engine", lambda: made.append(make_engine(trained, dtype, tokenizer, sharing, options)))
            (self.engine,) = made
            self.shared_bytes = 0
            """of weights that lie in one place for the trainer and the engine"""
            if share:
                self.shared_bytes = self._lockstep.together("sharing weights", lambda: share_weights(self._model(), self.engine))
            self._lockstep.together("giving memory back", self.sleep)
        except BaseException:
            for engine in made:  # this rank's; it may be another's that failed
                engine.close()
            self._leave()
            raise

    def __enter__(self) -> ColocatedEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def info(self) -> Any:
        """Of the engine: vocab_size, max_model_len, dtype, fingerprint, ..."""
        return self.engine.info

    def close(self) -> None:
        """Free everything. Twice is fine; waits for nobody."""
        if not self._closed:
            self._closed, self.awake, self.version = True, False, None
            self.engine.close()
            self._leave()

    def _leave(self) -> None:
        if isinstance(self._ranks, PatientRanks):
            self._ranks.close()

    @contextlib.contextmanager
    def generating(self, version: int | None = None, *, sync: bool = True) -> Iterator[ColocatedEngine]:
        """A phase of generation: memory comes, then the model's weights; at its end memory goes. `last_phase` then says what it took.

        Args:
            version: of the model's weights, e.g. the trainer's step; None: the last one plus 1. Not below the last one, alike on all ranks.
            sync: False samples from the weights of the last sync (`between="keep"`).

        Raises:
            UpdateError, TargetError, IllegalState: on every rank, whichever failed; the engine sleeps, and a next phase may be tried.
        """
        self.begin(version, sync=sync)
        trouble: BaseException | None = None
        try:
            yield self
        except BaseException as error:
            trouble = error
            raise
        finally:
            self.end(trouble)

    def begin(self, version: int | None = None, *, sync: bool = True) -> None:
        """What entering `generating` does."""
        if self._closed or self.awake:
            raise IllegalState("the engine is closed" if self._closed else "a phase of generation is on already: end it first")
        self._lockstep.begin()
        self.begin_report()
        following = self._agreed_version(version)
        if sync:
            weights = self._lockstep.together("reading the model", self._weights)
            self.sync_from(weights, following, self._ranks)
            return
        try:
            self._lockstep.together("waking up", lambda: self.wake_held(version))
        except BaseException as error:
            if self.awake:  # another rank is not
                self._sleep_after(error)
            raise

    def _agreed_version(self, version: int | None) -> int:
        """Of the phase's weights, one for all ranks; a commit that failed on one of them may have left engines at different ones.

        Raises:
            TargetError: on every rank: they were given different versions.
        """
        following = self.engine.control.lifecycle.version + 1 if self._synced else 1
        told = self._lockstep.meet("the start of the phase", value=(version, following))
        if any(given != version for given, _ in told):
            shown = ", ".join(f"rank {rank} {given}" for rank, (given, _) in enumerate(told))
            raise TargetError([f"the trainer's ranks begin this phase with different versions ({shown}): all must give the same one"])
        return max(last for _, last in told) if version is None else version

    def _weights(self) -> WeightSource:
        return weights_from(self._model(), dtype=getattr(torch, self.info.dtype), ranks=self._ranks)

    def wake_held(self, version: int | None = None) -> None:
        """Be awake with the weights that are there. IllegalState: there are none, or they are of another version."""
        if self.version is None or version not in (None, self.version):
            held = "no weights: begin with sync=True" if self.version is None else f"version {self.version}, not {version}"
            raise IllegalState(f"a phase without a sync samples from the weights that are there, and the engine holds {held}")
        with self.timed("wake"):
            self.engine.control.wake()
        self.awake, self._report.version = True, self.version

    def sync_from(self, weights: WeightSource, version: int, ranks: Ranks, *, force: bool = False) -> SyncReport:
        """Take weights in, and be awake; asleep if that fails. With `force` the version may go back.

        The KV pool comes once whatever it took to gather them is gone.
        """
        try:
            with aside():
                self._wake("weights")
                self.version = None
                with self.timed("sync"):
                    report = EngineUpdate(self.engine.control, force=force or not self._synced).run(weights, version, ranks)
                self._report.rss_bytes["synced"] = resident_bytes()
                self._wake("kv_cache")
        except BaseException as error:
            self._sleep_after(error)
            raise
        self.awake = self._synced = True
        self.version = self._report.version = version
        self._report.synced_bytes = report.nbytes - self.shared_bytes
        return report

    def _wake(self, tag: str) -> None:
        with self.timed("wake"):
            self._lockstep.together("waking up", lambda: self.engine.control.wake([tag]))

    def generate(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None = None, *, include: Sequence[str] = ()
    ) -> list[RolloutOutput]:
        """Sample for this rank's prompts, as `Engine.generate` does, and check every row before anybody trains on it.

        Raises:
            TargetError: on every rank: a row failed, or a rank did. Alone, a prompt that is refused is a BadRequest.
            IllegalState: no phase of generation is on.
        """
        if not self.awake:
            raise IllegalState("no phase of generation is on: use `with engine.generating(): ...`")
        with aside(), self.timed("generate"):
            return self._lockstep.together("generate", lambda: self._generate(prompts, params, include))

    def _generate(self, prompts: Sequence[Any], params: Any, include: Sequence[str]) -> list[RolloutOutput]:
        outputs = self.engine.generate(prompts, params, include=tuple(include)) if len(prompts) else []
        samples = [sample for output in outputs for sample in output.samples]
        check_rows(samples, len(samples), self.info.vocab_size, version=self.version, allow_empty=True)
        self.count(samples)
        return outputs

    def count(self, samples: Sequence[Any]) -> None:
        self._report.num_samples += len(samples)
        self._report.num_tokens += sum(len(sample.token_ids) for sample in samples)

    def end(self, trouble: BaseException | None = None) -> None:
        """What leaving `generating` does. Give `trouble`, if an error ends the phase: the other ranks raise it too."""
        if not self.awake:
            return
        if trouble is None:
            self._lockstep.together(LEAVING, self.sleep)
            return
        self._sleep_after(trouble)
        if isinstance(trouble, Exception):  # an interrupt waits for nobody
            with contextlib.suppress(Exception):  # `trouble` itself goes on
                self._lockstep.meet(LEAVING, trouble)

    def sleep(self) -> None:
        """Give memory back. Requests that an error has left behind go too. Even if that fails the phase is over."""
        was_awake, self.awake = self.awake, False
        engine, report = self.engine, self._report
        report.rss_bytes["generated"] = resident_bytes()
        tags = TAGS if self._between == "discard" or engine.control.lifecycle.invalid is not None else TAGS[1:]
        if "weights" in tags:
            self.version = None
        with self.timed("sleep"):
            engine.abort(all=True, reason="the phase of generation ended")
            engine.poll()
            report.freed_bytes = engine.control.sleep(tags, weights="discard")["freed_bytes"]
        report.rss_bytes["after"] = resident_bytes()
        report.seconds["total"] = time.perf_counter() - self._began
        if was_awake:
            self.last_phase = report
        self.begin_report()

    def _sleep_after(self, trouble: BaseException) -> None:
        """Sleep because of `trouble`, which goes on: an error in that is a note on it."""
        try:
            self.sleep()
        except Exception as error:
            trouble.add_note(f"giving memory back then failed as well: {describe(error)}")

    def begin_report(self) -> None:
        """What is measured from now on belongs to the next phase."""
        self._report = PhaseReport(rss_bytes={"before": resident_bytes()})
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._report.seconds[name] = self._report.seconds.get(name, 0.0) + time.perf_counter() - began

    def as_target(self) -> ColocatedTarget:
        """For `trl.attach` and other adapters: they sync and generate, and each generation ends with memory given back."""
        return ColocatedTarget(self)


class ColocatedTarget:
    """A `Target` over a ColocatedEngine: awake from a sync to the end of the generation that follows."""

    def __init__(self, owner: ColocatedEngine) -> None:
        self._owner, self._target = owner, EngineTarget(owner.engine)
        self._stays = False

    @property
    def version(self) -> int | None:
        """None while there are no weights: whoever wants to generate syncs first."""
        return self._owner.version

    def facts(self) -> Facts:
        return self._target.facts()

    def close(self) -> None:
        """The engine is its owner's to close."""

    def restart(self) -> None:
        """Nothing: each of its syncs may go back, as nobody else drives the engine."""

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int, include: Sequence[str] = ()) -> list[Any]:
        """See `Target.generate`. Memory is given back at the end, and with `between="discard"` the weights are gone."""
        owner = self._owner
        if not owner.awake:
            owner.wake_held()
        self._target.version = owner.version
        try:
            with aside(), owner.timed("generate"):
                rows = self._target.generate(prompts, params, seed=seed, include=include)
            check_rows(rows, len(prompts), owner.info.vocab_size, version=owner.version, allow_empty=True)
            owner.count(rows)
            return rows
        finally:
            if not self._stays:
                owner.sleep()

    @contextlib.contextmanager
    def staying(self) -> Iterator[None]:
        """Generations in here are one phase: memory is given back at the end, not after each."""
        self._stays = True
        try:
            yield
        finally:
            self._stays = False
            if self._owner.awake:
                self._owner.sleep()

    def sync(self, weights: WeightSource, version: int, ranks: Ranks) -> SyncReport:
        """See `Target.sync`."""
        if not self._owner.awake:
            self._owner.begin_report()
        return self._owner.sync_from(weights, version, ranks, force=True)  # its own phases between steps count versions too
