"""The worker's side: a replica of two ranks beside a trainer, its sleep, and updates that all ranks end alike."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rollsync import ConfigError, IllegalState
from rollsync.weight_sync.control import UpdateError
from verl_cases import ASK, FAULTS, PROMPT, digests, local_server, ranks, rollout_config, spoilt, weights

pytestmark = pytest.mark.adapters


class Counted:
    """Iterates, and counts what was taken."""

    def __init__(self, items: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._items, self.taken, self.ended = items, 0, False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for item in self._items:
            self.taken += 1
            yield item
        self.ended = True


async def update(sides: list[Any], streams: list[Any], version: int) -> list[Any]:
    work = [side.update_weights(stream, global_steps=version) for side, stream in zip(sides, streams, strict=True)]
    return await asyncio.gather(*work, return_exceptions=True)


def test_beside_a_trainer_memory_goes_and_comes_and_only_whole_updates_are_served(model: str, run: Any, monkeypatch: Any) -> None:
    config = rollout_config(tensor_model_parallel_size=2)
    names = weights(model)

    async def cycle() -> None:
        local = await local_server(monkeypatch, model, config, "hybrid")
        server, sides = local.server, ranks(monkeypatch, model, config)
        assert [s.is_leader_rank for s in sides] == [True, False] and {s.replica_rank for s in sides} == {0}
        generate = lambda: server.generate(PROMPT, {**ASK, "max_tokens": 4, "seed": 1}, "r")  # noqa: E731
        before = await generate()
        for side in sides:
            await side.release()
        with pytest.raises(IllegalState, match="discarded"):
            await generate()
        for side in sides:
            await side.resume(tags=["weights"])
        for fault in ("shape", "nan"):  # nothing is served on what such an update left
            streams = [Counted(spoilt(names, fault)) for _ in sides]
            failed = await update(sides, streams, 2)
            assert len({str(f) for f in failed}) == 1 and all(isinstance(f, UpdateError) for f in failed)
            assert FAULTS[fault] in str(failed[0]) and "nothing is served" in str(failed[0])
            assert all(s.ended and s.taken == len(names) for s in streams)
        assert await update(sides, [iter(names.items()) for _ in sides], 2) == [None, None]
        for side in sides:
            await side.resume(tags=["kv_cache"])
        again = await generate()
        assert (again.token_ids, again.log_probs, again.extra_fields["global_steps"]) == (before.token_ids, before.log_probs, 2)
        await server.close()

    run(cycle())


def test_what_fails_on_one_rank_fails_on_all_and_the_weights_stay(model: str, run: Any, monkeypatch: Any) -> None:
    config = rollout_config(tensor_model_parallel_size=2, own={"sync_timeout_s": 3.0})
    old, new = weights(model), weights(model, 2.0)

    async def fail() -> None:
        local = await local_server(monkeypatch, model, config, "standalone")
        server, sides = local.server, ranks(monkeypatch, model, config)
        for bad in (0, 1):
            streams = [Counted(spoilt(new, "raises" if rank == bad else None)) for rank in range(2)]
            failed = await update(sides, streams, 1)
            assert len({str(f) for f in failed}) == 1 and f"rank {bad}: the weights could not be made" in str(failed[0])
            assert "version 0 is served" in str(failed[0]) and streams[1 - bad].ended
        streams = [Counted(spoilt(new, "shape")), Counted(iter(new.items()))]
        failed = await update(sides, streams, 1)
        assert len({str(f) for f in failed}) == 1 and "rank 0" in str(failed[0]) and all(s.ended for s in streams)
        assert await server.digests() == digests(old)

        async def as_they_come() -> Any:
            for item in new.items():
                await asyncio.sleep(0)
                yield item

        assert await update(sides, [as_they_come(), iter(new.items())], 1) == [None, None]
        assert await server.digests() == digests(new)
        monkeypatch.setattr("rollsync.trainer_adapters.verl.calls.MARGIN_S", 1.0)
        with pytest.raises(UpdateError, match="rank 1 of the replica did not end its part within 3 s; version 1 is served"):
            await sides[0].update_weights(iter(old.items()), global_steps=2)
        with pytest.raises(UpdateError, match="rank 1 of the replica did not end its part within 3 s; version 1 is served"):
            await sides[1].update_weights(iter(old.items()), global_steps=2)  # it comes late, and learns the same at once
        assert await server.digests() == digests(new)
        await server.close()

    run(fail())


def test_weights_of_other_kinds_are_refused_before_a_tensor_is_taken(model: str, run: Any, monkeypatch: Any) -> None:
    (side,) = ranks(monkeypatch, model, rollout_config())
    stream = Counted(iter(weights(model).items()))
    with pytest.raises(ConfigError, match=r"lora\.merge"):
        run(side.update_weights(stream, peft_config={"r": 8}))
    with pytest.raises(ConfigError, match="delta_flush"):
        run(side.update_weights(stream, wire_format="delta_flush"))
    with pytest.raises(UpdateError, match="no server"):  # drained all the same: the other ranks are in the same gathers
        monkeypatch.setattr("rollsync.trainer_adapters.verl.rollout.find_server", _nowhere)
        run(side.update_weights(stream))
    assert stream.ended


def _nowhere(rank: int) -> Any:
    raise UpdateError("replica 0 has no server")


def test_a_trainers_float32_arrives_as_its_bfloat16_and_before_nothing_is_sampled(model: str, run: Any, monkeypatch: Any) -> None:
    config = rollout_config(dtype="bfloat16", load_format="dummy")
    masters = {name: tensor * 1.0001 for name, tensor in weights(model).items()}

    async def cast() -> None:
        local = await local_server(monkeypatch, model, config, "standalone")
        (side,) = ranks(monkeypatch, model, config)
        with pytest.raises(IllegalState, match="dummy"):  # nothing is made up
            await local.server.generate(PROMPT, dict(ASK), "early")
        await side.update_weights(iter(masters.items()))
        assert await local.server.digests() == digests({name: tensor.bfloat16() for name, tensor in masters.items()})
        assert (await local.server.status())["state"]["weights"]["version"] == 1
        await local.server.close()

    run(cast())
