"""What the tests of the verl adapter share: settings, a server in this process, a trainer that can be told to fail."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from rollsync.trainer_adapters.verl.server import RollsyncServer
from rollsync.weight_sync.digest import tensor_digest
from safetensors.torch import load_file
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

CONTEXT = 2048
PROMPT = [5, 6, 7, 8]
ASK = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
CHECKPOINT_ENGINE = CheckpointEngineConfig(backend="rollsync", engine_kwargs={"rollsync": {"timeout_s": 60.0}})


def rollout_config(**changes: Any) -> RolloutConfig:
    own = {"device": "cpu", "threads": 1, "num_blocks": 160, "sync_timeout_s": 30.0, **changes.pop("own", {})}
    usual = {
        "tensor_model_parallel_size": 1,
        "n_gpus_per_node": 1,
        "nnodes": 1,
        "prompt_length": 32,
        "response_length": 16,
        "load_format": "auto",
        "dtype": "float32",
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "checkpoint_engine": CHECKPOINT_ENGINE,
        "calculate_log_probs": True,
    }
    return RolloutConfig(name="rollsync", **{**usual, **changes}, engine_kwargs={"rollsync": own})


def model_config(folder: str) -> Any:
    return OmegaConf.create({"_target_": "verl.workers.config.HFModelConfig", "path": folder})


def weights(folder: str, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """A checkpoint's, times a power of two, so that nothing is rounded."""
    return {name: tensor * scale for name, tensor in sorted(load_file(Path(folder, "model.safetensors")).items())}


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{tensor_digest(tensor):016x}" for name, tensor in tensors.items()}


def spoilt(tensors: dict[str, torch.Tensor], how: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in order, with one fault: a wrong shape, a NaN, one too few, or an error after some."""
    last = len(tensors) - 1
    for i, (name, tensor) in enumerate(tensors.items()):
        if i == last and how == "raises":
            raise RuntimeError("the gather failed")
        if i == last and how == "missing":
            return
        if i == last and how == "nan":
            tensor = torch.full_like(tensor, torch.nan)
        if i == 1 and how == "shape":
            tensor = tensor[:-1].clone()
        yield name, tensor


FAULTS = {"shape": "must be", "missing": "is missing", "nan": "finite", "raises": "the gather failed"}
"""words of the error, by fault"""


class Trainer(Worker):
    """Plays trainer in a worker of verl's."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder, self._scale, self._fault = folder, 1.0, None
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "rollsync", is_master=self.rank == 0, bucket_size=1 << 14, **CHECKPOINT_ENGINE.engine_kwargs["rollsync"]
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def next_weights(self, scale: float, fault: str | None = None) -> None:
        self._scale, self._fault = scale, fault

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        return await self.checkpoint_engine.send_weights(spoilt(weights(self._folder, self._scale), self._fault), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


def trainers(folder: str, size: int) -> Any:
    cls = RayClassWithInitArgs(cls=ray.remote(Trainer), folder=folder)
    pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=cls, use_gpu=False, device_name="cpu")


class _Method:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return asyncio.ensure_future(self._method(*args, **kwargs))


class LocalServer:
    """A server in this process, called as its Ray handle is."""

    def __init__(self, server: RollsyncServer) -> None:
        self.server = server

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self.server, name))


async def local_server(monkeypatch: Any, folder: str, config: RolloutConfig, mode: str) -> LocalServer:
    """Launched, and what `RollsyncRollout` finds."""
    server = RollsyncServer(config, model_config(folder), mode, None)
    await server.launch(config.tensor_model_parallel_size)
    local = LocalServer(server)
    monkeypatch.setattr(importlib.import_module("rollsync.trainer_adapters.verl.rollout"), "find_server", lambda rank: local)
    return local


def ranks(monkeypatch: Any, folder: str, config: RolloutConfig) -> list[Any]:
    """The worker's side on every rank of replica 0."""
    from verl.workers.rollout.base import get_rollout_class

    found = []
    for rank in range(config.tensor_model_parallel_size):
        monkeypatch.setenv("RANK", str(rank))
        found.append(get_rollout_class("rollsync", "async")(config, model_config(folder), None))
    return found
