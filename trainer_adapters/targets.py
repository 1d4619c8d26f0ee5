"""What an adapter generates with and sends weights to: servers by their URLs, or an engine in this process, behind one face.

    target = target_of("http://127.0.0.1:8000")
    target.sync(weights_from(model), version=1, ranks=Alone())
    rows = target.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=64), seed=7)

A target serves nobody before its first sync: what an engine was started with need not be the trainer's weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from ..rollout.client import RolloutClient
from ..rollout.engine.params import SamplingParams
from ..rollout.errors import BadRequest, IllegalState, RollsyncError, describe
from ..rollout.fleet import RolloutFleet
from ..rollout.models.config import computation, parse_hf_config
from ..weight_sync.control import UpdateError
from ..weight_sync.ranks import Ranks, together
from ..weight_sync.sender import SyncReport, WeightSender
from ..weight_sync.sources import WeightSource
from .errors import TargetError
from .facts import Facts as Facts
from .facts import differences, info_of, instance_of
from .rows import Ask, asks_of, dealt
from .rows import Row as Row
from .rows import check_rows as check_rows
from .rows import derived_seed as derived_seed

log = logging.getLogger(__name__)
T = TypeVar("T")
LOOK_S = 5.0
"""how long a server may take to say which it is"""
DIGESTS_S = 300.0
"""how long a server may read its weights"""


class Target(Protocol):
    """Where rollouts come from. Every trainer rank has one of its own; `sync` is a collective, `generate` is not."""

    version: int | None
    """of the weights that were synced last; None before the first sync"""

    def facts(self) -> Facts:
        """Asked once, then remembered."""

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int, include: Sequence[str] = ()) -> list[Any]:
        """One sample (a `Row`) per prompt, in order; equal prompts are one request, and each gets a sample of its own.

        Args:
            prompts: token ids.
            params: of all rows; n and seed are the target's business.
            seed: with another seed all samples are others; with the same one and the same weights they are the same bits.
            include: further columns, as in `RolloutRequest`.

        Raises:
            TargetError: a row is refused, failed, or not as a row must be; all of them are named.
            IllegalState: nothing was synced yet. ServerUnreachable, EngineDead, ...: nobody takes the prompts.
        """

    def sync(self, weights: WeightSource, version: int, ranks: Ranks) -> SyncReport:
        """Make these weights current, on every rank together.

        The first sync may take a server back to a lower version, as a new run does; later ones may not.

        Raises:
            UpdateError: on every rank alike: no engine has them, or (at the first sync) not all have; or one was started again with another
                model, and gets none.
        """

    def restart(self) -> None:
        """The next sync is as the first one: a new run begins, maybe at a lower version."""

    def close(self) -> None: ...


def target_of(target: Any, **options: Any) -> Target:
    """A target for a URL, a list of URLs, an `Engine`, or an object that brings its own by `as_target()`.

    Args:
        options: of `UrlTarget`, for URLs.
    """
    if hasattr(target, "as_target"):
        made: Target = target.as_target(**options)
        return made
    if isinstance(target, str):
        return UrlTarget([target], **options)
    if isinstance(target, list | tuple) and target and all(isinstance(url, str) for url in target):
        return UrlTarget(target, **options)
    if all(hasattr(target, name) for name in ("generate", "control", "info")):
        return EngineTarget(target, **options)
    raise TypeError(f"target must be a URL, a list of URLs or an Engine, got {target!r:.200}")


def agreed(ranks: Ranks, what: str, work: Callable[[], T]) -> T:
    """`work` on every rank; if it fails on one, all raise. Alone, its own error comes through.

    Raises:
        TargetError: on every rank: which rank failed in `what`, and how.
    """
    if ranks.size == 1:
        return work()
    value, trouble = None, None
    try:
        value = work()
    except Exception as error:  # raised on every rank below
        trouble = error
    told = ranks.gather(None if trouble is None else describe(trouble))
    if failed := [f"{what} failed on trainer rank {rank}: {words}" for rank, words in enumerate(told) if words is not None]:
        raise TargetError(failed) from trouble
    return value  # type: ignore[return-value]


class EngineTarget:
    """An engine in this process. With several trainer ranks each has one, and the weights stream through all of them."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.version: int | None = None

    def facts(self) -> Facts:
        return Facts.of(self._engine.info)

    def close(self) -> None:
        """The engine is its owner's to close."""

    def restart(self) -> None:
        self.version = None

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int, include: Sequence[str] = ()) -> list[Any]:
        _check_synced(self.version)
        asks = asks_of(prompts, seed)
        each = [_with_n(params, len(ask.rows)) for ask in asks]
        outputs = self._engine.generate([ask.prompt for ask in asks], each, include=tuple(include), on_error="return")
        return dealt(len(prompts), asks, [output.samples for output in outputs])

    def sync(self, weights: WeightSource, version: int, ranks: Ranks) -> SyncReport:
        from .engine_sync import EngineUpdate

        update = EngineUpdate(self._engine.control, force=self.version is None)
        report = update.run(weights, version, ranks)
        self.version = version
        return report


class UrlTarget:
    """Servers: prompts go by a RolloutFleet to those that serve the weights synced last, weights by a WeightSender to all.

    Args:
        urls: of servers of one model.
        token: bearer token, of the control routes too.
        transport: how weights travel; None takes "ipc" if all servers are on this host, else "collective".
        timeout_s: longest silence of a server during a sync.
        patience_s: how long prompts wait while no server takes them.
        options: passed to `WeightSender`: bucket_bytes, folder, apply, kv_policy, ...
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        transport: Any = None,
        timeout_s: float = 60.0,
        patience_s: float = 60.0,
        **options: Any,
    ) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._token, self._timeout_s, self._options = token, timeout_s, options
        self._transport = transport or ("ipc" if all(map(_is_local, self.urls)) else "collective")
        self._fleet = RolloutFleet(self.urls, token, patience_s=patience_s)
        self._sender: WeightSender | None = None
        self._facts: Facts | None = None
        self._instances: dict[str, str | None] = {}
        self.version: int | None = None

    def restart(self) -> None:
        self.version = None

    def close(self) -> None:
        self._fleet.close()
        if self._sender is not None:
            self._sender.close()

    def facts(self) -> Facts:
        if self._facts is None:
            self._facts = self._ask_facts()
        return self._facts

    def _ask_facts(self) -> Facts:
        """What all servers say of themselves. TargetError: one is not there, speaks another protocol, or serves another model."""
        found: dict[str, Facts] = {}
        problems = []
        for url in self.urls:
            try:
                with RolloutClient(url, self._token, timeout_s=self._timeout_s) as client:
                    found[url] = Facts.of(info_of(client, url, self._timeout_s))
                    self._instances[url] = instance_of(client)
            except RollsyncError as error:
                problems.append(str(error) if url in str(error) else f"{url}: {error}")
        first_url = next(iter(found), "")
        for url in list(found)[1:]:
            if both := differences(found[url], found[first_url]):
                problems.append(f"{url} and {first_url} differ in {', '.join(both)}: all servers must serve one model alike")
        if problems:
            raise TargetError(problems)
        return next(iter(found.values()))

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int, include: Sequence[str] = ()) -> list[Any]:
        _check_synced(self.version)
        asks = asks_of(prompts, seed)
        by_count: dict[int, list[Ask]] = {}
        for ask in asks:
            by_count.setdefault(len(ask.rows), []).append(ask)

        def call(n: int) -> list[Any]:
            some = [ask.prompt for ask in by_count[n]]
            try:
                found = self._fleet.rollouts(some, n, _with_n(params, 1), include)
            except BadRequest as error:  # of every prompt
                return [error] * len(some)
            return [result.samples if result.error is None else result.error for result in found.results]

        if len(by_count) == 1:  # as a rule; an interrupt then ends the call
            samples = {n: call(n) for n in by_count}
        else:  # calls have one n each, and run at once
            with ThreadPoolExecutor(max_workers=max(1, len(by_count))) as threads:
                samples = dict(zip(by_count, threads.map(call, by_count), strict=True))
        ordered = {id(ask): got for n, some in by_count.items() for ask, got in zip(some, samples[n], strict=True)}
        return dealt(len(prompts), asks, [ordered[id(ask)] for ask in asks])

    def sync(self, weights: WeightSource, version: int, ranks: Ranks) -> SyncReport:
        first = self.version is None
        if self._sender is not None:
            together(ranks, "check", self._check_restarted, lead=True)
        else:
            self._facts = together(ranks, "connect", self.facts, lead=True)
            options = {"transport": self._transport, "token": self._token, "timeout_s": self._timeout_s, **self._options}
            self._sender = WeightSender(self.urls, weights, ranks=ranks, **options)
        try:
            report = self._sender.sync(version, source=weights, required="all" if first else 1, force=first)
        except UpdateError as error:
            if first or error.report is None or not error.report.engines:
                raise
            report = error.report
            log.warning("%s; the others serve version %d, and it gets no prompts until it does", error, version)
        if first:
            together(ranks, "check", lambda: self._check_held(report.digests or {}), lead=True)
        self.version = self._fleet.min_version = version
        return report

    def _check_restarted(self) -> None:
        """TargetError if a server was started again with another model. One that is silent now gets no prompts until it is synced."""
        problems = []
        for url in self._instances:
            with contextlib.suppress(RollsyncError), RolloutClient(url, self._token, min(self._timeout_s, LOOK_S)) as client:
                if (instance := instance_of(client)) not in (None, self._instances[url]):
                    told = Facts.of(info_of(client, url, self._timeout_s))
                    alike = dataclasses.replace(told, max_model_len=self.facts().max_model_len)  # how much fits is no matter of bits
                    if both := differences(alike, self.facts()):
                        problems.append(f"{url} was started again and serves another model than before: {', '.join(both)}")
                    else:
                        self._instances[url] = instance
        if problems:
            raise TargetError(problems)

    def _check_held(self, digests: dict[str, int]) -> None:
        """UpdateError if what servers hold is not what was sent: somebody else updates them."""
        for url in self.urls:
            with RolloutClient(url, self._token, max(self._timeout_s, DIGESTS_S)) as client:
                held = client.digests()["digests"]
            if differ := sorted(name for name, value in digests.items() if held.get(name, f"{value:016x}") != f"{value:016x}"):
                shown = ", ".join(differ[:5]) + (f" and {len(differ) - 5} more" if len(differ) > 5 else "")
                raise UpdateError(f"{url} does not hold the weights that were just sent ({shown} differ): does somebody else update it?")


def check_model(facts: Facts, model: Any) -> None:
    """TargetError naming every setting in which the engine's model computes something else than the trainer's.

    Weights of one shape fit either, so that no weight update would notice: rope's theta and scaling, norms' eps, windows, ...

    Args:
        model: a transformers model, or one that has its `config`. What Rollsync cannot read of it is not compared.
    """
    config = model.config
    raw = {**config.to_dict(), "dtype": "float32"}
    raw["architectures"] = raw.get("architectures") or [type(model).__name__]
    try:
        mine = computation(parse_hf_config(raw, where="the trainer's config"))
    except RollsyncError as error:
        log.warning("the trainer's model was not compared with the engine's: %s", error)
        return
    theirs = facts.computation
    if untold := [name for name in mine if name not in theirs]:
        log.warning("the trainer's model was not compared with the engine's, which does not tell its %s", ", ".join(untold))
    names = [name for name, value in mine.items() if theirs.get(name, value) != value]
    if differ := [f"{name} is {theirs[name]!r} in the engine and {mine[name]!r} in the trainer" for name in names]:
        raise TargetError([f"the engine's model is not the trainer's: {'; '.join(differ)}"])


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _check_synced(version: int | None) -> None:
    if version is None:
        raise IllegalState("nothing was synced yet: call sync first, an engine's own weights need not be the trainer's")


def _with_n(params: SamplingParams, n: int) -> SamplingParams:
    return dataclasses.replace(params, n=n, seed=None)
