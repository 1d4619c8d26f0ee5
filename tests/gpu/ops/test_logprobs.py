"""Logprobs and entropies against the reference, bit by bit, and their gradients against torch's."""

from __future__ import annotations

import pytest
import torch
from rollsync.kernels import logprobs as cpu
from rollsync.kernels.gpu.ops import token_logprobs, token_logprobs_and_entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_bits_and_gradients(device: str, dtype: torch.dtype, temperature: float) -> None:
    vocab = 301  # rows are not aligned as they come
    g = torch.Generator().manual_seed(4)
    logits = (4 * torch.randn(5, vocab, generator=g)).to(dtype)
    logits[1, 7:200] = -torch.inf
    ids = torch.randint(200, vocab, (5,), generator=g)
    want = cpu.token_logprobs_and_entropy(logits, ids, temperature=temperature, build="reference")
    x = logits.clone().to(device).requires_grad_()
    got = token_logprobs_and_entropy(x, ids.to(device), temperature)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.detach().cpu(), b)
    assert torch.equal(token_logprobs(x, ids.to(device), temperature).detach().cpu(), want[0])
    weights = torch.randn(2, 5, generator=g)
    sum((a.cpu() * w).sum() for a, w in zip(got, weights, strict=True)).backward()  # type: ignore[union-attr]
    leaf = logits.double().requires_grad_()
    logp = torch.log_softmax(leaf / temperature, 1)
    entropy = -(logp.exp() * logp.clamp(min=-1e30)).sum(1)
    ((logp.gather(1, ids[:, None])[:, 0] * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
    assert x.grad is not None and leaf.grad is not None
    bound = leaf.grad.abs().max() * (2.0**-7 if dtype == torch.bfloat16 else 1e-5)
    assert (x.grad.cpu().double() - leaf.grad).abs().max() < bound


def test_broken_rows_are_nan_and_spoil_no_other(device: str, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 40, dtype=dtype)
    logits[0, 3], logits[2, 5] = torch.nan, torch.inf
    got = token_logprobs(logits.to(device), torch.tensor([1, 1, 1], device=device)).cpu()
    assert got.isnan().tolist() == [True, False, True]
