"""Outputs of one call on the way to its reader. Deltas wait joined per sample: a slow reader costs its samples, not a queue.

A call that may be re-attached keeps what was read, and `rewind` gives it all to the next reader, from the beginning.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ..errors import EngineDead, RollsyncError
from ..wire import TOKEN_COLUMNS, begin_column, extend_column, slice_column
from .engine_client import Output


def join_spans(spans: list[dict[str, int]], more: list[dict[str, int]], shift: int) -> None:
    """Append `more`, moved by `shift` tokens; spans that touch and say the same become one."""
    for span in more:
        moved = {**span, "start": span["start"] + shift, "end": span["end"] + shift}
        if spans and spans[-1]["end"] == moved["start"] and {**spans[-1], "start": 0, "end": 0} == {**moved, "start": 0, "end": 0}:
            spans[-1]["end"] = moved["end"]
        else:
            spans.append(moved)


def output_from(output: Output, start: int) -> Output:
    """The delta that holds the tokens of `output` from `start` on. Spans keep counting from the sample's first token."""
    spans = [{**s, "start": max(start, s["start"])} for s in output["weight_versions"] if s["end"] > start]
    columns = {name: slice_column(output[name], start) for name in TOKEN_COLUMNS if name in output}
    return {"sample_index": output["sample_index"], "start": start, **columns, "weight_versions": spans}


class _Sample:
    """One sample: the deltas the reader has not got, joined, or the final output."""

    __slots__ = ("base", "columns", "end", "final", "sent", "sent_bytes", "spans")

    def __init__(self) -> None:
        self.base = self.end = self.sent = 0
        """`columns` and `spans` cover tokens [base, end); the reader has those before `sent`"""
        self.columns: dict[str, Any] = {}
        self.sent_bytes: dict[str, int] = {}
        """where in the columns' data `sent` is; at their begin, where it is not said"""
        self.spans: list[dict[str, int]] = []
        self.final: Output | None = None

    def add(self, delta: Output) -> None:
        for name in TOKEN_COLUMNS:
            if name in delta:
                new, old = delta[name], self.columns.get(name)
                if old is None:
                    self.columns[name] = begin_column(new)
                else:
                    extend_column(old, new)
        join_spans(self.spans, delta["weight_versions"], self.end)
        self.end += delta["token_ids"]["shape"][0]

    def take(self, index: int, keep: bool) -> Output:
        """The delta from `sent` on."""
        spans = [{**s, "start": max(self.sent, s["start"])} for s in self.spans if s["end"] > self.sent]
        columns = {
            name: slice_column(column, self.sent - self.base, self.sent_bytes.get(name, 0)) for name, column in self.columns.items()
        }
        delta = {"sample_index": index, "start": self.sent, **columns, "weight_versions": spans}
        self.sent, self.sent_bytes = self.end, {name: len(column["data"]) for name, column in self.columns.items()}
        if not keep:
            self.drop()
            self.base = self.end
        return delta

    def rewind(self) -> None:
        self.sent, self.sent_bytes = self.base, {}

    def drop(self) -> None:
        self.columns, self.sent_bytes, self.spans = {}, {}, []


class Mailbox:
    """What came for a call and was not yet read. `put` never waits; one reader at a time calls `get`."""

    def __init__(self, keep: bool = False) -> None:
        self._keep = keep
        self._deltas = False
        self._samples: dict[tuple[int, int], _Sample] = {}
        self._errors: dict[int, RollsyncError] = {}
        self._dead: RollsyncError | None = None
        self._news: dict[tuple[int, int], None] = {}
        """keys of `_samples` with something to read, oldest first; (i, -1) is the error of prompt i"""
        self._wake = asyncio.Event()

    def rewind(self, deltas: bool) -> None:
        """A reader begins, with or without interest in deltas: whatever is here is news to it."""
        self._deltas = deltas
        for key, sample in self._samples.items():
            sample.rewind()
            if sample.final is not None or (deltas and sample.end > sample.sent):
                self._news[key] = None
        self._news.update({(i, -1): None for i in self._errors})

    def put(self, i: int, item: Output | RollsyncError) -> None:
        """An output of prompt `i`, or its error. EngineDead ends the whole call."""
        if isinstance(item, EngineDead):
            self.fail(item)
        elif isinstance(item, RollsyncError):
            self._errors[i] = item
            self._news[i, -1] = None
        else:
            key = (i, item["sample_index"])
            sample = self._samples.setdefault(key, _Sample())
            if "finish_reason" in item:
                sample.final = item
                sample.drop()  # the final output holds it all
                self._news[key] = None
            else:
                sample.add(item)
                if self._deltas:
                    self._news[key] = None
        self._wake.set()

    def fail(self, error: RollsyncError) -> None:
        """Nothing more comes: `get` raises `error` once all is read."""
        self._dead = self._dead or error
        self._wake.set()

    async def get(self) -> tuple[int, Output | RollsyncError, int]:
        """(prompt index, delta, final output or error, tokens of that sample read before). Raises what the call failed with."""
        while not self._news:
            if self._dead is not None:
                raise self._dead
            self._wake.clear()
            await self._wake.wait()
        key = next(iter(self._news))
        del self._news[key]
        i, index = key
        if index < 0:
            return i, self._errors[i], 0
        sample = self._samples[key]
        if sample.final is None:
            sent = sample.sent
            return i, sample.take(index, self._keep), sent
        if not self._keep:
            del self._samples[key]
        return i, sample.final, sample.sent
