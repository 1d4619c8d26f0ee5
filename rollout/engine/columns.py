"""The columns of a sample. A StepResult, Columns and SampleOutput hold values under the same names, which wire.py lists once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...kernels.sampling_mask import SamplingMask
from ..wire import TABLES, TOKEN_COLUMNS
from .params import SamplingParams
from .types import SampleOutput

VALUE_COLUMNS = TOKEN_COLUMNS[1:]
"""the columns with a value per output token, `logprobs` first: all but the ids"""


def columns_for(include: Iterable[str], params: SamplingParams) -> tuple[str, ...]:
    """Names of the value columns that a request asks for, `logprobs` first."""
    asked = {"logprobs", *include, *(TABLES if params.top_logprobs else ())}
    return tuple(name for name in VALUE_COLUMNS if name in asked)


def empty_output(request_id: str, sample_index: int, columns: Iterable[str] = ("logprobs",), **fields: Any) -> SampleOutput:
    """A final output without tokens, in these value columns; `fields` say how it ended."""
    empty: dict[str, Any] = {name: SamplingMask(0) if name == "sampling_mask" else [] for name in ("token_ids", *columns)}
    return SampleOutput(request_id=request_id, sample_index=sample_index, **empty, **fields)


class Columns:
    """Values per output token, parallel lists; and which weight version made which tokens."""

    __slots__ = (*VALUE_COLUMNS, "spans", "version")
    logprobs: list[float]
    temperature_logprobs: list[float]
    model_logprobs: list[float]
    entropy: list[float]
    top_token_ids: list[list[int]]
    top_logprobs: list[list[float]]
    sampling_mask: list[bytes]
    """rows of kernels/sampling_mask.py"""

    def __init__(self) -> None:
        for name in VALUE_COLUMNS:
            setattr(self, name, [])
        self.spans: list[tuple[int, int, bool]] = []
        """(version, first output token, made on a KV cache of mixed versions)"""
        self.version = -1
        """that of the last span; -1: the next token looks whether another begins"""

    def open_span(self, version: int, mixed: bool) -> None:
        """Tokens from here on are of this version; nothing new if those before are the like."""
        self.version = version
        if not self.spans or (self.spans[-1][0], self.spans[-1][2]) != (version, mixed):
            self.spans.append((version, len(self.logprobs), mixed))

    def copy(self) -> Columns:
        new = Columns()
        for name in (*VALUE_COLUMNS, "spans"):
            setattr(new, name, getattr(self, name).copy())
        new.version = self.version
        return new
