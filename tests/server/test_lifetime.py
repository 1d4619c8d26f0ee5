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
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rollsync import RolloutClient

Until = Callable[..., None]
FLAGS = ("--num-blocks", "9000", "--block-tokens", "4", "--max-num-seqs", "8", "--max-batch-tokens", "8", "--max-model-len", "4096")
LONG = {"max_tokens": 4000, "ignore_eos": True}

LATER = "\N{HOURGLASS}"
"""what follows is sent when the test says so"""
CLIENT = f"""
import json, socket, sys, time
host, port, messages = json.loads(sys.stdin.readline())
parts = [message.partition({LATER!r}) for message in messages]
held = [socket.create_connection((host, port)) for _ in messages]
for connection, (first, _, _) in zip(held, parts):
    connection.sendall(first.encode())
sys.stdin.readline()
for connection, (_, _, rest) in zip(held, parts):
    connection.sendall(rest.encode())
print("sent", flush=True)
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
    "prefilling in chunks": ([call(prompt={"token_ids": [5 + i] * 4000}) for i in range(4)], busy(1)),
    "decoding": ([call(i) for i in range(1, 4)], busy(3)),
    "decoding eight samples": ([call(n=8)], busy(8)),
    "streaming": ([call(stream=True), call(4, stream=True, n=4)], busy(5)),
    "tokenising": ([call(prompt={"text": "a b " * 500_000})], lambda holds: holds["calls"] == 1),
    "having sent half a body": ([call()[:-20]], lambda holds: True),
    "having sent half a line": (["POST /v1/roll"], lambda holds: True),
    "having sent the next call too": ([call() + LATER + call(4)], busy(1)),
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
    assert (idle["running"], idle["waiting"], idle["free_blocks"]) == (0, 0, 9000)
    process = subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def is_reached() -> bool:
        return (now := scheduled.holds())["front files"] == idle["front files"] + len(messages) and reached(now)

    try:
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps([*scheduled.address, messages]), file=process.stdin, flush=True)
        until(is_reached, 20)
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "sent\n"
        until(is_reached, 20)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    until(lambda: scheduled.holds() == idle, 20)


def test_connections_dropped_at_any_moment_leave_nothing(scheduled: Any, until: Until) -> None:
    """By FIN or RST, at random times, in random states; a caller among them gets the tokens it gets alone."""
    until(lambda: scheduled.holds()["calls"] == 0)
    idle, dice = scheduled.holds(), random.Random(1)
    with RolloutClient(scheduled.url) as client:
        alone = client.rollouts([[9, 8, 7]], sampling_params={"seed": 5, "max_tokens": 40})

        async def drop() -> None:
            await asyncio.sleep(dice.random())
            _, writer = await asyncio.open_connection(*scheduled.address)
            kind = call(dice.choice((1, 5, 1000)), n=dice.choice((1, 1, 8)), stream=dice.random() < 0.5, group="g")
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
    until(lambda: scheduled.holds()["running"] == 0, 20)
    until(lambda: {**scheduled.holds(), "front files": 0} == {**idle, "front files": 0}, 20)


class Line:
    """One kept connection."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address

    async def __aenter__(self) -> Line:
        self.reader, self.writer = await asyncio.open_connection(*self.address)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.transport.abort()

    async def reopen(self) -> None:
        self.writer.transport.abort()
        await self.__aenter__()

    def send(self, request: str) -> None:
        self.writer.write(request.encode())

    async def answer(self) -> tuple[int, Any]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split()[0])
        return int(head.split()[1]), json.loads(await self.reader.readexactly(length))

    async def ask(self, request: str) -> tuple[int, Any]:
        self.send(request)
        return await self.answer()


ABORTS = [{"request_id": "same"}, {"group": "g"}, {"session": "s"}, {"all": True}]


def check_own(told: Any, number: int, limit: int) -> str:
    """The reply holds the tokens of this call's own prompt, once for each sample; how it ended."""
    (result,) = told["results"]
    assert [s["index"] for s in result["samples"]] == [0, 1], told
    for sample in result["samples"]:
        tokens, first = sample["token_ids"], number + 31 * sample["index"]
        assert tokens == [(first + 7 * k) % 256 for k in range(len(tokens))] and len(tokens) <= limit, (number, tokens)
        assert (sample["finish_reason"] == "length") == (len(tokens) == limit) and sample["finish_reason"] in ("length", "abort")
    return str(result["samples"][0]["finish_reason"])


async def reuse_one_id(address: tuple[str, int], rounds: int) -> Counter[str]:
    """The same request id again and again; each call is aborted, dropped or finished, at any moment, and the next comes at once."""
    dice, aborts, ends = random.Random(2), random.Random(3), Counter[str]()
    async with Line(address) as caller, Line(address) as other:
        for number in range(rounds):

            def ask_for(limit: int, first: int = number % 90) -> str:
                params = {"max_tokens": limit}
                return call(prompt={"token_ids": [first]}, params=params, n=2, request_id="same", group="g", session="s")

            how, limit = dice.choice((("finish", 2), ("drop", 4000), ("abort", 1), ("abort", 3), ("abort", 4000)))
            caller.send(ask_for(limit))
            await asyncio.sleep(dice.choice((0, 0, 0.002, 0.01)))
            if how == "drop":
                await caller.reopen()
                limit = 2
                while (told := await caller.ask(ask_for(limit)))[0] == 409:  # until the server has seen it
                    await asyncio.sleep(0.001)
            else:
                answer = asyncio.create_task(caller.answer())
                while how == "abort" and not answer.done():
                    assert (await other.ask(message(aborts.choice(ABORTS), "/v1/engine/abort")))[0] == 200
                told = await answer
            assert told[0] == 200, (number, how, told)
            end = check_own(told[1], number % 90, limit)
            # What is both short and aborted may end either way; what else there is can end in one way only.
            either = how == "abort" and limit < 4000
            assert either or end == ("abort" if how == "abort" else "length"), (number, how, limit, end)
            ends["either" if either else end] += 1
    return ends


@pytest.mark.parametrize("rounds", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_an_id_is_free_as_soon_as_its_call_is_answered(server: Any, until: Until, rounds: int) -> None:
    until(lambda: server.holds()["calls"] == 0)
    idle = server.holds()
    ends = asyncio.run(asyncio.wait_for(reuse_one_id(server.address, rounds), 120))
    assert ends["length"] > rounds // 4 and ends["abort"] > rounds // 10 and ends["either"] > rounds // 4, ends
    uncounted = {"front files": 0}  # connections of tests before this one may have ended meanwhile
    until(lambda: (now := server.holds()) | uncounted == idle | uncounted and now["front files"] <= idle["front files"], 20)
