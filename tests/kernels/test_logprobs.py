"""A trainer's log-probabilities: the sampler's bits, and gradients as torch's autograd has them in float64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from rollsync.kernels import logprobs
from rollsync.kernels import reference as ref
from rollsync.kernels.logprobs import hidden_token_logprobs_and_entropy, token_logprobs, token_logprobs_and_entropy
from rollsync.kernels.native_lib import available_builds
from rollsync.kernels.reference_sampler import kept_ids
from rollsync.kernels.sampling_mask import SamplingMask
from torch import Tensor

BUILDS = [*available_builds(), "reference"]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
T, V = 12, 300
OPTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 0.7}, {"top_k": 20, "temperature": 1.3}, {"top_p": 0.9, "temperature": np.linspace(0.5, 2, T)},
    {"min_p": 0.05}, {"vocab_limit": 290, "top_p": 0.95, "top_k": 50, "min_p": 0.01}, {"vocab_limit": 250},
]  # fmt: skip


def sampler_rows(ids_T: Tensor, options: dict[str, Any]) -> ref.SamplerRows:
    def column(name: str, off: Any, dtype: Any) -> Any:
        return np.broadcast_to(np.asarray(options.get(name, off), dtype), (T,))

    zeros, yes = np.zeros(T, np.uint32), np.ones(T, np.bool_)
    return ref.SamplerRows(
        temperature=column("temperature", 1, np.float64), top_p=column("top_p", 1, np.float64), top_k=column("top_k", 0, np.int64),
        min_p=column("min_p", 0, np.float32), seed=zeros.astype(np.uint64), sample_index=zeros, position=zeros, forced=ids_T.numpy(),
        want_model=yes, want_entropy=yes, banned=[[]] * T, vocab_limit=options.get("vocab_limit", V),
    )  # fmt: skip


def literal_kept(literal: Any, logits_TV: Tensor, options: dict[str, Any]) -> Tensor:
    """[T, V] bool, by the specification's words."""
    kept = torch.zeros(T, V, dtype=torch.bool)
    limit, temperatures = options.get("vocab_limit", V), np.broadcast_to(options.get("temperature", 1.0), (T,))
    for t in range(T):
        z = logits_TV[t, :limit].float().numpy() * np.float32(1 / temperatures[t])
        ids, _ = literal.kept_ids(list(z), options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0))
        kept[t, ids] = True
    return kept


def token_kept(logits_V: Tensor, t: int, options: dict[str, Any]) -> Tensor:
    limit, temperature = options.get("vocab_limit", V), float(np.broadcast_to(options.get("temperature", 1.0), (T,))[t])
    found = kept_ids(logits_V[:limit], temperature, **{name: options[name] for name in ("top_k", "top_p", "min_p") if name in options})
    return torch.nn.functional.pad(found, (0, V - limit))


def made(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(T, V, generator=g)).to(dtype)
    ids = torch.where(torch.rand(T, generator=g) < 0.7, logits[:, :250].argmax(1), torch.randint(0, V, (T,), generator=g))
    return logits, ids


@DTYPES
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")
def test_the_samplers_bits_and_float64_gradients(literal: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    logits, ids = made(dtype)
    logits.requires_grad_()
    want = ref.sample(logits.detach(), sampler_rows(ids, options))
    for build in BUILDS:
        got, entropy = token_logprobs_and_entropy(logits, ids, build=build, threads=2, **options)
        assert np.array_equal(got.detach().numpy(), want.logprob) and np.array_equal(entropy.detach().numpy(), want.entropy)
        assert torch.equal(got, token_logprobs(logits.detach().float(), ids, build=build, **options))
    weight = torch.linspace(-1, 1, T)
    drawn = got.isfinite()
    assert drawn.any()
    (slope,) = torch.autograd.grad((weight * torch.where(drawn, got, 0.0) + 0.5 * weight * entropy).sum(), logits)
    exact = logits.detach().double().requires_grad_()
    z = exact / torch.from_numpy(np.broadcast_to(np.float64(options.get("temperature", 1.0)), (T,)).copy())[:, None]
    whole, kept = torch.log_softmax(z, 1), literal_kept(literal, logits.detach(), options)
    restricted = torch.log_softmax(z.masked_fill(~kept, -math.inf), 1).gather(1, ids[:, None])[:, 0]
    assert torch.equal(restricted.isfinite(), drawn)
    loss = weight * (torch.where(drawn, restricted, 0.0) - 0.5 * (whole.exp() * whole).sum(1))
    (expected,) = torch.autograd.grad(loss.sum(), exact)
    assert torch.allclose(got[drawn].double(), restricted[drawn], atol=3e-6)
    assert torch.allclose(slope.double(), expected, atol=1e-6 if dtype == torch.float32 else 4e-3)


@DTYPES
def test_a_mask_gives_what_truncation_gave(dtype: torch.dtype) -> None:
    logits, ids = made(dtype)
    for options in OPTIONS:
        kept = torch.stack([token_kept(row, t, options) for t, row in enumerate(logits.float())])
        mask = SamplingMask.of(options.get("vocab_limit", V), [row.nonzero()[:, 0].tolist() for row in kept])
        temperature = options.get("temperature", 1.0)
        for build in BUILDS:
            got = token_logprobs(logits, ids, temperature=temperature, mask=mask, build=build)
            assert torch.equal(got, token_logprobs(logits, ids, build=build, **options))
        masked = logits.clone().requires_grad_()
        (slope,) = torch.autograd.grad(token_logprobs(masked, ids, temperature=temperature, mask=mask).clamp(min=-1e9).sum(), masked)
        assert not slope[~kept].any() and slope[kept].any()


def test_views_pieces_and_greedy_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ids = made(torch.float32)
    whole = torch.stack([logits, logits.flip(0)]).requires_grad_()
    shifted, labels = whole[:, :-1], torch.stack([ids, ids.flip(0)])[:, 1:]
    want = token_logprobs(shifted, labels)
    (slope,) = torch.autograd.grad(want.sum(), whole)
    monkeypatch.setattr(logprobs, "PIECE_BYTES", 5 * 4 * V)
    got = token_logprobs(shifted, labels)
    assert torch.equal(got, want) and torch.equal(torch.autograd.grad(got.sum(), whole)[0], slope)
    assert torch.equal(got[0], token_logprobs(logits[:-1], ids[1:]))
    greedy = torch.tensor([0.0, 1.0] * (T // 2))
    got = token_logprobs(logits.requires_grad_(), logits.argmax(1), temperature=greedy)
    assert (got[::2] == 0).all() and (got[1::2] < 0).all()
    (slope,) = torch.autograd.grad(got.sum(), logits)
    assert not slope[::2].any() and slope[1::2].any()


@DTYPES
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("head_dtype", [None, "float32"])
def test_hidden_states_in_pieces(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, cap: float, head_dtype: str | None) -> None:
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, T // 2, 72, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(V, 72, generator=g) / 4).to(dtype).requires_grad_()
    ids, options = torch.randint(0, V, (2, T // 2), generator=g), {"temperature": 0.8, "top_p": 0.999}
    flat = hidden.detach().flatten(0, 1)
    logits = (ref.linear_f32 if head_dtype else ref.linear)(flat, weight.detach())
    logits = ref.softcap(logits, cap) if cap else logits
    want = ref.sample(logits, sampler_rows(ids.flatten(), options))
    monkeypatch.setattr(logprobs, "PIECE_BYTES", 5 * V)
    for build in BUILDS:
        got = hidden_token_logprobs_and_entropy(hidden, weight, ids, softcap=cap, head_dtype=head_dtype, build=build, **options)
        assert np.array_equal(got[0].detach().flatten().numpy(), want.logprob)
        assert np.array_equal(got[1].detach().flatten().numpy(), want.entropy)
    slopes = torch.autograd.grad(torch.where(got[0].isfinite(), got[0], 0.0).sum() + got[1].sum(), (hidden, weight))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    z = exact[0] @ exact[1].T
    z = cap * torch.tanh(z / cap) if cap else z
    whole = torch.log_softmax(z / 0.8, 2)
    keep = torch.stack([kept_ids(row, 0.8, 0, 0.999, 0.0) for row in logits.float()]).view(2, -1, V)
    drawn = torch.log_softmax((z / 0.8).masked_fill(~keep, -math.inf), 2).gather(2, ids[..., None])[..., 0]
    loss = torch.where(drawn.isfinite(), drawn, 0.0).sum() - (whole.exp() * whole).sum()
    for slope, want_slope in zip(slopes, torch.autograd.grad(loss, exact), strict=True):
        assert slope.dtype == dtype
        assert (slope.double() - want_slope).norm() < (1e-5 if dtype == torch.float32 else 0.02) * want_slope.norm()


def test_no_rows() -> None:
    hidden, weight = torch.zeros(0, 8, requires_grad=True), torch.zeros(5, 8, requires_grad=True)
    found = hidden_token_logprobs_and_entropy(hidden, weight, torch.zeros(0, dtype=torch.long))[0]
    found.sum().backward()
    assert found.shape == (0,) and hidden.grad is not None and weight.grad is not None and not weight.grad.any()
    assert token_logprobs(torch.zeros(2, 0, 5), torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0)


def test_mistakes_are_named() -> None:
    logits, ids = torch.zeros(2, 3), torch.tensor([0, 2])
    broken, mask = torch.tensor([[0.0, 1, 2], [0, math.nan, 0]]), SamplingMask.of(3, [[0, 1], None])
    cases: list[tuple[str, Any]] = [
        (r"\[0, 3\), got \[3\] in row \[1\]", lambda: token_logprobs(logits, torch.tensor([0, 3]))),
        ("token_ids must be \\[2\\]", lambda: token_logprobs(logits, torch.tensor([0]))),
        ("tensor of integers", lambda: token_logprobs(logits, torch.tensor([0.0, 1]))),
        ("logits must be a bfloat16 or float32", lambda: token_logprobs(logits.half(), ids)),
        ("row 1 have a NaN", lambda: token_logprobs(broken, ids)),
        ("top_p must be in", lambda: token_logprobs(logits, ids, top_p=0.0)),
        (r"temperature must be 0 \(greedy\) or .*, got -1", lambda: token_logprobs(logits, ids, temperature=[1.0, -1.0])),
        ("temperature must be .* at least 1e-8, got 1e-40", lambda: token_logprobs(logits, ids, temperature=1e-40)),
        ("vocab_limit must be a whole number, got 1.5", lambda: token_logprobs(logits, ids, vocab_limit=1.5)),
        *((f"threads: must be a whole number .*, got {n}", partial(token_logprobs, logits, ids, threads=n)) for n in (0, -1, 1.5)),
        ("threads: .* got 0", lambda: hidden_token_logprobs_and_entropy(logits, logits, ids * 0, threads=0)),
        ("temperature must be a number or \\[2\\]", lambda: token_logprobs(logits, ids, temperature=[1.0])),
        ("top_k must be at least 0, got 1.5", lambda: token_logprobs(logits, ids, top_k=1.5)),
        ("vocab_limit must be in \\[1, 3\\]", lambda: token_logprobs(logits, ids, vocab_limit=4)),
        ("give mask, or top_k", lambda: token_logprobs(logits, ids, mask=mask, top_k=2)),
        ("mask must have 1 tokens, got 2", lambda: token_logprobs(logits[:1], ids[:1], mask=mask)),
        ("vocab_limit is 2, and the mask's 3", lambda: token_logprobs(logits, ids, mask=mask, vocab_limit=2)),
        ("vocab_limit must be in \\[1, 3\\], got 9", lambda: token_logprobs(logits, ids, mask=SamplingMask.all(2, 9))),
        ("build must be one of", lambda: token_logprobs(logits, ids, build="sse")),
        ("hidden is torch.float32 and head_weight", lambda: hidden_token_logprobs_and_entropy(logits, logits.bfloat16(), ids)),
        ("must meet head_weight", lambda: hidden_token_logprobs_and_entropy(logits, torch.zeros(9, 4), ids)),
        ("head_dtype", lambda: hidden_token_logprobs_and_entropy(logits, logits, ids, head_dtype="float16")),
        ("softcap", lambda: hidden_token_logprobs_and_entropy(logits, logits, ids, softcap=-1.0)),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
