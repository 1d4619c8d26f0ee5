"""What an adapter generates with and sends weights to: servers by their URLs, or an engine in this process, behind one face.

    target = target_of("http://127.0.0.1:8000")
    target.sync(weights_from(model), version=1, ranks=Alone())
    rows = target.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=64), seed=7)

A target serves nobody before its first sync: what an engine was started with need not be the trainer's weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from ..rollout.client import RolloutClient
from ..rollout.engine.params import MAX_SAMPLES, SamplingParams
from ..rollout.errors import BadRequest, IllegalState, RollsyncError, describe
from ..rollout.fleet import RolloutFleet
from ..weight_sync.control import UpdateError
from ..weight_sync.ranks import Ranks, together
from ..weight_sync.sender import SyncReport, WeightSender
from ..weight_sync.sources import TensorMeta, WeightSource
from .errors import TargetError

log = logging.getLogger(__name__)
T = TypeVar("T")


class Row(Protocol):
    """One sample, as `Sample` and `SampleOutput` have it: columns of one length, the EOS or stop id that ended it among them."""

    token_ids: list[int]
    logprobs: list[float]
    """of the distribution drawn from: after temperature, penalties and truncation"""
    finish_reason: str
    weight_versions: list[dict[str, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What engines say of themselves; servers of one target say the same."""

    dtype: str
    """bfloat16 or float32: weights are best sent in it"""
    fingerprint: str
    """of the numerics"""
    vocab_size: int
    max_model_len: int
    """tokens of prompt and completion together"""
    model_digest: str
    """of what is computed, whatever the weights"""


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
            UpdateError: on every rank alike: no engine has them, or (at the first sync) not all have.
        """

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


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a prompt and the rows that want a sample of it."""

    prompt: dict[str, Any]
    rows: list[int]


def asks_of(prompts: Sequence[Sequence[int]], seed: int) -> list[Ask]:
    """Requests that give every row a sample of its own: equal rows together, each distinct prompt under a seed of its own."""
    places: dict[tuple[int, ...], list[int]] = {}
    for row, ids in enumerate(prompts):
        places.setdefault(tuple(ids), []).append(row)
    asks = []
    for number, (ids, rows) in enumerate(places.items()):
        own = derived_seed(seed, number)
        for first in range(0, len(rows), MAX_SAMPLES):
            asks.append(Ask({"token_ids": list(ids), "seed": own, "first_sample": first}, rows[first : first + MAX_SAMPLES]))
    return asks


def derived_seed(*parts: Any) -> int:
    """64 bits that follow from `parts` alone, and differ if one of them does."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def check_rows(
    rows: Sequence[Any], count: int, vocab_size: int, *, column: str = "logprobs", version: int | None = None, allow_empty: bool = False
) -> None:
    """TargetError listing all rows that cannot be trained on.

    Args:
        count: so many rows must be there.
        column: the one that will be used: "logprobs", "temperature_logprobs" or "model_logprobs".
        version: the weights that every token must come from; None: any.
        allow_empty: rows without tokens pass.
    """
    problems = [] if len(rows) == count else [f"{len(rows)} rows came for {count} prompts"]
    for i, row in enumerate(rows):
        problems += [f"row {i} {problem}" for problem in _row_problems(row, vocab_size, column, version, allow_empty)]
    if problems:
        raise TargetError(problems)


def _row_problems(row: Any, vocab_size: int, column: str, version: int | None, allow_empty: bool) -> list[str]:
    if row is None:
        return ["did not come"]
    if row.finish_reason not in ("stop", "length"):
        why = getattr(row, "error", None) or getattr(row, "abort_reason", None)
        return [f"ended by {row.finish_reason}: {why}"]
    ids, logprobs = row.token_ids, getattr(row, column) or []
    problems = []
    if not ids and not allow_empty:
        problems.append("has no token")
    if len(logprobs) != len(ids):
        problems.append(f"has {len(logprobs)} {column} for {len(ids)} tokens")
    if wrong := [t for t in ids if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab_size]:
        problems.append(f"has the token id {wrong[0]!r}, outside the vocabulary of {vocab_size}")
    if wrong := [p for p in logprobs if not isinstance(p, float) or not p <= 0.0]:
        problems.append(f"has {wrong[0]!r} among its {column}")
    found = sorted({span["version"] for span in row.weight_versions})
    if version is not None and found and found != [version]:
        shown = ", ".join(map(str, found))
        problems.append(f"was drawn by weights of version {shown}, not {version}: does somebody else update this engine?")
    return problems


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
        info = self._engine.info
        return Facts(**{name: getattr(info, name) for name in Facts.__slots__})

    def close(self) -> None:
        """The engine is its owner's to close."""

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int, include: Sequence[str] = ()) -> list[Any]:
        _check_synced(self.version)
        asks = asks_of(prompts, seed)
        each = [_with_n(params, len(ask.rows)) for ask in asks]
        outputs = self._engine.generate([ask.prompt for ask in asks], each, include=tuple(include), on_error="return")
        return _dealt(len(prompts), asks, [output.samples for output in outputs])

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
        self._source = _Current()
        self._sender: WeightSender | None = None
        self._facts: Facts | None = None
        self.version: int | None = None

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
                    client.wait_until_ready(self._timeout_s)
                    info = client.status()["info"]
                found[url] = Facts(**{name: info[name] for name in Facts.__slots__})
            except RollsyncError as error:
                problems.append(str(error) if url in str(error) else f"{url}: {error}")
        for url, facts in found.items():
            first_url, first = next(iter(found.items()))
            if wrong := [name for name in Facts.__slots__ if getattr(facts, name) != getattr(first, name)]:
                both = ", ".join(f"{name} {getattr(facts, name)!r} and {getattr(first, name)!r}" for name in wrong)
                problems.append(f"{url} and {first_url} differ in {both}: all servers must serve one model alike")
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

        with ThreadPoolExecutor(max_workers=max(1, len(by_count))) as threads:  # calls have one n each, and run at once
            samples = dict(zip(by_count, threads.map(call, by_count), strict=True))
        ordered = {id(ask): got for n, some in by_count.items() for ask, got in zip(some, samples[n], strict=True)}
        return _dealt(len(prompts), asks, [ordered[id(ask)] for ask in asks])

    def sync(self, weights: WeightSource, version: int, ranks: Ranks) -> SyncReport:
        first = self.version is None
        if self._sender is None:
            self._facts = together(ranks, "connect", self.facts, lead=True)
            options = {"transport": self._transport, "token": self._token, "timeout_s": self._timeout_s, **self._options}
            self._sender = WeightSender(self.urls, self._source, ranks=ranks, **options)
        self._source.now = weights
        try:
            report = self._sender.sync(version, required="all" if first else 1, force=first)
        except UpdateError as error:
            if first or error.report is None or not error.report.engines:
                raise
            report = error.report
            log.warning("%s; the others serve version %d, and it gets no prompts until it does", error, version)
        finally:
            self._source.now = None
        self.version = self._fleet.min_version = version
        return report


class _Current:
    """A sender's source, which is another one at each sync."""

    now: WeightSource | None = None

    def metadata(self) -> list[TensorMeta]:
        assert self.now is not None
        return self.now.metadata()

    def __iter__(self) -> Any:
        assert self.now is not None
        return iter(self.now)


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _check_synced(version: int | None) -> None:
    if version is None:
        raise IllegalState("nothing was synced yet: call sync first, an engine's own weights need not be the trainer's")


def _with_n(params: SamplingParams, n: int) -> SamplingParams:
    return dataclasses.replace(params, n=n, seed=None)


def _dealt(count: int, asks: Sequence[Ask], found: Sequence[Any]) -> list[Any]:
    """Samples by row. TargetError naming the rows of prompts that were refused, or that got too few or too many."""
    rows: list[Any] = [None] * count
    problems = []
    if len(found) != len(asks):
        raise TargetError([f"{len(found)} results came for {len(asks)} prompts"])
    for ask, samples in zip(asks, found, strict=True):
        where = f"row {ask.rows[0]}" if len(ask.rows) == 1 else f"rows {', '.join(map(str, ask.rows))}"
        if isinstance(samples, Exception):
            problems.append(f"{where}: the prompt of {len(ask.prompt['token_ids'])} tokens was refused: {samples}")
        elif len(samples) != len(ask.rows):
            problems.append(f"{where}: {len(samples)} samples came for {len(ask.rows)}")
        else:
            for row, sample in zip(ask.rows, samples, strict=True):
                rows[row] = sample
    if problems:
        raise TargetError(problems)
    return rows
