"""Values of given tokens: continuations scored to their end, prompt logprobs from any offset, forced ids and what cuts them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fake_runner import EMBED, EOS, oracle
from harness import check, expect, make, request, run
from real_engine import bits, changed, finals, make_requests, prompt
from rollsync import Engine, RolloutRequest, SamplingParams
from rollsync.rollout.engine.score import score_request
from rollsync.rollout.errors import BadRequest, PromptTooLong

PROMPT = list(range(20, 33))
FREE: dict[str, Any] = {"ignore_eos": True, "seed": 1}
NAN_TOKEN = 255


# Prompt logprobs from an offset


@pytest.mark.parametrize("max_batch_tokens", [1, 5, 64])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_prompt_logprobs_begin_at_any_offset(max_tokens: int, max_batch_tokens: int) -> None:
    for forced in ((), (7, 8, 9)):
        for n in (1, 3):
            engine, runner = make(max_batch_tokens=max_batch_tokens, num_blocks=40)
            whole = request("w", PROMPT, ("prompt_logprobs", "model_logprobs"), n=n, max_tokens=max_tokens, forced_token_ids=forced, **FREE)
            requests = {f"r{k}": changed(whole, request_id=f"r{k}", prompt_logprobs_start=k) for k in range(len(PROMPT) + 1)}
            for r in requests.values():
                engine.add_request(r)
            outputs = run(engine)
            assert len(outputs) == n * len(requests)
            for output in outputs:
                expect(output, requests[output.request_id], engine)
            assert all(sum(f >= 0 for f in plan.row_forced) <= 256 for plan in runner.plans)


def test_tokens_before_the_offset_come_from_the_prefix_cache_and_get_no_row() -> None:
    engine, runner = make()
    for k, cached, rows in ((0, 0, 12), (8, 4, 5), (9, 8, 4), (13, 12, 0)):
        num_plans = len(runner.plans)
        engine.add_request(request("r", PROMPT, ("prompt_logprobs",), prompt_logprobs_start=k, max_tokens=1, **FREE))
        (output,) = run(engine)
        assert output.cached_tokens == cached and len(output.prompt_logprobs or []) == 13 - k
        assert sum(f >= 0 for plan in runner.plans[num_plans:] for f in plan.row_forced) == rows


def test_preemption_amid_a_prompt_keeps_the_rows_it_had() -> None:
    engine, runner = make(max_batch_tokens=3)
    r = request("r", PROMPT, ("prompt_logprobs",), prompt_logprobs_start=4, max_tokens=3, n=2, **FREE)
    engine.add_request(r)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        if len(runner.plans) in (2, 3, 5):
            engine.scheduler.preempt_all()
        check(engine)
    for output in outputs:
        expect(output, r, engine)


@pytest.mark.parametrize(("start", "asked"), [(14, True), (-1, True), (True, True), (3, False)])
def test_an_offset_that_means_nothing_is_refused_by_name(start: int, asked: bool) -> None:
    with pytest.raises(BadRequest, match="prompt_logprobs_start") as error:
        request("r", PROMPT, ("prompt_logprobs",) if asked else (), prompt_logprobs_start=start)
    assert error.value.field == "prompt_logprobs_start"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offsets_on_a_real_model_are_bit_equal_to_the_whole(cancelling: dict[str, str], dtype: str) -> None:
    torch.set_num_threads(1)
    base = changed(make_requests(2, max_tokens=3, shared=20)[1], prompt_token_ids=prompt(4, 37), n=2)
    with Engine(cancelling["llama"], dtype=dtype, threads=1, block_tokens=4, num_blocks=300, prefix_cache=False) as engine:
        whole = finals(engine, [base])
    want = {key[1]: output for key, output in whole.items()}
    for options in ({"max_batch_tokens": 7}, {"num_blocks": 14, "max_num_seqs": 4}, {"max_batch_tokens": 512}):
        with Engine(cancelling["llama"], dtype=dtype, threads=1, block_tokens=4, **{"num_blocks": 300, **options}) as engine:
            requests = [changed(base, request_id=f"{k}", prompt_logprobs_start=k) for k in range(38)]
            for (rid, index), output in finals(engine, requests).items():
                full = want[index].prompt_logprobs
                assert full is not None and output.prompt_logprobs == full[int(rid) :], (rid, options)
                output.prompt_logprobs = full
                assert bits(output) == bits(want[index]), (rid, options)


# Scoring


def test_a_continuation_is_scored_to_its_end_whatever_ends_it() -> None:
    engine, _ = make()
    continuation = [7, EOS[0], 8, 9, EOS[1], 10]
    params = SamplingParams(max_tokens=2, min_tokens=1, stop=("A",), stop_token_ids=(8,), n=3)
    (output,) = engine.score([PROMPT], [continuation], params)
    assert output.token_ids == continuation and output.finish_reason == "length"
    bare = request("x", PROMPT, ("model_logprobs",), forced_token_ids=continuation, max_tokens=6, **FREE)
    assert output.logprobs == oracle(bare, 0, engine.info).logprobs
    (joined,) = engine.generate([[*PROMPT, *continuation]], SamplingParams(max_tokens=0), include=("prompt_logprobs",))
    assert (joined.samples[0].prompt_logprobs or [])[13:] == output.model_logprobs
    assert engine.score([PROMPT], [[]])[0].token_ids == [] and engine.stats()["free_blocks"] == 64


def test_what_was_sampled_gets_its_own_bits_when_it_is_scored_under_the_same_params(cancelling: dict[str, str]) -> None:
    columns = ("model_logprobs", "temperature_logprobs", "entropy")
    with Engine(cancelling["llama"], dtype="bfloat16", threads=1, num_blocks=256) as engine:
        for params in (
            SamplingParams(seed=1, max_tokens=20),
            SamplingParams(seed=2, max_tokens=20, temperature=0.7, top_p=0.9, top_k=40),
            SamplingParams(seed=3, max_tokens=20, min_tokens=12, stop_token_ids=tuple(range(3, 40))),
            SamplingParams(seed=4, max_tokens=20, temperature=0.0),
        ):
            prompts = [list(prompt(i, 9 + 20 * i)) for i in range(3)]
            sampled = [out.samples[0] for out in engine.generate(prompts, params, include=columns)]
            scored = engine.score(prompts, [o.token_ids for o in sampled], params, include=columns)
            for was, now in zip(sampled, scored, strict=True):
                was.stop_reason, was.finish_reason = None, "length"
                assert bits(was) == bits(now), params
            joined = [[*p, *o.token_ids] for p, o in zip(prompts, sampled, strict=True)]
            plain = engine.generate(joined, {"max_tokens": 0}, include=("prompt_logprobs",))
            for p, out, now in zip(prompts, plain, scored, strict=True):
                assert (out.samples[0].prompt_logprobs or [])[len(p) :] == now.model_logprobs


def test_a_path_that_nobody_sampled_has_its_true_values_however_it_is_cut(cancelling: dict[str, str]) -> None:
    path, include = prompt(77, 45), ("model_logprobs", "temperature_logprobs", "entropy", "sampling_mask")
    base = changed(make_requests(1, max_tokens=45)[0], forced_token_ids=path, include=include, top_logprobs=3, min_tokens=0)
    requests = [
        changed(base, request_id="cut", temperature=4.0, top_k=100, top_p=0.99),
        changed(base, request_id="greedy", temperature=0.0),
        changed(base, request_id="plain", temperature=1.0),
    ]
    seen = []
    for options in ({}, {"max_batch_tokens": 7, "block_tokens": 4}, {"num_blocks": 5, "prefix_cache": False}):
        with Engine(cancelling["llama"], threads=1, **{"num_blocks": 64, **options}) as engine:
            found = {key[0]: output for key, output in finals(engine, requests).items()}
            joined = engine.generate([[*base.prompt_token_ids, *path]], {"max_tokens": 0}, include=("prompt_logprobs",))[0].samples[0]
        seen.append({name: bits(output) for name, output in found.items()})
        for output in found.values():
            assert tuple(output.token_ids) == path and output.model_logprobs == (joined.prompt_logprobs or [])[-45:]
    assert seen[0] == seen[1] == seen[2]
    cut, mask = found["cut"], found["cut"].sampling_mask
    assert mask is not None
    kept = [ids is None or token in ids for ids, token in zip(mask, path, strict=True)]
    assert kept == [value > -math.inf for value in cut.logprobs] and 5 < sum(kept) < 40, kept
    assert all(b > a for a, b, is_kept in zip(cut.temperature_logprobs or (), cut.logprobs, kept, strict=True) if is_kept)
    assert set(found["greedy"].logprobs) <= {0.0, -math.inf} and found["plain"].logprobs == found["plain"].model_logprobs


def test_a_continuation_without_room_or_sense_fails_by_name_and_can_fail_alone() -> None:
    engine, _ = make()
    with pytest.raises(PromptTooLong, match=r"prompts\[1\]: the prompt has 13 .* of 64 .* at most 12 \(with the continuation's 52\)"):
        engine.score([PROMPT, PROMPT], [[1] * 51, [1] * 52])
    what = r"its continuation\[1\] "
    for bad, words in (([1, EMBED], what), ([1, -1], what), ("text", "list of token ids"), (7, "list of token ids")):
        with pytest.raises(BadRequest, match=words):
            engine.score([PROMPT], [bad])  # type: ignore[list-item]
    with pytest.raises(BadRequest, match="1 for 2 prompts"):
        engine.score([PROMPT, PROMPT], [[1]])
    outs = engine.score([PROMPT, [], PROMPT], [[1], [1], [1] * 52], on_error="return")
    assert [o.finish_reason for o in outs] == ["length", "error", "error"] and "at most 12" in str(outs[2].error)
    with pytest.raises(BadRequest, match="continue_from"):
        score_request("r", [1], [2], continue_from=(3,))
    again = RolloutRequest.from_wire(score_request("r", [1], [2], SamplingParams(seed=3, n=2)).to_wire())
    assert again == score_request("r", [1], [2], SamplingParams(seed=3))


# Forced ids


def test_forced_ids_are_cut_as_sampled_ones_would_be_and_the_finish_reason_tells() -> None:
    engine, _ = make()
    for params, kept, reason, stop in (
        ({"max_tokens": 2}, 2, "length", None),
        ({}, 4, "stop", EOS[0]),
        ({"min_tokens": 5}, 6, "length", None),
        ({"stop_token_ids": (8,)}, 2, "stop", 8),
        ({"stop": "\x08\x09"}, 3, "stop", "\x08\x09"),
        ({"max_tokens": 0}, 0, "length", None),
    ):
        r = request("r", PROMPT, ("entropy",), forced_token_ids=(7, 8, 9, EOS[0], 10, 11), **{"max_tokens": 6, "seed": 1, **params})
        for stream in (False, True):
            engine.add_request(changed(r, stream=stream))
            output = run(engine)[-1]
            assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (kept, reason, stop), params
            expect(output, r, engine)


def test_what_a_sample_that_meets_broken_numbers_keeps_does_not_depend_on_chunks(cancelling: dict[str, str]) -> None:
    """Nothing before its first own token, everything from then on, deltas included."""
    before, include = list(prompt(5, 9)), ("prompt_logprobs", "model_logprobs")
    broken = [*before[:5], NAN_TOKEN, *before[5:]]
    requests = [
        request("forced", before, include, forced_token_ids=broken, max_tokens=12, **FREE),
        request("samples", before, include, forced_token_ids=broken, max_tokens=12, n=3, **FREE),
        request("prompt", broken, include, max_tokens=3, **FREE),
        request("behind", before, include, forced_token_ids=(*before, NAN_TOKEN), max_tokens=12, n=2, **FREE),
        request("scored", before, include, forced_token_ids=broken, score_only=True, max_tokens=10, **FREE),
        request("last", [*before, NAN_TOKEN], include, forced_token_ids=before, max_tokens=12, n=2, **FREE),
        request("drawn", before, include, forced_token_ids=before, max_tokens=12, allowed_token_ids=(NAN_TOKEN,), n=2, **FREE),
    ]
    for block in (1, 4, 16):
        for chunk in (1, 2, 3, 7, 64):
            options = {"block_tokens": block, "num_blocks": 256 // block, "max_batch_tokens": chunk, "max_num_seqs": min(chunk, 4)}
            with Engine(cancelling["nan"], threads=1, **options) as engine:
                for stream in (False, True):
                    outputs = finals(engine, [changed(r, stream=stream) for r in requests])
                    assert {o.finish_reason for o in outputs.values()} == {"error"} and len(outputs) == 12
                    for (name, _), output in outputs.items():
                        kept = len(output.token_ids), len(output.logprobs), len(output.model_logprobs or ()), output.prompt_logprobs is None
                        assert kept == ((10, 10, 10, False) if name == "drawn" else (0, 0, 0, True)), (name, options)
                        assert [span["end"] for span in output.weight_versions] == ([10] if name == "drawn" else [])
