"""Masks of a real engine: with them a stock trainer's logits give `logprobs` bit for bit, whatever restricted the draw."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
import transformers
from fake_runner import FakeRunner, make_info
from real_engine import changed, finals, prompt
from rollsync import Engine, RolloutRequest, SampleOutput, SamplingParams
from rollsync.kernels.logprobs import token_logprobs
from rollsync.kernels.native_lib import available_builds
from rollsync.kernels.sampling_mask import SamplingMask
from rollsync.rollout.errors import BadRequest
from rollsync.trainer_adapters.parity import rollsync_parity
from torch import Tensor

BANNED = (7, 9, 11)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def some_params(rng: random.Random, seed: int) -> SamplingParams:
    """Every restriction off or on, alone and with the others."""
    choices: dict[str, tuple[Any, ...]] = {
        "temperature": (0.0, 0.7, 1.0, 1.0, 3.0), "top_k": (0, 0, 1, 5, 200, 255), "top_p": (1.0, 1.0, 0.3, 0.95, 0.9999),
        "min_p": (0.0, 0.0, 0.02), "allowed_token_ids": (None, None, tuple(range(1, 256, 2)), (5, 8, 200), tuple(range(20, 256))),
        "min_tokens": (0, 0, 4), "logit_bias": ({}, {}, {3: 2.5, 8: -4.0, 200: 1.25}), "repetition_penalty": (1.0, 1.0, 1.3),
    }  # fmt: skip
    given = {name: rng.choice(values) for name, values in choices.items()}
    return SamplingParams(seed=seed, max_tokens=9, stop_token_ids=BANNED, ignore_eos=True, **given)


def engine_logits(logits_TV: Tensor, request: RolloutRequest, ids: list[int]) -> Tensor:
    """The trainer's logits of the output tokens with what the request changes about them (docs/numerics.md, "Changed logits")."""
    params, before = request.params, list(request.prompt_token_ids)
    out = logits_TV.float().clone()
    for t in range(len(out)):
        seen = set(before + ids[:t]) if params.repetition_penalty != 1 else set()
        for i in seen | set(params.logit_bias):
            y = out[t, i] + torch.tensor(params.logit_bias.get(i, 0.0))
            if i in seen:
                r = torch.tensor(params.repetition_penalty)
                y = y / r if y > 0 else y * r
            out[t, i] = y
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_trainers_logits_and_the_mask_give_the_logprobs(cancelling: dict[str, str], dtype: str) -> None:
    rng = random.Random(11)
    requests = [
        RolloutRequest(request_id=f"r{i}", prompt_token_ids=prompt(i, 4 + i % 7), params=some_params(rng, i), include=("sampling_mask",))
        for i in range(18)
    ]
    options: dict[str, Any] = {"dtype": dtype, "threads": 1, "num_blocks": 256}
    with Engine(cancelling["llama"], **options) as engine:
        outputs = finals(engine, requests)
        # given tokens: some could never be drawn
        forced = [changed(r, forced_token_ids=tuple(prompt(50 + i, 6)), min_tokens=0) for i, r in enumerate(requests)]
        scored = finals(engine, forced)
    for build in [*available_builds()[1:], "reference"]:
        with Engine(cancelling["llama"], kernels=build, **options) as engine:
            again = finals(engine, requests[:6] if build == "reference" else requests)
        assert all(o.sampling_mask == outputs[key].sampling_mask and o.logprobs == outputs[key].logprobs for key, o in again.items())
    model = transformers.AutoModelForCausalLM.from_pretrained(cancelling["llama"], dtype=getattr(torch, dtype)).eval()
    impossible = narrowed = 0
    for request, output in [(r, o[r.request_id, 0]) for rs, o in ((requests, outputs), (forced, scored)) for r in rs]:
        mask, ids = output.sampling_mask, output.token_ids
        assert mask is not None and len(mask) == len(ids) > 0 and mask.vocab_size == 256
        tokens = [*request.prompt_token_ids, *ids]
        with torch.no_grad(), rollsync_parity(model):
            logits = model(input_ids=torch.tensor([tokens])).logits[0, len(request.prompt_token_ids) - 1 : -1]
        given = engine_logits(logits, request, ids)
        got = token_logprobs(given, torch.tensor(ids), temperature=request.params.temperature, mask=mask)
        assert got.tolist() == output.logprobs, request.params
        impossible += int((got == -torch.inf).sum())
        narrowed += sum(row is not None for row in mask)
        for t, row in enumerate(mask):
            kept = range(256) if row is None else row
            assert (output.logprobs[t] > -float("inf")) == (ids[t] in kept)
            if request.params.allowed_token_ids is not None:
                assert row is not None and set(row) <= set(request.params.allowed_token_ids)
            assert not (t < request.params.min_tokens and set(BANNED) & set(kept)), "a stop id under min_tokens"
            assert mask.count(t) == 1 or request.params.temperature > 0
    assert impossible > 20 and narrowed > 150


def test_rows_that_nothing_restricts_take_one_word(cancelling: dict[str, str]) -> None:
    params = {"temperature": 0.9, "max_tokens": 6, "ignore_eos": True, "logit_bias": {5: 1.0}, "seed": 3}
    with Engine(cancelling["llama"], dtype="bfloat16", threads=1, num_blocks=64) as engine:
        plain, masked = (engine.generate([list(prompt(1, 9))], params, include=inc)[0].samples[0] for inc in ((), ("sampling_mask",)))
        assert plain.sampling_mask is None and plain.logprobs == masked.logprobs
        assert masked.sampling_mask == SamplingMask.all(6, 256) and len(masked.sampling_mask.words) == 6
        (score,) = engine.score([list(prompt(1, 9))], [masked.token_ids], {"temperature": 0.9, "top_k": 3}, include=("sampling_mask",))
        assert [len(row or ()) for row in score.sampling_mask] == [3] * 6
        for copied in (copy.deepcopy(masked), pickle.loads(pickle.dumps(masked))):
            assert copied == masked


def test_partials_and_samples_that_never_began_have_masks_of_their_length() -> None:
    class Masking(FakeRunner):
        def execute(self, plan: Any) -> Any:
            result = super().execute(plan)
            result.sampling_mask = [SamplingMask.of(97, [[0, token]]).to_bytes() for token in result.token_ids]
            return result

    request = RolloutRequest(
        request_id="a", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=30, n=3, seed=1, ignore_eos=True),
        include=("sampling_mask",), forced_token_ids=(5, 6),
    )  # fmt: skip
    engine = Engine("fake", runner=Masking(make_info(max_num_seqs=2)))
    engine.add_request(request)
    outputs: list[SampleOutput] = []
    for _ in range(4):
        outputs += engine.step()
    outputs += engine.abort(all=True)
    assert len(outputs) == 3 and min(len(o.token_ids) for o in outputs) == 0 < max(len(o.token_ids) for o in outputs)
    for output in outputs:
        assert output.sampling_mask is not None
        assert list(output.sampling_mask) == [sorted({0, token}) for token in output.token_ids]
    with pytest.raises(BadRequest, match=r"include must name only .*sampling_mask; got 'sampling_masks'"):
        changed(request, include=("sampling_masks",))
