"""A fault injected anywhere in the front ends its own item or call; neighbours are bit-equal. Ids alone need no tokenizer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollsync import EngineConfig
from rollsync.rollout.server import control, encoding, replies
from rollsync.rollout.server.access import Access
from rollsync.rollout.server.app import create_app
from rollsync.rollout.server.engine_client import EngineProcess
from rollsync.rollout.server.text import TextService
from rollsync.rollout.wire import MSGPACK


class Brittle:
    """A tokenizer of one byte per token that counts its calls and breaks where told."""

    is_byte_level = True
    special_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.calls = 0
        self.bad_token = -1

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        self.calls += 1
        if "break" in text:
            raise RuntimeError("no ids today")
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        self.calls += 1
        if token == self.bad_token:
            raise RuntimeError("no text today")
        return bytes([token])

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode(errors="replace")

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        raise RuntimeError("no template today")


class Front:
    def __init__(self, http: httpx.AsyncClient, app: Any, engine: EngineProcess, tokenizer: Brittle) -> None:
        self.http, self.app, self.engine, self.tokenizer = http, app, engine, tokenizer

    async def rollouts(self, *prompts: dict[str, Any], **more: Any) -> Any:
        body = {"prompts": prompts, "sampling_params": {"max_tokens": 6}, **more}
        return (await self.http.post("/v1/rollouts", json=body, headers={"Accept": "application/json"})).json()

    async def stream(self, *prompts: dict[str, Any], **more: Any) -> str:
        body = {"prompts": prompts, "sampling_params": {"max_tokens": 6}, "stream": "tokens", **more}
        return (await self.http.post("/v1/rollouts", json=body)).text


@pytest.fixture(scope="module")
def in_front() -> Callable[[Callable[[Front], Coroutine[Any, Any, None]]], None]:
    """Runs a coroutine over an app in this process, in front of a fake engine in another."""

    def run(work: Callable[[Front], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            config = EngineConfig(model="fake")
            engine = EngineProcess(config, factory="fake_engine:build")
            text, tokenizer = TextService(config), Brittle()
            text._tokenizer = tokenizer  # type: ignore[assignment]
            await engine.start()
            try:
                await engine.ready()
                app = create_app(engine, text, Access(host="127.0.0.1"), "0")
                transport = httpx.ASGITransport(app, raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=20) as http:
                    await work(Front(http, app, engine, tokenizer))
            finally:
                await engine.stop()

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


@pytest.fixture(autouse=True)
def fake_engine_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))


def columns(result: Any) -> Any:
    return [(s["token_ids"], s["logprobs"], s["finish_reason"]) for s in result["samples"]]


def test_faults_end_their_own_item(in_front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(front: Front) -> None:
        good = [{"token_ids": [1]}, {"token_ids": [2]}]
        wanted = [columns(r) for r in (await front.rollouts(*good, n=2))["results"]]
        assert front.tokenizer.calls == 0, "ids in, ids out: nobody asked for text"
        streamed = await front.stream(*good, include=["prompt_logprobs"])
        assert "event: done" in streamed and front.tokenizer.calls == 0

        broken = await front.rollouts(good[0], {"text": "break"}, {"messages": [{"role": "user"}]}, good[1], n=2)
        assert [columns(broken["results"][i]) for i in (0, 3)] == wanted
        assert [broken["results"][i]["error"]["code"] for i in (1, 2)] == ["internal", "bad_request"]
        assert "no ids today" in broken["results"][1]["error"]["message"]

        front.tokenizer.bad_token = wanted[0][1][0][3]  # in the first prompt's second sample alone
        decoded = await front.rollouts(*good, n=2, include=["text"])
        ends = [[s["finish_reason"] for s in r["samples"]] for r in decoded["results"]]
        assert ends == [["length", "error"], ["length", "length"]]
        assert [[s["token_ids"] for s in r["samples"]] for r in decoded["results"]] == [[c[0] for c in r] for r in wanted]
        assert "no text today" in decoded["results"][0]["samples"][1]["error"]
        events = await front.stream(*good, n=2, include=["text"])
        assert events.count("event: sample") == 4 and "no text today" in events and "event: done" in events

        submit = front.engine.submit

        def refuse_second(request: Any, deliver: Any, shared: Any) -> None:
            if request.prompt_token_ids == (2,):
                raise RuntimeError("no admission today")
            submit(request, deliver, shared)

        monkeypatch.setattr(front.engine, "submit", refuse_second)
        refused = await front.rollouts(*good, n=2)
        assert columns(refused["results"][0]) == wanted[0] and "no admission today" in refused["results"][1]["error"]["message"]
        monkeypatch.undo()

        whole = asyncio.create_task(front.rollouts(good[0], n=2))
        monkeypatch.setattr(replies, "frame", lambda event, binary: 1 / 0)  # a stream that cannot be written
        assert "event" not in await front.stream(*good)
        assert columns((await whole)["results"][0]) == wanted[0]
        monkeypatch.setattr(control, "ready", lambda service: 1 / 0)
        transport = httpx.ASGITransport(front.app)  # raises what leaves the app, which closes a real connection
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as strict:
            answer = await strict.get("/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
        status = (await front.http.get("/v1/engine/status")).json()
        assert status["calls_in_flight"] == 0

    in_front(work)


LONG = list(range(250)) * 16
LARGE = (
    ("/v1/rollouts", {"prompts": [{"token_ids": LONG}]}),
    ("/v1/rollouts", {"prompts": [{"token_ids": LONG}], "stream": True}),
    ("/v1/logprobs", {"items": [{"prompt": {"token_ids": LONG}, "continuation": {"token_ids": [1]}}]}),
    ("/v1/completions", {"prompt": [1, 2], "logprobs": 0, "detokenize": False, "max_tokens": 40, "n": 64}),
    ("/v1/completions", {"prompt": LONG, "return_token_ids": True, "detokenize": False, "max_tokens": 1, "stream": True}),
)


@pytest.mark.parametrize("accept", ["application/json", MSGPACK])
def test_a_large_reply_holds_up_nobody(in_front: Any, monkeypatch: pytest.MonkeyPatch, accept: str) -> None:
    """While it is being encoded, which here lasts until then, another caller is answered."""
    being_made, answered = threading.Event(), threading.Event()
    in_steps = encoding.encode_in_steps

    def lasting(value: Any, binary: bool, gone: threading.Event) -> bytes:
        being_made.set()
        assert answered.wait(20)
        return in_steps(value, binary, gone)

    monkeypatch.setattr(encoding, "encode_in_steps", lasting)
    monkeypatch.setattr(encoding, "ASIDE_BYTES", 1 << 12)

    async def work(front: Front) -> None:
        for path, body in LARGE:
            call = asyncio.create_task(front.http.post(path, json=body, headers={"Accept": accept}))
            while not being_made.is_set() and not call.done():
                await asyncio.sleep(0.01)
            assert being_made.is_set(), (path, body)
            assert (await front.http.get("/health")).status_code == 200
            answered.set()
            assert (await call).status_code == 200 and len((await call).content) > 1 << 12
            being_made.clear()
            answered.clear()

    in_front(work)


async def talk(app: Any, path: str, receive: Callable[[], Coroutine[Any, Any, Any]]) -> list[dict[str, Any]]:
    """What the app sends to a caller who sends what `receive` says."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "raw_path": path.encode()}
    await app({**scope, "http_version": "1.1", "scheme": "http", "state": {}}, receive, send)
    return sent


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/rollouts"])
def test_nobody_waits_for_the_tokens_of_a_caller_who_left(in_front: Any, path: str) -> None:
    async def work(front: Front) -> None:
        loop, left, ended = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        prompts = [f"prompt {i}" for i in range(50)]
        body = {"prompt": prompts} if path == "/v1/completions" else {"prompts": [{"text": p} for p in prompts]}
        to_send = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> dict[str, Any]:
            if not to_send:
                await left.wait()
            return to_send.pop() if to_send else {"type": "http.disconnect"}

        def encode(text: str, add_special_tokens: bool = False) -> list[int]:
            front.tokenizer.calls += 1
            if front.tokenizer.calls == 3:
                loop.call_soon_threadsafe(left.set)
                assert ended.wait(20)
            return list(text.encode())

        front.tokenizer.encode = encode  # type: ignore[method-assign]
        await talk(front.app, path, receive)
        ended.set()
        assert not front.app.state.service.in_flight
        await front.rollouts({"token_ids": [1]})
        assert front.tokenizer.calls == 3

    in_front(work)


def test_bodies_share_their_room(in_front: Any) -> None:
    async def work(front: Front) -> None:
        room = front.app.state.bodies
        room.total_bytes = room.limit_bytes = 1000
        whole = json.dumps({"prompts": [{"token_ids": [1]}], "sampling_params": {"max_tokens": 1}}).encode().ljust(600)

        async def send(*parts: bytes | None) -> int:
            """The status. None waits for the others; then the rest comes, or, if there is none, a hang-up."""
            to_send = list(parts)

            async def receive() -> dict[str, Any]:
                if to_send and to_send[0] is None:
                    await others.wait()
                    to_send.pop(0)
                    if not to_send:
                        return {"type": "http.disconnect"}
                if not to_send:
                    await asyncio.sleep(60)
                return {"type": "http.request", "body": to_send.pop(0), "more_body": to_send != []}

            sent = await talk(front.app, "/v1/rollouts", receive)
            assert sent[0]["status"] != 503 or (b"retry-after", b"1") in sent[0]["headers"]
            return int(sent[0]["status"])

        others = asyncio.Event()
        waits = [asyncio.create_task(send(whole[:300], None, whole[300:])), asyncio.create_task(send(whole[:300], None))]
        while room.taken_bytes < 600:
            await asyncio.sleep(0)
        assert await send(whole) == 503, "two half bodies leave no room for a third"
        assert await send(b" " * 1001) == 413 and await send(b"{" * 300) == 400
        assert room.taken_bytes == 600
        others.set()
        assert await asyncio.gather(*waits) == [200, 499] and room.taken_bytes == 0
        assert await send(whole) == 200

    in_front(work)
