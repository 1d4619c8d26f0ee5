"""Masks: what the specification's words keep, in the smallest form there is, and back."""

from __future__ import annotations

import itertools
import random
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from rollsync.kernels import reference as ref
from rollsync.kernels.native_ops import NativeOps
from rollsync.kernels.sampling_mask import BITS, SamplingMask, bit_words, encode_row, row_words

F32 = np.float32


def test_rows_come_back_and_take_the_smallest_form() -> None:
    rng, forms = random.Random(0), set()
    for vocab in (1, 31, 32, 33, 200):
        sizes = rng.choices([1, min(2, vocab), (vocab + 1) // 2, max(vocab - 1, 1), vocab], k=40)
        rows = [sorted(rng.sample(range(vocab), size)) for size in sizes]
        rows[0] = list(range(vocab))
        mask = SamplingMask.of(vocab, [*rows, None])
        for token, row in enumerate(rows):
            assert mask[token] == (None if len(row) == vocab else row) and mask.count(token) == len(row)
            size = 0 if len(row) == vocab else min(len(row), vocab - len(row), bit_words(vocab))
            head = mask.row(token)[0]
            assert len(mask.row(token)) == 1 + size == 1 + row_words(head, vocab)
            forms.add((head > 0) - (head < 0) if head != BITS else 2)
        assert mask[-1] is None and len(mask) == len(rows) + 1
        assert SamplingMask(vocab, mask.to_bytes()) == mask == SamplingMask.of(vocab, mask)
        cut = rng.randrange(len(mask))
        assert list(mask[:cut]) + list(mask[cut:]) == list(mask) and mask[:cut] + mask[cut:] == mask
        assert SamplingMask.join([mask[:cut], SamplingMask(vocab), mask[cut:]]) == mask
        assert list(SamplingMask.join([mask, mask])) == [*mask, *mask]
        assert SamplingMask.of_rows(vocab, (array("i", encode_row(r, vocab)).tobytes() for r in mask)) == mask
    assert forms == {0, 1, -1, 2}


@pytest.mark.parametrize("words, problem", [
    ([3, 1, 2], "token 0 ends 1 words early"), ([0, 2, 5, 4], "token 1 has ids that do not ascend"), ([1, 40], "outside"),
    ([-1, -1], "outside"), ([-40, *range(40)], "keeps no id"), ([BITS, 0, 0], "keeps no id"), ([BITS, 1, 1 << 8], "outside"),
    ([BITS, 1], "ends 1 words early"),
])  # fmt: skip
def test_broken_words_are_named(words: list[int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SamplingMask(40, words)


def test_other_mistakes_are_named() -> None:
    mask = SamplingMask.of(40, [[1], None])
    cases: list[tuple[str, Any]] = [
        ("no int32 words", lambda: SamplingMask(40, b"abc")), ("vocab_size", lambda: SamplingMask(-1)),
        ("but there are tokens", lambda: SamplingMask(0, [0])), ("do not join", lambda: SamplingMask.join([SamplingMask.all(1, 41), mask])),
        ("must be some of", lambda: SamplingMask.of(40, [[]])), ("must be some of", lambda: SamplingMask.of(40, [[40]])),
        ("do not join", lambda: mask + SamplingMask.all(1, 41)),
        ("nothing to join", lambda: SamplingMask.join([])), ("steps of 1", lambda: mask[::2]),
    ]  # fmt: skip
    for problem, call in cases:
        with pytest.raises(ValueError, match=problem):
            call()
    with pytest.raises(IndexError):
        mask[2]


def test_the_samplers_masks_are_the_specifications(literal: Any, once: Any, ops: NativeOps) -> None:
    """Ranks, masses and thresholds as docs/numerics.md words them, for every combination and what bans leave."""
    vocab, limit, g = 70, 66, np.random.default_rng(5)
    combinations = list(itertools.product((0, 1, 30, 66), (1.0, 0.4, 0.97), (0.0, 0.03), (1.0, 0.6), (False, True)))
    R = len(combinations)
    logits = torch.from_numpy(g.normal(0, 2, (R, vocab)).astype(F32))
    logits[::3] = (logits[::3] * 2).round() / 2  # ties
    top_k, top_p, min_p, temperature, bans = (np.array(column) for column in zip(*combinations, strict=True))
    banned = [g.choice(limit, 9, replace=False).tolist() if ban else [] for ban in bans]
    zeros, yes = np.zeros(R, np.uint32), np.ones(R, np.bool_)
    rows = ref.SamplerRows(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p.astype(F32), seed=zeros.astype(np.uint64), sample_index=zeros,
        position=zeros, forced=np.full(R, -1), want_model=~yes, want_entropy=~yes, banned=banned, vocab_limit=limit, want_mask=yes,
    )  # fmt: skip

    def kept(r: int) -> list[int]:
        part = [i for i in range(limit) if i not in banned[r]]
        z = [logits[r, i].numpy() * F32(1 / temperature[r]) for i in part]
        return [part[i] for i in literal.kept_ids(z, int(top_k[r]), float(top_p[r]), float(min_p[r]))[0]]

    wanted = once("kept", lambda: [kept(r) for r in range(R)])
    for result in (once("sampled", lambda: ref.sample(logits, rows)), ops.sample(logits, rows)):
        got = SamplingMask.of_rows(limit, (words[: 1 + row_words(int(words[0]), limit)].tobytes() for words in result.mask))
        assert list(got) == [None if len(want) == limit else want for want in wanted]
        assert all(token in want for token, want in zip(result.token, wanted, strict=True))


def test_a_row_that_draws_nothing_has_no_mask(ops: NativeOps) -> None:
    logits = torch.zeros(4, 40)
    logits[0, 3], logits[1] = float("nan"), -float("inf")
    zeros, yes = np.zeros(4, np.uint32), np.ones(4, np.bool_)
    rows = ref.SamplerRows(
        temperature=np.array([1.0, 1, 1, 0]), top_p=zeros + 0.5, top_k=zeros.astype(np.int64), min_p=zeros.astype(F32),
        seed=zeros.astype(np.uint64), sample_index=zeros, position=zeros, forced=np.full(4, -1), want_model=~yes, want_entropy=~yes,
        banned=[[], [], [*range(40)], [0, 1]], vocab_limit=40, want_mask=yes,
    )  # fmt: skip
    for result in (ref.sample(logits, rows), ops.sample(logits, rows)):
        assert result.nonfinite.tolist() == [1, 1, 2, 0] and not result.mask[:3].any() and result.mask[3].tolist() == [1, 2, 0]
        assert result.mask.shape == (4, 3)
