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
        self._id: str | None = None
        self._names: set[str] = set()
        """of the parameters that came, of which one that comes again is the first of a new beginning"""
        self._failed: str | None = None
        """why the update under way is lost; its other parameters are received all the same, for the trainer waits for that"""

    async def take(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], receive: Callable[[], torch.Tensor], *, last: bool
    ) -> dict[str, Any] | None:
        """Take in one parameter; with the last one all of them become current.

        Args:
            receive: blocks until the parameter is there, and gives it. It is called also for one that is refused: the trainer
                broadcasts while it calls.

        Returns:
            What the commit says, for the last parameter.

        Raises:
            UpdateError: this parameter, or one before it in this update, cannot be taken in, or the commit is refused. Nothing of
                the update is served then.
        """
        shape = tuple(int(n) for n in shape)
        if name in self._names:
            await self.drop("the trainer began anew")
        self._names.add(name)
        places: list[list[int]] = []
        if self._failed is None:
            with self._noting(name):
                places = await self._announce(name, dtype, shape)
        tensor: torch.Tensor | None = None
        try:
            tensor = await asyncio.wait_for(asyncio.to_thread(receive), RECEIVE_S)
        except TimeoutError:
            self._failed = self._failed or f"{name}: it did not come within {RECEIVE_S:g} s"
        except Exception as error:
            self._failed = self._failed or f"{name}: it could not be received: {type(error).__name__}: {error}"
        if self._failed is None and tensor is not None:
            with self._noting(name):
                await self._put(tensor, name, dtype, shape, places)
        report = None
        if self._failed is None and last:
            with self._noting(name):
                report = await self._engine.command("commit_update", update_id=self._id)
                self._id, self._names = None, set()
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
        await self.drop(str(words))
        if not last:
            self._failed, self._names = words, names
        served = (await self._engine.command("state"))["weights"]
        log.error("the weights of this step are lost: %s", words)
        if served["valid"]:
            raise UpdateError(f"the weights of this step were not taken, version {served['version']} serves on: {words}")
        raise UpdateError(f"the weights of this step were not taken, and none are served ({served['reason']}): {words}")

    async def drop(self, reason: str) -> None:
        """Forget what came so far: the trainer begins anew."""
        update_id, self._id, self._failed, self._names = self._id, None, None, set()
        if update_id is not None:
            with contextlib.suppress(RollsyncError):
                await self._engine.command("abort_update", update_id=update_id, reason=reason[:500])
