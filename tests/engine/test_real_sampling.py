"""What sampling parameters do, and what broken weights do not, on a real engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from real_engine import COLUMNS, bits, changed, finals, make_requests, prompt, run
from rollsync import Engine, RolloutRequest, SampleOutput, SamplingParams
from rollsync.kernels.native_lib import BUILDS, available_builds
from rollsync.rollout.engine.model_runner import NOTHING_LEFT
from rollsync.rollout.engine.sequence import Sequence

NAN_TOKEN = 255
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(scope="module")
def engine(cancelling: dict[str, str]) -> Iterator[Engine]:
    torch.set_num_threads(1)
    with Engine(cancelling["llama"], dtype="bfloat16", threads=1, num_blocks=256) as engine:
        yield engine


def sample(engine: Engine, request_id: str = "x", **params: Any) -> list[SampleOutput]:
    params = {"seed": 5, "max_tokens": 24, "n": 4, "ignore_eos": True, **params}
    request = RolloutRequest(request_id=request_id, prompt_token_ids=prompt(1, 20), params=SamplingParams(**params), include=COLUMNS)
    outputs = finals(engine, [request])
    return [outputs[request_id, i] for i in range(params["n"])]


def test_greedy_is_the_likeliest_token_and_certain(engine: Engine) -> None:
    first, *rest = sample(engine, temperature=0.0)
    assert all(bits(output) == bits(first) for output in rest)
    assert first.logprobs == [0.0] * 24 == first.entropy
    best = first.model_logprobs
    assert best is not None and all(math.exp(p) >= 1 / 256 for p in best)
    for i, token in enumerate(first.token_ids):  # no sampled token at the same place is likelier
        request = RolloutRequest(
            request_id=f"at{i}", prompt_token_ids=prompt(1, 20) + tuple(first.token_ids[:i]),
            params=SamplingParams(n=8, seed=i, max_tokens=1, ignore_eos=True), include=COLUMNS,
        )  # fmt: skip
        for output in finals(engine, [request]).values():
            assert output.model_logprobs is not None
            assert output.model_logprobs[0] <= best[i] and (output.token_ids[0] != token or output.model_logprobs[0] == best[i])


def test_truncation_to_one_token_is_greedy(engine: Engine) -> None:
    want = sample(engine, temperature=0.0)[0].token_ids
    for params in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0, "temperature": 0.7}):
        for output in sample(engine, **params):
            assert output.token_ids == want and output.logprobs == [0.0] * 24
            assert output.temperature_logprobs is not None and min(output.temperature_logprobs) < -0.01


def test_truncated_logprobs_are_renormalised(engine: Engine) -> None:
    for params, kept in (({"top_p": 0.7}, 0.7), ({"top_k": 5}, 0.0), ({"min_p": 0.1}, 0.1)):
        for output in sample(engine, **params):
            assert output.temperature_logprobs is not None
            # logprob - temperature logprob is minus the log of the mass kept, the same for every id that is kept
            masses = [math.exp(t - p) for t, p in zip(output.temperature_logprobs, output.logprobs, strict=True)]
            assert all(kept <= mass + 1e-5 <= 1.0 + 2e-5 for mass in masses) and min(masses) < 0.999
    for output in sample(engine):
        assert output.logprobs == output.temperature_logprobs == output.model_logprobs


def test_a_stop_id_ends_a_sample_and_is_kept(engine: Engine) -> None:
    free = sample(engine)
    for output in sample(engine, stop_token_ids=(free[0].token_ids[6],)):
        whole = free[output.sample_index].token_ids
        at = whole.index(free[0].token_ids[6]) if free[0].token_ids[6] in whole else None
        assert output.token_ids == whole[: None if at is None else at + 1]
        assert (output.finish_reason, output.stop_reason) == (("length", None) if at is None else ("stop", free[0].token_ids[6]))
        assert output.logprobs == free[output.sample_index].logprobs[: len(output.token_ids)]


def test_no_stop_id_is_drawn_under_min_tokens(engine: Engine) -> None:
    stops = tuple(range(0, 256, 2))[:60]
    for output in sample(engine, n=8, stop_token_ids=stops, min_tokens=6):
        assert not set(stops) & set(output.token_ids[:6])
        assert output.finish_reason != "stop" or output.token_ids[-1] in stops
        masses = [t - p for t, p in zip(output.temperature_logprobs or [], output.logprobs, strict=True)]
        assert max(masses[:6]) < -1e-3 and masses[6:] == [0.0] * len(masses[6:]), "the ids left share all the mass, and only so long"


def test_a_stop_string_ends_a_sample(engine: Engine) -> None:
    free = sample(engine, n=1)[0]
    text = engine.tokenizer.decode(free.token_ids)
    stop = next(c for c in text[3:] if c.isascii() and c.isprintable())
    output = sample(engine, n=1, stop=(stop,))[0]
    cut = next(i for i in range(1, 25) if stop in engine.tokenizer.decode(free.token_ids[:i]))
    assert output.token_ids == free.token_ids[:cut] and (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_a_stop_string_that_min_tokens_let_pass_does_not_end_the_sample_later(engine: Engine) -> None:
    free = sample(engine, n=1, max_tokens=200)[0]
    pieces = [engine.tokenizer.decode(free.token_ids[:i]) for i in range(201)]
    early = next(c for c in pieces[8] if c.isascii() and c.isprintable())
    later = [i for i in range(9, 201) if early in pieces[i][len(pieces[i - 1]) :]]
    for more in ((), ("never to be seen" * 8,)):
        output = sample(engine, n=1, max_tokens=200, min_tokens=9, stop=(early, *more))[0]
        assert output.token_ids == free.token_ids[: later[0] if later else 200]
        assert output.stop_reason == (early if later else None)


def test_the_end_of_text_id_ends_a_sample(engine: Engine) -> None:
    ended = [o for i in range(25) for o in sample(engine, n=8, seed=i, ignore_eos=False) if o.finish_reason == "stop"]
    assert ended and all(o.token_ids.index(2) == len(o.token_ids) - 1 and o.stop_reason == 2 for o in ended)


@DTYPES
@pytest.mark.parametrize("build", BUILDS)
def test_a_request_whose_numbers_break_fails_alone(cancelling: dict[str, str], build: str, dtype: str) -> None:
    if build not in available_builds():
        pytest.skip(f"no {build} here")
    healthy = make_requests(3, max_tokens=6, shared=30, step=7)
    broken = [
        changed(healthy[0], request_id="whole", prompt_token_ids=(NAN_TOKEN,) * 50),
        changed(healthy[1], request_id="last", prompt_token_ids=(*healthy[1].prompt_token_ids, NAN_TOKEN)),
        changed(healthy[2], request_id="group", n=3, prompt_token_ids=(*healthy[2].prompt_token_ids[:33], NAN_TOKEN, 9), include=()),
        changed(healthy[0], request_id="forced", forced_token_ids=(7, NAN_TOKEN, 8)),
    ]
    for block_tokens, num_blocks in ((32, 14), (4, 80)):
        options: dict[str, Any] = {"dtype": dtype, "kernels": build, "block_tokens": block_tokens, "num_blocks": num_blocks}
        want = run(cancelling["nan"], healthy, **options)
        with Engine(cancelling["nan"], threads=1, **options) as engine:
            for outputs in (finals(engine, [*broken, *healthy]), finals(engine, healthy), finals(engine, healthy, alone=True)):
                # Pages that held NaN are somebody else's in the second round.
                assert {key: bits(output) for key, output in outputs.items() if key[0][0] == "r"} == want
                assert {o.finish_reason for o in outputs.values() if o.request_id[0] != "r"} <= {"error"}
            stats = engine.stats()
            assert stats["nonfinite"] >= 4 and stats["free_blocks"] == num_blocks


def test_an_error_says_what_happened(cancelling: dict[str, str]) -> None:
    with Engine(cancelling["nan"], dtype="bfloat16", threads=1, num_blocks=8) as engine:
        request = RolloutRequest(request_id="x", prompt_token_ids=(NAN_TOKEN,), params=SamplingParams(max_tokens=3))
        output = finals(engine, [request])["x", 0]
    assert output.finish_reason == "error" and "NaN" in (output.error or "") and output.token_ids == []


SPOILED: dict[str, dict[str, Any]] = {
    "hot": {"temperature": "hot"},
    "odd": {"banned_ids": ("x",), "banned_until": 999},
    "bare": {"allowed_token_ids": (7,), "banned_ids": (7,), "banned_until": 999},
}


@pytest.mark.parametrize("kernels", ["reference", None])
def test_a_slot_that_nothing_can_be_drawn_with_ends_its_request_alone(
    cancelling: dict[str, str], monkeypatch: pytest.MonkeyPatch, kernels: str | None
) -> None:
    healthy = make_requests(3, max_tokens=3, shared=5, shortest=2, step=3)
    bad = [changed(healthy[i], request_id=rid, n=2 if i else 1) for i, rid in enumerate(SPOILED)]
    options: dict[str, Any] = {"dtype": "float32", "kernels": kernels, "block_tokens": 4, "num_blocks": 40, "max_batch_tokens": 9}
    want = run(cancelling["llama"], healthy, **options)
    real = Sequence.slot_init
    monkeypatch.setattr(Sequence, "slot_init", lambda self, slot: replace(real(self, slot), **SPOILED.get(self.request.id, {})))
    with Engine(cancelling["llama"], threads=1, **options) as engine:
        outputs = finals(engine, [bad[0], healthy[0], *bad[1:], *healthy[1:]])
        assert {key: bits(output) for key, output in outputs.items() if key[0] not in SPOILED} == want
        words = {(o.request_id, o.finish_reason, o.error) for o in outputs.values() if o.request_id in SPOILED}
        assert {(rid, reason) for rid, reason, _ in words} == {(rid, "error") for rid in SPOILED}
        assert {rid: text for rid, _, text in words}["bare"] == NOTHING_LEFT and "TypeError" in str(words)
        assert engine.stats()["faults"] == 5 and engine.stats()["nonfinite"] == 0 and engine.stats()["free_blocks"] == 40
        monkeypatch.setattr(Sequence, "slot_init", real)
        assert all(o.finish_reason == "length" for o in finals(engine, bad).values())
