"""/v1/rollouts through the real app, engine faked."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgpack
import pytest
from rollsync import AsyncRolloutClient, RolloutClient, SamplingParams
from rollsync.rollout.errors import BadRequest, DuplicateRequest, PromptTooLong, ServerUnreachable
from rollsync.rollout.metrics import FrontCounters, render
from rollsync.rollout.wire import MSGPACK, unpack_array

FOREVER = {"max_tokens": 4000}
Until = Callable[..., None]


def body(*ids: list[int], **more: Any) -> dict[str, Any]:
    return {"prompts": [{"token_ids": i} for i in ids], "sampling_params": {"max_tokens": 4}, **more}


def post(server: Any, content: Any, **kw: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/rollouts", json=content, timeout=20, **kw)


def plain(value: Any) -> Any:
    """msgpack's arrays as lists, -inf as JSON shows it."""
    if isinstance(value, dict):
        return unpack_array(value) if value.keys() == {"dtype", "shape", "data"} else {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def test_json_and_msgpack_agree_to_the_bit(server: Any) -> None:
    asked = body([1, 2, 3], [255], n=3, include=["model_logprobs", "prompt_logprobs"], request_id="same")
    by_json = post(server, asked).json()
    headers = {"Content-Type": MSGPACK}
    answer = httpx.post(f"{server.url}/v1/rollouts", content=msgpack.packb(asked), headers=headers)
    assert answer.headers["content-type"] == MSGPACK
    wire = msgpack.unpackb(answer.content)
    column = wire["results"][0]["samples"][0]["logprobs"]
    assert (column["dtype"], column["shape"]) == ("<f4", [4]) and column["data"] == struct.pack("<4f", -1 / 7, -1 / 14, -1 / 21, -1 / 28)
    assert plain(wire) == by_json
    assert by_json["results"][0]["samples"][0]["prompt_logprobs"] == [None, -0.5, -0.5]
    assert by_json["usage"] == {"prompt_tokens": 4, "completion_tokens": 24, "cached_tokens": 0, "samples": 6}


def test_minus_infinity_is_null_in_json_and_kept_in_msgpack(server: Any, client: RolloutClient) -> None:
    answer = post(server, body([249]))  # the fake's second token is 0, with logprob -inf
    assert answer.json()["results"][0]["samples"][0]["logprobs"][1] is None
    assert "Infinity" not in answer.text
    assert client.rollouts([[249]], sampling_params={"max_tokens": 4}).results[0].samples[0].logprobs[1] == -math.inf


def test_stream_gives_each_sample_when_it_is_finished(server: Any, client: RolloutClient) -> None:
    prompts = [{"token_ids": [1], "max_tokens": 300}, {"token_ids": [1], "max_tokens": 2}, {"token_ids": []}]
    events = list(client.stream(prompts, n=2))
    assert [e.prompt_index for e in events if e.sample] == [1, 1, 0, 0]
    assert [e.prompt_index for e in events if isinstance(e.error, BadRequest)] == [2]
    with httpx.stream("POST", f"{server.url}/v1/rollouts", json={"prompts": prompts, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert [line.split()[1] for line in lines[::2]] == ["start", "error", "sample", "sample", "done"]
    assert json.loads(lines[-1].removeprefix("data: "))["usage"]["completion_tokens"] == 302


def test_ids_may_be_of_any_integer_type(client: RolloutClient) -> None:
    numpy = pytest.importorskip("numpy")
    ids = numpy.array([1, 2])
    results = client.rollouts([ids, {"token_ids": ids}, (1, 2)], sampling_params={"max_tokens": 2, "seed": 1}).results
    assert [r.prompt_token_ids for r in results] == [[1, 2]] * 3


def test_equal_prompts_of_one_seed_go_on_counting(client: RolloutClient) -> None:
    result = client.rollouts([[5], [6], [5]], n=2, sampling_params={"seed": 3, "max_tokens": 1})
    assert [[s.index for s in r.samples] for r in result.results] == [[0, 1], [0, 1], [2, 3]]


def test_a_bad_prompt_fails_alone(client: RolloutClient, server: Any) -> None:
    result = client.rollouts([[1], [], [256], [-1], [1] * 5000, [2]], sampling_params=SamplingParams(max_tokens=1))
    errors = {r.prompt_index: r.error for r in result.results if r.error}
    assert errors.keys() == {1, 2, 3, 4} and isinstance(errors[4], PromptTooLong)
    assert getattr(errors[2], "field", None) == "prompts[2].token_ids[0]" and "[0, 256)" in str(errors[2])
    assert getattr(errors[4], "field", None) == "prompts[4].token_ids"
    assert [len(r.samples) for r in result.results] == [1, 0, 0, 0, 0, 1]
    refused = post(server, body([], [999]))
    assert refused.status_code == 400 and len(refused.json()["results"]) == 2 and refused.json()["error"]["field"] == "prompts[0]"


BAD_BODIES: list[tuple[Any, str | None]] = [
    ([], None),
    ({}, "prompts"),
    ({"prompts": []}, "prompts"),
    ({"prompts": [1]}, "prompts[0]"),
    (body([1], foo=1), "foo"),
    (body([1], min_version=-3), "min_version"),
    (body([1], deadline_s=-1), "deadline_s"),
    (body([1], n=0), "n"),
    (body([1], n=True), "n"),
    (body([1], include=["words"]), "include[0]"),
    (body([1], include=["routed_experts"]), "include[0]"),
    (body([1], sampling_params={"temperature": "hot"}), "sampling_params.temperature"),
    (body([1], sampling_params={"top_p": 0}), "sampling_params.top_p"),
    (body([1], sampling_params={"n": 2}), "sampling_params.n"),
    (body([1], sampling_params={"logit_bias": [7, 1.0]}), "sampling_params.logit_bias"),
    (body([1], sampling_params={"logit_bias": {"-1": 1.0}}), "sampling_params.logit_bias"),
    (body([1], sampling_params={"allowed_token_ids": []}), "sampling_params.allowed_token_ids"),
    (body([1], sampling_params={"repetition_penalty": 0}), "sampling_params.repetition_penalty"),
    (body([1], sampling_params={"beams": 2}), "sampling_params.beams"),
    (body([1], temperature=0.5), "temperature"),
    ({"prompts": [{"token_ids": [1], "n": 2}]}, "prompts[0].n"),
    ({"prompts": [{"role": "user", "content": "a"}]}, "prompts[0]"),
    (body([1], sampling_params={"seed": 1 << 64}), "sampling_params.seed"),
    ({"prompts": [{"token_ids": [1]}, {"token_ids": [1, 2, "x"]}]}, "prompts[1].token_ids[2]"),
    ({"prompts": [{"token_ids": [1.0]}]}, "prompts[0].token_ids[0]"),
    ({"prompts": [{"token_ids": [1], "text": "a"}]}, "prompts[0]"),
    ({"prompts": [{"token_ids": [1], "max_tokens": -1}]}, "prompts[0].max_tokens"),
    ({"prompts": [{"token_ids": [1], "continue_from": [2]}], "n": 2}, "prompts[0].continue_from"),
    ({"prompts": [{"messages": [{"content": "no role"}]}]}, "prompts[0].messages[0]"),
    (
        {"prompts": [{"messages": [{"role": "user"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}]},
        "prompts[0].chat_template_kwargs.chat_template",
    ),
    (body([1], deadline_s=10**400), "deadline_s"),
    (body([1], sampling_params={"temperature": 10**400}), "sampling_params.temperature"),
    (body([1], sampling_params={"stop_token_ids": [10**30]}), "sampling_params.stop_token_ids"),
    (body([1], sampling_params={"stop": ["\ud800"]}), "sampling_params.stop[0]"),
    (body([1], sampling_params={"stop": ["a", "b" * 1025]}), "sampling_params.stop[1]"),
    (body([1], sampling_params={"stop": ["a"] * 65}), "sampling_params.stop"),
    (body([1], sampling_params={"logit_bias": {str(i): 1.0 for i in range(1025)}}), "sampling_params.logit_bias"),
    (body([1], group="\ud800"), "group"),
    (body([1], session="\ud800"), "session"),
    (body([1], request_id="\ud800"), "request_id"),
    ({"prompts": [{"text": "a\ud800"}]}, "prompts[0].text"),
    (body([1], **{"\ud800": 1}), "\\ud800"),
]


def test_bad_bodies_are_refused_by_field(server: Any) -> None:
    with httpx.Client(base_url=server.url) as http:
        for content, field in BAD_BODIES:
            sent = json.dumps(content)  # httpx's own would refuse a lone surrogate
            for accept in ("application/json", MSGPACK):
                answer = http.post("/v1/rollouts", content=sent, headers={"Content-Type": "application/json", "Accept": accept})
                told = msgpack.unpackb(answer.content) if accept == MSGPACK else answer.json()
                assert (answer.status_code, told["error"].get("field")) == (400, field), answer.text
        for text in ('{"prompts": NaN}', '{"a": -Infinity}', "{", "\xff", "[" * 100000, '{"n": ' + "9" * 5000 + "}"):
            assert http.post("/v1/rollouts", content=text.encode("latin-1")).status_code == 400, text[:20]
        for raw in (b"", b"\xc1", msgpack.packb({"prompts": [{"token_ids": {"dtype": "<i4", "shape": [2], "data": b"abc"}}]})):
            assert http.post("/v1/rollouts", content=raw, headers={"Content-Type": MSGPACK}).status_code == 400
        huge = [2**63, -(2**70)]
        assert http.post("/v1/rollouts", json=body(huge)).status_code == 400
        streamed = http.post("/v1/rollouts", json=body(huge, [1], stream=True), headers={"Accept": "text/event-stream"}).text
        assert "event: sample" in streamed and "event: done" in streamed
        assert http.post("/v1/rollouts", json=body([1])).status_code == 200


def test_no_tokenizer_is_an_item_error_for_text_only(client: RolloutClient) -> None:
    result = client.rollouts(["words", [1]], sampling_params={"max_tokens": 1})
    assert "token_ids" in str(result.results[0].error) and result.results[1].error is None


def test_deadline_ends_with_the_partial_output(client: RolloutClient) -> None:
    sample = client.rollouts([[1]], sampling_params=FOREVER, deadline_s=0.2).results[0].samples[0]
    assert (sample.finish_reason, sample.abort_reason) == ("abort", "deadline") and 0 < len(sample.token_ids) < 4000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 8])
def test_a_dropped_connection_frees_its_work(until: Until, server: Any, stream: bool, n: int) -> None:
    content = json.dumps(body([1], [2], n=n, stream=stream, sampling_params=FOREVER)).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(f"POST /v1/rollouts HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        until(lambda: server.running() == 2 * n)
    until(lambda: server.running() == 0, 3.0)


def test_a_connection_that_ends_inside_its_body_is_nobodys_error(server: Any) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(f"POST /v1/rollouts HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000\r\n\r\n{{".encode())
    assert httpx.get(f"{server.url}/health").json() == {"ready": True}


def in_background(server: Any, **more: Any) -> tuple[threading.Thread, list[Any]]:
    got: list[Any] = []

    def run() -> None:
        with RolloutClient(server.url) as own:
            try:
                got.append(own.rollouts([[1], [2]], n=2, sampling_params=FOREVER, **more))
            except Exception as error:
                got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, got


@pytest.mark.parametrize("which", [{"request_id": "r"}, {"group": "g"}, {"session": "s"}, {"all": True}])
def test_abort_returns_the_partials_to_the_caller(until: Until, server: Any, client: RolloutClient, which: dict[str, Any]) -> None:
    thread, got = in_background(server, request_id="r", group="g", session="s")
    until(lambda: server.running() == 4)
    with pytest.raises(DuplicateRequest):
        client.rollouts([[1]], request_id="r")
    answer = client.abort(**which, reason="enough")
    thread.join(5)
    assert answer == {"changed": True, "request_ids": ["r"], "samples": 4}
    assert {(s.finish_reason, s.abort_reason) for r in got[0].results for s in r.samples} == {("abort", "enough")}
    assert client.abort(**which) == {"changed": False, "request_ids": [], "samples": 0}


def test_abort_needs_exactly_one_choice(client: RolloutClient) -> None:
    for which in ({}, {"group": "a", "all": True}, {"all": False}, {"group": 3}, {"everything": True}):
        with pytest.raises(BadRequest):
            client.abort(**which)


def test_status_and_health_answer_while_it_works(until: Until, server: Any, client: RolloutClient) -> None:
    thread, _ = in_background(server, request_id="busy")
    until(lambda: server.running() == 4)
    health = client.health()
    assert (health["live"], health["ready"]) == (True, True)
    assert client.status()["calls_in_flight"] == 1
    client.abort(all=True)
    thread.join(5)
    page = httpx.get(f"{server.url}/metrics").text
    assert "rollsync_running_samples" in page and 'finish_reason="abort"' in page
    for line in page.splitlines():
        assert line.startswith("#") or (len(line.rsplit(" ", 1)) == 2 and math.isfinite(float(line.rsplit(" ", 1)[1])))


def test_engine_totals_are_counters() -> None:
    page = render(FrontCounters(), {"generated_tokens": 5, "finished": 2, "aborted": 1, "running": 0}, {}, True, True)
    for line in (
        "# TYPE rollsync_generated_tokens_total counter",
        "# TYPE rollsync_engine_samples_finished_total counter",
        "# TYPE rollsync_engine_samples_aborted_total counter",
        "# TYPE rollsync_running_samples gauge",
    ):
        assert line in page.splitlines()


def test_waiting_for_a_silent_server_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with RolloutClient(url) as client, pytest.raises(ServerUnreachable, match="not ready within"):
            client.wait_until_ready(0.3)

        async def run() -> None:
            async with AsyncRolloutClient(url) as client:
                with pytest.raises(ServerUnreachable, match="not ready within"):
                    await client.wait_until_ready(0.3)

        asyncio.run(asyncio.wait_for(run(), 10))


def test_many_calls_at_once_are_not_capped(server: Any) -> None:
    async def run() -> None:
        async with AsyncRolloutClient(server.url) as client:
            calls = [asyncio.create_task(client.rollouts([[i % 90]], sampling_params=FOREVER)) for i in range(150)]
            end = time.monotonic() + 8
            while (await client.status())["calls_in_flight"] < 150:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            ended = await client.abort(all=True)
            assert ended["samples"] == 150 or ended["pending"]
            results = await asyncio.gather(*calls)
            assert {r.results[0].samples[0].finish_reason for r in results} == {"abort"}

    asyncio.run(run())


def test_async_client_streams_and_cancels(server: Any) -> None:
    async def run() -> None:
        async with AsyncRolloutClient(server.url) as client:
            await client.wait_until_ready(5)
            assert [i.prompt_index async for i in client.stream([[1], [2]], sampling_params={"max_tokens": 2})] == [0, 1]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.rollouts([[1]], sampling_params=FOREVER), 0.3)
            end = time.monotonic() + 3
            while (await client.status())["stats"]["running"]:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)

    asyncio.run(run())


def test_openapi_lists_the_table(server: Any) -> None:
    schemas = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
    assert "deadline_s" in schemas["Rollouts"]["properties"] and "temperature" in schemas["SamplingParams"]["properties"]
    assert schemas["SamplingParams"]["properties"]["top_k"]["description"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"prompts": [{"role": "user", "content": "a"}]}, "put the chat into a list"),
        ({"prompts": [[1], b"ab"]}, "prompts[1] must be a text"),
        ({"max_tokens": 5}, "give max_tokens in sampling_params"),
        ({"include": "text"}, "include must be a list of names, got 'text'"),
        ({"sampling_params": {"logprobs": 1}}, "logprobs always come; top_logprobs is for alternatives"),
        ({"sampling_params": {"max_new_tokens": 1}}, "here it is max_tokens"),
        ({"sampling_params": {"max_token": 1}}, "did you mean max_tokens"),
        ({"sampling_params": {"beams": 1}}, "min_tokens, presence_penalty"),
    ],
)
def test_misunderstandings_are_told_what_to_do(client: RolloutClient, call: dict[str, Any], words: str) -> None:
    for sample in (client.rollouts, lambda **kw: list(client.stream(**kw))):
        with pytest.raises(BadRequest) as error:
            sample(**{"prompts": [[1]], **call})
        assert words in str(error.value)
