"""OpenRLHF sends one parameter a call, and marks the last one. Here they are one update: it commits whole, or the old weights serve on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...rollout.engine.async_engine import AsyncEngine
from ...rollout.errors import BadRequest, RollsyncError
from ...weight_sync.control import UpdateError
from ...weight_sync.sources import dtype_name

log = logging.getLogger(__name__)

OWNER = "openrlhf"
RECEIVE_S = 300.0
"""how long one parameter may take to come"""
UPDATE_S = 3600.0
"""and all of them"""


class ParameterUpdates:
    """Updates of one engine, a parameter at a time, in the order in which the trainer sends them.

    Args:
        dtype: the engine's; parameters must come in it.
    """

    def __init__(self, engine: AsyncEngine, dtype: str) -> None:
        self._engine, self._dtype = engine, dtype
        self._lock = asyncio.Lock()
        """one parameter at a time; a new one for every group with the trainer, so that none waits for what an old one still receives"""
        self._id: str | None = None
        self._names: list[str] = []
        """of the parameters that came; where the first comes again, the trainer begins anew"""
        self._failed: str | None = None
        """why the update under way is lost; its other parameters are received all the same, for the trainer waits for that"""

    async def take(
        self,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        receive: Callable[[], torch.Tensor],
        *,
        last: bool,
        give_up: Callable[[str], None] | None = None,
    ) -> dict[str, Any] | None:
        """Take in one parameter; with the last one all of them become current.

        Args:
            receive: blocks until the parameter is there, and gives it. It is called also for one that is refused: the trainer
                broadcasts while it calls.
            give_up: called, with the reason, where nobody waits for `receive` any longer, which would take the next parameter's place.

        Returns:
            What the commit says, for the last parameter.

        Raises:
            UpdateError: this parameter, or one before it in this update, cannot be taken in, or the commit is refused. Nothing of
                the update is served then.
        """
        lock = self._lock
        async with lock:
            if lock is not self._lock:
                raise UpdateError(f"{name}: the trainer's group was formed anew before it was received")
            return await self._take(name, dtype, tuple(int(n) for n in shape), receive, last, give_up)

    async def _take(
        self,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        receive: Callable[[], torch.Tensor],
        last: bool,
        give_up: Callable[[str], None] | None,
    ) -> dict[str, Any] | None:
        lock = self._lock
        if not self._names or name == self._names[0]:
            await self._forget("the trainer began anew")
        elif name in self._names:
            self._failed = self._failed or f"{name}: it came twice"
        self._names.append(name)
        places: list[list[int]] = []
        if self._failed is None:
            with self._noting(name):
                places = await self._announce(name, dtype, shape)
        tensor: torch.Tensor | None = None
        problem = None
        try:
            tensor = await _received(receive, name, give_up)
        except UpdateError as error:
            problem = str(error)
        if lock is not self._lock:
            raise UpdateError(f"{name}: the trainer's group was formed anew while it was received")
        self._failed = self._failed or problem
        if self._failed is None and tensor is not None:
            with self._noting(name):
                await self._put(tensor, name, dtype, shape, places)
        report = None
        if self._failed is None and last:
            with self._noting(name):
                report = await self._engine.command("commit_update", update_id=self._id)
                self._id, self._names = None, []
        if self._failed is not None:
            await self._lose(last)
        return report

    async def _announce(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> list[list[int]]:
        """Name the parameter to the engine, in a new update if none is open; by which chunks it comes."""
        if dtype_name(dtype) != self._dtype:
            raise BadRequest(
                f"dtype is {dtype_name(dtype)}, the engine computes in {self._dtype}: --ds.param_dtype and --rollsync.dtype must agree"
            )
        if self._id is None:
            opened = await self._engine.command("open_update", mode="full", owner=OWNER, deadline_s=UPDATE_S)
            self._id = opened["id"]
        entry = {"name": name, "dtype": self._dtype, "shape": list(shape)}
        made = await self._engine.aside(OWNER, "extend", update_id=self._id, tensors=[entry], layout={"kind": "tensors"})
        chunks: list[list[int]] = made["chunks"]
        return chunks

    async def _put(self, tensor: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...], places: list[list[int]]) -> None:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise BadRequest(f"{tensor.dtype} {tuple(tensor.shape)} came, {dtype} {shape} was announced")
        data: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        for sender, sequence in places:
            where = {"data": memoryview(data)}
            await self._engine.aside(OWNER, "chunk", update_id=self._id, sender=sender, sequence=sequence, where=where)

    @contextlib.contextmanager
    def _noting(self, name: str) -> Any:
        """What goes wrong is what became of the update."""
        try:
            yield
        except (RollsyncError, ValueError) as error:
            lora = " (adapters come unmerged: leave --ds.lora.rank out)" if "lora_" in name else ""
            self._failed = f"{name}: {error}{lora}"

    async def _lose(self, last: bool) -> None:
        """End the update and tell why. Its other parameters are refused as well; after the last one the next update may begin."""
        words, names = self._failed, self._names
        await self._forget(str(words))
        if not last:
            self._failed, self._names = words, names
        served = (await self._engine.command("state"))["weights"]
        log.error("the weights of this step are lost: %s", words)
        if served["valid"]:
            raise UpdateError(f"the weights of this step were not taken, version {served['version']} serves on: {words}")
        raise UpdateError(f"the weights of this step were not taken, and none are served ({served['reason']}): {words}")

    async def drop(self, reason: str) -> None:
        """Forget what came so far, and what is under way: the trainer's group is formed anew."""
        self._lock = asyncio.Lock()
        await self._forget(reason)

    async def _forget(self, reason: str) -> None:
        update_id, self._id, self._failed, self._names = self._id, None, None, []
        if update_id is not None:
            with contextlib.suppress(RollsyncError):
                await self._engine.command("abort_update", update_id=update_id, reason=reason[:500])


async def _received(receive: Callable[[], torch.Tensor], name: str, give_up: Callable[[str], None] | None) -> torch.Tensor:
    """What `receive` gives, called on a thread. UpdateError if it gives nothing, or not within RECEIVE_S."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(receive), RECEIVE_S)
    except (TimeoutError, asyncio.CancelledError) as error:
        timed_out = isinstance(error, TimeoutError)
        words = f"{name}: it did not come within {RECEIVE_S:g} s" if timed_out else f"{name}: the call was cancelled"
        if give_up is not None:
            give_up(words)
        if not timed_out:
            raise
        raise UpdateError(words) from None
    except Exception as error:
        raise UpdateError(f"{name}: it could not be received: {type(error).__name__}: {error}") from None
