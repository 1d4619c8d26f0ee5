"""Calls of thousands of samples in the front: others get their turns meanwhile, and what is too much is refused before it is made."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from rollsync.rollout.engine.process import MESSAGE_OUTPUTS, Outbox
from rollsync.rollout.engine.types import SampleOutput
from rollsync.rollout.errors import BadRequest
from rollsync.rollout.server.app import _packed
from rollsync.rollout.server.protocol import MAX_CALL_SAMPLES, parse_rollouts

sys.path.append(str(Path(__file__).parent))
from lone_front import Front

N = 4096


def outbox() -> tuple[Outbox, list[bytes]]:
    """Without a socket: frames are kept."""
    frames: list[bytes] = []
    box = Outbox.__new__(Outbox)
    box._send = frames.append  # type: ignore[method-assign]
    return box, frames


async def turns(work: Any) -> tuple[Any, int]:
    """The result of a coroutine, and how many turns of the loop others had meanwhile."""
    count = 0

    async def tick() -> None:
        nonlocal count
        while True:
            count += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    try:
        return await work, count
    finally:
        ticking.cancel()


def body(**more: Any) -> dict[str, Any]:
    return {"prompts": [{"token_ids": [1]}], "n": N, "sampling_params": {"max_tokens": 1, "seed": 1}, **more}


def test_too_many_samples_are_refused_before_anything_is_made() -> None:
    class Untouched(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("looked at")

    with pytest.raises(BadRequest, match=rf"at most {MAX_CALL_SAMPLES} samples.*300 prompts x n = {N}: {300 * N}") as error:
        parse_rollouts(body(prompts=Untouched([{"token_ids": [1]}] * 300)))
    assert error.value.field == "n"
    assert len(parse_rollouts(body(prompts=[{"token_ids": [1]}] * 16)).prompts) == 16


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("ended", ["by the engine", "before submission"])
def test_a_call_of_thousands_lets_others_have_turns(streams: bool, ended: str) -> None:
    async def run() -> None:
        front = Front()
        ticket = front.service.open(parse_rollouts(body(stream=streams)))
        if ended == "before submission":
            ticket.mark_aborted("deadline")
        _, count = await turns(ticket.start())
        if ended == "before submission":
            assert count > N // 64 and not front.requests()
        else:
            key = front.requests()[0]["request_id"]
            done = [SampleOutput(request_id=key, sample_index=i, token_ids=[5], logprobs=[-1.0], finish_reason="length") for i in range(N)]
            box, frames = outbox()
            box.outputs(done)
            assert len(frames) == N // MESSAGE_OUTPUTS, "the engine's messages are bounded"
            _, count = await turns(front.says(frames))
            assert count >= len(frames), "others have a turn after each message"
        reply: Any
        if streams:

            async def read(events: AsyncIterator[dict[str, Any]]) -> list[int]:
                return [event["sample"]["index"] for event in [e async for e in events] if event["event"] == "sample"]

            reply, count = await turns(read(front.service.streamed(ticket)))
        else:
            (packed, status), count = await turns(_packed(front.service, ticket, True))
            assert status == 200
            reply = [sample["index"] for sample in msgpack.unpackb(packed)["results"][0]["samples"]]
        assert reply == list(range(N)) and count > N // 64

    asyncio.run(asyncio.wait_for(run(), 30))


def test_who_leaves_while_all_is_there_is_noticed() -> None:
    async def run() -> None:
        front = Front()
        ticket = front.service.open(parse_rollouts(body(deadline_s=1e-9)))
        await asyncio.sleep(0.001)
        reading = asyncio.create_task(front.service.whole(ticket))
        await asyncio.sleep(0)
        reading.cancel()
        ticket.leave(sent=False)
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not front.service.in_flight
        assert ticket._starting.done() or ticket._starting.cancelling()

    asyncio.run(asyncio.wait_for(run(), 10))
