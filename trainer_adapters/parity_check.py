"""`parity.check`: rollouts computed again by a trainer's model, and every value compared in every bit.

R rows of hidden states whose logits a sample's tokens were drawn from, D width, V vocabulary.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.fingerprint import numerics_fingerprint
from ..kernels.logprobs import token_logprobs, token_logprobs_and_entropy
from ..kernels.sampling_mask import SamplingMask
from ..rollout.engine.trace_line import weights_digest
from ..weight_sync.digest import tensor_digest
from ..weight_sync.sources import weights_from
from .errors import ParityError
from .parity_modules import device_of
from .parity_rollouts import COLUMNS, Sampled, read_rollouts

PIECE_BYTES = 64 << 20
"""of float32 logits that are there at a time"""
PADDINGS = ("right", "left", "packed")
PADDING_HINT = "the last ids may be padding of the vocabulary, which the engine never draws: pass vocab_limit=engine.info.vocab_size"


@dataclass(kw_only=True, slots=True)
class ColumnReport:
    """One column over all tokens."""

    equal: int = 0
    """values equal in every bit"""
    total: int = 0
    max_difference: float = 0.0
    """in nats; infinite where one side is"""
    sum_difference: float = 0.0

    @property
    def mean_difference(self) -> float:
        return self.sum_difference / self.total if self.total else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """A value in which the two sides differ."""

    where: str
    """prompt and sample, or line of a trace"""
    position: int
    """of the token in its sample, from 0"""
    token_id: int
    column: str
    rollout: float
    trainer: float

    def __str__(self) -> str:
        return (
            f"{self.where}, token {self.position} (id {self.token_id}), {self.column}: rollout {_show(self.rollout)}, "
            f"trainer {_show(self.trainer)}"
        )


def _show(value: float) -> str:
    return f"{value:.9g} (0x{struct.pack('>f', value).hex()})"


@dataclass(kw_only=True, slots=True)
class ParityReport:
    """What was compared, and how much of it was equal in every bit."""

    model: str
    """class of the trainer's model"""
    dtype: str
    """it computed in"""
    kernels: str
    padding: str
    trainer_fingerprint: str
    rollout_fingerprint: str | None
    """None where the rollouts do not say"""
    samples: int = 0
    """of which something was compared"""
    equal: int = 0
    """tokens all of whose values are equal in every bit"""
    total: int = 0
    columns: dict[str, ColumnReport] = field(default_factory=dict)
    not_compared: int = 0
    """tokens of samples that hold nothing to compare; in none of the counts above"""
    left_out: dict[str, int] = field(default_factory=dict)
    """tokens whose `logprobs` were not compared, by reason"""
    first_mismatch: Mismatch | None = None
    hint: str = ""
    """what to try, where only `logprobs` differ"""

    @property
    def all_equal(self) -> bool:
        """Whether something was compared and all of it was equal."""
        return 0 < self.total == self.equal

    @property
    def max_difference(self) -> float:
        return max((c.max_difference for c in self.columns.values()), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON, but for differences that are infinite."""
        columns = {
            name: {"equal": c.equal, "total": c.total, "max_difference": c.max_difference, "mean_difference": c.mean_difference}
            for name, c in self.columns.items()
        }
        first = self.first_mismatch
        own = {name: getattr(self, name) for name in self.__slots__ if name not in ("columns", "first_mismatch")}
        mismatch = None if first is None else {**{name: getattr(first, name) for name in first.__slots__}, "text": str(first)}
        return {"all_equal": self.all_equal, **own, "columns": columns, "first_mismatch": mismatch}

    def __str__(self) -> str:
        lines = [
            f"{self.equal} of {self.total} tokens of {self.samples} samples are equal in every bit",
            *(
                f"  {name}: {c.equal} of {c.total} equal, max difference {c.max_difference:.3g}, mean {c.mean_difference:.3g}"
                for name, c in self.columns.items()
            ),
            *([f"  {self.not_compared} tokens were not compared: their samples hold nothing to compare"] if self.not_compared else []),
            *(f"  logprobs of {count} tokens were left out: {reason}" for reason, count in self.left_out.items()),
            f"  trainer:  {self.model}, {self.dtype}, {self.kernels} kernels, {self.padding}, numerics {self.trainer_fingerprint}",
            f"  rollouts: numerics {self.rollout_fingerprint or 'not stated'}",
        ]
        if self.first_mismatch is not None:
            lines.append(f"  first mismatch: {self.first_mismatch}")
        if self.hint:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)


def check_under(
    parity: Any,
    rollouts: Any,
    *,
    params: Any = None,
    fingerprint: str | None = None,
    dtype: str | None = None,
    library_version: str | None = None,
    weight_version: int | None = None,
    vocab_limit: int | None = None,
    batch_tokens: int = 2048,
    padding: str = "right",
) -> ParityReport:
    """`parity.check` for a model that is under parity already. Arguments as there."""
    if padding not in PADDINGS:
        raise ParityError(f"padding must be one of {', '.join(PADDINGS)}, got {padding!r}")
    if batch_tokens < 1:
        raise ParityError(f"batch_tokens must be at least 1, got {batch_tokens}")
    settings, config = parity.settings, parity.model.config
    if vocab_limit is not None and not (isinstance(vocab_limit, int) and 0 < vocab_limit <= config.vocab_size):
        raise ParityError(f"vocab_limit must be a whole number in [1, {config.vocab_size}], got {vocab_limit!r}")
    if device_of(settings.ops) != "cpu":
        raise ParityError("parity.check compares with CPU engines: move the model to the CPU, or score by kernels.gpu.ops.token_logprobs")
    ours = numerics_fingerprint(getattr(settings.ops, "library", None), settings.k_shards, settings.head_dtype)
    samples = read_rollouts(
        rollouts, params, fingerprint=fingerprint, dtype=dtype, library_version=library_version, weight_version=weight_version,
        vocab_size=int(config.vocab_size), trainer_fingerprint=ours,
    )  # fmt: skip
    stated = next((s.fingerprint for s in samples if s.fingerprint is not None), None)
    report = ParityReport(
        model=type(parity.model).__name__, dtype="", kernels=settings.ops.build, padding=padding, trainer_fingerprint=ours,
        rollout_fingerprint=stated,
    )  # fmt: skip
    _check_weights(parity.model, samples)
    for sample in samples:
        count = len(sample.token_ids)
        if sample.no_logprobs:
            report.left_out[sample.no_logprobs] = report.left_out.get(sample.no_logprobs, 0) + count
        report.not_compared += 0 if sample.columns else count
    samples = [s for s in samples if s.columns]
    comparison = _Comparison(report, int(config.vocab_size), vocab_limit)
    with parity.active(), torch.no_grad():
        for batch in _batches(samples, batch_tokens, padding):
            inputs, rows = _lay_out(batch, padding)
            with parity.taking_logits(comparison.taker(batch, rows)):
                parity.model(**inputs, use_cache=False)
    unequal = [name for name, column in report.columns.items() if column.equal < column.total]
    if vocab_limit is None and unequal == ["logprobs"]:
        report.hint = PADDING_HINT
    return report


def _batches(samples: Sequence[Sampled], batch_tokens: int, padding: str) -> Iterator[list[Sampled]]:
    """In order; padding counts. A longer sequence has a batch to itself."""
    batch: list[Sampled] = []
    for sample in samples:
        lengths = [s.length for s in (*batch, sample)]
        if batch and (sum(lengths) if padding == "packed" else len(lengths) * max(lengths)) > batch_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def _lay_out(batch: Sequence[Sampled], padding: str) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of a forward pass, and the flat places whose logits give each sample's tokens, one sample after another: [R]."""
    lengths = [s.length for s in batch]
    if padding == "packed":
        ids = torch.tensor([[i for s in batch for i in s.all_ids]])
        inputs = {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
        starts = [sum(lengths[:i]) for i in range(len(batch))]
    else:
        width = max(lengths)
        ids, mask = torch.zeros(len(batch), width, dtype=torch.long), torch.zeros(len(batch), width, dtype=torch.long)
        starts = []
        for i, (sample, length) in enumerate(zip(batch, lengths, strict=True)):
            first = 0 if padding == "right" else width - length
            ids[i, first : first + length], mask[i, first : first + length] = torch.tensor(sample.all_ids), 1
            starts.append(i * width + first)
        inputs = {"input_ids": ids, "attention_mask": mask}
    ends = (a + len(s.prompt_token_ids) - 1 for a, s in zip(starts, batch, strict=True))
    return inputs, torch.cat([torch.arange(a, a + len(s.token_ids)) for a, s in zip(ends, batch, strict=True)])


def _check_weights(model: Any, samples: Sequence[Sampled]) -> None:
    """Raises ParityError if a trace says that a sample was made by other weights. Not looked at where that takes all ranks of a sharded
    model: each has samples of its own, and need not come here."""
    if weights_from(model).collective:
        return
    ours: dict[str | None, str] = {}
    for sample in samples:
        for version, theirs in sample.weights.items():
            if theirs is None:
                continue
            if sample.dtype not in ours:
                weights = weights_from(model, dtype=None if sample.dtype is None else getattr(torch, sample.dtype))
                ours[sample.dtype] = weights_digest({name: f"{tensor_digest(values):016x}" for name, values in weights})
            if theirs != ours[sample.dtype]:
                raise ParityError(
                    f"{sample.where} was made by weights {theirs} (version {version}), and this trainer has {ours[sample.dtype]}: "
                    "load those that it had then"
                )


class _Comparison:
    """Computes columns from a batch's hidden states and adds what it finds to a report."""

    def __init__(self, report: ParityReport, vocab_size: int, vocab_limit: int | None) -> None:
        self.report, self.vocab_size, self.vocab_limit = report, vocab_size, vocab_limit

    def taker(self, batch: Sequence[Sampled], rows_R: Tensor) -> Any:
        """What takes hidden states [..., D] and a function from some of them to logits, in the place of the model's head."""

        def take(hidden: Tensor, logits_of: Any) -> None:
            self._check_dtype(batch, hidden.dtype)
            hidden_RD = hidden.reshape(-1, hidden.shape[-1])[rows_R]
            rows = _Rows(batch)
            step = max(1, PIECE_BYTES // (4 * self.vocab_size))
            pieces: dict[str, list[Tensor]] = {name: [] for name in COLUMNS}
            for first in range(0, len(rows_R), step):
                at = slice(first, first + step)
                for name, values in rows.compute(logits_of(hidden_RD[at]), at, self.vocab_limit).items():
                    pieces[name].append(values)
            self._compare(batch, rows, {name: torch.cat(found).numpy() for name, found in pieces.items() if found})

        return take

    def _check_dtype(self, batch: Sequence[Sampled], dtype: torch.dtype) -> None:
        ours = str(dtype).removeprefix("torch.")
        self.report.dtype = ours
        for sample in batch:
            if sample.dtype not in (None, ours):
                raise ParityError(
                    f"{sample.where} was made in {sample.dtype}, and this trainer computes in {ours}: they must agree (float32 masters "
                    "compute in bfloat16 under torch.autocast)"
                )

    def _compare(self, batch: Sequence[Sampled], rows: _Rows, computed: dict[str, npt.NDArray[np.float32]]) -> None:
        report, first = self.report, 0
        for sample in batch:
            at = slice(first, first + len(sample.token_ids))
            first = at.stop
            all_equal = np.ones(len(sample.token_ids), np.bool_)
            for name, theirs in sample.columns.items():
                ours = computed[name][at]
                equal = ours.view(np.int32) == theirs.view(np.int32)
                all_equal &= equal
                self._count(report.columns.setdefault(name, ColumnReport()), ours, theirs, equal)
                if report.first_mismatch is None and not equal.all():
                    i = int(equal.argmin())
                    report.first_mismatch = Mismatch(
                        where=sample.where, position=i, token_id=sample.token_ids[i], column=name, rollout=float(theirs[i]),
                        trainer=float(ours[i]),
                    )  # fmt: skip
            report.samples += 1
            report.total += len(all_equal)
            report.equal += int(all_equal.sum())

    @staticmethod
    def _count(column: ColumnReport, ours: npt.NDArray[Any], theirs: npt.NDArray[Any], equal: npt.NDArray[np.bool_]) -> None:
        column.equal += int(equal.sum())
        column.total += len(equal)
        with np.errstate(invalid="ignore"):
            difference = np.where(equal, 0.0, np.abs(ours.astype(np.float64) - theirs.astype(np.float64)))
        difference = np.nan_to_num(difference, nan=math.inf, posinf=math.inf)
        column.max_difference = max(column.max_difference, float(difference.max(initial=0.0)))
        column.sum_difference += float(difference.sum())


class _Rows:
    """What each row of a batch is scored by."""

    def __init__(self, batch: Sequence[Sampled]) -> None:
        counts = [len(s.token_ids) for s in batch]
        self.ids_R = torch.tensor([i for s in batch for i in s.token_ids])
        self.wanted = {name for s in batch for name in s.columns}
        column = {
            name: np.repeat([getattr(s, name) for s in batch], counts) for name in ("temperature", "top_k", "top_p", "min_p")
        }
        self.temperature: npt.NDArray[Any] = column.pop("temperature")
        self.truncation: dict[str, npt.NDArray[Any]] = column
        masked = [s for s in batch if s.mask is not None]
        self.is_masked = np.repeat([s.mask is not None for s in batch], counts)
        self.mask_row = np.cumsum(self.is_masked) - 1
        self.mask = SamplingMask.join([s.mask for s in masked if s.mask is not None]) if masked else None

    def compute(self, logits_RV: Tensor, at: slice, limit: int | None) -> dict[str, Tensor]:
        """The wanted columns of the rows `at`, each [rows] float32."""
        ids, temperature, found = self.ids_R[at], self.temperature[at], {}
        if "model_logprobs" in self.wanted:
            found["model_logprobs"] = token_logprobs(logits_RV, ids)
        if "entropy" in self.wanted:
            found["temperature_logprobs"], found["entropy"] = token_logprobs_and_entropy(logits_RV, ids, temperature=temperature)
        elif "temperature_logprobs" in self.wanted:
            found["temperature_logprobs"] = token_logprobs(logits_RV, ids, temperature=temperature)
        if "logprobs" in self.wanted:
            found["logprobs"] = self._logprobs(logits_RV, ids, at, limit)
        return {name: values for name, values in found.items() if name in self.wanted}

    def _logprobs(self, logits_RV: Tensor, ids: Tensor, at: slice, limit: int | None) -> Tensor:
        out, masked = torch.empty(len(ids)), torch.from_numpy(self.is_masked[at])
        plain, temperature = ~masked, self.temperature[at]
        if plain.any():
            truncation = {name: values[at][plain.numpy()] for name, values in self.truncation.items()}
            out[plain] = token_logprobs(
                logits_RV[plain], ids[plain], temperature=temperature[plain.numpy()], vocab_limit=limit, **truncation
            )
        if masked.any():
            assert self.mask is not None
            row = self.mask_row[at][masked.numpy()]
            mask = self.mask[int(row[0]) : int(row[-1]) + 1]
            out[masked] = token_logprobs(logits_RV[masked], ids[masked], temperature=temperature[masked.numpy()], mask=mask)
        return out

