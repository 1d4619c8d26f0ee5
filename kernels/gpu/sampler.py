"""Choose and score one token per logits row on a GPU. Given the same logits, the bits of docs/numerics.md: those of the CPU.

R logits rows, V rows of the head.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..step import TOP_MAX
from .launch import Variant, check, check_rows, check_vectors, dtype_name, launch, pointer, power_of_two, units
from .linear import _unit
from .sampler_kernels import changed_logits_kernel, sample_kernel


class SamplerColumns(NamedTuple):
    """How to sample each row: device tensors, the columns of step.StepArrays (unsigned ones as the signed integers of the same bits)."""

    temperature: Tensor
    """[R] float64; 0 is greedy"""
    top_p: Tensor
    """[R] float64"""
    min_p: Tensor
    """[R] float32"""
    top_k: Tensor
    """[R] int64"""
    seed: Tensor
    """[R] int64"""
    sample_index: Tensor
    """[R] int32"""
    row_position: Tensor
    """[R] int32"""
    forced: Tensor
    """[R] int64; -1 draws"""
    want: Tensor
    """[R] uint8: 1 model logprob, 2 entropy, 4 mask"""
    top_n: Tensor
    """[R] uint8"""


class LogitChanges(NamedTuple):
    """What rows change about their logits: the columns of step.StepArrays on the device."""

    ban_offset: Tensor
    """[R + 1] int32: row r bans banned[ban_offset[r] : ban_offset[r + 1]]"""
    banned: Tensor
    """[B] int32"""
    adjust_offset: Tensor
    """[R + 1] int32, likewise"""
    adjust: Tensor
    """[A, 4] int32: id, and the bits of bias, factor and subtract as float32"""
    allowed_row: Tensor
    """[R] int32: row of `allowed`, or -1"""
    allowed: Tensor
    """[slots, words] int32: bit i % 32 of word i // 32 allows id i"""
    work: Tensor
    """[R, V] float32, rows a multiple of 16 bytes apart: room for the logits of rows that change any"""


class SamplerOut(NamedTuple):
    """What a step draws, as the columns out_... of step.StepArrays. Of the last two the first `top_n` entries of a row are written."""

    token: Tensor
    """[R] int64"""
    logprob: Tensor
    """[R] float32, as the next three"""
    temperature_logprob: Tensor
    model_logprob: Tensor
    entropy: Tensor
    nonfinite: Tensor
    """[R] uint8"""
    top_id: Tensor
    """[R, TOP_MAX] int32"""
    top_logprob: Tensor
    """[R, TOP_MAX] float32"""

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str) -> "SamplerOut":
        a, b, c, d = (torch.full((rows,), torch.nan, device=device) for _ in range(4))
        top_id = torch.full((rows, TOP_MAX), -1, dtype=torch.int32, device=device)
        top_logprob = torch.full((rows, TOP_MAX), -torch.inf, device=device)
        nonfinite = torch.zeros(rows, dtype=torch.uint8, device=device)
        return cls(torch.zeros(rows, dtype=torch.int64, device=device), a, b, c, d, nonfinite, top_id, top_logprob)


_COLUMNS = {
    "temperature": "*fp64", "top_p": "*fp64", "min_p": "*fp32", "top_k": "*i64", "seed": "*i64", "sample_index": "*i32",
    "row_position": "*i32", "forced": "*i64", "want": "*u8", "top_n": "*u8",
}  # fmt: skip
_OUT = {
    "token": "*i64", "logprob": "*fp32", "temperature_logprob": "*fp32", "model_logprob": "*fp32", "entropy": "*fp32", "nonfinite": "*u8",
    "top_id": "*i32", "top_logprob": "*fp32",
}  # fmt: skip
_CHANGES = ("ban_offset", "banned", "adjust_offset", "adjust", "allowed_row", "allowed")


@cache
def sample_variant(v: int, dtype: torch.dtype, changes: bool, mask: bool) -> Variant:
    """The binary for heads of `v` rows; with `changes` some rows may be read from `work`, with `mask` kept ids may be asked for."""
    columns = dict(zip(("temperatures", "top_ps", "min_ps", "top_ks", "seeds", "sample_indices", "positions", "forced_ids", "wants",
                        "top_ns"), _COLUMNS.values(), strict=True))  # fmt: skip
    outs = {f"out_{name}": kind for name, kind in _OUT.items()}
    offsets = dict.fromkeys(("ban_offset", "adjust_offset", "allowed_row"), "*i32")
    integers = dict.fromkeys(("ld_logits", "ld_work", "ld_mask", "limit"), "i32")
    return Variant(
        name=f"sample{'_changes' * changes}{'_mask' * mask}/{dtype_name(dtype)}/{v}",
        fn=sample_kernel,
        types={"logits": pointer(dtype), "work": "*fp32", **offsets, **columns, **outs, "out_mask": "*i32", **integers},
        constants={"V": v, "CHANGES": changes, "MASK": mask, "TOP_MAX": TOP_MAX, "UNIT": _unit(dtype), "BLOCK": _block(v)},
        num_warps=8,
    )


@cache
def changed_logits_variant(v: int, dtype: torch.dtype) -> Variant:
    types = {"logits": pointer(dtype), "work": "*fp32", **dict.fromkeys(_CHANGES, "*i32")}
    return Variant(
        name=f"changed_logits/{dtype_name(dtype)}/{v}",
        fn=changed_logits_kernel,
        types=types | dict.fromkeys(("ld_logits", "ld_work", "allowed_words"), "i32"),
        constants={"V": v, "UNIT": _unit(dtype), "BLOCK": _block(v), "LIST": 128},
        num_warps=8,
    )


def _block(v: int) -> int:
    return min(power_of_two(v, 128), 4096)


def _check_columns(count: int, columns: NamedTuple, kinds: dict[str, str]) -> None:
    for name, kind in kinds.items():
        tensor = getattr(columns, name)
        fits = len(tensor) >= count and pointer(tensor.dtype) == kind
        check("sample", fits, f"{name} must hold {count} rows of {kind[1:]}, got {[*tensor.shape]} {tensor.dtype}")
    check_vectors("sample", **columns._asdict())


def sample(
    logits_RV: Tensor,
    columns: SamplerColumns,
    *,
    vocab_limit: int,
    changes: LogitChanges | None = None,
    mask: Tensor | None = None,
    out: SamplerOut | None = None,
) -> SamplerOut:
    """Choose and score one token per row; a row's result depends on that row alone.

    Args:
        logits_RV: [R, V] bfloat16 or float32, rows a multiple of 16 bytes apart.
        columns: how, of at least R rows.
        vocab_limit: ids from here on are padding and take no part.
        changes: bans, allowed ids, biases and penalties, if any row has some.
        mask: [R, ceil(V / 32)] int32 or wider: of rows that want it, bit i % 32 of word i // 32 says whether id i could be drawn.
        out: written.

    Returns:
        `out`.

    Raises:
        ValueError: a tensor has the wrong shape, dtype or alignment.
    """
    count, v = logits_RV.shape
    check("sample", 0 < vocab_limit <= v, f"vocab_limit must be in [1, {v}], got {vocab_limit}")
    check_rows("sample", logits=logits_RV)
    out = SamplerOut.allocate(count, logits_RV.device) if out is None else out
    _check_columns(count, columns, _COLUMNS)
    _check_columns(count, out, _OUT)
    fits = out.top_id.shape[1:] == out.top_logprob.shape[1:] == (TOP_MAX,)
    check("sample", fits, f"top_id and top_logprob must have {TOP_MAX} columns")
    ints, work, ld_work = [columns.sample_index] * 3, out.logprob, 0
    if changes is not None:
        _check_changes(count, v, changes)
        ints, work, ld_work = [changes.ban_offset, changes.adjust_offset, changes.allowed_row], changes.work, units(changes.work)
        lists = [getattr(changes, name) for name in _CHANGES]
        sizes = (units(logits_RV), ld_work, changes.allowed.shape[1])
        launch(changed_logits_variant(v, logits_RV.dtype), (count,), logits_RV, work, *lists, *sizes)
    words = columns.sample_index if mask is None else mask
    if mask is not None:
        fits = mask.dtype == torch.int32 and mask.ndim == 2 and len(mask) >= count and mask.shape[1] * 32 >= v
        check("sample", fits, f"mask must be [{count}, {-(-v // 32)}] int32, got {[*mask.shape]} {mask.dtype}")
        check_vectors("sample", mask=mask)
    variant = sample_variant(v, logits_RV.dtype, changes is not None, mask is not None)
    numbers = (units(logits_RV), ld_work, words.shape[-1], vocab_limit)
    launch(variant, (count,), logits_RV, work, *ints, *columns, *out, words, *numbers)
    return out


def _check_changes(count: int, v: int, changes: LogitChanges) -> None:
    for name in _CHANGES:
        check("sample", getattr(changes, name).dtype == torch.int32, f"{name} must be int32, got {getattr(changes, name).dtype}")
    for name, least in (("ban_offset", count + 1), ("adjust_offset", count + 1), ("allowed_row", count)):
        check("sample", len(getattr(changes, name)) >= least, f"{name} must hold {least} entries, got {len(getattr(changes, name))}")
    check("sample", changes.adjust.shape[1:] == (4,), f"adjust must be [A, 4], got {[*changes.adjust.shape]}")
    fits = changes.work.dtype == torch.float32 and changes.work.shape[0] >= count and changes.work.shape[1] >= v
    check("sample", fits, f"work must be [{count}, {v}] float32, got {[*changes.work.shape]} {changes.work.dtype}")
    check_rows("sample", work=changes.work)
    check_vectors("sample", **{name: getattr(changes, name) for name in _CHANGES})
