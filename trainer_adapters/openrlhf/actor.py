"""The Ray actor that stands where OpenRLHF's vLLM actor stood: the same methods, an engine of Rollsync inside."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...rollout.engine.async_engine import AsyncEngine
from ...rollout.engine.types import RolloutRequest
from ...rollout.errors import BadRequest
from ...rollout.models.tokenizer import Tokenizer
from .exchange import RequestOutput, read_params, told
from .planes import Plane, open_handle
from .updates import OWNER, ParameterUpdates

ASLEEP = {1: "offload", 2: "discard"}
"""what becomes of the weights, by vLLM's level of sleep"""


class RolloutActor:
    """One engine. Executors of `openrlhf.utils.agent` run in it and call `generate`.

    Args:
        model: a local folder or a cached hub id.
        options: of the engine; see EngineConfig.
        agent_func_path: a Python file with a class AgentExecutor.
        remote_rm_url: where, or in which file, the default executor finds rewards.
        partial_kv: what becomes of the KV of samples that a pause froze, once new weights are there: keep or recompute.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        model: str,
        options: Mapping[str, Any],
        *,
        agent_func_path: str | None = None,
        remote_rm_url: Any = None,
        partial_kv: str = "keep",
    ) -> None:
        _see_own_gpu()
        self._executor = _executor(agent_func_path, remote_rm_url)
        self._engine = await AsyncEngine.start(model, **options)
        self._info = await self._engine.wait_ready()
        self._tokenizer = Tokenizer.from_model(self._info.config.tokenizer or self._info.config.model)
        self._device = torch.device(self._info.config.device or "cpu")
        self._plane = Plane(self._device)
        self._updates = ParameterUpdates(self._engine, self._info.dtype)
        self._partial_kv = partial_kv
        self._numbers = itertools.count(1)
        self._num_unfinished = 0

    # Generation

    async def generate_responses(
        self, prompt: str, label: Any, sampling_params: Any, max_length: int, hf_tokenizer: Any, num_samples: int = 1, images: Any = None
    ) -> list[dict[str, Any]]:
        """`num_samples` episodes of one prompt, each by the executor. If one fails the others end, and its error is raised."""
        if images:
            raise BadRequest("images are not supported: leave --data.max_images_per_prompt out", field="images")
        tasks = [
            asyncio.ensure_future(
                self._executor.execute(
                    prompt=prompt,
                    label=label,
                    sampling_params=sampling_params,
                    max_length=max_length,
                    hf_tokenizer=hf_tokenizer,
                    llm_engine=self,
                    images=None,
                )
            )
            for _ in range(num_samples)
        ]
        try:
            found: list[dict[str, Any]] = await asyncio.gather(*tasks)
            return found
        finally:
            for task in tasks:
                task.cancel()

    async def generate(self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: Any = None) -> RequestOutput:
        """Sample from one prompt, as `AsyncLLMEngine.generate` does. Logprobs are those of the distribution drawn from.

        Raises:
            BadRequest, PromptTooLong: naming the field. TargetError: a sample failed or has no token.
        """
        if multi_modal_data:
            raise BadRequest("multi_modal_data is not supported", field="multi_modal_data")
        params = read_params(sampling_params)
        request = RolloutRequest(request_id=str(next(self._numbers)), prompt_token_ids=tuple(prompt_token_ids), params=params)
        self._num_unfinished += 1
        try:
            samples = await self._engine.generate(request)
        finally:
            self._num_unfinished -= 1
        return told(
            request.request_id,
            request.prompt_token_ids,
            params,
            samples,
            self._tokenizer,
            self._info.vocab_size,
            want_logprobs=getattr(sampling_params, "logprobs", None) is not None,
            skip_special_tokens=getattr(sampling_params, "skip_special_tokens", True),
        )

    async def get_num_unfinished_requests(self) -> int:
        """Requests in flight."""
        return self._num_unfinished

    # Weights

    async def init_process_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str, use_ray: bool
    ) -> None:
        """Meet the trainer; what an earlier one left half sent is dropped."""
        await self._updates.drop("the trainer's group is formed anew")
        where = (master_address, master_port, rank_offset, world_size, group_name, backend, use_ray)
        await asyncio.to_thread(self._plane.join, *where)

    async def update_weight(self, name: str, dtype: torch.dtype, shape: Sequence[int], empty_cache: bool = False) -> Any:
        """Take in the parameter that the trainer broadcasts now; with the last one (`empty_cache`) all become current."""
        receive = lambda: self._plane.receive(dtype, tuple(shape))  # noqa: E731
        return await self._updates.take(name, dtype, shape, receive, last=empty_cache, give_up=self._plane.close)

    async def update_weight_cuda_ipc(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], ipc_handles: Mapping[str, Any], empty_cache: bool = False
    ) -> Any:
        """The same for a parameter in GPU memory that the trainer shares."""
        return await self._updates.take(name, dtype, shape, lambda: open_handle(ipc_handles, self._device), last=empty_cache)

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes. A commit of weights does so anyway."""
        await self._engine.command("reset_prefix_cache")

    # Pause and sleep

    async def pause_generation(self) -> None:
        """Stop between two steps; samples in flight stay and go on after `resume_generation`, under the weights that came meanwhile."""
        await self._engine.command("pause", mode=self._partial_kv, owner=OWNER)

    async def resume_generation(self) -> None:
        """Go on."""
        await self._engine.command("resume", owner=OWNER)

    async def sleep(self, level: int = 1) -> None:
        """Give memory back: 1 keeps the weights aside, 2 drops them until the next update. The KV cache goes in both."""
        if level not in ASLEEP:
            raise BadRequest(f"level must be 1 or 2, got {level!r}", field="level")
        await self._engine.command("sleep", weights=ASLEEP[level])

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Have memory back: weights, kv_cache, or (None) both."""
        await self._engine.command("wake", tags=tags)

    # Not of OpenRLHF's actor

    async def status(self) -> dict[str, Any]:
        """The engine's own facts and counters."""
        found: dict[str, Any] = await self._engine.command("status")
        return found

    async def digests(self) -> dict[str, str]:
        """Of the weights that are served, in hexadecimal, by name; see weight_sync.digest."""
        found: dict[str, str] = await self._engine.aside("digests", "digests")
        return found


def _see_own_gpu() -> None:
    """Where Ray is told to leave CUDA_VISIBLE_DEVICES alone, take the GPU it gave this actor all the same."""
    import ray

    told = any(name.startswith("RAY_EXPERIMENTAL_NOSET_") and value for name, value in os.environ.items())
    if told and ray.get_gpu_ids():
        os.environ["CUDA_VISIBLE_DEVICES"] = str(ray.get_gpu_ids()[0])


def _executor(agent_func_path: str | None, remote_rm_url: Any) -> Any:
    """The executor of an agent file, or OpenRLHF's for a single turn.

    Raises:
        BadRequest: naming what the file lacks.
    """
    from openrlhf.utils.agent import AgentExecutorBase, SingleTurnAgentExecutor

    if not agent_func_path:
        return SingleTurnAgentExecutor(remote_rm_url)
    if not agent_func_path.endswith(".py") or not os.path.isfile(agent_func_path):
        raise BadRequest(f"train.agent_func_path must be a Python file, got {agent_func_path!r}", field="train.agent_func_path")
    spec = importlib.util.spec_from_file_location("agent_module", agent_func_path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind = getattr(module, "AgentExecutor", None)
    if not isinstance(kind, type) or not issubclass(kind, AgentExecutorBase):
        words = f"{agent_func_path} must hold a class AgentExecutor that is an openrlhf.utils.agent.AgentExecutorBase"
        raise BadRequest(f"train.agent_func_path: {words}, got {kind!r}", field="train.agent_func_path")
    return kind()
