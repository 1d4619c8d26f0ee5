"""Both clients' verbs, against a real front and the real state machine."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from rollsync import RolloutClient
from rollsync.rollout.client import AsyncRolloutClient
from rollsync.rollout.errors import BadRequest, IllegalState, ProtocolMismatch, Unauthorized, UnknownUpdate
from rollsync.rollout.verbs import AsyncControlVerbs, ControlVerbs

MANIFEST = {"tensors": [{"name": "w", "dtype": "float32", "shape": [1]}]}
Do = Callable[..., Any]


@pytest.fixture(scope="module")
def live(serving: Any) -> Iterator[Any]:
    with serving("--control-token", "t", factory="fake_live:build") as found:
        yield found


@pytest.fixture(params=["sync", "async"])
def do(request: pytest.FixtureRequest, live: Any) -> Iterator[Do]:
    """Calls a method of a client by name."""
    if request.param == "sync":
        with RolloutClient(live.url, "t") as client:
            yield lambda name, *args, **kw: getattr(client, name)(*args, **kw)
    else:
        with asyncio.Runner() as runner:
            found = AsyncRolloutClient(live.url, "t")
            yield lambda name, *args, **kw: runner.run(getattr(found, name)(*args, **kw))
            runner.run(found.close())


def test_the_verbs_do_what_they_say(do: Do, live: Any) -> None:
    assert do("pause", owner="me", ttl_s=60, mode="recompute")["changed"] and not do("pause", owner="me")["changed"]
    assert [lease["owner"] for lease in do("leases")] == ["me"] and do("health")["reason"] == "paused by me"
    if "engine.leases" in do("version")["capabilities"]:
        assert do("renew_lease", owner="me", ttl_s=30)["lease"]["owner"] == "me"
        assert do("pause", owner="a&b c")["changed"] and do("revoke_lease", "a&b c")["changed"]
    assert do("resume", owner="me")["running"] and not do("resume", owner="me")["changed"]
    assert do("sleep", tags=["kv_cache"])["changed"] and do("weights")["memory"]["kv_cache"] == "discarded"
    assert do("wake")["running"] and do("reset_prefix_cache").keys() >= {"changed"}
    assert do("digests", compare={}).keys() == {"digests", "differ"}
    open_ = {"json": {"manifest": MANIFEST}, "headers": {"Authorization": "Bearer t"}}
    update = httpx.post(f"{live.url}/v1/weights/updates", **open_).json()["id"]  # type: ignore[arg-type]
    assert do("update_status", update)["phase"] == "receiving" and do("status")["update"]["id"] == update
    assert do("abort_update", update, reason="why not")["reason"] == "why not" and do("weights")["update"] is None


def test_errors_are_those_of_the_table(do: Do, live: Any) -> None:
    with pytest.raises(UnknownUpdate):
        do("update_status", "no such?update")
    with pytest.raises(BadRequest, match="mode"):
        do("pause", mode="gently")
    httpx.post(f"{live.url}/v1/engine/sleep", json={"tags": ["weights"]}, headers={"Authorization": "Bearer t"})
    answer = httpx.post(f"{live.url}/v1/weights/updates", json={"manifest": MANIFEST}, headers={"Authorization": "Bearer t"})
    assert answer.json()["error"]["code"] == IllegalState.code and do("wake")["running"]
    with RolloutClient(live.url) as stranger, pytest.raises(Unauthorized):
        stranger.pause()


def test_a_verb_that_the_server_lacks_is_named_before_it_is_tried(live: Any) -> None:
    with RolloutClient(live.url, "t") as client:
        told = client.version()
        client._server = {**told, "capabilities": [c for c in told["capabilities"] if c != "engine.pause"]}
        with pytest.raises(ProtocolMismatch, match=r"lacks engine\.pause"):
            client.pause()
        assert client.leases() == []


def test_both_clients_have_the_same_verbs() -> None:
    def shown(cls: type) -> dict[str, str]:
        return {name: str(inspect.signature(f)) for name, f in vars(cls).items() if inspect.isfunction(f)}

    assert shown(ControlVerbs) == shown(AsyncControlVerbs)
