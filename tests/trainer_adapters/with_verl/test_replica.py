"""Stock verl over a replica: its client, its load balancer, its manager of weights, Ray's workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf
from rollsync import BadRequest, ConfigError, Engine, SamplingParams
from rollsync.weight_sync.control import UpdateError
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import get_rollout_replica_class
from verl.workers.rollout.router import get_router_handle
from verl_cases import ASK, CHECKPOINT_ENGINE, CONTEXT, FAULTS, PROMPT, digests, model_config, rollout_config, trainers, weights

pytestmark = pytest.mark.adapters
LONG = 1800


class Case:
    """A replica, and what verl puts in front of it and behind."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.replica = get_rollout_replica_class("rollsync")(0, rollout_config(), model_config(folder), gpus_per_node=1)
        asyncio.run(self.replica.init_standalone())
        self.server = self.replica.server_handle
        servers = {self.replica.server_address: self.server}
        self._balancer = get_router_handle(servers=servers, router_config_path=None, full_determinism=False, load_balancer_cls=None)
        self.trainers = trainers(folder, 2)
        self.manager = CheckpointEngineManager(CHECKPOINT_ENGINE, self.trainers, [self.replica])

    def client(self, cls: type[LLMServerClient] = LLMServerClient) -> LLMServerClient:
        rollout = {"name": "rollsync", "response_length": 16, "full_determinism": False}
        return cls(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), self._balancer)

    async def version(self) -> int:
        return int((await self.server.status.remote())["state"]["weights"]["version"])

    async def begun(self, running: int) -> None:
        """Until so many requests run, and some tokens later."""
        while (await self.server.status.remote())["running"] < running:
            await asyncio.sleep(0.002)
        start = (await self.server.status.remote())["generated_tokens"]
        while (await self.server.status.remote())["generated_tokens"] < start + 20:
            await asyncio.sleep(0.002)


@pytest.fixture(scope="module")
def case(cluster: None, model: str) -> Case:
    return Case(model)


def sampled_by_an_engine(folder: str, seed: int, max_tokens: int) -> tuple[list[int], list[float]]:
    with Engine(folder, dtype="float32", threads=1, num_blocks=128) as engine:
        (sample,) = engine.generate([PROMPT], SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True))[0].samples
    return list(sample.token_ids), list(sample.logprobs)


def test_verls_client_gets_the_engines_bits(case: Case, run: Any) -> None:
    async def ask(**more: Any) -> Any:
        return await case.client().generate("request", prompt_ids=PROMPT, sampling_params={**ASK, "seed": 3, "ignore_eos": True, **more})

    output = run(ask(max_tokens=9))
    assert (output.token_ids, output.log_probs) == sampled_by_an_engine(case.folder, 3, 9)
    assert (output.stop_reason, output.extra_fields["global_steps"], output.extra_fields["min_global_steps"]) == ("completed", 0, 0)
    assert run(ask(max_tokens=9, logprobs=False)).log_probs is None
    assert len(run(ask()).token_ids) == 16  # response_length
    assert len(run(ask(max_tokens=10**6)).token_ids) == CONTEXT - len(PROMPT)  # the context's room


def test_a_later_turn_finds_the_earlier_ones_in_the_cache(case: Case, run: Any) -> None:
    async def turns() -> Any:
        first = await case.server.generate.remote(list(range(3, 83)), {**ASK, "max_tokens": 8}, "turn 1")
        return await case.server.generate.remote([*range(3, 83), *first.token_ids, 9], {**ASK, "max_tokens": 8}, "turn 2")

    assert run(turns()).extra_fields["num_cached_tokens"] >= 64


def test_refusals_reach_the_caller_by_name(case: Case, run: Any) -> None:
    async def ask(**given: Any) -> Any:
        return await case.server.generate.remote(**{"prompt_ids": PROMPT, "sampling_params": dict(ASK), "request_id": "bad", **given})

    with pytest.raises(BadRequest, match="best_of"):
        run(ask(sampling_params={**ASK, "best_of": 2}))
    with pytest.raises(BadRequest, match="image_data"):
        run(ask(image_data=[b"png"]))
    with pytest.raises(BadRequest, match="prompt_token_ids"):
        run(ask(prompt_ids=[100_000]))
    for asked in ({"is_reward_model": True}, {"is_teacher_model": True}):
        with pytest.raises(ConfigError, match="model cannot be"):
            get_rollout_replica_class("rollsync")(1, rollout_config(), model_config(case.folder), gpus_per_node=1, **asked)


def test_an_abort_gives_the_partial_and_a_resumed_sample_has_the_bits_of_one_that_never_was(case: Case, run: Any) -> None:
    params = {**ASK, "seed": 5, "ignore_eos": True, "max_tokens": LONG}

    async def aborted() -> tuple[Any, Any, Any]:
        direct = case.server.generate.remote(PROMPT, dict(params), "direct")
        through = asyncio.create_task(
            case.client(FullyAsyncLLMServerClient).generate("resumed", prompt_ids=PROMPT, sampling_params=dict(params))
        )
        await case.begun(2)
        told = await case.replica.abort_all_requests()
        partial = await direct
        parked = asyncio.ensure_future(case.server.generate.remote(PROMPT, {**ASK, "max_tokens": 2}, "parked"))
        await asyncio.sleep(0.2)
        assert not parked.done() and not through.done()
        await case.replica.abort_all_requests(reject_request=True)
        assert (await parked).stop_reason == "aborted"
        late = await case.server.generate.remote(PROMPT, dict(params), "late")
        assert (late.token_ids, late.log_probs, late.stop_reason) == ([], None, "aborted")
        await case.replica.abort_all_requests()
        await case.replica.resume_generation()
        return told, partial, await through

    told, partial, resumed = run(aborted())
    assert told["aborted_count"] == 2 and "direct" in told["request_ids"]
    ids, logprobs = sampled_by_an_engine(case.folder, 5, LONG)
    some = len(partial.token_ids)
    assert partial.stop_reason == "aborted" and 0 < some < LONG
    assert (partial.token_ids, partial.log_probs) == (ids[:some], logprobs[:some])
    assert (resumed.token_ids, resumed.log_probs) == (ids, logprobs)


def test_weights_move_under_a_sample_and_both_versions_are_told(case: Case, run: Any) -> None:
    async def moved() -> Any:
        params = {**ASK, "seed": 6, "ignore_eos": True, "max_tokens": LONG}
        through = asyncio.create_task(case.client(FullyAsyncLLMServerClient).generate("moved", prompt_ids=PROMPT, sampling_params=params))
        await case.begun(1)
        told = await case.manager.update_weights(global_steps=4)
        return told, await through

    case.trainers.next_weights(0.5)
    told, output = run(moved())
    assert told["rollsync/sent_tensors"] == len(weights(case.folder))
    assert run(case.server.digests.remote()) == digests(weights(case.folder, 0.5))
    assert len(output.token_ids) == len(output.log_probs) == LONG
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (0, 4)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_update_that_fails_leaves_the_weights_that_were_and_the_next_one_works(case: Case, run: Any, fault: str) -> None:
    before = run(case.server.digests.remote())
    version = run(case.version())
    case.trainers.next_weights(2.0, fault)
    with pytest.raises((UpdateError, RuntimeError), match=FAULTS[fault]):
        case.manager.update_weights(global_steps=version + 1)

    async def after() -> Any:
        await case.replica.resume_kv_cache()
        await case.replica.resume_generation()
        return await case.server.generate.remote(PROMPT, {**ASK, "max_tokens": 4}, "after")

    assert run(after()).extra_fields["global_steps"] == version
    assert run(case.server.digests.remote()) == before
    scale = 0.25 if fault == "nan" else 0.125
    case.trainers.next_weights(scale)
    case.manager.update_weights(global_steps=version + 2)
    assert run(case.server.digests.remote()) == digests(weights(case.folder, scale))
    assert run(case.version()) == version + 2


def test_verls_control_calls_work_and_its_server_ends_with_it(case: Case, run: Any) -> None:
    async def calls() -> None:
        replica = case.replica
        for call in (replica.release_kv_cache, replica.resume_kv_cache, replica.clear_kv_cache, replica.sleep, replica.wake_up):
            await call()
        await replica.start_profile()
        await replica.stop_profile()
        assert (await replica.abort_request("nobody"))["aborted"] is False

    run(calls())
    assert ray.get_actor("rollsync_server_0_0") == case.server
