"""Updates tied to a connection: who opened one and is gone leaves nothing open."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import msgpack  # type: ignore[import-untyped]
import pytest
import torch
from rollsync.weight_sync.control import HttpControl, UpdateError
from rollsync.weight_sync.sender import WeightSender
from rollsync.weight_sync.sources import TensorSource

MANIFEST = {"tensors": [{"name": "w", "dtype": "float32", "shape": [1]}]}
FREE_S = 1.5
"""how soon a dead owner's update is gone; the promise is a second, on a machine that is not shared"""
OWNER = """
import sys, time
from rollsync.weight_sync.control import HttpControl
control = HttpControl(sys.argv[1])
update = control.open({"manifest": %r, "owner": "doomed", "deadline_s": float(sys.argv[2])})["id"]
control.chunk(update, 0, 0, b"1234")
print(update, flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def live(serving: Any) -> Iterator[Any]:
    with serving(factory="fake_live:build") as found:
        yield found


def update_of(live: Any) -> Any:
    return httpx.get(f"{live.url}/v1/engine/status").json()["update"]


@pytest.fixture
def control(live: Any) -> Iterator[HttpControl]:
    found = HttpControl(live.url)
    yield found
    found.close()


def commits(control: HttpControl) -> dict[str, Any]:
    """A whole update, as the next trainer makes it."""
    update = control.open({"manifest": MANIFEST})["id"]
    control.chunk(update, 0, 0, b"1234")
    return control.commit(update, None)


@pytest.mark.parametrize("end, deadline_s", [(signal.SIGKILL, 600), (signal.SIGSTOP, 1.5)])
def test_an_owner_that_is_killed_frees_the_engine_at_once_and_one_that_freezes_by_the_deadline(
    live: Any, control: HttpControl, until: Any, end: signal.Signals, deadline_s: float
) -> None:
    process = subprocess.Popen([sys.executable, "-c", OWNER % MANIFEST, live.url, str(deadline_s)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        update = process.stdout.readline().strip()
        assert update_of(live)["id"] == update
        process.send_signal(end)
        until(lambda: update_of(live) is None, FREE_S if end == signal.SIGKILL else deadline_s + 1)
    finally:
        process.kill()
        process.wait()
    ended = control.call("GET", f"/v1/weights/updates/{update}")
    assert ended["state"] == "aborted" and ("connection" if end == signal.SIGKILL else "deadline") in ended["reason"]
    assert commits(control)["state"] == "committed"


def test_any_rank_that_drops_ends_the_update_and_a_commit_ends_the_hold(live: Any, control: HttpControl, until: Any) -> None:
    other = HttpControl(live.url)
    update = control.open({"manifest": MANIFEST})["id"]
    other.hold(update)
    other.close()
    until(lambda: update_of(live) is None, FREE_S)
    with pytest.raises(UpdateError, match="404"):
        other.hold("nobody's")
    with httpx.stream("POST", f"{live.url}/v1/weights/updates", json={"manifest": MANIFEST, "hold": True}) as held:
        lines = held.iter_lines()
        events = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
        first = next(events)
        assert first["event"] == first["state"] == "open"
        control.chunk(first["id"], 0, 0, b"1234")
        done = control.commit(first["id"], None)
        last = next(events)
        assert (last["event"], last["id"], last["version"]) == ("committed", first["id"], done["version"])
        assert next(events, None) is None
    assert control.call("GET", f"/v1/weights/updates/{first['id']}")["state"] == "committed"


def test_a_caller_that_leaves_before_its_open_is_answered_leaves_nothing_open(live: Any, control: HttpControl, until: Any) -> None:
    for held in (False, True):
        with pytest.raises(httpx.ReadTimeout):
            body = {"manifest": {"tensors": [{**MANIFEST["tensors"][0], "name": "slow"}]}, "hold": held}
            httpx.post(f"{live.url}/v1/weights/updates", json=body, timeout=0.3)
        time.sleep(1.0)
        until(lambda: update_of(live) is None, FREE_S)
        assert commits(control)["changed"]


def test_a_hold_ends_with_the_server(serving: Any) -> None:
    """It is told so: a shutdown does not wait for its grace to cut the connection."""
    with serving(factory="fake_live:build") as server:
        body = {"manifest": MANIFEST, "hold": True}
        with httpx.stream("POST", f"{server.url}/v1/weights/updates", json=body, timeout=20) as held:
            lines = held.iter_lines()
            assert next(lines) == "event: open"
            server.process.send_signal(signal.SIGTERM)
            last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")][-1]
        assert last["event"] == "error" and last["error"]["code"] == "shutting_down"


def test_a_sender_names_what_a_server_lacks_before_it_opens_anything(live: Any, control: HttpControl) -> None:
    control.require(["weights.updates", "weights.updates.hold", "weights.transport.ipc", "weights.apply.in_place", "engine.pause"])
    with pytest.raises(UpdateError, match=r"lacks weights\.transport\.pigeon"):
        control.require(["weights.updates", "weights.transport.pigeon"])
    assert update_of(live) is None


@pytest.mark.parametrize("lacks", ["protocol", "update routes"])
def test_a_server_of_another_kind_is_told_in_words(lacks: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told = {"/version": {"version": "9", **({"capabilities": ["weights.updates"]} if lacks == "protocol" else {})}}
            body: bytes = msgpack.packb(told.get(self.path, {"status": "fine"}))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        words = "is not that of this rollsync" if lacks == "protocol" else r"lacks weights\.updates"
        with WeightSender(url, TensorSource({"w": torch.zeros(1)})) as sender, pytest.raises(UpdateError, match=words):
            sender.sync()
        other.shutdown()
