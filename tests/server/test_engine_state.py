"""Status, health and abort: what the engine's state is, told at once whatever the engine is at."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

MANIFEST = {"tensors": [{"name": "w", "dtype": "float32", "shape": [1]}]}
SOON_S = 0.5


@pytest.fixture(scope="module")
def live(serving: Any) -> Iterator[Any]:
    with serving(factory="fake_live:build") as found, httpx.Client(base_url=found.url, timeout=20) as http:
        yield http


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code < 300, answer.text
    return answer.json()


def opened(http: httpx.Client, **body: Any) -> str:
    return str(post(http, "/v1/weights/updates", manifest=MANIFEST, **body)["id"])


def chunk(http: httpx.Client, update: str) -> httpx.Response:
    headers = {"Content-Type": "application/octet-stream"}
    return http.post(f"/v1/weights/updates/{update}/chunks?sender=0&sequence=0", content=b"1234", headers=headers)


def facts(http: httpx.Client) -> tuple[Any, ...]:
    """(ready, scheduling, memory, version, valid, open update's id) as every place tells them alike."""
    status, weights = http.get("/v1/engine/status").json(), http.get("/v1/weights").json()
    assert all(status[name] == weights[name] for name in ("memory", "weights", "legal"))
    ready = http.get("/health/ready")
    assert (ready.status_code == 200) == ready.json()["ready"] == (weights["why_not_running"] is None)
    assert http.get("/health").status_code == http.get("/health/live").status_code == 200
    update, served = status["update"] and status["update"]["id"], status["weights"]
    assert update == served["update"]
    return ready.json()["ready"], status["scheduling"]["state"], status["memory"], served["version"], served["valid"], update


def test_a_verb_that_was_answered_shows_at_once_in_status_and_health(live: httpx.Client) -> None:
    """The engine is idle, so nothing but the verb itself can have published the change."""
    home, away = dict.fromkeys(("weights", "kv_cache"), "resident"), {"weights": "offloaded", "kv_cache": "discarded"}
    assert facts(live) == (True, "running", home, 0, True, None)
    post(live, "/v1/engine/pause", owner="a")
    assert facts(live) == (False, "paused", home, 0, True, None)
    assert "paused by a" in live.get("/health/ready").json()["reason"]
    post(live, "/v1/engine/sleep")
    post(live, "/v1/engine/resume", owner="a")
    assert facts(live)[:3] == (False, "paused", away) and "asleep" in live.get("/health").json()["reason"]
    post(live, "/v1/engine/wake")
    assert facts(live) == (True, "running", home, 0, True, None)
    update = opened(live, version=3, apply="in_place")
    assert facts(live) == (False, "paused", home, 0, True, update)
    assert chunk(live, update).status_code == 200
    post(live, f"/v1/weights/updates/{update}/commit")
    assert facts(live) == (True, "running", home, 3, True, None)
    update = opened(live, apply="in_place")
    chunk(live, update)
    post(live, f"/v1/weights/updates/{update}/abort")
    assert facts(live)[3:] == (3, False, None) and "torn" in live.get("/health/ready").json()["reason"]
    update = opened(live)
    chunk(live, update)
    post(live, f"/v1/weights/updates/{update}/commit")
    assert facts(live) == (True, "running", home, 4, True, None)


def test_a_lease_and_an_update_that_expire_show_without_anything_coming_in(live: httpx.Client, until: Any) -> None:
    post(live, "/v1/engine/pause", owner="brief", ttl_s=0.3)
    left = live.get("/v1/engine/status").json()["scheduling"]["leases"][0]["expires_in_s"]
    assert 0 < left <= 0.3
    until(lambda: live.get("/health/ready").status_code == 200, 5)
    update = opened(live, deadline_s=0.3, owner="late")
    shown = live.get("/v1/engine/status").json()["update"]
    assert (shown["id"], shown["owner"], shown["phase"], shown["bytes"]) == (update, "late", "receiving", 4)
    assert shown["elapsed_s"] >= 0 and 0 < shown["deadline_in_s"] <= 0.3
    until(lambda: live.get("/v1/engine/status").json()["update"] is None, 5)
    assert live.get(f"/v1/weights/updates/{update}").json()["state"] == "aborted"


@pytest.mark.parametrize("seconds", [1e10, 1e300, 1.7e308])
def test_a_deadline_further_away_than_any_clock_ends_nobody(live: httpx.Client, seconds: float) -> None:
    post(live, "/v1/engine/pause", owner="long", ttl_s=seconds)
    update = opened(live, deadline_s=seconds)
    time.sleep(0.1)  # idle, it sleeps until the next of these
    assert facts(live)[1] == "paused" and facts(live)[5] == update
    post(live, f"/v1/weights/updates/{update}/abort")
    assert post(live, "/v1/engine/resume", owner="long")["running"]


UPDATE = "/v1/weights/updates"


@pytest.mark.parametrize(
    "path, body, field",
    [
        ("/v1/engine/pause", {"timeout_s": 1}, "timeout_s"),
        ("/v1/engine/pause", {"mode": "abort", "at_timeout": "keep"}, "at_timeout"),
        ("/v1/engine/pause", {"mode": "drain", "at_timeout": "keep"}, "at_timeout"),
        ("/v1/engine/sleep", {"tags": ["kv_cache"], "weights": "discard"}, "weights"),
        (UPDATE, {"manifest": MANIFEST, "transport": {}}, "transport.name"),
        (UPDATE, {"manifest": MANIFEST, "transport": {"name": "mixed"}}, "transport.name"),
        (UPDATE, {"manifest": MANIFEST, "transport": {"name": "http", "streams": 4}}, "transport.streams"),
        (UPDATE, {"manifest": MANIFEST, "transport": {"name": "ipc", "group": "g"}}, "transport.group"),
        (UPDATE, {"manifest": MANIFEST, "transport": {"name": "collective", "offers": ["g"]}}, "transport.offers[0]"),
        (UPDATE, {"transport": {"name": "disk", "folder": "m", "files": {}, "root": "/"}}, "transport.files"),
        (UPDATE, {}, "manifest"),
    ],
)
def test_what_would_change_nothing_is_refused_by_name(live: httpx.Client, path: str, body: dict[str, Any], field: str) -> None:
    before = facts(live)
    answer = live.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, field), answer.text
    assert facts(live) == before


READS = ("/health/live", "/health/ready", "/health", "/v1/engine/status", "/v1/weights", "/version", "/metrics")


def quickly(http: httpx.Client, while_it_lasts: threading.Thread, *more: Any) -> None:
    """Every read, and `more` calls, answer within SOON_S as long as the thread is at it."""
    rounds = 0
    while while_it_lasts.is_alive():
        for ask in (*((lambda path=path: http.get(path)) for path in READS), *more):
            began = time.monotonic()
            ask()
            assert time.monotonic() - began < SOON_S
        rounds += 1
        time.sleep(0.05)
    assert rounds


@pytest.mark.parametrize("phase, shown", [("slow-check", "checking"), ("slow-switch", "switching"), ("slow-chunk", "receiving")])
def test_all_answer_while_an_update_is_at_work(live: httpx.Client, phase: str, shown: str) -> None:
    update, seen = opened(live, owner=phase), set()
    with httpx.Client(base_url=live.base_url, timeout=20) as other:
        if phase != "slow-chunk":
            chunk(live, update)
        work = chunk if phase == "slow-chunk" else (lambda http, id: post(http, f"/v1/weights/updates/{id}/commit"))
        thread = threading.Thread(target=work, args=(other, update))
        thread.start()
        time.sleep(0.3)
        look = lambda: seen.add((live.get("/v1/engine/status").json()["update"] or {}).get("phase"))  # noqa: E731
        quickly(live, thread, look, lambda: live.get(f"/v1/weights/updates/{update}"), lambda: post(live, "/v1/engine/abort", all=True))
        assert seen - {None} == {shown}
    if phase == "slow-chunk":
        post(live, f"/v1/weights/updates/{update}/abort")


def test_aborts_answer_while_a_step_or_a_commit_is_long_and_are_carried_out_after_it(live: httpx.Client, until: Any) -> None:
    with httpx.Client(base_url=live.base_url, timeout=20) as other:
        replies: list[Any] = []
        body = {"prompts": [{"token_ids": [98]}], "request_id": "slow", "sampling_params": {"max_tokens": 4000}}
        thread = threading.Thread(target=lambda: replies.append(other.post("/v1/rollouts", json=body).json()))
        thread.start()
        until(lambda: live.get("/v1/engine/status").json()["phase"] == "step")
        began = time.monotonic()
        ended = post(live, "/v1/engine/abort", request_id="slow")
        assert time.monotonic() - began < SOON_S and ended["pending"] and ended["request_ids"] == ["slow"]
        thread.join(10)
        assert replies[0]["results"][0]["samples"][0]["finish_reason"] == "abort"
    update = opened(live, owner="slow-check")
    with httpx.Client(base_url=live.base_url, timeout=20) as other:
        thread = threading.Thread(target=other.post, args=(f"/v1/weights/updates/{update}/commit",))
        thread.start()
        time.sleep(0.2)
        began = time.monotonic()
        shown = post(live, f"/v1/weights/updates/{update}/abort", reason="no more")
        assert time.monotonic() - began < SOON_S and shown["pending"] and shown["state"] == "open" and shown["phase"] == "checking"
        thread.join(10)
    until(lambda: live.get(f"/v1/weights/updates/{update}").json()["state"] == "aborted")
    assert live.get(f"/v1/weights/updates/{update}").json()["reason"] == "no more"


def test_deadlines_and_leases_of_any_length_end_nobody(live: httpx.Client) -> None:
    """As long as a float can say: more than the clocks that are waited on can."""
    update = opened(live, deadline_s=1e300)
    post(live, f"/v1/weights/updates/{update}/abort")
    post(live, "/v1/engine/pause", owner="long", ttl_s=1e300)
    post(live, "/v1/engine/resume", owner="long")
    assert live.get("/health").status_code == 200


@pytest.mark.parametrize("value", [r'"\ud800"', str(1 << 70)])
def test_what_no_message_can_carry_is_refused_as_bad_input(live: httpx.Client, value: str) -> None:
    body = f'{{"manifest": {{"tensors": [{{"name": "w", "dtype": {value}, "shape": [1]}}]}}}}'
    answer = live.post("/v1/weights/updates", content=body)
    assert answer.status_code == 400 and "bad_request" in answer.text, answer.text
