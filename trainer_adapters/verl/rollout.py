"""verl's side of a replica in each worker that holds weights: memory and weight updates, forwarded to the replica's server."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from ...rollout.errors import ConfigError
from ...weight_sync.control import UpdateError
from .calls import answer, find_server, in_words
from .push import Push, outcome_or_raise
from .settings import field_of, replica_settings


class RollsyncRollout(BaseRollout):  # type: ignore[misc]
    """One rank of a replica. The first one leads: it alone sends; at the end of an update all meet at the server, and learn the same.

    Args:
        replica_rank: -1 takes that of this rank among equally large replicas.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self._timeout_s = replica_settings(self.config, self.model_config).sync_timeout_s
        self._bucket_bytes = int(field_of(self.config, "checkpoint_engine.update_weights_bucket_megabytes", 32)) << 20
        size, rank = int(self.config.tensor_model_parallel_size), int(os.environ["RANK"])
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.rollout_rank = rank % size
        self._num_updates = 0
        self._server: Any = None

    @property
    def is_leader_rank(self) -> bool:
        return self.rollout_rank == 0

    def server(self) -> Any:
        """The replica's server, which is launched after this worker."""
        if self._server is None:
            self._server = find_server(self.replica_rank)
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """Have memory back: tags of weights, kv_cache."""
        if self.is_leader_rank:
            await answer(self.server().wake_up.remote(tags=tags), "wake_up", self._timeout_s)

    async def release(self) -> None:
        """Give memory of weights and KV cache back."""
        if self.is_leader_rank:
            await answer(self.server().sleep.remote(), "sleep", self._timeout_s)

    @torch.no_grad()
    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: int | None = None, peft_config: Any = None, **kwargs: Any
    ) -> None:
        """Make `weights` current, as version `global_steps` (None: the next one). Every rank drains them, whatever goes wrong.

        Args:
            weights: (Hugging Face name, whole tensor) one after another, as a generator, plain or async; the same on every rank.

        Raises:
            ConfigError: weights of a kind that is not taken. Nothing was drained.
            UpdateError: on all ranks of the replica alike: what failed on which rank, and what is served now.
        """
        if wire_format != "named_tensors":
            raise ConfigError(f"wire_format must be named_tensors, got {wire_format!r}: use another checkpoint_engine.backend")
        if peft_config is not None:
            raise ConfigError("an adapter alone is not taken: set model.lora.merge=True, so that weights come with it merged in")
        self._num_updates += 1
        push, error = None, None
        if self.is_leader_rank:
            push, error = await _attempt(self._begin(global_steps))
        error = await _drain(weights, push, error)
        outcome, lost = await _attempt(self._end(push, error))
        if outcome is None:
            words = "; ".join(w for w in (error, lost) if w)
            raise UpdateError(f"weight update of replica {self.replica_rank} failed: {words}")
        outcome_or_raise(outcome, self.replica_rank, global_steps)

    async def _begin(self, version: int | None) -> Push:
        push = Push(self.server(), self._bucket_bytes, self._timeout_s)
        await push.begin(version)
        return push

    async def _end(self, push: Push | None, error: str | None) -> Any:
        sent = {} if push is None else {"update_id": push.update_id, "digests": push.digests if error is None else None}
        ended = self.server().end_update.remote(self._num_updates, self.rollout_rank, error, **sent)
        return await answer(ended, "end_update", 2 * self._timeout_s)


async def _drain(weights: Any, push: Push | None, error: str | None) -> str | None:
    """Take every weight, so that no other rank is left in a gather, and hand it to `push`. What went wrong first, if anything did."""
    try:
        async for name, tensor in ensure_async_iterator(weights):
            if push is not None and error is None:
                error = (await _attempt(push.add(name, tensor)))[1]
    except Exception as failed:
        error = error or f"the weights could not be made: {in_words(failed)}"
    if push is not None:
        flushed: tuple[Callable[[], Awaitable[None]], ...] = (push.settle,) if error is not None else (push.flush, push.settle)
        for finish in flushed:
            error = error or (await _attempt(finish()))[1]
    return error


async def _attempt(work: Awaitable[Any]) -> tuple[Any, str | None]:
    """(value, None), or (None, what it raised, in words)."""
    try:
        return await work, None
    except Exception as failed:
        return None, in_words(failed)
