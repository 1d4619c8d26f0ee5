"""Calls that outlive their connection: detach_s and GET /v1/rollouts/{id}."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import httpx
import pytest

HEADERS = {"Accept": "application/json"}
LONG = {"prompts": [{"token_ids": [1]}, {"token_ids": []}, {"token_ids": [2]}], "n": 2, "sampling_params": {"max_tokens": 300}}


def drop(server: Any, until: Any, method: str, path: str, body: Any = None, read: int = 0) -> None:
    """Begin a call, and hang up once it is being worked on (and `read` bytes of its reply were read)."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.request(method, path, body and json.dumps(body), HEADERS)
    until(lambda: server.running() > 0 or method == "GET")
    if read:
        connection.getresponse().read(read)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def unread(server: Any) -> int:
    return int(httpx.get(f"{server.url}/v1/engine/status").json()["calls_unread"])


def get(server: Any, name: str, query: str = "") -> httpx.Response:
    return httpx.get(f"{server.url}/v1/rollouts/{name}{query}", headers=HEADERS, timeout=20)


def results(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["results"]


@pytest.mark.parametrize("stream", [False, "tokens"])
def test_a_dropped_call_goes_on_and_is_read_later(server: Any, until: Any, stream: Any) -> None:
    wanted = results(httpx.post(f"{server.url}/v1/rollouts", json=LONG, headers=HEADERS))
    call = {**LONG, "request_id": "kept/1", "detach_s": 60, "stream": stream}
    drop(server, until, "POST", "/v1/rollouts", call, read=300 if stream else 0)
    until(lambda: unread(server) == 1)
    again = httpx.post(f"{server.url}/v1/rollouts", json={**LONG, "request_id": "kept/1"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "duplicate_request")
    drop(server, until, "GET", "/v1/rollouts/kept%2F1?stream=tokens", read=200)  # dropped again, while it is read
    until(lambda: (get(server, "kept%2F1").status_code == 200))  # 409 until the drop is noticed
    assert results(get(server, "kept%2F1")) == wanted, "sent, but who knows whether it was received"
    again = httpx.post(f"{server.url}/v1/rollouts", json={**call, "prompts": [{"token_ids": [5]}], "stream": False}, headers=HEADERS)
    assert again.status_code == 200, "its name is free"
    unknown = get(server, "kept")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_request")


def test_a_stream_that_re_attaches_begins_at_the_beginning(server: Any, until: Any) -> None:
    call = {**LONG, "request_id": "s", "detach_s": 60, "stream": "tokens"}
    drop(server, until, "POST", "/v1/rollouts", call, read=3000)
    until(lambda: unread(server) == 1)
    answer = get(server, "s", "?stream=tokens")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert (events[0]["event"], events[-1]["event"]) == ("start", "done")
    sums: dict[tuple[int, int], list[int]] = {}
    for event in events[1:-1]:
        if event["event"] == "delta":
            so_far = sums.setdefault((event["prompt_index"], event["sample"]["index"]), [])
            assert event["sample"]["start"] == len(so_far)
            so_far += event["sample"]["token_ids"]
        elif event["event"] == "sample":
            assert sums[event["prompt_index"], event["sample"]["index"]] == event["sample"]["token_ids"]
    assert len(sums) == 4 and sum(e["event"] == "error" for e in events) == 1
    assert get(server, "s", "?stream=maybe").status_code == 400
    assert get(server, "s", "?strm=tokens").status_code == 400


def test_two_readers_time_and_limits(server: Any, until: Any) -> None:
    forever = {"prompts": [{"token_ids": [1]}], "sampling_params": {"max_tokens": 4000}}
    with httpx.stream("POST", f"{server.url}/v1/rollouts", json={**forever, "detach_s": 60, "stream": True}, headers=HEADERS) as answer:
        lines = answer.iter_lines()
        name = json.loads([next(lines), next(lines)][1].removeprefix("data: "))["id"]
        busy = get(server, name)
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "illegal_state")
    until(lambda: unread(server) == 1)
    assert httpx.post(f"{server.url}/v1/engine/abort", json={"request_id": name, "reason": "enough"}).json()["samples"] == 1
    sample = results(get(server, name))[0]["samples"][0]
    assert (sample["finish_reason"], sample["abort_reason"]) == ("abort", "enough") and sample["token_ids"]

    drop(server, until, "POST", "/v1/rollouts", {**forever, "request_id": "late", "detach_s": 60, "deadline_s": 0.4})
    assert results(get(server, "late"))[0]["samples"][0]["abort_reason"] == "deadline"

    drop(server, until, "POST", "/v1/rollouts", {**forever, "request_id": "over", "detach_s": 0.2})
    until(lambda: server.running() == 0)
    assert get(server, "over").status_code == 404 and unread(server) == 0

    huge = {"prompts": [{"token_ids": [1]}] * 8, "n": 4096, "request_id": "huge", "detach_s": 1}
    refused = httpx.post(f"{server.url}/v1/rollouts", json=huge)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "detach_limit")
    nameless = httpx.post(f"{server.url}/v1/rollouts", json={**forever, "detach_s": 1})
    assert (nameless.status_code, nameless.json()["error"]["field"]) == (400, "detach_s")
