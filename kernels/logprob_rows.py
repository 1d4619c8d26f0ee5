"""What kernels/logprobs.py stands on: the ops of one build, and how the rows of a batch are to be scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import native_lib
from . import reference as ref
from .native_ops import NativeOps, check_threads
from .reference_sampler import SampleResult, SamplerRows
from .sampling_mask import ALL, BITS, SamplingMask, row_words

Array = npt.NDArray[Any]
Column = float | Sequence[float] | Tensor | Array
"""one value for all rows, or one per row"""

KINDS: dict[str, Any] = {"temperature": np.float64, "top_k": np.int64, "top_p": np.float64, "min_p": np.float32}
RANGES: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "temperature": ("0 (greedy) or finite and at least 1e-8", lambda x: np.isfinite(x) & ((x == 0) | (x >= 1e-8))),
    "top_k": ("at least 0", lambda x: x >= 0),
    "top_p": ("in (0, 1]", lambda x: (x > 0) & (x <= 1)),
    "min_p": ("in [0, 1]", lambda x: (x >= 0) & (x <= 1)),
}


def check(name: str, ok: bool, problem: str) -> None:
    if not ok:
        raise ValueError(f"{name}: {problem}")


@lru_cache
def default_build() -> str:
    """The fastest build that runs here; "reference" where there is none."""
    for build in native_lib.available_builds():
        try:
            return native_lib.load_build(build).build
        except OSError:  # the system refuses its instructions
            continue
    return "reference"


class Backend:
    """The sampler and the head of one build ("amx", "avx512", "avx2" or "reference"; None: the fastest here)."""

    def __init__(self, build: str | None = None, threads: int | None = None) -> None:
        if threads is not None:
            check_threads(threads)
        self.build = default_build() if build is None else build
        self._ops: NativeOps | None = None
        if self.build != "reference":
            known = native_lib.available_builds()
            if self.build not in known:
                raise ValueError(f"build must be one of {', '.join([*known, 'reference'])}, got {build!r}")
            self._ops = NativeOps(native_lib.load_build(self.build), torch.get_num_threads() if threads is None else threads)

    def sample(self, logits_RV: Tensor, rows: SamplerRows) -> SampleResult:
        return ref.sample(logits_RV, rows) if self._ops is None else self._ops.sample(logits_RV, rows)

    def head(self, weight_VD: Tensor, cap: float, float32: bool) -> Callable[[Tensor], Tensor]:
        """What makes logits [rows, V] of hidden states [rows, D]: the engine's, capped if `cap` is not 0, rounded unless `float32`."""
        ops = self._ops
        if ops is None:

            def reference(hidden: Tensor) -> Tensor:
                found = (ref.linear_f32 if float32 else ref.linear)(hidden, weight_VD)
                return ref.softcap(found, cap) if cap else found

            return reference
        packed = ops.pack_linear(weight_VD)
        if float32:
            return lambda hidden: ops.linear_f32(hidden, packed, cap)
        return lambda hidden: ops.linear_softcap(hidden, packed, cap) if cap else ops.linear(hidden, packed)


def restriction(mask: SamplingMask, row: int) -> tuple[Array | None, Array]:
    """The ids that a row of a mask allows (None: all below its limit), and those it bans of them: int arrays, ascending.

    What `mask[row]` says in plain Python, quick enough for a trainer's batch, whose rows may each keep half a vocabulary.
    """
    words = np.frombuffer(mask.row(row), np.int32)
    head, rest = int(words[0]), words[1:]
    if head == BITS:  # (a bool's nonzero is several times faster than a byte's)
        return np.unpackbits(rest.view(np.uint8), bitorder="little").view(np.bool_).nonzero()[0], rest[:0]
    return (rest, rest[:0]) if head > ALL else (None, rest)


class Rows:
    """How each of T rows is scored. Arguments as for `token_logprobs`, whose `name` errors carry."""

    def __init__(
        self, name: str, num_rows: int, vocab: int, vocab_limit: int | None, mask: SamplingMask | None, columns: dict[str, Column]
    ) -> None:
        self.name, self.mask, self.vocab = name, mask, vocab
        self._columns = {column: self._column(column, value, num_rows) for column, value in columns.items()}
        truncates = {"top_k": 0, "top_p": 1, "min_p": 0}
        self._truncates = any((self._columns[column] != off).any() for column, off in truncates.items())
        if mask is not None:
            check(name, isinstance(mask, SamplingMask), f"mask must be a SamplingMask, got {type(mask).__name__}")
            check(name, not self._truncates, "a mask says what truncation kept: give mask, or top_k, top_p and min_p, not both")
            check(name, len(mask) == num_rows, f"mask must have {num_rows} tokens, got {len(mask)}")
            fits = vocab_limit is None or vocab_limit == mask.vocab_size
            check(name, fits, f"vocab_limit is {vocab_limit}, and the mask's {mask.vocab_size}")
            vocab_limit = mask.vocab_size
        whole = vocab_limit is None or isinstance(vocab_limit, int | np.integer)
        check(name, whole, f"vocab_limit must be a whole number, got {vocab_limit!r}")
        self.limit = vocab if vocab_limit is None else int(vocab_limit)
        check(name, 0 < self.limit <= vocab, f"vocab_limit must be in [1, {vocab}], got {self.limit}")
        temperature = self._columns["temperature"]
        self.greedy = torch.from_numpy(temperature == 0)
        """rows at temperature 0, whose values do not move with the logits, [T] bool"""
        self.inverse = torch.from_numpy((1.0 / np.where(temperature == 0, 1.0, temperature)).astype(np.float32))
        """what logits are multiplied with, [T] float32"""
        self._found: list[bytes] = []
        """with `keep`, rows of the masks that truncation made"""

    def _column(self, column: str, value: Column, num_rows: int) -> Array:
        found = np.asarray(value.detach().cpu().double() if isinstance(value, Tensor) else value)
        check(self.name, found.ndim == 0 or found.shape == (num_rows,), f"{column} must be a number or [{num_rows}], got {[*found.shape]}")
        check(self.name, found.dtype.kind in "iuf", f"{column} must be a number, got {value!r}")
        what, fits = RANGES[column]
        wrong = ~fits(found) if column != "top_k" else ~(fits(found) & (found == np.floor(found)))
        check(self.name, not wrong.any(), f"{column} must be {what}, got {found[wrong].ravel()[0] if wrong.any() else None}")
        return np.broadcast_to(found.astype(KINDS[column]), (num_rows,))

    def score(self, backend: Backend, piece_TV: Tensor, ids_T: Tensor, first: int, want_entropy: bool, keep: bool) -> Tensor:
        """Logprobs and entropies of the rows from `first` on: [2, rows] float32. Pieces come in order.

        Args:
            keep: remember what truncation leaves, for `kept`.

        Raises:
            ValueError: a row's logits are broken, or nothing of it may be drawn; names the row.
        """
        count = len(piece_TV)
        at = slice(first, first + count)
        mask, every = self.mask, (None, np.zeros(0, np.int32))
        choices = [every if mask is None else restriction(mask, row) for row in range(first, first + count)]
        keep = keep and self._truncates
        zeros, none = np.zeros(count, np.uint64), np.zeros(count, np.bool_)
        columns: dict[str, Any] = {column: values[at] for column, values in self._columns.items()}
        rows = SamplerRows(
            **columns,
            seed=zeros, sample_index=zeros.astype(np.uint32), position=zeros.astype(np.uint32), forced=ids_T[at].numpy(),
            want_model=none, want_entropy=none | want_entropy, vocab_limit=self.limit, want_mask=none | keep,
            banned=[banned for _, banned in choices], allowed=None if mask is None else [allowed for allowed, _ in choices],
        )  # fmt: skip
        result = backend.sample(piece_TV, rows)
        if result.nonfinite.any():
            row = int(result.nonfinite.nonzero()[0][0])
            why = "no finite one among the ids that the mask and vocab_limit leave"
            why = "a NaN, a +inf or no finite one" if result.nonfinite[row] == 1 else why
            raise ValueError(f"{self.name}: the logits of row {first + row} have {why}")
        if keep:
            self._found += [words[: 1 + row_words(int(words[0]), self.limit)].tobytes() for words in result.mask]
        return torch.from_numpy(np.stack([result.logprob, result.entropy]))

    def kept(self, count: int, first: int) -> Tensor | None:
        """Which ids the logprobs of `count` rows from `first` on run over, [count, V] bool; None for all of them."""
        if self.mask is None and not self._truncates and self.limit == self.vocab:
            return None
        kept_TV = np.zeros((count, self.vocab), np.bool_)
        kept_TV[:, : self.limit] = True
        mask = self.mask
        if self._truncates:
            mask, first = SamplingMask.of_rows(self.limit, self._found[first : first + count]), 0
        if mask is not None:
            for kept_V, row in zip(kept_TV, range(first, first + count), strict=True):
                allowed, banned = restriction(mask, row)
                if allowed is not None:
                    kept_V[:] = False
                    kept_V[allowed] = True
                kept_V[banned] = False
        return torch.from_numpy(kept_TV)
