"""The reference sampler: what it keeps, how often it draws it, and the numbers it reports."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from rollsync.kernels import philox
from rollsync.kernels import reference as ref
from torch import Tensor

INF, NAN = math.inf, math.nan


def make_rows(num_rows: int, vocab: int, **columns: Any) -> ref.SamplerRows:
    """Plain sampling at temperature 1 with all numbers asked for; a scalar stands for a whole column."""
    kinds: dict[str, tuple[Any, Any]] = {
        "temperature": (1.0, np.float64),
        "top_p": (1.0, np.float64),
        "top_k": (0, np.int64),
        "min_p": (0.0, np.float32),
        "seed": (7, np.uint64),
        "sample_index": (0, np.uint32),
        "position": (np.arange(num_rows), np.uint32),
        "forced": (-1, np.int64),
        "want_model": (True, np.bool_),
        "want_entropy": (True, np.bool_),
    }
    arrays: Any = {
        name: np.broadcast_to(np.asarray(columns.get(name, default), dtype=kind), (num_rows,)) for name, (default, kind) in kinds.items()
    }
    changes = {name: columns[name] for name in ("adjust", "allowed", "top_n") if name in columns}
    banned, limit = columns.get("banned", [[]] * num_rows), columns.get("vocab_limit", vocab)
    return ref.SamplerRows(**arrays, **changes, banned=banned, vocab_limit=limit)


def draw(logits: Tensor, **columns: Any) -> ref.SampleResult:
    return ref.sample(logits, make_rows(*logits.shape, **columns))


def some_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return (3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))).bfloat16()


def kept_by_score(logits_V: Tensor, **columns: Any) -> list[int]:
    """The kept ids, read off the logprobs of every id forced in turn."""
    vocab = len(logits_V)
    got = draw(logits_V.expand(vocab, vocab), forced=np.arange(vocab), **columns)
    assert got.token.tolist() == list(range(vocab))
    assert abs(np.exp(got.logprob.astype(np.float64)).sum() - 1) < 1e-5
    return [int(i) for i in np.flatnonzero(np.isfinite(got.logprob))]


TRUNCATIONS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.03},
]


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_kept_ids_and_the_draw_match_a_naive_sort(literal: ModuleType, truncation: dict[str, Any], temperature: float) -> None:
    logits_V = some_logits(1, 60)[0]
    logits_V[40:50] = logits_V[10]  # ties, broken by id
    z = logits_V.float().numpy() * np.float32(1 / temperature)
    top_k, top_p, min_p = (truncation.get(name, default) for name, default in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)))
    kept, q = literal.kept_ids(z, top_k, top_p, min_p)
    assert kept_by_score(logits_V, temperature=temperature, **truncation) == kept
    mass = sum(q[i] for i in kept)
    got = draw(logits_V.expand(50, -1), temperature=temperature, seed=2**63 + 5, sample_index=3, **truncation)
    for position in range(50):
        r = philox.draw64(2**63 + 5, 3, position) * mass >> 64
        running, token = 0, -1
        while running <= r:
            token += 1
            running += q[token] if token in kept else 0
        assert got.token[position] == token
        below = float(z[token]) - float(z.max())
        assert got.logprob[position] == np.float32(below - literal.log_mass(mass))
        assert got.temperature_logprob[position] == np.float32(below - literal.log_mass(sum(q)))
    assert (got.entropy == literal.entropy(z)).all()


def test_ties_are_broken_by_the_lowest_id() -> None:
    flat = torch.zeros(12)
    assert kept_by_score(flat, top_k=3) == [0, 1, 2]
    assert kept_by_score(flat, top_p=0.25) == [0, 1, 2]
    assert draw(flat[None], temperature=0.0).token[0] == 0


def test_numbers_against_float64() -> None:
    logits = some_logits(20, 5000)
    got = draw(logits, temperature=0.8)
    tokens = torch.from_numpy(got.token)[:, None]
    at_one, log_p = logits.double().log_softmax(-1), (logits.double() / 0.8).log_softmax(-1)
    assert np.allclose(got.model_logprob, at_one.gather(1, tokens)[:, 0], rtol=0, atol=4e-6)
    assert np.allclose(got.temperature_logprob, log_p.gather(1, tokens)[:, 0], rtol=0, atol=4e-6)
    assert np.allclose(got.entropy, -(log_p.exp() * log_p).sum(-1), rtol=0, atol=4e-6)
    assert (got.logprob == got.temperature_logprob).all() and not got.nonfinite.any()
    plain = draw(logits, forced=got.token)
    assert (plain.model_logprob == got.model_logprob).all() and (plain.model_logprob == plain.logprob).all()


@pytest.mark.parametrize("columns", [{}, {"temperature": 1.7}, {"top_k": 6}, {"top_p": 0.8}])
def test_frequencies_follow_the_distribution(columns: dict[str, Any]) -> None:
    logits_V, draws = some_logits(1, 16, seed=2)[0] / 2, 2000
    got = draw(logits_V.expand(draws, -1), seed=np.arange(draws), position=9, want_model=False, want_entropy=False, **columns)
    log_p = draw(logits_V.expand(16, -1), forced=np.arange(16), **columns).logprob.astype(np.float64)
    counts, expected = np.bincount(got.token, minlength=16), draws * np.exp(log_p)
    assert not counts[expected == 0].any()
    live = expected > 0
    chi2, dof = ((counts - expected)[live] ** 2 / expected[live]).sum(), live.sum() - 1
    assert chi2 < dof + 4 * math.sqrt(2 * dof) + 4


def test_a_row_depends_on_nothing_but_itself() -> None:
    logits = some_logits(12, 300)
    columns: dict[str, Any] = {
        "temperature": np.array([0, 0.5, 1, 2] * 3),
        "top_k": np.array([0, 0, 7] * 4),
        "top_p": np.array([1, 0.9] * 6),
        "seed": np.arange(12),
        "sample_index": np.arange(12)[::-1],
    }
    whole = draw(logits, **columns)
    for r in range(12):
        alone = draw(logits[r : r + 1], position=r, **{name: column[r] for name, column in columns.items()})
        for name in ref.SampleResult.__slots__:
            assert getattr(alone, name).tobytes() == getattr(whole, name)[r : r + 1].tobytes()


def test_greedy() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, -2.0]] * 3)
    got = draw(logits, temperature=0.0, forced=[-1, 1, 2])
    assert got.token.tolist() == [1, 1, 2]
    assert got.logprob.tolist() == [0.0, 0.0, -INF] == got.temperature_logprob.tolist()
    assert got.entropy.tolist() == [0.0] * 3
    assert np.allclose(got.model_logprob, torch.tensor([1.0, 4, 4, -2]).log_softmax(0)[1])


def test_banned_ids_and_padding_are_not_drawn_but_stay_in_the_model_distribution() -> None:
    logits_V = torch.tensor([9.0, 1.0, 2.0, 3.0, 50.0, 7.0])
    got = draw(logits_V.expand(40, -1), banned=[[0, 3]] * 40, vocab_limit=4)
    token = torch.from_numpy(got.token)
    assert set(token.tolist()) == {1, 2} and not got.nonfinite.any()
    assert np.allclose(got.logprob, torch.tensor([1.0, 2.0]).log_softmax(0)[token - 1])
    assert np.allclose(got.model_logprob, logits_V.log_softmax(0)[token])
    assert np.allclose(got.temperature_logprob, logits_V.log_softmax(0)[token])
    forced = draw(logits_V.expand(3, -1), banned=[[0]] * 3, vocab_limit=4, forced=[0, 4, 1])
    assert np.isneginf(forced.logprob).tolist() == [True, True, False]
    assert np.allclose(forced.model_logprob, logits_V.log_softmax(0)[[0, 4, 1]])
    assert draw(logits_V[None], banned=[[0]], vocab_limit=4, temperature=0.0).token[0] == 3
    assert draw(logits_V[None], banned=[[0, 1, 2, 3]], vocab_limit=4).nonfinite[0]


CHANGED = [(3, 0.0, 1.5, 0.0), (7, -2.5, 1.0, 0.75), (9, 3.0, 0.7, -0.3), (11, 0.125, 1.7, 1.0), (12, -100.0, 1.0, 0.0)]


def test_changed_logits_are_those_the_formula_gives() -> None:
    """Everything the draw reports is as if the model had said so; everything a trainer computes is as if nothing had been changed."""
    logits = some_logits(1, 24).float()
    logits[0, [3, 7]] = torch.tensor([-1.3, 2.0])
    changed = logits.clone()
    for i, bias, factor, subtract in CHANGED:
        x = np.float32(logits[0, i]) + np.float32(bias)
        x = x / np.float32(factor) if x > 0 else x * np.float32(factor)
        changed[0, i] = float(x - np.float32(subtract))
    for options in ({}, {"temperature": 0.7, "top_k": 9}, {"temperature": 0.0}, {"temperature": 2.0, "top_p": 0.8, "banned": [[9]] * 24}):
        each = {"forced": np.arange(24), "top_n": np.full(24, 20, np.uint8), **options}
        got = draw(logits.expand(24, -1), adjust=[CHANGED] * 24, **each)
        as_if, plain = draw(changed.expand(24, -1), **each), draw(logits.expand(24, -1), **each)
        for name in ("logprob", "top_id", "top_logprob"):
            assert getattr(got, name).tobytes() == getattr(as_if, name).tobytes(), (name, options)
        for name in ("model_logprob", "entropy", *(("temperature_logprob",) if options.get("temperature") != 0.0 else ())):
            assert getattr(got, name).tobytes() == getattr(plain, name).tobytes(), (name, options)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}, {"top_k": 30, "top_p": 0.95, "min_p": 0.01}])
def test_logprobs_of_changed_rows_against_float64(temperature: float, truncation: dict[str, Any]) -> None:
    """Bias, penalties, allowed ids, temperature, truncation, in that order."""
    vocab, allowed = 30, list(range(2, 28))
    logits = some_logits(1, vocab, seed=4).float()
    z = logits[0].double().numpy().copy()
    for i, bias, factor, subtract in CHANGED:
        x = z[i] + bias
        z[i] = (x / factor if x > 0 else x * factor) - subtract
    z[[i for i in range(vocab) if i not in allowed]] = -np.inf
    p = np.exp((z - z.max()) / temperature)
    order = np.argsort(-p, kind="stable")
    if top_k := truncation.get("top_k"):
        order = order[:top_k]
    if top_p := truncation.get("top_p"):
        running = p[order].cumsum()
        order = order[: int(np.searchsorted(running, top_p * running[-1])) + 1]
    order = order[p[order] > 0]
    order = order[p[order] >= truncation.get("min_p", 0.0)]
    want = np.full(vocab, -np.inf)
    want[order] = np.log(p[order] / p[order].sum())
    options = {"temperature": temperature, "adjust": [CHANGED] * vocab, "allowed": [allowed] * vocab, **truncation}
    got = draw(logits.expand(vocab, -1), forced=np.arange(vocab), top_n=np.full(vocab, 20, np.uint8), **options)
    assert np.allclose(got.logprob, want, rtol=0, atol=1e-5)
    assert abs(np.exp(got.logprob.astype(np.float64)).sum() - 1) < 1e-5
    count = min(20, len(order))
    assert got.top_id[0].tolist() == order[:count].tolist() + [-1] * (20 - count)
    assert np.allclose(got.top_logprob[0][:count], want[order[:count]], rtol=0, atol=1e-5) and np.isneginf(got.top_logprob[0][count:]).all()


def test_reported_ids() -> None:
    logits = torch.tensor([[2.0, 5.0, 5.0, 1.0, -INF, 5.0]])
    four = {"top_n": np.array([4], np.uint8)}
    assert draw(logits, **four).top_id.tolist() == [[1, 2, 5, 0]], "ties go to the lower id"
    assert draw(logits, **four, forced=3).top_id.tolist() == [[1, 2, 5, 0]], "the token need not be among them"
    assert draw(logits, **four, allowed=[[4, 5, 0]]).top_id.tolist() == [[5, 0, -1, -1]], "only what can be drawn"
    assert draw(logits, **four, top_k=2).top_id.tolist() == [[1, 2, -1, -1]]
    greedy = draw(logits, **four, temperature=0.0, banned=[[1]], top_k=1)
    assert greedy.token[0] == 2 and greedy.top_id.tolist() == [[2, 5, 0, 3]], "temperature 0 has the alternatives of temperature 1"
    assert np.allclose(greedy.top_logprob, torch.tensor([5.0, 5.0, 2.0, 1.0]).log_softmax(0))
    assert draw(logits).top_id.shape == (1, 0)


def test_nothing_left_to_draw_is_reported() -> None:
    got = draw(torch.zeros(3, 6), allowed=[[1], [1], None], banned=[[1], [2], []], top_n=np.full(3, 2, np.uint8))
    assert got.nonfinite.tolist() == [2, 0, 0] and got.top_id.tolist() == [[-1, -1], [1, -1], [0, 1]]


def test_minus_infinity_has_no_mass() -> None:
    logits = torch.tensor([[-INF, 1.0, -INF, 1.0]]).expand(30, -1)
    got = draw(logits)
    assert set(got.token.tolist()) == {1, 3} and np.allclose(got.entropy, math.log(2)) and np.allclose(got.logprob, -math.log(2))


@pytest.mark.parametrize("bad", [[NAN, 1.0], [INF, 1.0], [-INF, -INF], [-INF, NAN]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nonfinite_row_is_reported_and_spoils_no_other(bad: list[float], temperature: float) -> None:
    got = draw(torch.tensor([[1.0, 2.0], bad, [1.0, 2.0]]), temperature=temperature, position=0)
    assert got.nonfinite.tolist() == [False, True, False]
    assert got.token[1] == 0 and np.isnan(got.logprob[1]) and np.isnan(got.entropy[1])
    assert got.token[0] == got.token[2] and got.logprob[0] == got.logprob[2]


def test_lowest_temperature_and_widest_logits() -> None:
    logits = torch.tensor([[3.0, 3.0078125, -40.0], [1e15, 2e15, -3e15]])
    got = draw(logits, temperature=1e-6)
    assert got.token.tolist() == [1, 1] and got.logprob.tolist() == [0.0, 0.0] and got.entropy.tolist() == [0.0, 0.0]
    assert draw(torch.tensor([[1e33, 0.0]]), temperature=1e-6).nonfinite.all()  # logit / T overflows: nothing to sample from


def test_only_what_was_asked_for() -> None:
    got = draw(some_logits(4, 10), want_model=[0, 1, 0, 1], want_entropy=[0, 0, 1, 1], temperature=[0.0, 0.0, 0.5, 0.5])
    assert np.isnan(got.model_logprob).tolist() == [True, False, True, False]
    assert np.isnan(got.entropy).tolist() == [True, True, False, False]


def test_mistakes_are_named() -> None:
    logits = some_logits(2, 10)
    with pytest.raises(ValueError, match="2 logits rows"):
        ref.sample(logits, make_rows(3, 10))
    with pytest.raises(ValueError, match=r"vocab_limit must be in \[1, 10\], got 11"):
        draw(logits, vocab_limit=11)
    with pytest.raises(ValueError, match="forced ids"):
        draw(logits, forced=10)
