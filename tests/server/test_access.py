"""Who may call: keys on every route there is, and the Host and Origin that a web page cannot send."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import msgpack
import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from rollsync import EngineConfig
from rollsync.rollout.errors import Forbidden
from rollsync.rollout.server import app
from rollsync.rollout.server.access import Access, check
from rollsync.rollout.server.engine_client import EngineProcess
from rollsync.rollout.server.guard import Guard, RouteNeeds
from rollsync.rollout.server.schemas import route
from rollsync.rollout.server.text import TextService
from rollsync.rollout.wire import MSGPACK
from starlette.routing import Route

KEY, CONTROL = {"Authorization": "Bearer k\N{LATIN SMALL LETTER E WITH ACUTE}y"}, {"Authorization": "bearer  c"}
ROUTES = [(m, r.path) for r in app.routes() if isinstance(r, APIRoute) for m in sorted(r.methods)]
NEEDS = RouteNeeds(app.routes())
OPEN = {"/", "/health", "/health/live", "/health/ready", "/version", "/ready", "/ping"}
SGLANG_CONTROL = {
    *("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache", "/release_memory_occupation"),
    *("/resume_memory_occupation", "/update_weight_version", "/post_process_weights"),
    *("/init_weights_update_group", "/destroy_weights_update_group", "/begin_weight_update", "/end_weight_update"),
    *("/update_weights_from_distributed", "/update_weights_from_tensor", "/update_weights_from_disk"),
    *("/weights_checker", "/get_weights_by_name", "/update_weights_from_ipc"),
    *("/areal_pause_generation", "/areal_continue_generation", "/areal_init_weights_update_group", "/areal_update_weights"),
    *("/areal_set_update_weight_meta", "/areal_update_weights_xccl"),
}
READS = {("GET", "/v1/engine/status"), ("GET", "/v1/engine/leases")}
VLLM_CONTROL = {
    "/pause", "/resume", "/abort_requests", "/inference/v1/abort_requests", "/sleep", "/wake_up", "/release_kv_cache_memory",
    "/reset_prefix_cache", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/weight_checker", "/collective_rpc", "/init_broadcaster",
}  # fmt: skip
OTHERS = [("GET", "/openapi.json"), ("GET", "/nowhere"), ("GET", "/docs"), ("OPTIONS", "/v1/rollouts"), ("POST", "/v1/rollouts/")]
DISGUISED = ["/v1/engine/%61bort", "/v1/engine/abort/", "/v1/engine/abort?x=/health", "/v1/engine/../engine/abort", "/v1/engine/abort%0A"]


@pytest.fixture(scope="module")
def locked(serving: Any) -> Iterator[httpx.Client]:
    key = KEY["Authorization"].removeprefix("Bearer ")
    with serving("--api-key", key, "--control-token", "c") as server, httpx.Client(base_url=server.url) as http:
        yield http


def ask(http: httpx.Client, method: str, path: str, headers: dict[str, str], accept: str = "application/json") -> httpx.Response:
    given = {k: v.encode() for k, v in headers.items()}
    return http.request(method, re.sub(r"\{[^}]*\}", "x", path), headers={"Accept": accept, **given})


def test_no_route_answers_without_its_key(locked: httpx.Client) -> None:
    assert {path for _, path in ROUTES} >= OPEN | {"/v1/rollouts", "/v1/engine/abort"}
    for method, path in [*ROUTES, *OTHERS]:
        controls = path in SGLANG_CONTROL | VLLM_CONTROL or path.startswith(("/v1/engine/", "/v1/weights/"))
        controls = controls and (method, path) not in READS
        for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic key"}, {"Authorization": "Bearer"}):
            refused = ask(locked, method, path, wrong).status_code == 401
            assert refused == (path not in OPEN), (method, path, wrong)
        assert (ask(locked, method, path, KEY).status_code == 401) == controls, (method, path)
        assert ask(locked, method, path, CONTROL).status_code not in (401, 403), (method, path)
    for path in DISGUISED:
        assert ask(locked, "POST", path, {}).status_code == 401, path
        assert ask(locked, "POST", path, KEY).status_code in (307, 401, 404), path


def test_a_route_must_declare_what_it_needs() -> None:
    """Also one of a later version, in another engine's dialect: there is no default that leaves it open."""
    router = APIRouter()
    router.post("/pause")(lambda: None)
    with pytest.raises(ValueError, match=r"'/pause'.* must declare"):
        RouteNeeds(router.routes)
    engine = EngineProcess(EngineConfig(model="fake"))
    served = app.create_app(engine, TextService(engine.config), Access(host="127.0.0.1"), "0")
    assert {r.path for r in served.routes if isinstance(r, Route | APIRoute)} <= NEEDS.paths, "each through a router of app.ROUTERS"
    router = APIRouter()
    router.post("/pause", openapi_extra=route("Control", "control"))(lambda: None)
    router.get("/{rest:path}", openapi_extra=route("Health", "open"))(lambda: None)
    needs = RouteNeeds(router.routes)
    asked = (("POST", "/pause"), ("POST", "/pause\n"), ("PUT", "/pause"), ("GET", "/pause"), ("GET", "/pauses"), ("GET", "nowhere"))
    assert [needs.of(*each) for each in asked] == ["control", "control", "control", "open", "open", "traffic"]


@pytest.mark.parametrize("path, status", [("/v1/rollouts", 503), ("/health", 200)])
def test_a_connection_over_the_limit_is_closed_even_when_the_crowd_has_gone(path: str, status: int) -> None:
    sent: list[Any] = []

    async def works(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    guard = Guard(works, Access(host="127.0.0.1"), Counter(), NEEDS)
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [(b"host", b"localhost")]}
    asyncio.run(guard({**scope, "state": {"over_limit": True, "crowded": False}}, receive, send))
    assert sent[0]["status"] == status and (b"connection", b"close") in sent[0]["headers"]


def test_refusals_have_the_shape_of_all_errors(locked: httpx.Client) -> None:
    for headers, status, code in (({}, 401, "unauthorized"), ({**KEY, "Host": "evil.example"}, 403, "forbidden")):
        for accept in ("application/json", MSGPACK):
            answer = ask(locked, "POST", "/v1/rollouts", headers, accept)
            told = msgpack.unpackb(answer.content) if accept == MSGPACK else answer.json()
            assert (answer.status_code, told["error"]["code"], answer.headers["content-type"]) == (status, code, accept)
            assert told.keys() == {"error"} and told["error"].keys() == {"code", "message"}
            assert ("www-authenticate" in answer.headers) == (status == 401)


HOSTS = {
    "localhost": True, "localhost:8000": True, "LOCALHOST:1": True, "localhost.": True, "127.0.0.1": True, "127.1.2.3:80": True,
    "[::1]": True, "[::1]:8000": True, "[::ffff:127.0.0.1]:8000": True, "[0:0:0:0:0:0:0:1]": True,
    "": False, "evil.example": False, "localhost.evil.example": False, "127.0.0.1.evil.example": False, "127.0.0.1.nip.io:8000": False,
    "evil.example:127": False, "0.0.0.0": False, "[::]": False, "192.168.0.1": False, "[fe80::1]": False, "127.1": False,
    "2130706433": False,
    "localhost:": False, "localhost:8000:1": False, "::1": False, "[::1": False, "a@localhost": False, "localhost/evil": False,
    "localhost evil": False, "localhost,evil.example": False, "xn--lcalhost-54a": False, "loc\xe0lhost": False, ".": False,
    "localhost..": False,
}  # fmt: skip


def test_host_and_origin_must_name_this_machine() -> None:
    def passes(**headers: str) -> bool:
        try:
            check(Access(host="127.0.0.1"), "open", headers)
        except Forbidden:
            return False
        return True

    for host, is_ours in HOSTS.items():
        assert passes(host=host) == is_ours, host
        for scheme in ("http", "https", "HTTP"):
            assert passes(host="localhost", origin=f"{scheme}://{host}") == is_ours, host
    for origin in ("null", "", "localhost", "file://", "file://localhost", "chrome-extension://localhost", "http:localhost", "http://"):
        assert not passes(host="localhost", origin=origin), origin
    assert not passes()


def test_a_call_without_host_is_refused(locked: httpx.Client) -> None:
    url = locked.base_url
    for version, status in (("1.0", b"403"), ("1.1", b"400")):
        with socket.create_connection((url.host, int(url.port or 0))) as raw:
            raw.sendall(f"GET /version HTTP/{version}\r\n\r\n".encode())
            assert raw.recv(1000).split()[1] == status
