"""`rollsync replay FILE`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from .engine.config import EngineConfig
from .errors import ConfigError
from .replay import Replayer, ReplayReport
from .trace import TraceError, TraceRecord, read_trace
from .wire import jsonable


class _Skips:
    """Lines that are passed over (`--skip`), each told once."""

    def __init__(self, wanted: bool) -> None:
        self.lines: dict[int, str] = {}
        self._wanted = wanted

    def __call__(self, error: TraceError) -> None:
        if not self._wanted or error.line is None:
            raise error
        self.lines.setdefault(error.line, str(error))


def config_for(record: TraceRecord, flags: dict[str, Any]) -> EngineConfig:
    """An engine like the one that made `record`, but for what the flags say."""
    made: dict[str, Any] = {"model": record.model, "dtype": record.dtype, "device": record.device.partition(":")[0], **record.options}
    made |= {"numerics.k_shards": record.k_shards, "numerics.head_dtype": record.head_dtype}
    return EngineConfig.from_flat({**made, "apply": "in_place", **flags})  # no update will come


def replay_file(args: argparse.Namespace, flags: dict[str, Any]) -> int:
    """The exit status: 0 if all that was compared is equal, 1 if not or if nothing was.

    Raises:
        ConfigError: the trace, a line of it or the engine cannot be used. All lines are looked at before any is computed.
    """
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}")
    skips = _Skips(args.skip)

    def records() -> Iterator[TraceRecord]:
        return islice(read_trace(args.file, on_error=skips), args.limit)

    def seen(last: int) -> Iterator[TraceRecord]:
        """Those that were looked at: a trace that is still written to grows meanwhile, and what was skipped stays so."""
        return (record for record in read_trace(args.file, on_error=skips, last_line=last) if record.line not in skips.lines)

    first = next(records(), None)
    if first is None:
        raise TraceError(f"no line of {args.file} can be read: {next(iter(skips.lines.values()))}")
    from .engine.engine import Engine

    with Engine(config_for(first, flags)) as engine:
        replayer = Replayer(engine, forced=args.forced, on_refusal=skips)
        last = 0
        for record in records():
            last = record.line
            try:
                replayer.check(record)
            except TraceError as error:
                skips(TraceError(f"{args.file}, {error}", error.line))
        report = replayer.run(seen(last))
    if args.json:
        print(json.dumps(jsonable({"file": str(args.file), **report.to_dict(), "skipped": list(skips.lines.values())})))
    else:
        print(in_words(args.file, report, list(skips.lines.values()), engine.info.kernels))
    return 0 if report.all_equal else 1


def in_words(file: str, report: ReplayReport, skipped: list[str], kernels: str) -> str:
    """The report for a reader."""
    how = "scored along their tokens" if report.forced else "sampled again from their seeds"
    lines = [
        f"{file}: {report.samples} samples {how}",
        f"by {report.model}, {report.dtype}, {kernels} kernels, numerics {report.fingerprint}, weights {report.weights}",
        "",
    ]
    columns = [(name, *counts) for name, counts in report.columns.items() if name != "token_ids"]
    for name, equal, total in (("samples", report.equal_samples, report.samples), ("tokens", report.equal_tokens, report.tokens), *columns):
        lines.append(f"{name:<21}{equal:>9,} of {total:>9,} equal")
    if report.empty:
        lines.append(f"without a token: {report.empty} samples")
    if skipped:
        lines += ["", f"skipped: {len(skipped)} lines, the first:", f"  {skipped[0]}"]
    if report.first_mismatch is not None:
        lines += ["", f"first difference: {report.first_mismatch}"]
    of = f" of the lines that were not skipped ({len(skipped)} were)" if skipped else ""
    verdict = f"every bit is equal{of}" if report.all_equal else "NOT equal" if report.samples else "nothing was compared"
    return "\n".join([*lines, "", verdict])
