"""Replay: compute traced samples again and compare every bit.

    with Engine("MODEL", dtype="bfloat16") as engine:
        report = replay(read_trace("rollouts.jsonl"), engine)
    print(report.all_equal, report.equal_tokens, report.tokens, report.first_mismatch)
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from .. import __version__
from .engine.score import score_request
from .engine.trace_line import weights_digest
from .engine.types import RolloutRequest, SampleOutput
from .errors import BadRequest, ConfigError, IllegalState
from .trace import TraceError, TraceRecord
from .wire import COLUMNS, TOKEN_COLUMNS

if TYPE_CHECKING:
    from .engine.engine import Engine

OnRefusal = Callable[[TraceError], None]
"""told of a line that cannot be replayed, which is then passed over"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """The first place where a replayed sample differs from its line."""

    line: int
    request_id: str
    sample_index: int
    column: str
    """token_ids, logprobs, ..., or finish_reason"""
    position: int
    """of the token, from 0; in prompt_logprobs, of the prompt's"""
    traced: Any
    """what the line holds there; None where it has no such token"""
    replayed: Any
    error: str | None = None
    """what the engine says of a sample that it could not end"""

    def __str__(self) -> str:
        where = f"line {self.line} (request {self.request_id}, sample {self.sample_index})"
        values = f"the trace has {_show(self.traced)}, the replay {_show(self.replayed)}"
        place = self.column if self.column == "finish_reason" else f"token {self.position}, {self.column}"
        return f"{where}, {place}: {values}" + (f" ({self.error})" if self.error else "")


@dataclass(kw_only=True, slots=True)
class ReplayReport:
    """What was compared, and how much of it was equal in every bit."""

    forced: bool
    """whether the tokens were given and scored; else they were sampled again"""
    model: str
    dtype: str
    fingerprint: str
    weights: str
    """digest of the engine's"""
    samples: int = 0
    equal_samples: int = 0
    tokens: int = 0
    equal_tokens: int = 0
    """whose id and every value are equal"""
    columns: dict[str, list[int]] = field(default_factory=dict)
    """[equal values, values] by column"""
    empty: int = 0
    """samples without a token or a scored prompt: nothing of them can be compared"""
    skipped: Counter[str] = field(default_factory=Counter)
    """lines passed over, by reason"""
    first_mismatch: Mismatch | None = None

    @property
    def all_equal(self) -> bool:
        """Whether something was compared and all of it was equal. Lines passed over do not count."""
        return self.samples > 0 and self.equal_samples == self.samples

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON but for values that are not finite."""
        names = [name for name in self.__slots__ if name != "first_mismatch"]
        found = {name: getattr(self, name) for name in names}
        first = self.first_mismatch
        mismatch = None if first is None else {name: getattr(first, name) for name in first.__slots__}
        return {"all_equal": self.all_equal, **found, "skipped": dict(self.skipped), "first_mismatch": mismatch}


def replay(
    records: Iterable[TraceRecord],
    engine: Engine,
    *,
    forced: bool = False,
    limit: int | None = None,
    on_refusal: OnRefusal | None = None,
) -> ReplayReport:
    """Compute samples again, batched anew, and compare ids and all values with their records, bit for bit.

    Args:
        records: of `read_trace`.
        engine: holds the weights that made them; must have no other requests in flight.
        forced: give the tokens and score them, instead of sampling them again from their seed. Both give the same values.
        limit: look at the first so many records only.
        on_refusal: is told of a record that cannot be replayed, which is then passed over; without it the error is raised.

    Raises:
        TraceError: a record is of another model, other weights, numerics, dtype or version than the engine; says what differs.
        IllegalState: the engine has work.
    """
    return Replayer(engine, forced=forced, on_refusal=on_refusal).run(islice(records, limit))


class Replayer:
    """`replay`, with its checks for those who want them first."""

    def __init__(self, engine: Engine, *, forced: bool = False, on_refusal: OnRefusal | None = None) -> None:
        if engine.has_work:
            raise IllegalState("replay needs an engine without other requests in flight")
        self._engine, self._forced, self._on_refusal = engine, forced, on_refusal
        self._version, digests = engine.control.versioned_digests()
        info = engine.info
        self.report = ReplayReport(
            forced=forced, model=info.model, dtype=info.dtype, fingerprint=info.fingerprint, weights=weights_digest(digests)
        )
        self._records: dict[str, TraceRecord] = {}
        """in the engine, by request id"""
        self._num_requests = 0

    def check(self, record: TraceRecord) -> RolloutRequest:
        """The request that computes a record again.

        Raises:
            TraceError: this engine cannot; says which two things differ.
        """
        reason = next(self._objections(record), None)
        if reason is not None:
            raise TraceError(f"line {record.line} {reason}", record.line)
        self._num_requests += 1
        try:
            request = request_for(record, f"replay-{self._num_requests}", forced=self._forced)
            self._engine.check_request(request)
        except (BadRequest, ConfigError) as error:
            raise TraceError(f"line {record.line} cannot be computed by this engine: {error}", record.line) from None
        return request

    def _objections(self, record: TraceRecord) -> Iterator[str]:
        info, report = self._engine.info, self.report
        if record.version != __version__:
            yield f"was written by rollsync {record.version}, and this is {__version__}"
        if record.model_digest != info.model_digest:
            mine, theirs = f"{info.model} ({info.model_digest or 'unknown'})", f"{record.model} ({record.model_digest or 'unknown'})"
            yield f"is of another model: {theirs}, and the engine has {mine}"
        if record.dtype != info.dtype:
            yield f"was computed in {record.dtype}, and the engine computes in {info.dtype}"
        if record.fingerprint != info.fingerprint:
            yield f"has the numerics fingerprint {record.fingerprint}, and the engine {info.fingerprint}"
        if len(record.weights) > 1:
            each = " and ".join(f"{version} ({digest or 'digest unknown'})" for version, digest in sorted(record.weights.items()))
            yield f"spans the weight versions {each}: no one set of weights gives it again"
        if record.prompt_mixed_kv or any(span.get("mixed_kv") for span in record.weight_versions):
            yield "was made in part on a KV cache of older weights: no one set of weights gives it again"
        if record.has_values and not record.weights:
            yield "holds values, and does not say which weights gave them"
        for version, digest in record.weights.items():
            if digest is None:
                yield f"does not say which weights its version {version} was: they changed before their digest was taken"
            elif digest != report.weights:
                yield f"was made by weights {digest} (version {version}), and the engine has {report.weights} (version {self._version})"

    def run(self, records: Iterable[TraceRecord]) -> ReplayReport:
        """Compute and compare."""
        engine, coming = self._engine, iter(records)
        width, more = engine.config.scheduler.max_num_seqs, True
        try:
            while more or engine.has_work:
                while more and len(self._records) < 2 * width:
                    record = next(coming, None)
                    more = record is not None
                    if record is not None:
                        self._add(record)
                if engine.has_work:
                    for output in engine.step():
                        self._compare(self._records.pop(output.request_id), output)
        except BaseException:
            engine.abort(all=True, reason="replay was interrupted")
            raise
        return self.report

    def _add(self, record: TraceRecord) -> None:
        try:
            request = self.check(record)
        except TraceError as error:
            if self._on_refusal is None:
                raise
            self.report.skipped[str(error).partition(" ")[2].partition(" ")[2]] += 1
            self._on_refusal(error)
            return
        if not record.has_values:
            self.report.empty += 1
            return
        self._records[request.request_id] = record
        self._engine.add_request(request)

    def _compare(self, record: TraceRecord, output: SampleOutput) -> None:
        report = self.report
        found = list(compare(record, output, forced=self._forced))
        wrong = {m.position for m in found if m.column in TOKEN_COLUMNS}
        report.samples += 1
        report.equal_samples += not found
        report.tokens += len(record.token_ids)
        report.equal_tokens += len(record.token_ids) - len([p for p in wrong if p < len(record.token_ids)])
        for name in COLUMNS:
            column = getattr(record, name)
            if column is not None:
                counts = report.columns.setdefault(name, [0, 0])
                counts[0] += len(column) - sum(m.column == name and m.position < len(column) for m in found)
                counts[1] += len(column)
        if found and report.first_mismatch is None:
            report.first_mismatch = min(found, key=lambda m: (m.column not in TOKEN_COLUMNS, m.position))


def request_for(record: TraceRecord, request_id: str, *, forced: bool = False) -> RolloutRequest:
    """The request that computes one traced sample again, under the seed it had.

    Args:
        forced: its tokens given and scored, instead of sampled.

    Raises:
        BadRequest: its fields do not go together.
    """
    start: dict[str, Any] = {"prompt_logprobs_start": record.prompt_logprobs_start, "first_sample": record.sample_index}
    params, own = record.params, len(record.token_ids)
    if forced:
        params = replace(params, seed=record.seed)
        return score_request(request_id, record.prompt_token_ids, record.token_ids, params, include=record.include, **start)
    given = record.forced_token_ids
    if record.score_only:
        given = given[:own]
    most = record.max_len - len(record.prompt_token_ids)
    if record.finish_reason not in ("stop", "length"):
        most = own  # it was ended from outside: what is there is compared
    params = replace(params, n=1, seed=record.seed, max_tokens=most, min_tokens=min(params.min_tokens, most))
    return RolloutRequest(
        request_id=request_id,
        prompt_token_ids=tuple(record.prompt_token_ids),
        params=params,
        include=record.include,
        continue_from=record.continue_from,
        forced_token_ids=given,
        score_only=record.score_only,
        **start,
    )


def compare(record: TraceRecord, output: SampleOutput, *, forced: bool = False) -> Iterator[Mismatch]:
    """Every place where a sample differs from its record."""
    where: dict[str, Any] = {
        "line": record.line, "request_id": record.request_id, "sample_index": record.sample_index, "error": output.error,
    }  # fmt: skip
    for name in COLUMNS:
        theirs, ours = getattr(record, name), getattr(output, name)
        if theirs is None:
            continue
        for position in range(max(len(theirs), len(ours or ()))):
            a = theirs[position] if position < len(theirs) else None
            b = ours[position] if ours is not None and position < len(ours) else None
            if not _same_bits(a, b):
                yield Mismatch(column=name, position=position, traced=a, replayed=b, **where)
    ended = record.finish_reason in ("stop", "length") and not forced
    if ended and (record.finish_reason, record.stop_reason) != (output.finish_reason, output.stop_reason):
        own, new = [f"{o.finish_reason} ({o.stop_reason})" if o.stop_reason is not None else o.finish_reason for o in (record, output)]
        yield Mismatch(column="finish_reason", position=len(record.token_ids), traced=own, replayed=new, **where)


def _same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same_bits, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("<f", a) == struct.pack("<f", b) or (a != a and b != b)
    return bool(a == b)


def _show(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else "nothing" if value is None else str(value)
