"""`x W^T` with its epilogues, in one tile shape per dtype.

One tile for every M, N and K, and K in steps of one size in order: so neither the batch, nor how rows of a weight are fused or
divided among ranks, shows in a bit. A row-parallel layer sums K in separate accumulators, combined as the balanced tree of
docs/numerics.md; a rank's share of them is a subtree, whose float32 root `add_parts` combines with the others'.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import gate, round_to
from .launch import Variant, aligned_room, cdiv, check, check_rows, dtype_name, launch, pointer, units
from .tiles import takes_large, tile_for

MAX_SHARDS = 16
GATES = {"silu": False, "gelu_tanh": True}
"""activations, and whether it is GELU"""


@triton.jit
def _range_sum(x, w, rm, rn, m_ok, n_ok, ld_x, first, K: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, TM: tl.constexpr,
               TN: tl.constexpr, TK: tl.constexpr):  # fmt: skip
    # float32 [TM, TN]: the sum over k in [first, first + WIDTH), from 0.
    acc = tl.zeros((TM, TN), dtype=tl.float32)
    rk = tl.arange(0, TK)
    x_row = x + rm.to(tl.int64)[:, None] * (ld_x * UNIT)
    w_row = w + rn.to(tl.int64)[None, :] * K
    for k in range(0, WIDTH, TK):
        x_ok, w_ok = m_ok[:, None], n_ok[None, :]
        if WIDTH % TK != 0:
            inside = k + rk < WIDTH
            x_ok, w_ok = x_ok & inside[None, :], w_ok & inside[:, None]
        a = tl.load(x_row + (first + k + rk)[None, :], mask=x_ok, other=0.0)
        b = tl.load(w_row + (first + k + rk)[:, None], mask=w_ok, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _tree_sum(x, w, rm, rn, m_ok, n_ok, ld_x, K: tl.constexpr, SHARDS: tl.constexpr, UNIT: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr,
              TK: tl.constexpr):  # fmt: skip
    # The sums of SHARDS ranges of K as a balanced tree: a finished subtree waits on its level for its neighbour.
    WIDTH: tl.constexpr = K // SHARDS
    acc = _range_sum(x, w, rm, rn, m_ok, n_ok, ld_x, 0, K, WIDTH, UNIT, TM, TN, TK)
    if SHARDS > 1:
        level0, level1, level2, level3 = acc, acc, acc, acc
        for i in tl.static_range(1, SHARDS):
            acc = _range_sum(x, w, rm, rn, m_ok, n_ok, ld_x, i * WIDTH, K, WIDTH, UNIT, TM, TN, TK)
            if i % 2 == 0:
                level0 = acc
            else:
                acc = level0 + acc
                if i % 4 == 1:
                    level1 = acc
                else:
                    acc = level1 + acc
                    if i % 8 == 3:
                        level2 = acc
                    else:
                        acc = level2 + acc
                        if i % 16 == 7:
                            level3 = acc
                        else:
                            acc = level3 + acc
    return acc


@triton.jit
def _place(M, TM: tl.constexpr, TN: tl.constexpr, N: tl.constexpr):
    # Programs of one weight tile stand together, so that it is read from memory once.
    tiles_m = tl.cdiv(M, TM)
    pid = tl.program_id(0)
    rm, rn = (pid % tiles_m) * TM + tl.arange(0, TM), (pid // tiles_m) * TN + tl.arange(0, TN)
    return rm, rn, rm < M, rn < N


@triton.jit(do_not_specialize=["M", "ld_x", "ld_out", "ld_residual", "part_stride"])
def linear_kernel(x, w, bias, residual, out, M, ld_x, ld_out, ld_residual, part_stride, N: tl.constexpr, K: tl.constexpr,
                  SHARDS: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, UNIT: tl.constexpr,
                  OUT_UNIT: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr):  # fmt: skip
    rm, rn, m_ok, n_ok = _place(M, TM, TN, N)
    if PARTS:  # one range of K of SHARDS per program; its sum is left for add_parts
        part = tl.program_id(1)
        acc = _range_sum(x, w, rm, rn, m_ok, n_ok, ld_x, part * (K // SHARDS), K, K // SHARDS, UNIT, TM, TN, TK)
        out += part.to(tl.int64) * part_stride * OUT_UNIT
    else:
        acc = _tree_sum(x, w, rm, rn, m_ok, n_ok, ld_x, K, SHARDS, UNIT, TM, TN, TK)
    if BIAS:
        acc += tl.load(bias + rn, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    ok = m_ok[:, None] & n_ok[None, :]
    rows = rm.to(tl.int64)[:, None]
    if RESIDUAL:
        before = tl.load(residual + rows * (ld_residual * UNIT) + rn[None, :], mask=ok, other=0.0).to(tl.float32)
        acc = before + round_to(acc, out.dtype.element_ty)
    tl.store(out + rows * (ld_out * OUT_UNIT) + rn[None, :], acc.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["M", "ld_x", "ld_out"])
def gated_kernel(x, w, out, M, ld_x, ld_out, N: tl.constexpr, K: tl.constexpr, GELU: tl.constexpr, UNIT: tl.constexpr, TM: tl.constexpr,
                 TN: tl.constexpr, TK: tl.constexpr):  # fmt: skip
    # w: [2 N, K], gate rows before up rows.
    rm, rn, m_ok, n_ok = _place(M, TM, TN, N)
    g = _range_sum(x, w, rm, rn, m_ok, n_ok, ld_x, 0, K, K, UNIT, TM, TN, TK)
    u = _range_sum(x, w, rm, rn + N, m_ok, n_ok, ld_x, 0, K, K, UNIT, TM, TN, TK)
    dtype: tl.constexpr = out.dtype.element_ty
    y = gate(round_to(g, dtype), round_to(u, dtype), GELU, dtype)
    ok = m_ok[:, None] & n_ok[None, :]
    tl.store(out + rm.to(tl.int64)[:, None] * (ld_out * UNIT) + rn[None, :], y.to(dtype), mask=ok)


@triton.jit(do_not_specialize=["M", "ld_part", "part_stride", "ld_out", "ld_residual"])
def add_parts_kernel(parts, residual, out, M, ld_part, part_stride, ld_out, ld_residual, N: tl.constexpr, PARTS: tl.constexpr,
                     RESIDUAL: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    # One row and BLOCK columns a program.
    row, rn = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = rn < N
    first = parts + row * (ld_part * 4) + rn
    acc = tl.load(first, mask=ok, other=0.0)
    if PARTS > 1:
        level0, level1, level2, level3 = acc, acc, acc, acc
        for i in tl.static_range(1, PARTS):
            acc = tl.load(first + i * part_stride.to(tl.int64) * 4, mask=ok, other=0.0)
            if i % 2 == 0:
                level0 = acc
            else:
                acc = level0 + acc
                if i % 4 == 1:
                    level1 = acc
                else:
                    acc = level1 + acc
                    if i % 8 == 3:
                        level2 = acc
                    else:
                        acc = level2 + acc
                        if i % 16 == 7:
                            level3 = acc
                        else:
                            acc = level3 + acc
    if RESIDUAL:
        before = tl.load(residual + row * (ld_residual * UNIT) + rn, mask=ok, other=0.0).to(tl.float32)
        acc = before + round_to(acc, out.dtype.element_ty)
    tl.store(out + row * (ld_out * UNIT) + rn, acc.to(out.dtype.element_ty), mask=ok)


def _unit(dtype: torch.dtype) -> int:
    return 16 // dtype.itemsize


@cache
def linear_variant(
    n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, shards: int, *, parts: bool = False, bias: bool = False,
    residual: bool = False, large: bool = False,
) -> Variant:  # fmt: skip
    """The binary for weights [n, k]; M is no part of it."""
    tile, element = tile_for(dtype, large, shards > 1 and not parts), pointer(dtype)
    kind = "_parts" * parts + "_bias" * bias + "_residual" * residual + "_f32out" * (out_dtype != dtype and not parts)
    return Variant(
        name=f"linear{kind}/{dtype_name(dtype)}/{n}x{k}" + f"/s{shards}" * (shards > 1) + "/large" * large,
        fn=linear_kernel,
        types={
            "x": element, "w": element, "bias": element, "residual": element, "out": pointer(out_dtype), "M": "i32", "ld_x": "i32",
            "ld_out": "i32", "ld_residual": "i32", "part_stride": "i32",
        },
        constants={
            "N": n, "K": k, "SHARDS": shards, "PARTS": parts, "BIAS": bias, "RESIDUAL": residual, "UNIT": _unit(dtype),
            "OUT_UNIT": _unit(out_dtype), "TM": tile.m, "TN": tile.n, "TK": tile.k,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


@cache
def gated_variant(n: int, k: int, dtype: torch.dtype, activation: str, large: bool = False) -> Variant:
    """The binary for fused weights [2 n, k]."""
    tile, element = tile_for(dtype, large, True), pointer(dtype)
    return Variant(
        name=f"linear_{activation}/{dtype_name(dtype)}/{n}x{k}" + "/large" * large,
        fn=gated_kernel,
        types={"x": element, "w": element, "out": element, "M": "i32", "ld_x": "i32", "ld_out": "i32"},
        constants={"N": n, "K": k, "GELU": GATES[activation], "UNIT": _unit(dtype), "TM": tile.m, "TN": tile.n, "TK": tile.k},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@cache
def add_parts_variant(n: int, dtype: torch.dtype, parts: int, residual: bool) -> Variant:
    element = pointer(dtype)
    return Variant(
        name=f"add_parts{'_residual' * residual}/{dtype_name(dtype)}/{n}/{parts}",
        fn=add_parts_kernel,
        types={
            "parts": "*fp32", "residual": element, "out": element, "M": "i32", "ld_part": "i32", "part_stride": "i32", "ld_out": "i32",
            "ld_residual": "i32",
        },
        constants={"N": n, "PARTS": parts, "RESIDUAL": residual, "UNIT": _unit(dtype), "BLOCK": 1024},
        num_warps=4,
    )  # fmt: skip


def _check_shapes(op: str, x_MK: Tensor, w_NK: Tensor, shards: int) -> tuple[int, int, int]:
    check(op, x_MK.ndim == 2 == w_NK.ndim and x_MK.shape[1] == w_NK.shape[1], f"{[*x_MK.shape]} does not meet {[*w_NK.shape]}")
    check(op, x_MK.dtype == w_NK.dtype, f"x is {x_MK.dtype} and w is {w_NK.dtype}; they must agree")
    dtype_name(x_MK.dtype)
    row_bytes = x_MK.shape[1] * x_MK.element_size()
    check(op, row_bytes % 16 == 0, f"a row of K = {x_MK.shape[1]} {x_MK.dtype} entries has {row_bytes} bytes, no multiple of 16")
    (m, k), n = x_MK.shape, w_NK.shape[0]
    check(op, w_NK.stride(0) == k or n == 1, f"rows of w lie {w_NK.stride(0)} entries apart, not K = {k}")
    power = 1 <= shards <= MAX_SHARDS and shards & (shards - 1) == 0
    check(op, power and k % shards == 0, f"shards must be a power of two up to {MAX_SHARDS} that divides K = {k}, got {shards}")
    check_rows(op, x=x_MK, w=w_NK)
    return m, n, k


def _out(op: str, out: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """`out`, or room of which rows begin at multiples of 16 bytes: kernels count strides in those."""
    if out is None:
        return aligned_room(*shape, dtype, like.device)
    check(op, out.shape == shape and out.dtype == dtype, f"out must be {[*shape]} {dtype}, got {[*out.shape]} {out.dtype}")
    check_rows(op, out=out)
    return out


def linear(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    residual_MN: Tensor | None = None,
    shards: int = 1,
    float32: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`round(x W^T + bias)`, or `round(residual + round(x W^T + bias))`.

    Args:
        x_MK: [M, K] bfloat16 or float32.
        w_NK: [N, K] contiguous, dtype of `x_MK`.
        bias_N: [N], dtype of `x_MK`.
        residual_MN: [M, N], dtype of `x_MK`; may be `out` itself.
        shards: in how many ranges K is summed (`spec.effective_shards` of the layer; a rank's share of them), a power of two up to 16.
        float32: leave the rounding out; the result is float32.
        out: [M, N] of the result's dtype.

    Returns:
        [M, N], `out` if given.

    Raises:
        ValueError: shapes or dtypes do not fit, or a row does not begin at a multiple of 16 bytes.
    """
    m, n, k = _check_shapes("linear", x_MK, w_NK, shards)
    check("linear", not (float32 and residual_MN is not None), "a residual is added to rounded sums: not with float32")
    out = _out("linear", out, (m, n), torch.float32 if float32 else x_MK.dtype, x_MK)
    for name, other, shape in (("bias", bias_N, (n,)), ("residual", residual_MN, (m, n))):
        fits = other is None or (other.shape == shape and other.dtype == x_MK.dtype)
        check("linear", fits, f"{name} must be {[*shape]} {x_MK.dtype}")
    check_rows("linear", bias=bias_N, residual=residual_MN)
    flags = {"bias": bias_N is not None, "residual": residual_MN is not None, "large": takes_large(m, x_MK.dtype)}
    variant = linear_variant(n, k, x_MK.dtype, out.dtype, shards, **flags)
    ld_residual = units(residual_MN) if residual_MN is not None else 0
    other = x_MK if bias_N is None else bias_N
    args = (x_MK, w_NK, other, x_MK if residual_MN is None else residual_MN, out, m, units(x_MK), units(out), ld_residual, 0)
    launch(variant, _grid(variant, m, n), *args)
    return out


def linear_parts(x_MK: Tensor, w_NK: Tensor, parts_SMN: Tensor) -> Tensor:
    """The sums of each range of K apart, for `add_parts`: the same bits as `linear` with as many shards, by S times the programs.

    For few rows, where one program per tile of the weights leaves most of a GPU idle.

    Args:
        x_MK, w_NK: as for `linear`.
        parts_SMN: [S, M, N] float32, written; S is a power of two up to 16.
    """
    m, n, k = _check_shapes("linear_parts", x_MK, w_NK, parts_SMN.shape[0])
    want = (parts_SMN.shape[0], m, n)
    fits = parts_SMN.shape == want and parts_SMN.dtype == torch.float32
    check("linear_parts", fits, f"parts must be {[*want]} float32, got {[*parts_SMN.shape]} {parts_SMN.dtype}")
    check_rows("linear_parts", parts=parts_SMN)
    variant = linear_variant(n, k, x_MK.dtype, torch.float32, want[0], parts=True)
    args = (x_MK, w_NK, x_MK, x_MK, parts_SMN, m, units(x_MK), units(parts_SMN, 1), 0, units(parts_SMN))
    launch(variant, (*_grid(variant, m, n), want[0]), *args)
    return parts_SMN


def add_parts(parts_SMN: Tensor, *, residual_MN: Tensor | None = None, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The balanced tree over sums of K made apart, rounded as `linear` rounds: ranks' subtrees, or what `linear_parts` left.

    Args:
        parts_SMN: [S, M, N] float32; S is a power of two up to 16.
        residual_MN: [M, N] of `dtype`; may be `out` itself.
        dtype: of the result.
        out: [M, N].
    """
    count, m, n = parts_SMN.shape
    check("add_parts", 1 <= count <= MAX_SHARDS and count & (count - 1) == 0, f"the number of parts must be a power of two, got {count}")
    check("add_parts", parts_SMN.dtype == torch.float32, f"parts must be float32, got {parts_SMN.dtype}")
    out = _out("add_parts", out, (m, n), dtype, parts_SMN)
    fits = residual_MN is None or (residual_MN.shape == (m, n) and residual_MN.dtype == dtype)
    check("add_parts", fits, f"residual must be {[m, n]} {dtype}")
    check_rows("add_parts", parts=parts_SMN, residual=residual_MN)
    variant = add_parts_variant(n, dtype, count, residual_MN is not None)
    ld_residual = units(residual_MN) if residual_MN is not None else 0
    args = (parts_SMN, out if residual_MN is None else residual_MN, out, m, units(parts_SMN, 1), units(parts_SMN), units(out), ld_residual)
    launch(variant, (m, cdiv(n, variant.constants["BLOCK"])), *args)
    return out


def linear_gated(x_MK: Tensor, w_NK: Tensor, activation: str, *, out: Tensor | None = None) -> Tensor:
    """`activation(gate) * up` of a fused weight: [M, I]. The same bits as two `linear` and a `gated`.

    Args:
        x_MK: [M, K] bfloat16 or float32.
        w_NK: [2 I, K]: I gate rows, then I up rows.
        activation: silu or gelu_tanh.
        out: [M, I], dtype of `x_MK`.
    """
    m, rows, k = _check_shapes("linear_gated", x_MK, w_NK, 1)
    check("linear_gated", rows % 2 == 0, f"w must hold as many gate rows as up rows, got {rows} in all")
    check("linear_gated", activation in GATES, f"activation must be one of {', '.join(GATES)}, got {activation!r}")
    out = _out("linear_gated", out, (m, rows // 2), x_MK.dtype, x_MK)
    variant = gated_variant(rows // 2, k, x_MK.dtype, activation, takes_large(m, x_MK.dtype))
    launch(variant, _grid(variant, m, rows // 2), x_MK, w_NK, out, m, units(x_MK), units(out))
    return out


def _grid(variant: Variant, m: int, n: int) -> tuple[int, ...]:
    constants: Any = variant.constants
    return (cdiv(m, constants["TM"]) * cdiv(n, constants["TN"]),)
