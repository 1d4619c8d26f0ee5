"""What happens to processes: start-up, signals, and either side killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollsync import RolloutClient
from rollsync.rollout.cli import main
from rollsync.rollout.errors import BadRequest, EngineDead, ServerUnreachable, ShuttingDown
from rollsync.rollout.server.snapshot import Snapshot, liveness

FOREVER = {"max_tokens": 4000}
Until = Callable[..., None]
Alive = Callable[[int], bool]


def waiters(server: Any, until: Until, count: int = 3) -> tuple[list[threading.Thread], list[Any]]:
    """Calls that would take long: whole ones and a stream."""
    got: list[Any] = []

    def run(stream: bool) -> None:
        with RolloutClient(server.url) as client:
            call: Any = (lambda *a, **kw: list(client.stream(*a, **kw))) if stream else client.rollouts
            try:
                got.append(call([[1]], sampling_params=FOREVER))
            except Exception as error:
                got.append(error)

    threads = [threading.Thread(target=run, args=(i == 0,)) for i in range(count)]
    for thread in threads:
        thread.start()
    until(lambda: server.running() == count)
    return threads, got


def check_front(server: Any) -> None:
    """The announcement says all, and the front is light."""
    assert server.line.startswith("Rollsync ") and server.line.count("\n") == 1
    for part in ("listening on http://127.0.0.1:", "model fake", "bfloat16", "KV 2,048 tokens (1.0 MiB)", "kernels none, 1 threads"):
        assert part in server.line
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps and "/torch/" not in maps
    status = httpx.get(f"{server.url}/v1/engine/status").json()
    assert status["state"] == "running" and status["memory_bytes"]["front"]["anonymous"] < 100 << 20


def test_killed_engine_is_told_to_every_waiter(serving: Any, until: Until) -> None:
    with serving() as server:
        threads, got = waiters(server, until)
        os.kill(server.engine_pid, signal.SIGKILL)
        for thread in threads:
            thread.join(2.0)
        assert len(got) == 3 and all(isinstance(e, EngineDead) and "SIGKILL" in str(e) for e in got), got
        live = httpx.get(f"{server.url}/health/live")
        assert live.status_code == 503 and "SIGKILL" in live.json()["reason"]
        assert httpx.get(f"{server.url}/health/ready").status_code == 503
        refused = httpx.post(f"{server.url}/v1/rollouts", json={"prompts": [{"token_ids": [1]}]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")


def test_a_step_that_raises_is_told_with_its_words(serving: Any, until: Until, alive: Alive) -> None:
    with serving() as server:
        threads, got = waiters(server, until)
        pid = server.engine_pid
        with RolloutClient(server.url) as client, pytest.raises(EngineDead, match="the fake step broke"):
            client.rollouts([[99]])
        for thread in threads:
            thread.join(2.0)
        assert all(isinstance(e, EngineDead) for e in got) and len(got) == 3
        until(lambda: not alive(pid), 20)


def test_a_killed_front_leaves_nothing(
    serving: Any, until: Until, alive: Alive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving() as server:
        threads, got = waiters(server, until, 2)
        pid = server.engine_pid
        until(lambda: not [name for name in os.listdir(tmp_path) if name.startswith("rollsync-")])
        os.kill(server.process.pid, signal.SIGKILL)
        until(lambda: not alive(pid), 20)
        for thread in threads:
            thread.join(2.0)
        assert all(isinstance(e, ServerUnreachable) for e in got)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything(serving: Any, until: Until, alive: Alive, signum: int, code: int) -> None:
    with serving() as server:
        check_front(server)
        threads, got = waiters(server, until)
        pid, port = server.engine_pid, int(server.url.rsplit(":", 1)[1])
        server.process.send_signal(signum)
        assert server.process.wait(8) == code
        for thread in threads:
            thread.join(2.0)
        assert len(got) == 3 and all(isinstance(e, ShuttingDown) for e in got), got
        assert not alive(pid)
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_ctrl_c_while_it_loads(spawn: Any, until: Until, alive: Alive, tokenizer_folder: Path) -> None:
    port = free_port()
    process: subprocess.Popen[str] = spawn("--port", str(port), "--tokenizer", str(tokenizer_folder), model="fake-slow-load")
    try:
        with RolloutClient(f"http://127.0.0.1:{port}") as client:
            until(lambda: not isinstance(why := client._not_ready(5.0), str) or "loading" in why)
            health = client.health()
            assert (health["live"], health["ready"], health["progress"]) == (True, False, 0.5)
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/rollouts", json={"prompts": [{"token_ids": [1]}]})
            assert (answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]) == (503, "not_ready", "1")
            refuse = {"prompts": [{"token_ids": [1]}], "on_unavailable": "refuse"}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/rollouts", json=refuse)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "illegal_state")
            assert client.version()["fingerprint"] == "" and client.detokenize([[64, 65]])
            with pytest.raises(BadRequest, match=r"in \[0, 256\), got 256"):
                client.detokenize([[256]])
            pid = client.status()["engine_pid"]
            process.send_signal(signal.SIGINT)
            assert process.wait(8) == 130
            assert not alive(pid)
    finally:
        process.kill()
        process.communicate()


def processes_naming(text: str, alive: Alive) -> list[int]:
    """Whose command line holds `text`: an engine's names its socket folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if text.encode() in (entry / "cmdline").read_bytes() and alive(int(entry.name)):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


CODES = {signal.SIGTERM: {143, -15}, signal.SIGHUP: {129, -1}, signal.SIGINT: {130, -2, 1}, signal.SIGKILL: {-9}}
"""of a start that is interrupted: 128 + signal, or, before our code runs, what Python makes of the signal"""


@pytest.mark.parametrize(
    ("signum", "has_child", "moment_s"),
    [
        (signal.SIGTERM, False, 0.0),
        (signal.SIGHUP, False, 0.3),
        (signal.SIGTERM, True, 0.0),
        (signal.SIGINT, True, 0.05),
        (signal.SIGKILL, True, 0.0),
        (signal.SIGKILL, True, 0.2),
        *(pytest.param(s, child, 0.04 * k, marks=pytest.mark.slow) for s in CODES for child in (False, True) for k in range(10)),
    ],
)
def test_an_end_at_any_moment_of_the_start_leaves_nothing(
    spawn: Any, until: Until, alive: Alive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int, has_child: bool, moment_s: float
) -> None:
    """Counted from the start, or from that of the engine process, when the socket folder is about to be made."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process: subprocess.Popen[str] = spawn(model="fake-slow-load")
    until(lambda: not has_child or process.poll() is not None or processes_naming(str(tmp_path), alive), 60.0)
    time.sleep(moment_s)
    process.send_signal(signum)
    out, err = process.communicate(timeout=20)
    assert process.returncode in CODES[signum] and out == "", (process.returncode, out, err)
    assert process.returncode in (-2, 1) or "Traceback" not in err, err
    until(lambda: not processes_naming(str(tmp_path), alive) and not os.listdir(tmp_path), 20)


def test_ctrl_c_in_a_terminal_reaches_the_front_alone(serving: Any, until: Until, alive: Alive) -> None:
    with serving(new_session=True) as server:
        threads, got = waiters(server, until)
        pid = server.engine_pid
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(8) == 130 and not alive(pid)
        for thread in threads:
            thread.join(2.0)
        assert len(got) == 3 and all(isinstance(e, EngineDead | ServerUnreachable) for e in got), got


def test_a_load_that_fails_is_one_line_and_not_zero(spawn: Any) -> None:
    models = {"fake-fail-load": "error: config.json: architecture Fake is not supported", "fake-crash-load": "no such luck"}
    for process, text in [(spawn(model=model), text) for model, text in models.items()]:
        out, err = process.communicate(timeout=20)
        assert process.returncode == 1 and out == "" and text in err.splitlines()[-1], err


def test_start_up_mistakes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flags, text in (
            (("--port", port), f"port {port} on 127.0.0.1 is in use"),
            (("--host", "0.0.0.0"), "--control-token"),
            (("--block-tokens", "12"), "cache.block_tokens must be a power of two"),
            (("--api-key", "@/nowhere"), "cannot read the secret"),
        ):
            assert main(["serve", "fake", *flags]) == 2
            err = capsys.readouterr().err
            assert err.startswith("error: ") and text in err and err.count("\n") == 1, err


def test_a_frozen_or_stuck_engine_is_not_live() -> None:
    fresh = Snapshot(phase="step", phase_age_s=3.0, beat_at=100.0)
    assert liveness(fresh, None, now=104.0) is None
    assert "no heartbeat" in str(liveness(fresh, None, now=106.0))
    assert "in one step for 500 s" in str(liveness(Snapshot(phase="step", phase_age_s=500.0, beat_at=100.0), None, now=100.0))
    assert liveness(Snapshot(phase="idle", phase_age_s=500.0, beat_at=100.0), None, now=100.0) is None
    assert liveness(fresh, "gone", now=100.0) == "gone"


def test_keys_hosts_and_sizes(serving: Any) -> None:
    content = {"prompts": [{"token_ids": [1]}], "sampling_params": {"max_tokens": 1}}
    with serving("--api-key", "k", "--control-token", "c", "--max-body-bytes", "1000") as server:
        key, control = {"Authorization": "Bearer k"}, {"Authorization": "Bearer c"}
        with httpx.Client(base_url=server.url) as http:
            assert [http.get(path).status_code for path in ("/health", "/version", "/v1/engine/status", "/metrics")] == [200, 200, 401, 401]
            assert [http.post("/v1/rollouts", json=content, headers=h).status_code for h in ({}, key, control)] == [401, 200, 200]
            assert [http.post("/v1/engine/abort", json={"all": True}, headers=h).status_code for h in ({}, key, control)] == [401, 401, 200]
            assert http.get("/version", headers={"Host": "evil.example"}).status_code == 403
            assert http.get("/version", headers={"Origin": "http://evil.example"}).status_code == 403
            assert http.get("/version", headers={"Origin": "http://["}).status_code == 403
            assert http.get("/version", headers={"Origin": "http://localhost:3000"}).status_code == 200
            big = http.post("/v1/rollouts", content=b" " * 1001, headers=key)
            assert (big.status_code, big.json()["error"]["code"]) == (413, "body_too_large")
            chunked = http.post("/v1/rollouts", content=iter([b" " * 600] * 2), headers=key)
            assert chunked.status_code == 413
            assert (http.get("/nowhere", headers=key).status_code, http.get("/v1/rollouts", headers=key).status_code) == (404, 405)
        with RolloutClient(server.url, api_key="k") as client:
            assert client.rollouts([[1]], sampling_params={"max_tokens": 1}).usage["samples"] == 1


IN_PROCESS = """
import asyncio, sys
sys.path.append(sys.argv[2])
from fake_engine import build
from rollsync import EngineConfig, RolloutRequest, SamplingParams
from rollsync.rollout.engine.async_engine import AsyncEngine
from scheduled_engine import build as build_scheduled
LONG = RolloutRequest(request_id="r", prompt_token_ids=(1,), params=SamplingParams(max_tokens=4000, ignore_eos=True))

async def main(how):
    engine = AsyncEngine(lambda: {build}(EngineConfig(model="fake"), lambda *_: None))
    await engine.wait_ready()
    work = asyncio.create_task(engine.generate(LONG))
    await asyncio.sleep(0.1)
    assert engine.heartbeat.steps and not work.done()
    print("working", flush=True)
    if how == "raise":
        raise SystemExit(7)
    if how == "wait":
        await work

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("build", ["build", "build_scheduled"])
def test_an_interpreter_ends_with_work_in_flight(build: str) -> None:
    """By returning, by SystemExit, by Ctrl-C: no hang, and the status it would have without us."""
    for how, code in (("return", 0), ("raise", 7), ("wait", -signal.SIGINT)):
        command = [sys.executable, "-c", IN_PROCESS.replace("{build}", build), how, str(Path(__file__).parent)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None and process.stdout.readline() == "working\n"
            if how == "wait":
                process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=10)
            assert process.returncode == code, (how, err)
        finally:
            process.kill()
