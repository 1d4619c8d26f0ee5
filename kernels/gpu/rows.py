"""Row ops: norms, embedding rows, gates and caps. One program per row, so a row knows of no other."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import gate, round_to, softcap_of
from .launch import Variant, cdiv, check, check_rows, check_vectors, dtype_name, launch, pointer, power_of_two, units
from .linear import GATES, _out, _unit

NORM_BLOCK = 4096
"""entries of a row that are summed side by side"""


@triton.jit
def _square_sum(x, D: tl.constexpr, BLOCK: tl.constexpr):
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, D, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < D, other=0.0).to(tl.float32)
        squares += value * value
    return tl.sum(squares, axis=0)


@triton.jit(do_not_specialize=["rows_count", "ld_group", "ld_x", "ld_out"])
def rmsnorm_kernel(x, weight, weight2, rows, out, rows_count, eps, ld_group, ld_x, ld_out, D: tl.constexpr, GROUP: tl.constexpr,
                   GROUP1: tl.constexpr, ONE_PLUS: tl.constexpr, GATHER: tl.constexpr, ADD: tl.constexpr, UNIT: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    # Row r of x lies at (r // GROUP) * ld_group + (r % GROUP) * ld_x; the first GROUP1 of a group take `weight`, the others `weight2`.
    r = tl.program_id(0)
    source = r
    if GATHER:
        source = tl.load(rows + r)
    member = source % GROUP
    offset = (source // GROUP).to(tl.int64) * (ld_group * UNIT) + member * (ld_x * UNIT)
    target = offset
    if GROUP == 1:
        target = r.to(tl.int64) * (ld_out * UNIT)
    dtype: tl.constexpr = out.dtype.element_ty
    mean = tl.div_rn(_square_sum(x + offset, D, BLOCK), D * 1.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    for first in range(0, D, BLOCK):
        at = first + tl.arange(0, BLOCK)
        ok = at < D
        value = tl.load(x + offset + at, mask=ok, other=0.0).to(tl.float32) * scale
        factor = tl.load(weight + at, mask=ok, other=0.0).to(tl.float32)
        if GROUP1 < GROUP:
            factor = tl.where(member < GROUP1, factor, tl.load(weight2 + at, mask=ok, other=0.0).to(tl.float32))
        if ONE_PLUS:
            y = round_to(value * (1.0 + factor), dtype)
        else:
            y = round_to(round_to(value, dtype) * factor, dtype)
        if ADD:
            y = tl.load(out + target + at, mask=ok, other=0.0).to(tl.float32) + y
        tl.store(out + target + at, y.to(dtype), mask=ok)


@triton.jit(do_not_specialize=["T"])
def embed_kernel(ids, weight, out, T, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + t).to(tl.int64)
    value = tl.load(weight + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    tl.store(out + t * D + at, (value * scale).to(out.dtype.element_ty), mask=at < D)


@triton.jit(do_not_specialize=["T", "ld_gate", "ld_up"])
def gated_rows_kernel(g, u, out, T, ld_gate, ld_up, N: tl.constexpr, GELU: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_value = tl.load(g + t * (ld_gate * UNIT) + at, mask=at < N, other=0.0).to(tl.float32)
    up_value = tl.load(u + t * (ld_up * UNIT) + at, mask=at < N, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + t * N + at, gate(gate_value, up_value, GELU, dtype).to(dtype), mask=at < N)


@triton.jit(do_not_specialize=["R", "ld"])
def softcap_kernel(x, out, R, ld, cap, V: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.program_id(0).to(tl.int64) * (ld * UNIT) + at
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + offset, mask=at < V, other=0.0).to(tl.float32)
    tl.store(out + offset, softcap_of(value, cap, dtype).to(dtype), mask=at < V)


@cache
def norm_variant(d: int, dtype: torch.dtype, *, one_plus: bool, gather: bool, add: bool, group: int = 1, group1: int = 1) -> Variant:
    """The binary for rows of `d`. What sums a row's squares depends on d and the dtype alone."""
    element, block = pointer(dtype), min(power_of_two(d, 16), NORM_BLOCK)
    kind = "_one_plus" * one_plus + "_rows" * gather + "_add" * add + f"_heads{group1}of{group}" * (group > 1)
    return Variant(
        name=f"rmsnorm{kind}/{dtype_name(dtype)}/{d}",
        fn=rmsnorm_kernel,
        types={
            "x": element, "weight": element, "weight2": element, "rows": "*i32", "out": element, "rows_count": "i32", "eps": "fp32",
            "ld_group": "i32", "ld_x": "i32", "ld_out": "i32",
        },
        constants={
            "D": d, "GROUP": group, "GROUP1": group1, "ONE_PLUS": one_plus, "GATHER": gather, "ADD": add, "UNIT": _unit(dtype),
            "BLOCK": block,
        },
        num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip


@cache
def embed_variant(d: int, dtype: torch.dtype) -> Variant:
    return Variant(
        name=f"embed/{dtype_name(dtype)}/{d}",
        fn=embed_kernel,
        types={"ids": "*i32", "weight": pointer(dtype), "out": pointer(dtype), "T": "i32", "scale": "fp32"},
        constants={"D": d, "BLOCK": min(power_of_two(d, 16), 1024)},
        num_warps=4,
    )


@cache
def gated_rows_variant(n: int, dtype: torch.dtype, activation: str) -> Variant:
    element = pointer(dtype)
    return Variant(
        name=f"{activation}_mul/{dtype_name(dtype)}/{n}",
        fn=gated_rows_kernel,
        types={"g": element, "u": element, "out": element, "T": "i32", "ld_gate": "i32", "ld_up": "i32"},
        constants={"N": n, "GELU": GATES[activation], "UNIT": _unit(dtype), "BLOCK": 1024},
        num_warps=4,
    )


@cache
def softcap_variant(v: int, dtype: torch.dtype) -> Variant:
    return Variant(
        name=f"softcap/{dtype_name(dtype)}/{v}",
        fn=softcap_kernel,
        types={"x": pointer(dtype), "out": pointer(dtype), "R": "i32", "ld": "i32", "cap": "fp32"},
        constants={"V": v, "UNIT": _unit(dtype), "BLOCK": 1024},
        num_warps=4,
    )


def rmsnorm(
    x_TD: Tensor, weight_D: Tensor, eps: float, one_plus: bool = False, *, rows: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Each row of `x_TD` (or the rows that `rows` names) at unit RMS, times the weight; with `one_plus` times 1 + weight (Gemma).

    Args:
        x_TD: [T, D] bfloat16 or float32.
        weight_D: [D], dtype of `x_TD`.
        eps: added to the mean square, same unit as x**2.
        rows: [R] int32, rows of `x_TD` to norm; None: all.
        out: [T, D] or [R, D]; not `x_TD` itself if `rows` is given.

    Returns:
        [T, D] or [R, D], dtype of `x_TD`.
    """
    return _norm("rmsnorm", x_TD, weight_D, eps, one_plus, rows, out)


def add_rmsnorm(residual_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, one_plus: bool = False) -> Tensor:
    """residual = round(residual + rmsnorm(x)), in place; both [T, D] of one dtype. Returns `residual_TD`."""
    check("add_rmsnorm", residual_TD.shape == x_TD.shape, f"residual is {[*residual_TD.shape]}, x is {[*x_TD.shape]}")
    return _norm("add_rmsnorm", x_TD, weight_D, eps, one_plus, None, residual_TD, add=True)


def _norm(
    op: str, x: Tensor, weight: Tensor, eps: float, one_plus: bool, rows: Tensor | None, out: Tensor | None, add: bool = False
) -> Tensor:
    check(op, x.ndim == 2 and weight.shape == x.shape[1:], f"rows of {[*x.shape]} do not meet a weight of {[*weight.shape]}")
    check(op, weight.dtype == x.dtype, f"weight is {weight.dtype}, x is {x.dtype}")
    check(op, rows is None or (rows.dtype == torch.int32 and rows.ndim == 1), "rows must be [R] int32")
    aligned = x.shape[1] * x.element_size() % 16 == 0
    check(op, aligned, f"a row of {x.shape[1]} {x.dtype} entries is no multiple of 16 bytes")
    check_rows(op, x=x, weight=weight)
    check_vectors(op, rows=rows)
    count, d = len(x) if rows is None else len(rows), x.shape[1]
    out = _out(op, out, (count, d), x.dtype, x)
    variant = norm_variant(d, x.dtype, one_plus=one_plus, gather=rows is not None, add=add)
    args = (x, weight, weight, _dummy(x) if rows is None else rows, out, count, eps, units(x), 0, units(out))
    launch(variant, (count,), *args)
    return out


def _packed(op: str, out: Tensor | None, shape: tuple[int, int], like: Tensor) -> Tensor:
    """`out`, or room, of which rows lie one right behind another, however long."""
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    fits = out.shape == shape and out.dtype == like.dtype
    check(op, fits, f"out must be {[*shape]} {like.dtype}, got {[*out.shape]} {out.dtype}")
    check_vectors(op, out=out)
    return out


def _dummy(x: Tensor) -> Tensor:
    """An int32 argument that is not read."""
    return x.view(torch.int32) if x.is_contiguous() else x[0].view(torch.int32)


def head_norm(
    qkv_TC: Tensor, q_weight_H: Tensor, k_weight_H: Tensor, eps: float, one_plus: bool = False, *, heads: int, kv_heads: int
) -> Tensor:
    """RMSNorm of every query and key head, in place. The bits of `rmsnorm` over rows of H.

    Args:
        qkv_TC: [T, (heads + 2 kv_heads) * H]: query heads, then key heads, then value heads, which stay as they are.
        q_weight_H, k_weight_H: [H], dtype of `qkv_TC`.

    Returns:
        `qkv_TC`.
    """
    h = qkv_TC.shape[1] // (heads + 2 * kv_heads)
    check("head_norm", qkv_TC.shape[1] == (heads + 2 * kv_heads) * h, f"{qkv_TC.shape[1]} columns are not {heads} + 2 * {kv_heads} heads")
    for name, weight in (("q_weight", q_weight_H), ("k_weight", k_weight_H)):
        fits = weight.shape == (h,) and weight.dtype == qkv_TC.dtype
        check("head_norm", fits, f"{name} must be [{h}] {qkv_TC.dtype}, got {[*weight.shape]} {weight.dtype}")
    check_rows("head_norm", qkv=qkv_TC, q_weight=q_weight_H, k_weight=k_weight_H)
    check("head_norm", h * qkv_TC.element_size() % 16 == 0, f"a head of {h} entries is no multiple of 16 bytes")
    variant = norm_variant(h, qkv_TC.dtype, one_plus=one_plus, gather=False, add=False, group=heads + kv_heads, group1=heads)
    count, head_units = len(qkv_TC) * (heads + kv_heads), h * qkv_TC.element_size() // 16
    launch(variant, (count,), qkv_TC, q_weight_H, k_weight_H, _dummy(qkv_TC), qkv_TC, count, eps, units(qkv_TC), head_units, 0)
    return qkv_TC


def embed(ids_T: Tensor, weight_VD: Tensor, scale: float = 1.0, *, out: Tensor | None = None) -> Tensor:
    """Rows of `weight_VD`, times `scale` as rounded to its dtype: [T, D].

    Args:
        ids_T: [T] int32, each in [0, V).
        weight_VD: [V, D] contiguous, bfloat16 or float32.
        scale: factor; 1 changes nothing.
        out: [T, D].
    """
    d, dtype = weight_VD.shape[1], weight_VD.dtype
    check("embed", ids_T.dtype == torch.int32 and ids_T.ndim == 1, f"ids must be [T] int32, got {[*ids_T.shape]} {ids_T.dtype}")
    check_vectors("embed", ids=ids_T, weight=weight_VD)
    check_rows("embed", weight=weight_VD)
    out = _packed("embed", out, (len(ids_T), d), weight_VD)
    variant = embed_variant(d, dtype)
    launch(variant, (len(ids_T), cdiv(d, variant.constants["BLOCK"])), ids_T, weight_VD, out, len(ids_T), _rounded(scale, dtype))
    return out


@cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    return torch.tensor(scale, dtype=dtype).item()


def gated(gate_TN: Tensor, up_TN: Tensor, activation: str, *, out: Tensor | None = None) -> Tensor:
    """`activation(gate) * up`, each rounded: [T, N]. Both may be views of one fused [T, 2 N].

    Args:
        gate_TN, up_TN: [T, N] bfloat16 or float32.
        activation: silu or gelu_tanh.
        out: [T, N] contiguous.
    """
    check("gated", gate_TN.shape == up_TN.shape and gate_TN.ndim == 2, f"gate is {[*gate_TN.shape]}, up is {[*up_TN.shape]}")
    check("gated", gate_TN.dtype == up_TN.dtype, f"gate is {gate_TN.dtype}, up is {up_TN.dtype}")
    check("gated", activation in GATES, f"activation must be one of {', '.join(GATES)}, got {activation!r}")
    check_rows("gated", gate=gate_TN, up=up_TN)
    out = _packed("gated", out, (len(gate_TN), gate_TN.shape[1]), gate_TN)
    (t, n), variant = gate_TN.shape, gated_rows_variant(gate_TN.shape[1], gate_TN.dtype, activation)
    launch(variant, (t, cdiv(n, 1024)), gate_TN, up_TN, out, t, units(gate_TN), units(up_TN))
    return out


def softcap(x_RV: Tensor, cap: float, *, out: Tensor | None = None) -> Tensor:
    """`cap * tanh(x / cap)`, each step rounded to the dtype: [R, V]. `out` may be `x_RV`, and must have its strides."""
    out = _out("softcap", out, (len(x_RV), x_RV.shape[1]), x_RV.dtype, x_RV) if out is not None else torch.empty_strided(
        x_RV.shape, x_RV.stride(), dtype=x_RV.dtype, device=x_RV.device
    )  # fmt: skip
    check("softcap", out.stride() == x_RV.stride(), f"out has strides {out.stride()}, x has {x_RV.stride()}")
    check_rows("softcap", x=x_RV)
    variant = softcap_variant(x_RV.shape[1], x_RV.dtype)
    launch(variant, (len(x_RV), cdiv(x_RV.shape[1], 1024)), x_RV, out, len(x_RV), units(x_RV), cap)
    return out
