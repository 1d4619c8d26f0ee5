"""More callers than files, and callers that hold a connection without moving: everyone is answered, nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from rollsync import AsyncRolloutClient
from rollsync.rollout.errors import Overloaded

Until = Callable[..., None]
FOUR = json.dumps({"prompts": [{"token_ids": [1]}], "sampling_params": {"max_tokens": 4}}).encode()


def file_limit(files: int) -> str:
    return f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({min(files, 256)}, {files}))"


def head(length: int) -> bytes:
    return f"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """(status, headers, body) of one reply on a connection."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines if line)}
    return int(first.split()[1]), headers, json.loads(await reader.readexactly(int(headers["content-length"])))


async def raw_call(address: tuple[str, int]) -> str:
    """How one call over a connection of its own was answered."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(head(len(FOUR)) + FOUR)
        status, headers, body = await answer(reader)
    except (OSError, EOFError) as error:
        return f"{type(error).__name__}"
    finally:
        writer.close()
    if status == 503:
        assert headers["retry-after"] and body["error"]["code"] == "overloaded" and headers["connection"] == "close"
        return "refused"
    assert status == 200 and len(body["results"][0]["samples"][0]["token_ids"]) == 4
    return "answered"


async def client_call(client: AsyncRolloutClient) -> str:
    try:
        result = await client.rollouts([[1]], sampling_params={"max_tokens": 4})
    except Overloaded:
        return "refused"
    assert len(result.results[0].samples[0].token_ids) == 4
    return "answered"


async def crowd(server: Any, num_clients: int, num_raw: int) -> Counter[str]:
    async with AsyncRolloutClient(server.url) as client:
        calls = [client_call(client) for _ in range(num_clients)] + [raw_call(server.address) for _ in range(num_raw)]
        return Counter(await asyncio.wait_for(asyncio.gather(*calls), 300))


def check_crowd(serving: Any, until: Until, files: int, count: int) -> Counter[str]:
    with serving(first=file_limit(files)) as server:
        asyncio.run(crowd(server, 4, 4))  # what is made on first use
        until(lambda: server.holds()["calls"] == 0)
        idle = server.holds()
        begun = time.monotonic()
        told = asyncio.run(crowd(server, count // 2, count // 2))
        print(f"{count} calls, {files} files: {dict(told)}, {time.monotonic() - begun:.1f} s, {server.memory()}")
        assert told.keys() <= {"answered", "refused"}, told
        until(lambda: server.holds() == idle, 20)
        assert asyncio.run(crowd(server, 8, 8)) == {"answered": 16}
    return told


def test_more_callers_than_files_are_all_answered(serving: Any, until: Until) -> None:
    told = check_crowd(serving, until, files=200, count=300)
    assert told["answered"] >= 104


@pytest.mark.slow
@pytest.mark.parametrize("files", [1024, 20000])
def test_two_thousand_callers(serving: Any, until: Until, files: int) -> None:
    told = check_crowd(serving, until, files, 2000)
    assert told["answered"] >= min(2000, files - 96)
