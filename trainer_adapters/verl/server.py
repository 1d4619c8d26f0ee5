"""The Ray actor of one replica: an engine, verl's calls to it, and the gate in front."""

from __future__ import annotations

import os
from typing import Any

from ...rollout.engine.async_engine import AsyncEngine
from ...rollout.engine.types import RolloutRequest
from ...rollout.errors import BadRequest, RollsyncError
from .gate import Gate
from .sampling import read_params, rejected, seeded, token_output
from .settings import engine_config, field_of, replica_settings
from .updates import Outcome, ReplicaUpdates


def local_paths(model: Any) -> tuple[str, str | None]:
    """Folders of the model and of the tokenizer, fetched where verl keeps such (hdfs, shared memory)."""
    from verl.utils.fs import copy_to_local

    use_shm = bool(field_of(model, "use_shm", False))
    tokenizer = field_of(model, "tokenizer_path")
    return copy_to_local(field_of(model, "path"), use_shm=use_shm), tokenizer and copy_to_local(tokenizer, use_shm=use_shm)


class RollsyncServer:
    """An `AsyncEngine` behind the calls that verl makes to a rollout server. Each returns when it is done.

    Args:
        config, model_config: verl's, of the rollout and of the model.
        mode: hybrid, colocated or standalone: who else uses its memory.
        visible_devices: of CUDA; None leaves them as they are.
    """

    def __init__(self, config: Any, model_config: Any, mode: str, visible_devices: str | None) -> None:
        if visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        import torch

        self._config, self._model, self._mode = config, model_config, mode
        on_gpu = bool(visible_devices) and torch.cuda.is_available()
        self._settings = replica_settings(config, model_config, on_gpu=on_gpu, alone=mode == "standalone")
        self._gate = Gate(self._settings.park_timeout_s)
        self._num_requests = 0
        self._inside: dict[str, str] = {}
        """verl's request ids, by the engine's"""

    async def launch(self, ranks: int) -> dict[str, Any]:
        """Load the engine. What it is: "dtype", "max_model_len", "device", ...

        Args:
            ranks: workers of the replica, which take part in its weight updates.
        """
        folder, tokenizer = local_paths(self._model)
        self._engine = await AsyncEngine.start(engine_config(self._settings, folder, tokenizer))
        info = await self._engine.wait_ready()
        self._updates = ReplicaUpdates(self._engine, ranks, self._settings.sync_timeout_s)
        self._max_model_len, self._dtype, self._version = info.max_model_len, info.dtype, 0
        return {"dtype": info.dtype, "max_model_len": info.max_model_len, "fingerprint": info.fingerprint, "pid": os.getpid()}

    # Generation

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> Any:
        """Sample one response, as verl's TokenOutput. Aborted, it holds what was sampled so far.

        Raises:
            BadRequest: images and the like; a sampling parameter that is unknown, by its name. PromptTooLong: no room for one token.
            IllegalState: the weights are invalid, and why; or it was parked too long.
        """
        from verl.utils import normalize_token_ids
        from verl.workers.rollout.replica import TokenOutput

        for name, value in (("image_data", image_data), ("video_data", video_data), ("audio_data", audio_data)):
            if value is not None and len(value):
                raise BadRequest(f"{name} must be left out: the models served here read text", field=name)
        ids = tuple(normalize_token_ids(prompt_ids))
        params, wanted = read_params(sampling_params, len(ids), self._max_model_len, self._settings)
        if not await self._gate.admits():
            return TokenOutput(**rejected(self._version))
        self._num_requests += 1
        name, column = str(self._num_requests), self._settings.column
        request = RolloutRequest(
            request_id=name,  # verl's may come twice
            group=request_id,
            prompt_token_ids=ids,
            params=seeded(params, self._settings, request_id, self._version),
            include=() if column == "logprobs" else (column,),
            priority=priority,
        )
        self._inside[name] = request_id
        try:
            (sample,) = await self._engine.generate(request)
        finally:
            del self._inside[name]
        return TokenOutput(**token_output(sample, self._version, wanted, column))

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Close the gate, then end what is inside: its callers get their partial responses.

        Args:
            reject_request: turn away who comes until `resume_generation`, with nothing sampled and stop_reason "aborted".
        """
        self._gate.close(reject=reject_request)
        inside = dict(self._inside)
        ended = await self._engine.abort(all=True, reason="verl aborted all requests")
        if reset_prefix_cache:
            await self.clear_kv_cache()
        return {"aborted_count": ended["samples"], "request_ids": [inside[name] for name in ended["request_ids"]]}

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """End one request by verl's id."""
        ended = await self._engine.abort(group=request_id, reason="verl aborted the request")
        if reset_prefix_cache:
            await self.clear_kv_cache()
        return {"aborted": bool(ended["samples"]), "request_id": request_id}

    async def resume_generation(self) -> None:
        self._gate.open()

    async def clear_kv_cache(self) -> None:
        await self._engine.command("reset_prefix_cache")

    # Memory

    async def sleep(self) -> None:
        """Give memory back. Beside a trainer the weights are dropped, as a whole update follows; beside another model they are kept."""
        if self._settings.frees_memory and self._mode != "standalone":
            await self._engine.command("sleep", weights="discard" if self._mode == "hybrid" else "offload")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Have memory back. Weights that sleep dropped serve nobody before a whole update commits."""
        if self._mode != "standalone":
            await self._engine.command("wake", tags=tags if self._mode == "hybrid" else None)

    async def release_kv_cache(self) -> None:
        if self._settings.frees_memory and self._mode != "colocated":
            await self._engine.command("sleep", tags=["kv_cache"])

    async def resume_kv_cache(self) -> None:
        if self._settings.frees_memory and self._mode != "colocated":
            await self._engine.command("wake", tags=["kv_cache"])

    # Weights

    async def begin_update(self, version: int | None) -> dict[str, Any]:
        """See `updates.ReplicaUpdates.begin`; with the "dtype" that tensors are to be sent in."""
        return {**await self._updates.begin(version), "dtype": self._dtype}

    async def take_tensors(self, update_id: str, tensors: list[dict[str, Any]], data: Any) -> None:
        """Take in tensors (name, dtype, shape) whose bytes lie one behind the other in `data`, an array of bytes."""
        await self._updates.take(update_id, tensors, memoryview(data))

    async def end_update(
        self, number: int, rank: int, error: str | None = None, update_id: str | None = None, digests: dict[str, int] | None = None
    ) -> Outcome:
        """See `updates.ReplicaUpdates.end`. On success the prefix cache is empty and later tokens have the new version."""
        outcome = await self._updates.end(number, rank, error, update_id, digests)
        if outcome["ok"]:
            self._version = outcome["report"]["version"]
        return {**outcome, "serves": await self._serves()}

    async def _serves(self) -> str:
        """What is served now, in words."""
        try:
            weights = (await self.status())["state"]["weights"]
        except RollsyncError as error:  # a rank that learns why the update failed must learn it all the same
            return f"nothing is served ({error})"
        return f"version {weights['version']} is served" if weights["valid"] else f"nothing is served ({weights['reason']})"

    async def status(self) -> dict[str, Any]:
        """Counters, and the engine's state."""
        found: dict[str, Any] = await self._engine.command("status")
        return {**found, "gate_open": self._gate.is_open, "pid": os.getpid()}

    async def digests(self) -> dict[str, str]:
        """Digest of every live tensor by name."""
        found: dict[str, str] = await self._engine.aside("digests", "digests")
        return found

    # What verl asks of every server

    async def start_profile(self, **kwargs: Any) -> None:
        """verl calls this on every replica; a profiler was refused when the replica was launched."""

    async def stop_profile(self) -> None:
        """As `start_profile`."""

    async def close(self) -> None:
        """End the engine."""
        await self._engine.close()
