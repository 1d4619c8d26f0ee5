"""What a server says to requests while its weights are missing, too old, paused or asleep; and to those who pause it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollsync.rollout.selftest.model import write_model
from rollsync.weight_sync.sender import WeightSender
from rollsync.weight_sync.sources import TensorSource
from safetensors.torch import load_file

FLAGS = ("--load-format", "dummy", "--block-tokens", "16", "--num-blocks", "256", "--max-waiting", "4", "--threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_model(tmp_path_factory.mktemp("dummy") / "m", "llama", max_position_embeddings=4096))


@pytest.fixture(scope="module")
def http(serving: Any, folder: Path) -> Iterator[httpx.Client]:
    with serving(*FLAGS, model=str(folder), factory=None) as found, httpx.Client(base_url=found.url, timeout=30) as client:
        yield client


def sample(http: httpx.Client, route: str = "/v1/rollouts", **more: Any) -> httpx.Response:
    bodies: dict[str, Any] = {
        "/v1/rollouts": {"prompts": [{"token_ids": [5, 6, 7]}], "sampling_params": {"max_tokens": 4}},
        "/v1/logprobs": {"items": [{"prompt": {"token_ids": [5]}, "continuation": {"token_ids": [6]}}]},
        "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": 4, "detokenize": False},
    }
    return http.post(route, json={**bodies[route], **more})


def sync(http: httpx.Client, folder: Path, **how: Any) -> int:
    with WeightSender(str(http.base_url), TensorSource(load_file(folder / "model.safetensors")), transport="http") as sender:
        return sender.sync(**how).version


def later(call: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


ROUTES = ("/v1/rollouts", "/v1/logprobs", "/v1/completions")


def test_without_weights_nothing_is_served_and_all_say_so(http: httpx.Client, folder: Path) -> None:
    ready = http.get("/health/ready")
    assert ready.status_code == 503 and "dummy: commit a full update first" in ready.json()["reason"]
    for route in ROUTES:
        refused = sample(http, route)
        assert refused.status_code == 409 and "dummy: commit a full update first" in refused.text
    assert sync(http, folder) == 1
    assert http.get("/health/ready").status_code == 200
    for route in ROUTES:
        assert sample(http, route).status_code == 200


def test_min_version_waits_until_its_deadline_or_is_503_at_once(http: httpx.Client, folder: Path) -> None:
    version = http.get("/v1/weights").json()["weights"]["version"]
    for route in ROUTES:
        refused = sample(http, route, min_version=version + 1, on_unavailable="refuse")
        assert refused.status_code == 503 and refused.headers["retry-after"] and f"version {version} is served" in refused.text
    late = sample(http, min_version=version + 1, deadline_s=0.2).json()["results"][0]["samples"][0]
    assert (late["finish_reason"], late["abort_reason"], late["token_ids"]) == ("abort", "deadline", [])
    thread, found = later(lambda: sample(http, min_version=version + 1, n=3, stream=False, request_id="kept", detach_s=30))
    time.sleep(0.2)
    assert not found
    sync(http, folder)
    thread.join(20)
    samples = found[0].json()["results"][0]["samples"]
    assert [s["weight_versions"] for s in samples] == [[{"version": version + 1, "start": 0, "end": 4}]] * 3
    assert http.get("/v1/rollouts/kept").json()["results"][0]["samples"] == samples


def test_max_version_lag_ends_what_runs_too_long(http: httpx.Client, folder: Path, until: Any) -> None:
    options = {"sampling_params": {"max_tokens": 4000, "ignore_eos": True}, "max_version_lag": 0}
    thread, found = later(lambda: sample(http, **options))
    until(lambda: http.get("/v1/engine/status").json()["stats"]["running"] == 1)
    sync(http, folder)
    thread.join(20)
    (ended,) = found[0].json()["results"][0]["samples"]
    assert (ended["finish_reason"], ended["abort_reason"]) == ("abort", "max_version_lag")
    assert len(ended["weight_versions"]) == 1 and ended["token_ids"]


@pytest.mark.parametrize(("verb", "back"), [("pause", "resume"), ("sleep", "wake")])
def test_while_nothing_runs_calls_wait_up_to_a_bound_or_are_refused(http: httpx.Client, until: Any, verb: str, back: str) -> None:
    assert http.post(f"/v1/engine/{verb}").json()["changed"]
    for route in ROUTES:
        refused = sample(http, route, on_unavailable="refuse")
        assert refused.status_code == 409 and ("paused by operator" if verb == "pause" else "asleep") in refused.text
        assert route != "/v1/rollouts" or refused.headers["retry-after"]
    thread, found = later(lambda: sample(http, n=4))
    until(lambda: http.get("/v1/engine/status").json()["stats"]["waiting"] == 4)
    full = sample(http)
    assert full.status_code == 503 and full.headers["retry-after"] and full.json()["error"]["code"] == "overloaded"
    assert http.post(f"/v1/engine/{back}").json()["running"]
    thread.join(20)
    assert [s["finish_reason"] for s in found[0].json()["results"][0]["samples"]] == ["length"] * 4


def test_leases_over_http(http: httpx.Client) -> None:
    leases = lambda: [lease["owner"] for lease in http.get("/v1/engine/leases").json()["leases"]]  # noqa: E731
    thread, found = later(lambda: sample(http, request_id="long", sampling_params={"max_tokens": 4000, "ignore_eos": True}))
    time.sleep(0.3)
    report = http.post("/v1/engine/pause", json={"owner": "a#1", "ttl_s": 60}).json()
    assert (report["kept"], report["request_ids"]) == (1, {"kept": ["long"]})
    http.post("/v1/engine/pause", json={"owner": "b"})
    assert leases() == ["a#1", "b"]
    renewed = http.post("/v1/engine/leases", json={"owner": "a#1", "ttl_s": 90}).json()
    assert 60 < renewed["lease"]["expires_in_s"] <= 90
    assert http.post("/v1/engine/leases", json={"owner": "c"}).status_code == 409
    assert http.delete("/v1/engine/leases").status_code == 400
    assert http.delete("/v1/engine/leases", params={"owner": "b"}).json() == {"changed": True, "running": False, "reason": "paused by a#1"}
    assert not http.delete("/v1/engine/leases", params={"owner": "b"}).json()["changed"]
    aborted = http.post("/v1/engine/pause", json={"owner": "a#1", "mode": "abort"}).json()
    assert aborted["request_ids"] == {"aborted": ["long"]} and not aborted["changed"]
    thread.join(20)
    assert found[0].json()["results"][0]["samples"][0]["abort_reason"] == "paused"
    assert http.delete("/v1/engine/leases", params={"owner": "a#1"}).json()["running"] and leases() == []
    for _ in range(20):
        assert sample(http).status_code == http.post("/v1/engine/reset_prefix_cache").status_code == 200
