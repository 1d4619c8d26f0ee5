"""One replica as the driver sees it: where its server runs, and verl's control calls, which the base class forwards."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplica

from ...rollout.errors import ConfigError
from .calls import server_name
from .server import RollsyncServer
from .settings import replica_settings

LAUNCH_TIMEOUT_S = 1800.0


class RollsyncReplica(RolloutReplica):  # type: ignore[misc]
    """`tensor_model_parallel_size` workers of one host, and the server that generates for them there.

    Raises:
        ConfigError: settings that an engine cannot run, all of them by name.
    """

    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        super().__init__(replica_rank, config, model_config, gpus_per_node, is_reward_model, is_teacher_model, name_suffix)
        for kind, asked in (("reward", is_reward_model), ("teacher", is_teacher_model)):
            if asked:
                raise ConfigError(f"a {kind} model cannot be a {self.config.name} replica: it needs routes or values of another rollout")
        replica_settings(self.config, model_config)
        if self.nnodes != 1:
            raise ConfigError(f"a replica lives on one host: tensor_model_parallel_size {self.world_size} needs {self.nnodes}")

    async def launch_servers(self) -> None:
        """Start the server beside its workers, on their host and with their GPUs. Returns once it can generate."""
        assert self.rollout_mode is not None and len(self.workers) == self.world_size
        places = await asyncio.gather(*(worker.__ray_call__.remote(_place) for worker in self.workers))
        if len({node for node, _ in places}) != 1:
            raise ConfigError(f"the {self.world_size} workers of replica {self.replica_rank} are on several hosts; a replica lives on one")
        devices = [device for _, device in places if device is not None]
        server = ray.remote(RollsyncServer).options(
            name=server_name(self.replica_rank, self.name_suffix),
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=places[0][0], soft=False),
            runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
            max_concurrency=self.max_concurrency,
        ).remote(self.config, self.model_config, self.rollout_mode.value, ",".join(devices) or None)
        async with asyncio.timeout(LAUNCH_TIMEOUT_S):
            await server.launch.remote(self.world_size)
        self.servers, self._server_handle = [server], server
        self._server_address = f"{self.config.name}-{self.replica_rank}{self.name_suffix}"  # names it to the load balancer; serves no HTTP

    async def abort_all_requests(self, reject_request: bool = False) -> Any:
        """See `RollsyncServer.abort_all_requests`; with its reply."""
        return await self._server_handle.abort_all_requests.remote(reject_request=reject_request)

    async def abort_request(self, request_id: str) -> Any:
        return await self._server_handle.abort_request.remote(request_id)


def _place(worker: Any) -> tuple[str, str | None]:
    """Within a worker: its node, and its GPU if it has one."""
    context = ray.get_runtime_context()
    found = context.get_accelerator_ids().get("GPU") or [None]
    return context.get_node_id(), found[0]
