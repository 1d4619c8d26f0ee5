"""Who may steer the engine, over which listener, and what is written down of it."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollsync.rollout.cli import main
from rollsync.rollout.errors import ConfigError, Forbidden, Unauthorized
from rollsync.rollout.server.access import Access, check, network
from rollsync.rollout.server.audit import WAITING_LINES, AuditLog

KEY, TOKEN, LOCAL = {"authorization": "Bearer k"}, {"authorization": "Bearer t"}, {"host": "localhost"}
FAR = "10.1.2.3"
ALLOW = (network("10.0.0.0/8"), network("fd00::/8"))


def verdict(access: Access, needs: Any, headers: dict[str, str], on: Any = "traffic", peer: str = FAR) -> str:
    try:
        return check(access, needs, headers, on, peer)
    except (Forbidden, Unauthorized) as error:
        return str(error.status)


@pytest.mark.parametrize(
    "access, headers, on, peer, control, traffic",
    [
        (Access(host="0.0.0.0", api_key="k", control_token="t"), KEY, "traffic", FAR, "401", "key"),
        (Access(host="0.0.0.0", api_key="k", control_token="t"), TOKEN, "traffic", FAR, "token", "token"),
        (Access(host="0.0.0.0", api_key="k", control_token="t"), {}, "traffic", "127.0.0.1", "401", "401"),
        (Access(host="0.0.0.0", api_key="k", control_allow=ALLOW), {}, "traffic", FAR, "network", "network"),
        (Access(host="::", api_key="k", control_allow=ALLOW), {}, "traffic", "::ffff:10.1.2.3", "network", "network"),
        (Access(host="::", api_key="k", control_allow=ALLOW), {}, "traffic", "fd00::7%eth0", "network", "network"),
        (Access(host="0.0.0.0", api_key="k", control_allow=ALLOW), KEY, "traffic", "11.0.0.1", "403", "key"),
        (Access(host="0.0.0.0", control_allow=ALLOW), {"origin": "http://10.0.0.9"}, "traffic", FAR, "403", "open"),
        (Access(host="0.0.0.0", control_token="t", control_allow=ALLOW), {}, "traffic", "11.0.0.1", "401", "open"),
        (Access(host="0.0.0.0", api_key="k", control_host="127.0.0.1"), TOKEN | LOCAL, "traffic", FAR, "403", "401"),
        (Access(host="0.0.0.0", control_token="t", control_host="127.0.0.1"), TOKEN | LOCAL, "traffic", FAR, "403", "token"),
        (Access(host="0.0.0.0", control_host="127.0.0.1"), LOCAL, "control", "127.0.0.1", "open", "open"),
        (Access(host="0.0.0.0", api_key="k", control_host="127.0.0.1"), KEY | LOCAL, "control", "127.0.0.1", "key", "key"),
        (Access(host="0.0.0.0", control_host="127.0.0.1"), {"host": "evil.example"}, "control", "127.0.0.1", "403", "403"),
        (Access(host="127.0.0.1", control_host="0.0.0.0", control_token="t"), {"host": "far.example"}, "control", FAR, "401", "open"),
    ],
)
def test_control_opens_for_the_token_and_for_named_networks_alone(
    access: Access, headers: dict[str, str], on: Any, peer: str, control: str, traffic: str
) -> None:
    assert (verdict(access, "control", headers, on, peer), verdict(access, "traffic", headers, on, peer)) == (control, traffic)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--host", "0.0.0.0"], ["--host 0.0.0.0", "--control-token", "--control-allow", "--control-port"]),
        (["--host", "::"], ["--host ::", "--control-token"]),
        (["--host", "0.0.0.0", "--control-port", "0", "--control-host", "0.0.0.0"], ["--control-host 0.0.0.0", "--control-token"]),
        (["--control-host", "127.0.0.1"], ["--control-port"]),
        (["--control-port", "70000"], ["--control-port", "70000"]),
        (["--host", "0.0.0.0", "--control-allow", "10.1.2.3/8"], ["--control-allow", "10.1.2.3/8", "10.0.0.0/8"]),
        (["--control-allow", "10.0.0.0/33"], ["--control-allow", "10.0.0.0/33"]),
        (["--control-allow", "localhost"], ["--control-allow", "localhost"]),
        (["--control-allow", ""], ["--control-allow"]),
        (["--api-key", "same", "--control-token", "same"], ["--api-key", "--control-token", "differ"]),
        (["--control-token", "env:ROLLSYNC_NO_SUCH"], ["ROLLSYNC_NO_SUCH"]),
        (["--control-token", " t"], ["space"]),
    ],
)
def test_start_up_refuses_to_leave_control_open(flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "fake", "--port", "0", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and all(word in error for word in words), error


def test_a_network_of_mapped_addresses_is_the_ipv4_network() -> None:
    assert str(network("::ffff:10.0.0.0/104")) == "10.0.0.0/8"
    assert str(network(" 10.1.2.3 ")) == "10.1.2.3/32"
    with pytest.raises(ConfigError):
        network("10.0.0.0/8/8")


def lines_of(stderr: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stderr.splitlines() if line.startswith('{"audit"')]


def test_a_control_listener_of_its_own_takes_control_away_from_the_traffic(serving: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    flags = ("--api-key", "k3y", "--control-port", "0", "--control-token", f"@{tmp_path / 'token'}")
    key, token = ({"Authorization": f"Bearer {secret}"} for secret in ("k3y", "s3cret"))
    owner = 'me\n{"audit": "control", "owner": "forged"}\r\x1b[31m\u2028'
    with serving(*flags) as server:
        control = server.line.split("control on ")[1].split()[0]
        pause = {"owner": owner, "mode": "keep"}
        for headers in (key, token, {}):
            answer = httpx.post(f"{server.url}/v1/engine/pause", json=pause, headers=headers)
            assert answer.status_code == 403 and "--control-port" in answer.json()["error"]["message"]
        assert httpx.post(f"{control}/v1/engine/pause", json=pause, headers=key).status_code == 401
        assert httpx.post(f"{control}/v1/engine/pause", json=pause, headers=token).json()["changed"]
        assert httpx.post(f"{control}/v1/weights/updates/x%0Ay/commit", headers=token).status_code == 404
        assert httpx.get(f"{control}/v1/engine/status", headers=token).status_code == 200
        assert httpx.get(f"{server.url}/v1/engine/status", headers=key).status_code == 200
        stderr = server.ended()
    lines = lines_of(stderr)
    assert [line["status"] for line in lines] == [403, 403, 403, 401, 200, 404]
    assert lines[4]["owner"] == owner and lines[4]["by"] == "token" and lines[4]["route"] == "/v1/engine/pause"
    assert lines[5]["update"] == "x\ny" and lines[5]["route"].endswith("/commit")
    assert all(line["peer"].startswith("127.0.0.1:") and line["ms"] >= 0 and line["time"].endswith("+00:00") for line in lines)
    assert not any(word in stderr for word in ("s3cret", "k3y", "\x1b")) and len(lines) == stderr.count('{"audit"')


def test_a_network_without_token_is_said_loudly(serving: Any) -> None:
    try:
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True).close()
        host = "[::]"
    except OSError:
        host = "0.0.0.0"
    with serving("--host", host, "--control-allow", "127.0.0.0/8", "--control-allow", "fd00::/8") as server:
        url = f"http://127.0.0.1:{server.url.rsplit(':', 1)[1]}"
        assert httpx.post(f"{url}/v1/engine/pause", json={"owner": "o"}).json()["changed"]
        assert httpx.post(f"{url}/v1/engine/pause", headers={"Origin": url}).status_code == 403
        stderr = server.ended()
    assert stderr.count("WARNING: control routes are open WITHOUT A TOKEN to 127.0.0.0/8") == 1 and "fd00::/8" in stderr
    assert [line["by"] for line in lines_of(stderr)] == ["network", "refused"]


def test_a_reader_of_the_audit_log_that_stands_still_holds_up_nobody() -> None:
    stuck, written = threading.Event(), []

    def write(line: bytes) -> None:
        stuck.wait(10)
        written.append(json.loads(line))

    log = AuditLog(write)
    for i in range(WAITING_LINES + 10):
        log.add({"number": i})
    stuck.set()
    while len(written) < WAITING_LINES:
        stuck.wait(0.01)
    log.add({"owner": "x" * 1000, "status": None})
    log.close(5)
    assert written[-1]["dropped"] in (9, 10) and len(written[-1]["owner"]) < 200 and "status" not in written[-1]

