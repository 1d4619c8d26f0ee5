"""Ops of the specification with gradients: forward passes have the engine's bits, backward passes are ordinary.

Shape letters as in trainer_ops.py. None of these can be differentiated twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .segments import Segments
from .trainer_ops import TrainerOps


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: TrainerOps, x: Tensor, weight: Tensor, bias: Tensor | None, shards: int, wide: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = ops.linear(x.reshape(-1, x.shape[-1]), weight, bias, shards, wide)
        return rows.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[1:4]
        rows = grad.to(x.dtype).reshape(-1, grad.shape[-1])
        return (
            None,
            (rows @ weight).view(x.shape) if needs_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
            None,
            None,
        )


def linear(ops: TrainerOps, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, shards: int = 1, wide: bool = False) -> Tensor:
    """`x W^T + bias` over the last dimension.

    Args:
        x: [..., K] bfloat16 or float32.
        weight: [N, K], dtype of `x`.
        bias: [N], dtype of `x`.
        shards: the `k_shards` setting for a row-parallel layer, 1 for any other.
        wide: leave the sums in float32.

    Returns:
        [..., N], dtype of `x` or float32.
    """
    apply: Any = _Linear.apply
    out: Tensor = apply(ops, x, weight, bias, shards, wide)
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: TrainerOps, x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.one_plus = eps, one_plus
        return ops.rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps, one_plus).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, _, _ = ctx.needs_input_grad
        wide, grad = x.float(), grad.float()
        r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
        scaled = wide * r
        grad_weight = (grad * scaled).flatten(0, -2).sum(0).to(weight.dtype) if needs_weight else None
        if not needs_x:
            return None, None, grad_weight, None, None
        grad = grad * (weight.float() + 1 if ctx.one_plus else weight.float())
        grad_x = (grad - scaled * (grad * scaled).mean(-1, keepdim=True)) * r
        return None, grad_x.to(x.dtype), grad_weight, None, None


def rmsnorm(ops: TrainerOps, x: Tensor, weight: Tensor, eps: float, one_plus: bool = False) -> Tensor:
    """RMSNorm over the last dimension (reference.rmsnorm): [..., D], dtype of `x`.

    Args:
        x: [..., D] bfloat16 or float32.
        weight: [D], dtype of `x`.
    """
    apply: Any = _RmsNorm.apply
    out: Tensor = apply(ops, x, weight, eps, one_plus)
    return out


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: TrainerOps, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return ops.activation(x, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if ctx.kind == "silu":
            return None, torch.ops.aten.silu_backward(grad, x), None
        return None, torch.ops.aten.gelu_backward(grad, x, approximate="tanh"), None


def activation(ops: TrainerOps, x: Tensor, kind: str) -> Tensor:
    """"silu" or "gelu_tanh" of every element, rounded to the dtype of `x`; same shape and dtype."""
    apply: Any = _Activation.apply
    out: Tensor = apply(ops, x, kind)
    return out


class _Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: TrainerOps, x: Tensor, cap: float) -> Tensor:
        out = ops.softcap(x, cap)
        ctx.save_for_backward(out)
        ctx.cap = cap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        return None, torch.ops.aten.tanh_backward(grad, out / ctx.cap), None


def softcap(ops: TrainerOps, x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`, each step rounded to the dtype of `x`; same shape and dtype."""
    apply: Any = _Softcap.apply
    out: Tensor = apply(ops, x, cap)
    return out


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    return seen.triu_(1 - window) if window else seen


def _plain_attention(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, scale: float, window: int, cap: float) -> Tensor:
    """What is differentiated: attention of rows that are one sequence each, by torch."""
    groups, length = q_BNTH.shape[1] // k_BKTH.shape[1], q_BNTH.shape[2]
    k, v = k_BKTH.repeat_interleave(groups, dim=1), v_BKTH.repeat_interleave(groups, dim=1)
    if not cap:
        mask = _window_mask(length, window, k.device) if 0 < window < length else None
        return F.scaled_dot_product_attention(q_BNTH, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    scores = torch.tanh(q_BNTH.float() @ k.float().mT * (scale / cap)) * cap
    scores = scores.masked_fill(~_window_mask(length, window, k.device), float("-inf"))
    return (scores.softmax(-1) @ v.float()).to(q_BNTH.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: TrainerOps, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int, cap: float
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.segments, ctx.options = segments, (scale, window, cap)
        return ops.attention(q, k, v, segments, scale, window, cap)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        segments = ctx.segments
        inputs = [t.transpose(1, 2) for t in ctx.saved_tensors]
        grad = grad.transpose(1, 2)
        if segments.right_padded:
            if not segments.full:  # what padding gave is a constant
                grad = grad.masked_fill(~torch.from_numpy(segments.real).to(grad.device)[:, None, :, None], 0)
            return None, *(t.transpose(1, 2) for t in _attention_grads(inputs, grad, ctx.options)), None, None, None, None
        grads = [torch.zeros_like(t) for t in inputs]
        for row, begin, end in segments.spans:
            at = (slice(row, row + 1), slice(None), slice(begin, end))
            for whole, part in zip(grads, _attention_grads([t[at] for t in inputs], grad[at], ctx.options), strict=True):
                whole[at] = part
        return None, *(t.transpose(1, 2) for t in grads), None, None, None, None


def _attention_grads(inputs: list[Tensor], grad: Tensor, options: tuple[float, int, float]) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        q, k, v = leaves = [t.detach().requires_grad_() for t in inputs]
        out = _plain_attention(q, k, v, *options)
    return torch.autograd.grad(out, leaves, grad)


def attention(
    ops: TrainerOps,
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    segments: Segments,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Causal attention of each of a batch's sequences over itself: [B, T, N, H], zeros in padding.

    Args:
        q_BTNH: [B, T, N, H] bfloat16 or float32; q and k rotated already.
        k_BTKH, v_BTKH: [B, T, K, H], dtype of `q_BTNH`; N is a multiple of K.
        window: keys a token sees, itself included; 0: all.
        cap: soft cap of the scaled scores; 0: none.
    """
    apply: Any = _Attention.apply
    out: Tensor = apply(ops, q_BTNH, k_BTKH, v_BTKH, segments, scale, window, cap)
    return out
