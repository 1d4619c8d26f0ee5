"""Callers that are killed, leave, abort or read nothing, in every state: their work ends, and nobody else's."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
from rollsync import RolloutClient
from rollsync.rollout.wire import MSGPACK, pack_array

Until = Callable[..., None]
FLAGS = ("--num-blocks", "256", "--block-tokens", "4", "--max-num-seqs", "8", "--max-batch-tokens", "8", "--max-model-len", "256")
LONG = {"max_tokens": 200, "ignore_eos": True}

CLIENT = """
import json, socket, sys, time
host, port, messages = json.load(sys.stdin)
held = []
for message in messages:
    held.append(socket.create_connection((host, port)))
    held[-1].sendall(message.encode("latin-1"))
time.sleep(600)
"""


def message(body: Any, path: str = "/v1/rollouts") -> str:
    content = json.dumps(body)
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n{content}"


def call(length: int = 3, params: Any = LONG, **more: Any) -> str:
    prompt = more.pop("prompt", {"token_ids": [7 * length % 90 + 5] * length})
    return message({"prompts": [prompt], "sampling_params": params, **more})


def busy(running: int, waiting: int = 0) -> Callable[[dict[str, int]], bool]:
    return lambda holds: holds["running"] >= running and holds["waiting"] >= waiting


STATES: dict[str, tuple[list[str], Callable[[dict[str, int]], bool]]] = {
    "waiting in the queue": ([call(i) for i in range(1, 13)], busy(8, 4)),
    "prefilling in chunks": ([call(250, {"max_tokens": 1}, request_id=str(i), prompt={"token_ids": [5 + i] * 250}) for i in range(4)], busy(1)),
    "decoding": ([call(i) for i in range(1, 4)], busy(3)),
    "decoding eight samples": ([call(n=8)], busy(8)),
    "streaming": ([call(stream=True), call(4, stream=True, n=4)], busy(5)),
    "tokenising": ([call(prompt={"text": "a b " * 500_000})], lambda holds: holds["calls"] == 1),
    "having sent half a body": ([call()[:-20]], lambda holds: True),
    "having sent half a line": (["POST /v1/roll"], lambda holds: True),
    "having sent the next call too": ([call() + call(4)], busy(1)),
    "having been answered": ([call(params={"max_tokens": 1})], lambda holds: holds["calls"] == 0),
}


@pytest.fixture(scope="module")
def scheduled(serving: Any, cancelling: dict[str, str]) -> Iterator[Any]:
    with serving(*FLAGS, "--tokenizer", cancelling["llama"], factory="scheduled_engine:build") as server:
        with RolloutClient(server.url) as client:
            client.rollouts(["text"], sampling_params={"max_tokens": 1})  # what is made on first use
        yield server


@pytest.mark.parametrize("state", STATES)
def test_a_killed_client_leaves_nothing(scheduled: Any, until: Until, state: str) -> None:
    messages, reached = STATES[state]
    until(lambda: scheduled.holds()["calls"] == 0)
    idle = scheduled.holds()
    assert (idle["running"], idle["waiting"], idle["free_blocks"]) == (0, 0, 256)
    process = subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        with process.stdin:
            json.dump([*scheduled.address, messages], process.stdin)
        until(lambda: (now := scheduled.holds())["front files"] == idle["front files"] + len(messages) and reached(now))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until(lambda: scheduled.holds() == idle, 3.0)


def test_connections_dropped_at_any_moment_leave_nothing(scheduled: Any, until: Until) -> None:
    """By FIN or RST, at random times, in random states; a caller among them gets the tokens it gets alone."""
    until(lambda: scheduled.holds()["calls"] == 0)
    idle, dice = scheduled.holds(), random.Random(1)
    with RolloutClient(scheduled.url) as client:
        alone = client.rollouts([[9, 8, 7]], sampling_params={"seed": 5, "max_tokens": 40})

        async def drop() -> None:
            await asyncio.sleep(dice.random())
            _, writer = await asyncio.open_connection(*scheduled.address)
            kind = call(dice.choice((1, 5, 120)), n=dice.choice((1, 1, 8)), stream=dice.random() < 0.5, group="g")
            writer.write(kind.encode()[: dice.choice((10**6, 10**6, 100))])
            await asyncio.sleep(0.3 * dice.random())
            if dice.random() < 0.5:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

        async def run() -> Any:
            drops = asyncio.gather(*(drop() for _ in range(150)))
            among = await asyncio.to_thread(client.rollouts, [[9, 8, 7]], sampling_params={"seed": 5, "max_tokens": 40}, priority=-1)
            await drops
            return among

        among = asyncio.run(asyncio.wait_for(run(), 60))
    assert among.results[0].samples[0].token_ids == alone.results[0].samples[0].token_ids
    until(lambda: scheduled.holds()["running"] == 0, 3.0)
    until(lambda: {**scheduled.holds(), "front files": 0} == {**idle, "front files": 0}, 3.0)
