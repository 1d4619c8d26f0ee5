"""A replica that generates, takes weights from a worker that plays trainer, and generates on those: what a job does, in small."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout.replica import get_rollout_replica_class

from ...weight_sync.digest import tensor_digest
from . import NAME
from .calls import in_words
from .check import Finding

TRIAL_S = 300.0
SCALE = 0.5
VERSION = 7


class TrialTrainer(Worker):  # type: ignore[misc]
    """Holds a checkpoint's weights, scaled."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._weights = scaled(model)
        self.checkpoint_engine = CheckpointEngineRegistry.new(NAME, is_master=self.rank == 0, bucket_size=1 << 16)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        return await self.checkpoint_engine.send_weights(iter(self._weights.items()), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


def scaled(model: str) -> dict[str, torch.Tensor]:
    """The weights of a folder times SCALE, which every dtype holds exactly."""
    return {name: tensor * SCALE for name, tensor in sorted(load_file(Path(model, "model.safetensors")).items())}


def trainers(model: str, size: int = 1) -> Any:
    """A worker group that plays trainer."""
    cls = RayClassWithInitArgs(cls=ray.remote(TrialTrainer), model=model)
    pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=cls, use_gpu=False, device_name="cpu")


def trial(model: str) -> Finding:
    """A Finding on all of it. Ray must be initialised."""

    async def limited() -> str:
        async with asyncio.timeout(TRIAL_S):
            return await _run(model)

    what = "generate, update weights, generate"
    try:
        return Finding(what, asyncio.run(limited()))
    except TimeoutError:
        return Finding(what, "", (f"not done within {TRIAL_S:g} s",))
    except Exception as error:
        return Finding(what, "", (in_words(error),))


async def _run(model: str) -> str:
    engine = CheckpointEngineConfig(backend=NAME, engine_kwargs={NAME: {"timeout_s": TRIAL_S}})
    rollout = RolloutConfig(
        name=NAME, tensor_model_parallel_size=1, n_gpus_per_node=1, nnodes=1, prompt_length=32, response_length=8, load_format="auto",
        dtype="float32", max_num_seqs=16, max_num_batched_tokens=256, checkpoint_engine=engine, engine_kwargs={NAME: {"num_blocks": 64}},
    )  # fmt: skip
    config = OmegaConf.create({"_target_": "verl.workers.config.HFModelConfig", "path": model})
    replica = get_rollout_replica_class(NAME)(0, rollout, config, gpus_per_node=1)
    await replica.init_standalone()
    server = replica.server_handle
    asked = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "max_tokens": 8, "seed": 1}
    before = await server.generate.remote([5, 6, 7], asked, "before")
    manager = CheckpointEngineManager(engine, await asyncio.to_thread(trainers, model), [replica])
    await manager.update_weights(global_steps=VERSION)
    after = await server.generate.remote([5, 6, 7], asked, "after")
    served = await server.digests.remote()
    wrong = [name for name, tensor in scaled(model).items() if served.get(name) != f"{tensor_digest(tensor):016x}"]
    versions = (before.extra_fields["global_steps"], after.extra_fields["global_steps"])
    if wrong or versions != (0, VERSION) or len(after.log_probs) != len(after.token_ids):
        raise AssertionError(f"versions {versions}, weights that differ from those sent: {', '.join(wrong) or 'none'}")
    words = f"{len(before.token_ids)} tokens at version {versions[0]}, {len(after.token_ids)} at version {versions[1]}"
    return f"{words}; {len(served)} tensors arrived bit for bit"
