"""Logprobs and entropies of given tokens on a GPU, with gradients; no float32 copy of the logits is made.

The sums are the sampler's, integers and all, so these are its `model_logprob` and `temperature_logprob`, bit for bit.
T rows of logits, V wide.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import Variant, aligned_rows, check, check_rows, check_vectors, dtype_name, launch, pointer, power_of_two, rows_like, units
from .linear import _unit
from .masses import entropy_of, logprob_of, mass_sum, peak_of, z_at


@triton.jit(do_not_specialize=["ld_logits"])
def logprobs_kernel(logits, ids, inverse, out_logprob, out_entropy, out_peak, out_mass, ld_logits, V: tl.constexpr, ENTROPY: tl.constexpr,
                    UNIT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    row, inv = logits + t * (ld_logits * UNIT), tl.load(inverse + t)
    peak, broken = peak_of(row, inv, V, BLOCK)
    total = mass_sum(row, inv, peak, V, BLOCK)
    sound = (broken == 0) & (tl.abs(peak) < float("inf"))
    total = tl.where(sound, total, 1)
    nan = float("nan")
    tl.store(out_logprob + t, tl.where(sound, logprob_of(z_at(row, tl.load(ids + t), inv, V), peak, total), nan))
    tl.store(out_peak + t, tl.where(sound, peak, nan))
    tl.store(out_mass + t, total)
    if ENTROPY:
        tl.store(out_entropy + t, tl.where(sound, entropy_of(row, inv, peak, total, V, BLOCK).to(tl.float32), nan))


@triton.jit(do_not_specialize=["ld_logits", "ld_grad"])
def logprobs_grad_kernel(logits, ids, inverse, entropy, peak, mass, grad_logprob, grad_entropy, out, ld_logits, ld_grad, V: tl.constexpr,
                         ENTROPY: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    # d logprob / d z_i = [i = id] - p_i; d entropy / d z_i = -p_i (log p_i + entropy). One block of a row.
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inv, top, token = tl.load(inverse + t), tl.load(peak + t), tl.load(ids + t)
    total = tl.load(mass + t).to(tl.float32) * 9.094947017729282e-13
    below = z_at(logits + t * (ld_logits * UNIT), at, inv, V) - top
    p = tl.div_rn(tl.exp(below), tl.zeros_like(below) + total)
    slope = tl.load(grad_logprob + t) * (tl.where(at == token, 1.0, 0.0) - p)
    if ENTROPY:
        log_p = below - tl.log(total)
        slope -= tl.load(grad_entropy + t) * tl.where(p > 0.0, p * (log_p + tl.load(entropy + t)), 0.0)
    tl.store(out + t * (ld_grad * UNIT) + at, (slope * inv).to(out.dtype.element_ty), mask=at < V)


@cache
def logprobs_variant(v: int, dtype: torch.dtype, entropy: bool) -> Variant:
    types = {"logits": pointer(dtype), "ids": "*i64", "inverse": "*fp32", "out_logprob": "*fp32", "out_entropy": "*fp32"}
    return Variant(
        name=f"logprobs{'_entropy' * entropy}/{dtype_name(dtype)}/{v}",
        fn=logprobs_kernel,
        types=types | {"out_peak": "*fp32", "out_mass": "*i64", "ld_logits": "i32"},
        constants={"V": v, "ENTROPY": entropy, "UNIT": _unit(dtype), "BLOCK": min(power_of_two(v, 128), 4096)},
        num_warps=8,
    )


@cache
def logprobs_grad_variant(v: int, dtype: torch.dtype, entropy: bool) -> Variant:
    floats = dict.fromkeys(("inverse", "entropy", "peak"), "*fp32")
    return Variant(
        name=f"logprobs_grad{'_entropy' * entropy}/{dtype_name(dtype)}/{v}",
        fn=logprobs_grad_kernel,
        types={
            "logits": pointer(dtype), "ids": "*i64", **floats, "mass": "*i64", "grad_logprob": "*fp32", "grad_entropy": "*fp32",
            "out": pointer(dtype), "ld_logits": "i32", "ld_grad": "i32",
        },
        constants={"V": v, "ENTROPY": entropy, "UNIT": _unit(dtype), "BLOCK": min(power_of_two(v, 128), 4096)},
        num_warps=8,
    )  # fmt: skip


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, ids_T: Tensor, inverse_T: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        logits, (count, v) = aligned_rows(logits_TV), logits_TV.shape
        check_rows("logprobs", logits=logits)
        check_vectors("logprobs", ids=ids_T, inverse=inverse_T)
        logprob, found, peak = (torch.empty(count, device=logits.device) for _ in range(3))
        mass = torch.empty(count, dtype=torch.int64, device=logits.device)
        variant = logprobs_variant(v, logits.dtype, entropy)
        launch(variant, (count,), logits, ids_T, inverse_T, logprob, found, peak, mass, units(logits))
        ctx.save_for_backward(logits, ids_T, inverse_T, found, peak, mass)
        ctx.entropy = entropy
        return logprob, found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids_T, inverse_T, entropy, peak, mass = ctx.saved_tensors
        count, v = logits.shape
        out = rows_like(logits)
        variant = logprobs_grad_variant(v, logits.dtype, ctx.entropy)
        grads = grad_T.contiguous(), grad_entropy_T.contiguous()
        grid = (count, -(-v // variant.constants["BLOCK"]))
        launch(variant, grid, logits, ids_T, inverse_T, entropy, peak, mass, *grads, out, units(logits), units(out))
        return out, None, None, None


def token_logprobs(logits_TV: Tensor, token_ids_T: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """The engine's logprob of each token: `model_logprob` at temperature 1, else `temperature_logprob`. Differentiable by the logits.

    Args:
        logits_TV: [T, V] bfloat16 or float32 on a GPU. Rows that do not begin at multiples of 16 bytes are copied.
        token_ids_T: [T] int64, each in [0, V).
        temperature: > 0; a number, or [T] float64.

    Returns:
        [T] float32; NaN for a row with a NaN or +inf.
    """
    return _apply("token_logprobs", logits_TV, token_ids_T, temperature, False)[0]


def token_logprobs_and_entropy(logits_TV: Tensor, token_ids_T: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and the entropy of each row's distribution in nats: [T] float32 each, both differentiable."""
    return _apply("token_logprobs_and_entropy", logits_TV, token_ids_T, temperature, True)


def _apply(op: str, logits_TV: Tensor, ids_T: Tensor, temperature: float | Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    check(op, logits_TV.ndim == 2, f"logits must be [T, V], got {[*logits_TV.shape]}")
    dtype_name(logits_TV.dtype)
    fits = ids_T.dtype == torch.int64 and ids_T.shape == logits_TV.shape[:1]
    check(op, fits, f"token_ids must be [{len(logits_TV)}] int64, got {[*ids_T.shape]} {ids_T.dtype}")
    divisor = torch.as_tensor(temperature, dtype=torch.float64, device=logits_TV.device)
    inverse = (1.0 / divisor).float().expand(len(logits_TV)).contiguous()
    apply: Any = _Logprobs.apply
    found: tuple[Tensor, Tensor] = apply(logits_TV, ids_T.contiguous(), inverse, entropy)
    return found
