"""Log-probabilities of given tokens, for a trainer: the engine's bits (docs/numerics.md), with gradients.

T rows of logits, V their width (the rows of the head), D hidden width. All on the CPU; gradients are ordinary float32 arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .logprob_rows import Backend, Column, Rows, check
from .sampling_mask import SamplingMask

PIECE_BYTES = 16 << 20
"""of float32 logits that are worked on at a time"""
HEAD_PIECES = 4
"""as many at a time where they are products of the head, which is read anew each time"""


def token_logprobs(
    logits_TV: Tensor,
    token_ids_T: Tensor,
    *,
    temperature: Column = 1.0,
    vocab_limit: int | None = None,
    top_k: Column = 0,
    top_p: Column = 1.0,
    min_p: Column = 0.0,
    mask: SamplingMask | None = None,
    build: str | None = None,
    threads: int | None = None,
) -> Tensor:
    """The engine's logprob of each token, bit for bit, if these are the engine's logits. Differentiable by the logits.

    As they stand, these are the engine's `model_logprobs`; with its temperature, `temperature_logprobs`; with all that restricted
    the draw besides, `logprobs`: what is left is renormalised. At temperature 0 the likeliest id has 0. An id that could not be drawn has
    -inf, and its row no gradient. Of the ids a row leaves out, the gradient is 0.

    Logits that the engine changed before it drew (`logit_bias`, penalties) must be changed here likewise: a row knows nothing of them.

    Args:
        logits_TV: [..., V] bfloat16 or float32, on the CPU; float32 copies of bfloat16 values give the same bits.
        token_ids_T: [...] integers, in [0, V).
        temperature: 0, or >= 1e-8; a number, or one per row, flattened: as `top_k` (0: all), `top_p` and `min_p`.
        vocab_limit: ids from here on are padding of the head and never drawn; by default none is.
        mask: what the engine reported as `sampling_mask`, of all rows (`SamplingMask.join` joins several); instead of
            vocab_limit, top_k, top_p and min_p. The temperature counts still.
        build: kernels to compute with, by default the fastest here. No bit depends on it.
        threads: at least 1, by default torch's number.

    Returns:
        [...] float32.

    Raises:
        ValueError: a shape, dtype, id or parameter does not fit, or a row's logits are broken (NaN, +inf); names the row.
    """
    rows_of: dict[str, Column] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return _token_logprobs("token_logprobs", logits_TV, token_ids_T, vocab_limit, mask, rows_of, (build, threads), False)[0]


def token_logprobs_and_entropy(
    logits_TV: Tensor,
    token_ids_T: Tensor,
    *,
    temperature: Column = 1.0,
    vocab_limit: int | None = None,
    top_k: Column = 0,
    top_p: Column = 1.0,
    min_p: Column = 0.0,
    mask: SamplingMask | None = None,
    build: str | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and the engine's `entropy` of each row, bit for bit: nats, of the temperature's distribution before anything
    restricts it. Both are differentiable by the logits. Arguments and errors as for `token_logprobs`."""
    rows_of: dict[str, Column] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return _token_logprobs("token_logprobs_and_entropy", logits_TV, token_ids_T, vocab_limit, mask, rows_of, (build, threads), True)


def hidden_token_logprobs(
    hidden_TD: Tensor,
    head_weight_VD: Tensor,
    token_ids_T: Tensor,
    *,
    temperature: Column = 1.0,
    vocab_limit: int | None = None,
    top_k: Column = 0,
    top_p: Column = 1.0,
    min_p: Column = 0.0,
    mask: SamplingMask | None = None,
    softcap: float = 0.0,
    head_dtype: str | torch.dtype | None = None,
    build: str | None = None,
    threads: int | None = None,
) -> Tensor:
    """`token_logprobs` of the engine's logits of these hidden states, of which only a piece is there at any time.

    Differentiable by the hidden states and the head's weight; `backward` computes the logits anew.

    Args:
        hidden_TD: [..., D] bfloat16 or float32: what the final norm gives.
        head_weight_VD: [V, D], dtype of `hidden_TD`.
        softcap: of the logits (Gemma 2), 0 for none.
        head_dtype: float32 leaves logits unrounded, as the engine's `numerics.head_dtype` does.
        token_ids_T, temperature, vocab_limit, top_k, top_p, min_p, mask, build, threads: as for `token_logprobs`.

    Returns:
        [...] float32.

    Raises:
        ValueError: as for `token_logprobs`; or the width or dtype of the two differ.
    """
    rows_of: dict[str, Column] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    name = "hidden_token_logprobs"
    head = _check_head(name, hidden_TD, head_weight_VD, softcap, head_dtype)
    return _hidden(name, hidden_TD, head_weight_VD, token_ids_T, vocab_limit, mask, rows_of, head, (build, threads), False)[0]


def hidden_token_logprobs_and_entropy(
    hidden_TD: Tensor,
    head_weight_VD: Tensor,
    token_ids_T: Tensor,
    *,
    temperature: Column = 1.0,
    vocab_limit: int | None = None,
    top_k: Column = 0,
    top_p: Column = 1.0,
    min_p: Column = 0.0,
    mask: SamplingMask | None = None,
    softcap: float = 0.0,
    head_dtype: str | torch.dtype | None = None,
    build: str | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`hidden_token_logprobs`, and each row's entropy as `token_logprobs_and_entropy` gives it."""
    name = "hidden_token_logprobs_and_entropy"
    rows_of: dict[str, Column] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    head = _check_head(name, hidden_TD, head_weight_VD, softcap, head_dtype)
    return _hidden(name, hidden_TD, head_weight_VD, token_ids_T, vocab_limit, mask, rows_of, head, (build, threads), True)


def _check_floats(name: str, what: str, x: Tensor) -> None:
    fits = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float32)
    check(name, fits, f"{what} must be a bfloat16 or float32 tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    check(name, x.device.type == "cpu", f"{what} must be on the CPU, got {x.device}")


def _check_ids(name: str, ids: Tensor, shape: Sequence[int], vocab: int) -> Tensor:
    integers = isinstance(ids, Tensor) and not ids.is_floating_point() and not ids.is_complex() and ids.dtype != torch.bool
    check(name, integers, f"token_ids must be a tensor of integers, got {getattr(ids, 'dtype', type(ids).__name__)}")
    check(name, ids.device.type == "cpu", f"token_ids must be on the CPU, got {ids.device}")
    check(name, list(ids.shape) == list(shape), f"token_ids must be {[*shape]} as the rows are, got {[*ids.shape]}")
    ids_T = ids.reshape(-1).long()
    wrong = ((ids_T < 0) | (ids_T >= vocab)).nonzero().flatten().tolist()
    check(name, not wrong, f"token_ids must be in [0, {vocab}), got {ids_T[wrong[:1]].tolist()} in row {wrong[:1]}")
    return ids_T


def _check_head(name: str, hidden: Tensor, weight_VD: Tensor, softcap: float, head_dtype: str | torch.dtype | None) -> tuple[float, bool]:
    _check_floats(name, "hidden", hidden)
    _check_floats(name, "head_weight", weight_VD)
    check(name, hidden.dtype == weight_VD.dtype, f"hidden is {hidden.dtype} and head_weight is {weight_VD.dtype}: they must agree")
    fits = hidden.ndim >= 1 and weight_VD.ndim == 2 and hidden.shape[-1] == weight_VD.shape[1]
    check(name, fits, f"hidden [..., D] must meet head_weight [V, D], got {[*hidden.shape]} and {[*weight_VD.shape]}")
    check(name, 0 <= softcap < float("inf"), f"softcap must be finite and at least 0, got {softcap}")
    kinds = (None, "float32", torch.float32)
    check(name, head_dtype in kinds, f"head_dtype must be None or float32, got {head_dtype}")
    return float(softcap), head_dtype is not None and hidden.dtype != torch.float32


def _token_logprobs(
    name: str, logits: Tensor, ids: Tensor, limit: int | None, mask: SamplingMask | None, columns: dict[str, Column],
    choice: tuple[str | None, int | None], entropy: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_floats(name, "logits", logits)
    check(name, logits.ndim >= 2 and logits.shape[-1] > 0, f"logits must be [..., V], got {[*logits.shape]}")
    ids_T = _check_ids(name, ids, logits.shape[:-1], logits.shape[-1])
    rows = Rows(name, len(ids_T), logits.shape[-1], limit, mask, columns)
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(logits, ids_T, rows, Backend(*choice), entropy)  # type: ignore[no-untyped-call]
    return found[0].view(ids.shape), found[1].view(ids.shape)


def _hidden(
    name: str, hidden: Tensor, weight_VD: Tensor, ids: Tensor, limit: int | None, mask: SamplingMask | None, columns: dict[str, Column],
    head: tuple[float, bool], choice: tuple[str | None, int | None], entropy: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    vocab = len(weight_VD)
    ids_T = _check_ids(name, ids, hidden.shape[:-1], vocab)
    rows = Rows(name, len(ids_T), vocab, limit, mask, columns)
    hidden_TD = hidden.reshape(-1, hidden.shape[-1])
    arguments = hidden_TD, weight_VD, ids_T, rows, Backend(*choice), head, entropy
    found: tuple[Tensor, Tensor] = _HiddenLogprobs.apply(*arguments)  # type: ignore[no-untyped-call]
    return found[0].view(ids.shape), found[1].view(ids.shape)


def _parts(logits: Tensor) -> list[Tensor]:
    """Its rows as views [rows, V], one after the other, without a copy."""
    if logits.ndim == 2 or logits.is_contiguous():
        return [logits.flatten(0, -2)]
    return [part for one in logits.unbind(0) for part in _parts(one)]


def _pieces(parts: Sequence[Tensor], vocab: int, size: int = 1) -> Iterator[tuple[int, Tensor]]:
    """(first row, piece): rows whose logits are no more than `size` times `PIECE_BYTES` in float32."""
    first, step = 0, max(1, size * PIECE_BYTES // (4 * vocab))
    for part in parts:
        for begin in range(0, len(part), step):
            yield first + begin, part[begin : begin + step]
        first += len(part)


def _gradient(
    piece_TV: Tensor,
    ids_T: Tensor,
    rows: Rows,
    first: int,
    values: Tensor,
    grads: tuple[Tensor, Tensor | None],
    out_TV: Tensor | None = None,
) -> Tensor:
    """d sum(grad * logprob + grad' * entropy) / d logits of a piece: float32 [rows, V], in `out_TV` if given."""
    at = slice(first, first + len(piece_TV))
    logprob, inverse, moves = values[0, at], rows.inverse[at], ~rows.greedy[at]
    drawn = logprob.isfinite() & moves  # what could not be drawn has no slope
    g = torch.where(drawn, grads[0][at], 0.0) * inverse
    x, chosen = piece_TV.float(), ids_T[at, None]
    log_sum = torch.where(drawn, x.gather(1, chosen)[:, 0] * inverse - logprob, torch.inf)
    if out_TV is None and x is not piece_TV and grads[1] is None:
        out_TV = x
    p = torch.addcmul(-log_sum[:, None], x, inverse[:, None], out=out_TV).exp_().mul_(-g[:, None])
    p.scatter_add_(1, chosen, g[:, None])
    kept = rows.kept(len(piece_TV), first)
    if kept is not None:
        p.masked_fill_(~kept, 0.0)
    if grads[1] is not None:
        logp = torch.log_softmax(x * inverse[:, None], 1)
        scale = torch.where(moves, grads[1][at], 0.0) * inverse
        p.sub_(logp.exp().mul_(logp.clamp_(min=-1e30).add_(values[1, at, None])).mul_(scale[:, None]))
    return p


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids_T: Tensor, rows: Rows, backend: Backend, entropy: bool) -> tuple[Tensor, Tensor]:
        values, keep = torch.empty(2, len(ids_T)), ctx.needs_input_grad[0]
        for first, piece in _pieces(_parts(logits), logits.shape[-1]):
            values[:, first : first + len(piece)] = rows.score(backend, piece, ids_T, first, entropy, keep)
        ctx.save_for_backward(logits, ids_T, values)
        ctx.rows, ctx.entropy = rows, entropy
        return values[0].clone(), values[1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids_T, values = ctx.saved_tensors
        out = torch.empty(logits.shape, dtype=logits.dtype)
        out_TV, grads = out.flatten(0, -2), (grad_T, grad_entropy_T if ctx.entropy else None)
        for first, piece in _pieces(_parts(logits), logits.shape[-1]):
            target = out_TV[first : first + len(piece)]
            slope = _gradient(piece, ids_T, ctx.rows, first, values, grads, target if out.dtype == torch.float32 else None)
            if slope is not target:
                target.copy_(slope)
        return out, None, None, None, None


class _HiddenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, ids_T: Tensor, rows: Rows, backend: Backend, head: tuple[float, bool], entropy: bool
    ) -> tuple[Tensor, Tensor]:
        values, make_logits, keep = torch.empty(2, len(ids_T)), backend.head(weight_VD, *head), any(ctx.needs_input_grad)
        for first, piece in _pieces([hidden_TD], len(weight_VD), HEAD_PIECES):
            values[:, first : first + len(piece)] = rows.score(backend, make_logits(piece), ids_T, first, entropy, keep)
        ctx.save_for_backward(hidden_TD, weight_VD, ids_T, values)
        ctx.rows, ctx.backend, ctx.head, ctx.entropy = rows, backend, head, entropy
        return values[0].clone(), values[1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, ids_T, values = ctx.saved_tensors
        (cap, _), grads = ctx.head, (grad_T, grad_entropy_T if ctx.entropy else None)
        hidden_grad = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        weight_grad: Tensor | None = None
        make_logits = ctx.backend.head(weight_VD, *ctx.head)
        for first, piece in _pieces([hidden_TD], len(weight_VD), HEAD_PIECES):
            logits = make_logits(piece)
            slope = _gradient(logits, ids_T, ctx.rows, first, values, grads)
            if cap:
                slope.mul_(1 - (logits.float() / cap).square())
            slope = slope.to(weight_VD.dtype)
            if hidden_grad is not None:
                hidden_grad[first : first + len(piece)] = slope @ weight_VD
            if ctx.needs_input_grad[1]:
                product = slope.T @ piece
                weight_grad = product if weight_grad is None else weight_grad.float().add_(product)
        if ctx.needs_input_grad[1] and weight_grad is None:  # no row
            weight_grad = torch.zeros_like(weight_VD)
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight_VD.dtype), None, None, None, None, None
