"""What is registered as `openrlhf.trainer.ray.vllm_engine`: how OpenRLHF makes its engines, and calls all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...rollout.errors import BadRequest, EngineDead
from .actor import RolloutActor

START_S = 1800.0
"""how long engines may take to load, or wait for GPUs"""
CALL_S = 3600.0
CONCURRENCY = 1 << 16
"""calls in flight per engine: a batch of rollouts must never keep a pause or an update waiting"""


def make_engines(
    own: Mapping[str, Any],
    num_engines: int,
    tensor_parallel_size: int,
    pretrain: str,
    seed: int,
    full_determinism: bool,
    enable_prefix_caching: bool,
    enforce_eager: bool,
    max_model_len: int,
    shared_pg: Any = None,
    gpu_memory_utilization: float | None = None,
    vllm_enable_sleep: bool = False,
    logprobs_mode: str | None = None,
    agent_func_path: str | None = None,
    remote_rm_url: Any = None,
    max_images_per_prompt: int = 0,
) -> list[Any]:
    """Start engines and wait until they serve; handles, in order. After `own`, the arguments are OpenRLHF's.

    Args:
        own: `--rollsync.NAME` by name: options of the engine, and `partial_kv`.

    Raises:
        BadRequest: naming the argument that Rollsync has no counterpart for. EngineDead: with the words of an engine that does not start.
    """
    if tensor_parallel_size != 1:
        raise BadRequest(
            f"vllm.tensor_parallel_size must be 1, got {tensor_parallel_size}: raise vllm.num_engines", field="vllm.tensor_parallel_size"
        )
    if max_images_per_prompt:
        raise BadRequest(f"data.max_images_per_prompt must be 0, got {max_images_per_prompt}", field="data.max_images_per_prompt")
    if logprobs_mode not in (None, "processed_logprobs"):
        raise BadRequest(f"logprobs_mode must be processed_logprobs, got {logprobs_mode!r}", field="logprobs_mode")
    own = dict(own)
    partial_kv = own.pop("partial_kv", "keep")
    first_seed = seed if (given := own.pop("seed", None)) is None else given
    device = own.get("device") or (None if ray.cluster_resources().get("GPU") else "cpu")
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": max_model_len,
        "prefix_cache": enable_prefix_caching,
        **({"device": device} if device else {}),
        **({} if device == "cpu" else {"cuda_graphs": not enforce_eager, "memory_fraction": gpu_memory_utilization}),
        **own,
    }
    engines = []
    for number, place in enumerate(_places(num_engines, device, shared_pg, int(own.get("threads") or 1))):
        actor = ray.remote(RolloutActor).options(max_concurrency=CONCURRENCY, **place)
        engines.append(
            actor.remote(
                pretrain,
                {**options, "seed": first_seed + number},
                agent_func_path=agent_func_path,
                remote_rm_url=remote_rm_url,
                partial_kv=partial_kv,
            )
        )
    _wait(engines)
    if vllm_enable_sleep:
        call_engines(engines, "sleep")
    return engines


def _wait(engines: Sequence[Any]) -> None:
    """Until all serve. EngineDead with the words of the first that does not; none is left then."""
    for number, engine in enumerate(engines):
        try:
            ray.get(engine.status.remote(), timeout=START_S)
        except ray.exceptions.RayError as error:
            for one in engines:
                ray.kill(one)
            words = str(error).strip().rpartition("\n")[2]
            raise EngineDead(f"engine {number} of {len(engines)} did not start: {words}") from error


def _places(num_engines: int, device: str | None, shared_pg: Any, threads: int) -> list[dict[str, Any]]:
    """Ray's options for each engine: on the CPU, so many cores; else a GPU of its own, or (`shared_pg`) a part of the trainer's."""
    if device == "cpu":
        return [{"num_cpus": threads}] * num_engines
    part = 0.2 if shared_pg is not None else 1
    group = shared_pg
    if group is None:
        group = placement_group([{"GPU": 1, "CPU": 1}] * num_engines, strategy="PACK")
        ray.get(group.ready(), timeout=START_S)
    return [
        {
            "num_cpus": part,
            "num_gpus": part,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_capture_child_tasks=True, placement_group_bundle_index=number
            ),
        }
        for number in range(num_engines)
    ]


def call_engines(engines: Sequence[Any], method_name: str, *args: Any, rank_0_only: bool = True, **kwargs: Any) -> list[Any] | None:
    """Call a method of every engine and wait; the values in order. None on trainer ranks that leave it to rank 0."""
    import torch

    distributed = torch.distributed
    if rank_0_only and distributed.is_initialized() and distributed.get_rank() != 0:
        return None
    found: list[Any] = ray.get([getattr(engine, method_name).remote(*args, **kwargs) for engine in engines], timeout=CALL_S)
    return found
