"""The checkpoint engine by itself: one sender and two receivers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rollsync import ConfigError
from rollsync.trainer_adapters.verl.checkpoint import RollsyncCheckpointEngine
from rollsync.weight_sync.control import UpdateError
from rollsync.weight_sync.names import GroupError

pytestmark = pytest.mark.adapters
BUCKET = 1 << 12


async def joined(timeout_s: float = 20.0) -> tuple[RollsyncCheckpointEngine, RollsyncCheckpointEngine, list[RollsyncCheckpointEngine]]:
    """The master, an actor rank that only drains, and receivers; as verl's manager brings them together."""
    master, drainer, *receivers = (RollsyncCheckpointEngine(BUCKET, is_master=i == 0, timeout_s=timeout_s) for i in range(4))
    engines = [master, drainer, *receivers]
    actor, rollout = RollsyncCheckpointEngine.build_topology(2, 2, [engine.prepare() for engine in engines])
    assert actor["rank"] == [0, -1] and rollout["rank"] == [1, 2]
    calls = [{name: values[i] for name, values in side.items()} for side in (actor, rollout) for i in range(2)]
    await asyncio.gather(*(asyncio.to_thread(e.init_process_group, **call) for e, call in zip(engines, calls, strict=True)))
    return master, drainer, receivers


async def received(engine: RollsyncCheckpointEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() async for name, tensor in engine.receive_weights()}


def tensors() -> dict[str, torch.Tensor]:
    """Of several dtypes and shapes: small ones that share a bucket, one larger than a bucket, a scalar, one of nothing."""
    generator = torch.Generator().manual_seed(1)
    shapes = [((3,), torch.bfloat16), ((7, 5), torch.float32), ((), torch.float32), ((0, 4), torch.bfloat16), ((600, 9), torch.float16)]
    made = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in shapes * 4]
    return {f"t{i}": tensor for i, tensor in enumerate([*made, torch.randn(BUCKET, generator=generator), torch.ones(1)])}


def test_every_receiver_gets_every_tensor_and_the_master_says_how_many(run: Any) -> None:
    async def transfer() -> None:
        master, drainer, receivers = await joined()
        sent = tensors()
        told, drained, *got = await asyncio.gather(
            master.send_weights(iter(sent.items())), drainer.send_weights(iter(sent.items())), *(received(r) for r in receivers)
        )
        assert (told["rollsync/sent_tensors"], drained) == (len(sent), {})
        for one in got:
            assert list(one) == list(sent)
            assert all(one[name].dtype == sent[name].dtype and torch.equal(one[name], sent[name]) for name in sent)
        for engine in (master, drainer, *receivers):
            engine.finalize()

    run(transfer())


def test_a_sender_that_fails_or_is_lost_ends_the_wait_of_all(run: Any) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors().items())[:6]
        raise RuntimeError("out of memory")

    async def fail() -> list[Any]:
        master, _, receivers = await joined()
        return await asyncio.gather(master.send_weights(broken()), *(received(r) for r in receivers), return_exceptions=True)

    async def lose() -> list[Any]:
        master, _, receivers = await joined()
        waits = [asyncio.create_task(received(r)) for r in receivers]
        await asyncio.sleep(0.1)
        master.finalize()
        return await asyncio.gather(*waits, return_exceptions=True)

    sender, *receivers = run(fail())
    assert str(sender) == "out of memory"
    assert all(isinstance(r, UpdateError) and "out of memory" in str(r) for r in receivers)
    assert all(isinstance(r, GroupError) for r in run(lose()))


def test_what_cannot_be_a_transfer_is_refused() -> None:
    with pytest.raises(ConfigError, match="transport must be gloo or nccl"):
        RollsyncCheckpointEngine(BUCKET, transport="mpi")
    with pytest.raises(UpdateError, match="must be the master"):
        RollsyncCheckpointEngine.build_topology(1, 1, [None, None])
