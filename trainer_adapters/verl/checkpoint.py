"""Weights from a trainer to replicas of its own hosts or others: `checkpoint_engine.backend=rollsync`, over gloo or NCCL.

Actor rank 0 broadcasts buckets to every worker of every replica; the other actor ranks only drain (their gathers need them). A group
is formed for each update and stands beside torch's default one. NCCL has the same code and has only been checked as far as CPUs go.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import msgpack  # type: ignore[import-untyped]
import ray
import torch
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from ...rollout.errors import ConfigError, describe
from ...weight_sync.control import UpdateError
from ...weight_sync.names import GroupError
from ...weight_sync.transports.collective import Group, form
from ...weight_sync.transports.rendezvous import Store
from . import NAME

BUCKET_BYTES = 64 << 20
TIMEOUT_S = 600.0
BACKENDS = ("gloo", "nccl")
Piece = tuple[str, str, list[int], int]
"""name, dtype, shape and first byte of a tensor in a bucket"""


@CheckpointEngineRegistry.register(NAME)
class RollsyncCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One rank of a transfer.

    Args:
        bucket_size: bytes of a message at most; more than 64 MiB are not used. A larger tensor is a message by itself.
        is_master: actor rank 0.
        transport: gloo or nccl, on all ranks alike (`checkpoint_engine.engine_kwargs.rollsync.transport`); None takes nccl if actor
            rank 0 has a GPU.
        timeout_s: for forming the group, and for each message.
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, transport: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        if transport not in (None, *BACKENDS):
            raise ConfigError(f"checkpoint_engine.engine_kwargs.{NAME}.transport must be gloo or nccl, got {transport!r}")
        self.bucket_bytes, self.is_master, self.timeout_s = min(bucket_size, BUCKET_BYTES), is_master, timeout_s
        self._transport = transport or ("nccl" if torch.cuda.is_available() else "gloo")
        self._store: Store | None = None
        self._group: Group | None = None

    def prepare(self) -> dict[str, Any] | None:
        """The master's: where the ranks are to meet, and how."""
        self.finalize()
        if not self.is_master:
            return None
        self._store = Store.bind(f"{NAME}-weights", ray.util.get_node_ip_address().strip("[]"))
        return {"host": self._store.host, "port": self._store.port, "transport": self._transport}

    @classmethod
    def build_topology(cls, actor_world_size: int, rollout_world_size: int, metadata: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of `init_process_group` for actor and rollout workers, a list of one per worker."""
        places = [place for place in metadata if place is not None]
        if len(places) != 1:
            raise UpdateError(f"one actor rank must be the master of checkpoint_engine.backend={NAME}, got {len(places)}")
        size = 1 + rollout_world_size
        ranks = {"actor": [0] + [-1] * (actor_world_size - 1), "rollout": list(range(1, size))}
        actor, rollout = ({"rank": r, "world_size": [size] * len(r), "place": places * len(r)} for r in ranks.values())
        return actor, rollout

    def init_process_group(self, rank: int, world_size: int, place: dict[str, Any]) -> None:
        """Join. Rank -1 takes no part.

        Raises:
            GroupError: it was not formed in time: who is missing, and why.
        """
        if rank < 0:
            return
        store, self._store = self._store, None
        if store is None:
            store = Store.connect(f"{NAME}-weights", place["host"], place["port"], world_size, self.timeout_s)
        backend = place["transport"]
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        self._group = form(store, rank, world_size, backend=backend, device=device, timeout_s=self.timeout_s, layout="native")

    def finalize(self) -> None:
        """Leave the group. Any number of times."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.close("the update is over")

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """Broadcast `weights` (name, whole tensor), draining them to the end. "rollsync/sent_bytes" and "rollsync/sent_tensors".

        Raises:
            UpdateError: the weights could not be made (the receivers are told); GroupError: a receiver was lost.
        """
        sender = None if self._group is None else _Sender(self._group, self.bucket_bytes)
        failed: Exception | None = None
        try:
            async for name, tensor in ensure_async_iterator(weights):
                if sender is not None and failed is None:
                    try:
                        await sender.add(name, tensor)
                    except Exception as error:  # the others' gathers need this rank: it goes on draining
                        failed = error
        except Exception as error:
            failed = failed or error
        if sender is None:
            if failed is not None:
                raise failed
            return {}
        if failed is None:
            await sender.finish()
            return {f"{NAME}/sent_bytes": sender.num_bytes, f"{NAME}/sent_tensors": sender.num_tensors}
        if not isinstance(failed, GroupError):
            await sender.fail(describe(failed))
        raise failed

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield the tensors as they come; each is valid until the next.

        Raises:
            UpdateError: the sender says that it could not make them. GroupError: it was lost.
        """
        group = self._group
        if group is None:
            raise UpdateError("this rank is in no group: init_process_group comes first")
        buffer = torch.empty(0, dtype=torch.uint8, device=group.device)
        while True:
            header = await asyncio.to_thread(_receive_header, group)
            if "error" in header:
                raise UpdateError(f"the trainer could not make its weights: {header['error']}")
            if header["bytes"] > buffer.numel():
                buffer = torch.empty(header["bytes"], dtype=torch.uint8, device=group.device)
            data = buffer[: header["bytes"]]
            if header["bytes"]:
                await asyncio.to_thread(_broadcast, group, data, "tensors")
            for name, dtype, shape, start in header["tensors"]:
                kind = getattr(torch, dtype)
                yield name, data[start : start + math.prod(shape) * kind.itemsize].view(kind).view(shape)
            if header["last"]:
                return


class _Sender:
    """Packs buckets; while one is on its way the next is packed into the other of two buffers."""

    def __init__(self, group: Group, bucket_bytes: int) -> None:
        self._group, self._bucket_bytes = group, bucket_bytes
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=group.device) for _ in range(2)]
        self._pieces: list[Piece] = []
        self._used = 0
        self._under_way: asyncio.Task[None] | None = None
        self.num_bytes = self.num_tensors = 0

    async def add(self, name: str, tensor: Tensor) -> None:
        start = -(-self._used // 16) * 16  # views of any dtype can begin there
        if self._pieces and start + tensor.nbytes > self._bucket_bytes:
            await self._flush(last=False)
            start = 0
        if self._buffers[0].numel() < start + tensor.nbytes:  # nothing is in it then
            room = max(tensor.nbytes, self._bucket_bytes)
            self._buffers[0] = torch.empty(room, dtype=torch.uint8, device=self._group.device)
        place = self._buffers[0][start : start + tensor.nbytes]
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        self._pieces.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start))
        self._used = start + tensor.nbytes
        self.num_bytes, self.num_tensors = self.num_bytes + tensor.nbytes, self.num_tensors + 1

    async def finish(self) -> None:
        await self._flush(last=True)
        await self._settle()

    async def fail(self, words: str) -> None:
        """Tell the receivers, who wait for a bucket, that none comes."""
        try:
            await self._settle()
            await asyncio.to_thread(_send, self._group, {"error": words[:1000]}, None)
        except GroupError:
            return  # then they know

    async def _flush(self, last: bool) -> None:
        await self._settle()
        header = {"tensors": self._pieces, "bytes": self._used, "last": last}
        data = self._buffers[0][: self._used]
        self._under_way = asyncio.ensure_future(asyncio.to_thread(_send, self._group, header, data))
        self._buffers.reverse()
        self._pieces, self._used = [], 0

    async def _settle(self) -> None:
        task, self._under_way = self._under_way, None
        if task is not None:
            await task


def _broadcast(group: Group, data: Tensor, what: str) -> None:
    if data.device.type == "cuda":
        torch.cuda.synchronize(data.device)  # what was copied into it, on whichever stream
    group.broadcast(data, 0, what=what).wait()


def _send(group: Group, header: dict[str, Any], data: Tensor | None) -> None:
    raw = torch.frombuffer(bytearray(msgpack.packb(header)), dtype=torch.uint8).to(group.device)
    _broadcast(group, torch.tensor([raw.numel()], device=group.device), "the size of a header")
    _broadcast(group, raw, "a header")
    if data is not None and data.numel():
        _broadcast(group, data, "tensors")


def _receive_header(group: Group) -> dict[str, Any]:
    size = torch.zeros(1, dtype=torch.long, device=group.device)
    _broadcast(group, size, "the size of a header")
    raw = torch.empty(int(size.item()), dtype=torch.uint8, device=group.device)
    _broadcast(group, raw, "a header")
    found: dict[str, Any] = msgpack.unpackb(raw.cpu().numpy().tobytes())
    return found
