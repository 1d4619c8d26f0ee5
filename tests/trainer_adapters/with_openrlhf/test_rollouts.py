"""O2: OpenRLHF's own SamplesGenerator and executors, over Ray, with engines of Rollsync."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from openrlhf_helpers import STAND_INS, make_generator, start, stop
from rollsync import BadRequest, EngineDead

pytestmark = pytest.mark.adapters


@pytest.mark.parametrize("agent", [None, "two_turns.py"])
def test_samples_have_the_trainers_logprobs(cluster: Any, folder: str, tokenizer: Any, reference: Any, agent: str | None) -> None:
    engines = start(folder, 2, agent_func_path=agent and str(STAND_INS / agent))
    generator = make_generator(tokenizer, engines, prompts=3)
    rows, _, consumed, exhausted = generator.generate_samples(max_len=120, max_new_tokens=12, temperature=0.7, top_p=1.0)
    assert (len(rows), consumed, exhausted) == (4, 2, False)
    turns = []
    for row in rows:
        ids, mask, found = row.sequences[0].tolist(), row.action_mask[0].bool(), row.rollout_log_probs[0]
        assert mask.shape == found.shape == (len(ids) - 1,)
        assert not found[~mask].any()
        begins = (mask & ~torch.cat([torch.tensor([False]), mask[:-1]])).nonzero()[:, 0].tolist()
        torch.testing.assert_close(found[mask], reference(ids, 0.7, begins=begins)[mask], atol=1e-4, rtol=0)
        turns.append(len(begins))
        assert tokenizer.decode(ids).startswith(row.prompts[0])
    assert turns == [1] * 4 if agent is None else set(turns) <= {1, 2} and 2 in turns
    assert len({tuple(row.sequences[0].tolist()) for row in rows}) == 4
    if agent is not None:
        assert all(row.rewards.item() in (1.0, 2.0) and row.scores.item() == 0.5 for row in rows)
    stop(engines)


def test_without_correction_there_are_no_logprobs(cluster: Any, folder: str, tokenizer: Any) -> None:
    engines = start(folder, logprobs_mode=None)
    rows, *_ = make_generator(tokenizer, engines, level="off").generate_samples(max_len=64, max_new_tokens=4, temperature=1.0, top_p=0.9)
    assert all(row.rollout_log_probs is None and row.truncated.item() in (0, 1) for row in rows)
    stop(engines)


def test_what_an_engine_cannot_do_is_said_by_name(cluster: Any, folder: str, tokenizer: Any) -> None:
    for changes, words in (
        ({"tensor_parallel_size": 2}, "vllm.tensor_parallel_size must be 1, got 2"),
        ({"max_images_per_prompt": 1}, "data.max_images_per_prompt must be 0, got 1"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode must be processed_logprobs, got 'raw_logprobs'"),
        ({"max_model_len": 4096}, "max_model_len 4096 exceeds the model's context of 512 tokens"),
        ({"agent_func_path": str(STAND_INS / "own_hook.py")}, "must hold a class AgentExecutor"),
        ({"agent_func_path": "/nowhere.py"}, "train.agent_func_path must be a Python file, got '/nowhere.py'"),
    ):
        with pytest.raises((BadRequest, EngineDead), match=words) as caught:
            start(folder, **changes)
        assert "\n" not in str(caught.value)


def test_a_bad_request_ends_alone(cluster: Any, folder: str, tokenizer: Any) -> None:
    import ray
    from vllm import SamplingParams

    (engine,) = engines = start(folder)

    def ask(ids: list[int], **params: Any) -> Any:
        return engine.generate.remote(ids, SamplingParams(**params))

    good = ask([1, 2, 3], max_tokens=64, ignore_eos=True, logprobs=2)
    for ids, params, words in (
        ([], {}, "prompt_token_ids must hold at least one id"),
        ([1] * 300, {}, "prompt"),
        ([1, 999], {}, "999"),
        ([1], {"temperature": -1.0}, "sampling_params.temperature must be"),
        ([1], {"logprobs": 50}, "sampling_params.logprobs must be an int in"),
        ([1], {"max_tokens": 0}, "has no token"),
    ):
        with pytest.raises(Exception, match=words):
            ray.get(ask(ids, **params), timeout=60)
    (sample,) = ray.get(good, timeout=60).outputs
    assert sample.finish_reason == "length" and len(sample.token_ids) == len(sample.logprobs) == 64
    assert all(token in row and 2 <= len(row) <= 3 for token, row in zip(sample.token_ids, sample.logprobs, strict=True))
    assert sample.text == tokenizer.decode(sample.token_ids, skip_special_tokens=True)
    assert ray.get(engine.get_num_unfinished_requests.remote()) == 0
    stop(engines)
