"""The leader's end of a weight update: tensors packed into buckets, digested, and handed to the replica's server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...rollout.engine.weight_digest import fast_fill
from ...weight_sync.boxes import Box
from ...weight_sync.control import UpdateError
from .calls import answer

BUCKET_BYTES = 32 << 20


class Push:
    """One update on its way to a server. While a bucket is taken in, the next is packed.

    Args:
        server: its Ray handle.
        bucket_bytes: of a message; a larger tensor is one by itself.
        timeout_s: for every call.
    """

    def __init__(self, server: Any, bucket_bytes: int, timeout_s: float) -> None:
        self._server, self._timeout_s = server, timeout_s
        self._bucket_bytes = min(bucket_bytes, BUCKET_BYTES)
        self._fill = fast_fill()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._tensors: list[dict[str, Any]] = []
        self._used = 0
        self._under_way: asyncio.Task[Any] | None = None
        self.update_id = ""
        self.digests: dict[str, int] = {}

    async def begin(self, version: int | None) -> None:
        opened = await answer(self._server.begin_update.remote(version), "begin_update", self._timeout_s)
        self.update_id = opened["id"]
        self._dtype: torch.dtype = getattr(torch, opened["dtype"])

    async def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor out, cast to the engine's dtype. It may be gone afterwards.

        Raises:
            UpdateError: it is not of floating point. RollsyncError: the engine refused what came before.
        """
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UpdateError(f"weight {name} must be a tensor of floating point, got {got}")
        shape = tuple(tensor.shape)
        nbytes = math.prod(shape) * self._dtype.itemsize
        if self._used and self._used + nbytes > self._bucket_bytes:
            await self.flush()
        if self._buffer.numel() < self._used + nbytes:  # nothing is in it then
            self._buffer = torch.empty(max(nbytes, self._bucket_bytes), dtype=torch.uint8)
        target = self._buffer[self._used : self._used + nbytes].view(self._dtype).view(shape)
        self.digests[name] = self._fill(target, tensor.detach(), Box.whole(shape), shape)
        self._tensors.append({"name": name, "dtype": str(self._dtype).removeprefix("torch."), "shape": list(shape)})
        self._used += nbytes

    async def flush(self) -> None:
        """Send what is packed, once what was sent before is taken in."""
        await self.settle()
        if self._tensors:
            data = self._buffer[: self._used].numpy()
            sent = self._server.take_tensors.remote(self.update_id, self._tensors, data)  # a copy is made before this returns
            self._under_way = asyncio.ensure_future(answer(sent, "take_tensors", self._timeout_s))
            self._tensors, self._used = [], 0

    async def settle(self) -> None:
        """Wait for the bucket under way."""
        task, self._under_way = self._under_way, None
        if task is not None:
            await task


def outcome_or_raise(outcome: Mapping[str, Any], replica_rank: int, version: int | None) -> None:
    """Raise what every rank of the replica raises if the update failed."""
    if not outcome["ok"]:
        to = "" if version is None else f" to version {version}"
        raise UpdateError(f"weight update of replica {replica_rank}{to} failed: {outcome['error']}; {outcome['serves']}")
