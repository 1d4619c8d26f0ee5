"""verl's own configuration, servers' manager and agent loop, with one setting changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from rollsync import Engine
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.workers.rollout.llm_server import LLMServerManager

pytestmark = pytest.mark.adapters


def composed(folder: str) -> Any:
    rollout = {
        "name": "rollsync",
        "tensor_model_parallel_size": 1,
        "nnodes": 1,
        "n_gpus_per_node": 1,
        "prompt_length": 64,
        "response_length": 16,
        "load_format": "auto",
        "dtype": "float32",
        "calculate_log_probs": True,
        "max_num_batched_tokens": 256,
        "agent.num_workers": 1,
    }
    own = {"device": "cpu", "threads": 1, "num_blocks": 160}
    overrides = [f"actor_rollout_ref.rollout.{name}={value}" for name, value in rollout.items()]
    overrides += [f"+actor_rollout_ref.rollout.engine_kwargs.rollsync.{name}={value}" for name, value in own.items()]
    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[f"actor_rollout_ref.model.path={folder}", *overrides])


def test_a_stock_agent_loop_gets_logprobs_that_an_engine_computes_again(cluster: None, model: str) -> None:
    config = composed(model)
    servers = LLMServerManager.create(config, start_rank=10)
    loop = AgentLoopManager.create(config, servers.get_client())
    chats = np.empty(4, dtype=object)
    chats[:] = [[{"role": "user", "content": f"count to {i}"}] for i in range(4)]
    same: dict[str, Any] = {"data_source": "none", "reward_model": {"style": "rule", "ground_truth": "1"}}
    fields = {name: np.array([value] * len(chats), dtype=object) for name, value in same.items()}
    batch = loop.generate_sequences(DataProto.from_dict(non_tensors={"raw_prompt": chats, **fields}))
    masks, ids = batch.batch["attention_mask"].bool(), batch.batch["input_ids"]
    prompts = [row[:64][mask[:64]].tolist() for row, mask in zip(ids, masks, strict=True)]
    responses = [row[64:][mask[64:]].tolist() for row, mask in zip(ids, masks, strict=True)]
    with Engine(model, dtype="float32", threads=1, num_blocks=64) as engine:
        scored = engine.score(prompts, responses)
    for row, sample in zip(batch.batch["rollout_log_probs"], scored, strict=True):
        assert row[: len(sample.token_ids)].tolist() == list(sample.logprobs)
    assert batch.non_tensor_batch["max_global_steps"].tolist() == [0] * 4
