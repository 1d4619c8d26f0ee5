"""Reading a trace: finished samples, one to a line, as an engine with `trace=` (or `rollsync serve --trace`) wrote them.

    for record in read_trace("rollouts.jsonl"):
        print(record.prompt_token_ids, record.token_ids, record.logprobs)

No torch is imported. docs/replay.md describes the lines.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from itertools import islice
from typing import Any

from ..kernels.sampling_mask import SamplingMask
from .engine.params import SamplingParams
from .engine.trace_line import FORMAT, OPTIONS
from .errors import ConfigError, RollsyncError, show
from .wire import COLUMNS, TABLES, TOKEN_COLUMNS

NOT_JSON = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
"""what JSON has no numbers for"""


class TraceError(ConfigError):
    """A trace, or a line of it, cannot be used; the message names the file and line, and what differs."""

    code = "trace"

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRecord:
    """One finished sample. The columns have one value per token; those that were not asked for are None."""

    line: int
    """its number in the file, from 1"""
    version: str
    """of rollsync"""
    model: str
    """as it was named to the engine"""
    model_digest: str
    """of the model's configuration; empty if not known"""
    dtype: str
    fingerprint: str
    """of the engine's numerics"""
    k_shards: int
    head_dtype: str | None
    device: str
    """cpu, or cuda and its number"""
    kernels: str
    request_id: str
    """as the engine knew it"""
    prompt_token_ids: list[int]
    params: SamplingParams
    """as they were asked for: `params.seed` may be None"""
    max_len: int
    """tokens of prompt and output at most, by max_tokens or the engine's context"""
    seed: int
    """in effect"""
    sample_index: int
    weights: dict[int, str | None]
    """digest by version (`weights_digest`) of the weights that gave its values, the prompt's too; None if it was not taken in time"""
    weight_versions: list[dict[str, int]]
    """spans {"version", "start", "end"} over its tokens"""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    temperature_logprobs: list[float] | None = None
    model_logprobs: list[float] | None = None
    entropy: list[float] | None = None
    top_token_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None
    sampling_mask: SamplingMask | None = None
    prompt_logprobs: list[float | None] | None = None
    include: tuple[str, ...] = ()
    """the columns asked for"""
    prompt_logprobs_start: int = 0
    prompt_mixed_kv: bool = False
    """whether some of `prompt_logprobs` were computed behind KV of older weights"""
    continue_from: tuple[int, ...] = ()
    """output tokens that were given"""
    forced_token_ids: tuple[int, ...] = ()
    """likewise"""
    score_only: bool = False
    stop_reason: int | str | None = None
    abort_reason: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    group: str | None = None
    session: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """of the engine, that say what its model was: tokenizer, load_format, sample_padding, where they were not the defaults"""
    others: dict[str, Any] = field(default_factory=dict)
    """fields that this version does not know"""

    @property
    def has_values(self) -> bool:
        """Whether it holds anything that weights gave."""
        return bool(self.token_ids) or any(value is not None for value in self.prompt_logprobs or ())


def read_trace(
    path: str | os.PathLike[str], *, on_error: Callable[[TraceError], None] | None = None, last_line: int | None = None
) -> Iterator[TraceRecord]:
    """The samples of a trace, in the order in which they were written.

    Args:
        path: of the file.
        on_error: is told of a line that cannot be read, which is then passed over; without it the error is raised.
        last_line: read no further than this one (from 1); by default to the end, which is that of the file when it is come to.

    Raises:
        TraceError: there is no such file, it is a folder, or empty; or a line is torn, malformed or of a newer format.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except IsADirectoryError:
        raise TraceError(f"{path} is a folder, not a trace") from None
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from None
    with file:
        number = 0
        for number, text in enumerate(islice(file, last_line), 1):
            try:
                record = _record(text, number, path)
            except TraceError as error:
                if on_error is None:
                    raise
                on_error(error)
                continue
            yield record
    if not number and last_line != 0:
        raise TraceError(f"{path} is empty: no sample was written to it")


def _record(text: bytes, number: int, path: str | os.PathLike[str]) -> TraceRecord:
    where = f"{path}, line {number}"
    try:
        wire = json.loads(text)
    except RecursionError:
        raise TraceError(f"{where} is malformed: it is nested too deep", number) from None
    except ValueError as error:
        if not text.endswith(b"\n"):
            why = "the file ends amid it (its writer was killed, or is just writing it)"
            raise TraceError(f"{where} is cut off after {len(text)} bytes: {why}", number) from None
        raise TraceError(f"{where} is not JSON: {error}", number) from None
    if not isinstance(wire, dict) or "rollsync_trace" not in wire:
        raise TraceError(f"{where} is no line of a trace: it has no rollsync_trace, but begins with {show(text[:40])}", number)
    if type(wire["rollsync_trace"]) is not int or wire["rollsync_trace"] > FORMAT:
        found = show(wire["rollsync_trace"])
        raise TraceError(f"{where} is of format {found}, and this version reads up to {FORMAT}: read it with a newer rollsync", number)
    try:
        return _checked(dict(wire), number)
    except KeyError as error:
        raise TraceError(f"{where} lacks {error.args[0]}", number) from None
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError, RollsyncError) as error:
        raise TraceError(f"{where} is malformed: {error}", number) from None


def _checked(wire: dict[str, Any], number: int) -> TraceRecord:
    del wire["rollsync_trace"]
    model = wire.pop("model")
    found: dict[str, Any] = {"line": number, "version": wire.pop("rollsync"), "model": model["name"], "model_digest": model["digest"]}
    found["params"] = SamplingParams.from_wire(wire.pop("params"))
    found["weights"] = {int(version): digest for version, digest in wire.pop("weights").items()}
    for name in ("prompt_token_ids", "continue_from", "forced_token_ids"):
        if name in wire or name == "prompt_token_ids":
            ids = _column(name, wire.pop(name), "<i4")
            found[name] = ids if name == "prompt_token_ids" else tuple(ids)
    for name, dtype in COLUMNS.items():
        if wire.get(name) is not None:
            value = wire.pop(name)
            found[name] = SamplingMask.from_wire(value) if dtype == "mask" else _column(name, value, dtype)
    found["include"] = tuple(wire.pop("include", ()))
    found["weight_versions"] = [{key: int(value) for key, value in span.items()} for span in wire.pop("weight_versions")]
    known = {f.name for f in fields(TraceRecord)}
    for name in ("seed", "sample_index", "max_len", "k_shards"):
        found[name] = int(wire.pop(name))
    found |= {name: wire.pop(name) for name in list(wire) if name in known}
    missing = [f.name for f in fields(TraceRecord) if f.name not in found and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        raise KeyError(missing[0])
    _check_kinds(found)
    record = TraceRecord(**found, others=wire)
    for name in TOKEN_COLUMNS:
        column = getattr(record, name)
        if column is not None and len(column) != len(record.token_ids):
            raise ValueError(f"{name} holds {len(column)} values for {len(record.token_ids)} tokens")
    return record


TEXTS = ("version", "model", "model_digest", "dtype", "fingerprint", "device", "kernels", "request_id")
TEXTS_OR_NULL = ("head_dtype", "abort_reason", "error", "group", "session")
ENDINGS = ("stop", "length", "abort", "error")


def _check_kinds(found: dict[str, Any]) -> None:
    for names, kinds, what in ((TEXTS, (str,), "a string"), (TEXTS_OR_NULL, (str, type(None)), "a string or null")):
        for name in names:
            if not isinstance(found.get(name), kinds):
                raise ValueError(f"{name} must be {what}, got {show(found.get(name))}")
    if not isinstance(found["finish_reason"], str) or found["finish_reason"] not in ENDINGS:
        raise ValueError(f"finish_reason must be one of {', '.join(ENDINGS)}, got {show(found['finish_reason'])}")
    if not isinstance(found["logprobs"], list):
        raise ValueError(f"logprobs must be a list, got {show(found['logprobs'])}")
    if not isinstance(options := found.get("options", {}), dict):
        raise ValueError(f"options must be an object, got {show(options)}")
    for name, value in options.items():
        if not isinstance(value, OPTIONS.get(name, ())):
            known = ", ".join(f"{option} ({kind.__name__})" for option, kind in OPTIONS.items())
            raise ValueError(f"options holds {name} = {show(value)}; it can hold {known}")
    for version, digest in found["weights"].items():
        if not isinstance(digest, str | None):
            raise ValueError(f"weights[{version}] must be a digest or null, got {show(digest)}")


def _column(name: str, values: Any, dtype: str) -> list[Any]:
    if name in TABLES:
        return [_column(f"{name} row", row, dtype) for row in values]
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list, got {show(values)}")
    try:
        if dtype[1] != "f":
            return array("q", values).tolist()
        if name == "prompt_logprobs":
            return [None if v is None else _floats([v])[0] for v in values]
        return _floats(values)
    except (TypeError, ValueError, KeyError):
        raise ValueError(f"{name} holds something that is not a number") from None


def _floats(values: list[Any]) -> list[float]:
    """As float32: what was written has nine digits, which lie next to one such number only."""
    try:
        return array("f", values).tolist()
    except TypeError:
        return array("f", [NOT_JSON[v] if isinstance(v, str) else v for v in values]).tolist()
