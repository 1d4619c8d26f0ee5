"""The numbers of live weights: on /metrics, in wandb, and what becomes of serving if wandb is broken."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollsync.rollout.cli import main
from rollsync.rollout.live_numbers import TokenLags, live_numbers
from rollsync.rollout.server import report, wandb_child
from rollsync.rollout.server.report import Reporter

MANIFEST = {"tensors": [{"name": "w", "dtype": "float32", "shape": [1]}]}


def numbers_of(page: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(rollsync_\S+) (\S+)$", page, re.M)}


def update(url: str, **body: Any) -> str:
    made = httpx.post(f"{url}/v1/weights/updates", json={"manifest": MANIFEST, **body}).json()["id"]
    headers = {"Content-Type": "application/octet-stream"}
    httpx.post(f"{url}/v1/weights/updates/{made}/chunks?sender=0&sequence=0", content=b"1234", headers=headers)
    return str(made)


def test_metrics_tell_what_updates_cost_and_how_they_ended(serving: Any, until: Any) -> None:
    with serving(factory="fake_live:build") as server:
        url = server.url
        httpx.post(f"{url}/v1/rollouts", json={"prompts": [{"token_ids": [1]}], "sampling_params": {"max_tokens": 40}})
        slow = update(url, owner="slow-switch", version=3)
        httpx.post(f"{url}/v1/weights/updates/{slow}/commit", timeout=20)
        httpx.post(f"{url}/v1/weights/updates/{update(url)}/abort")
        update(url, deadline_s=0.2)
        httpx.post(f"{url}/v1/engine/pause", json={"owner": "brief", "ttl_s": 0.2})
        found: dict[str, float] = {}

        def told() -> bool:
            found.update(numbers_of(httpx.get(f"{url}/metrics").text))
            return found["rollsync_leases_expired_total"] == 1 and found['rollsync_weight_updates_total{outcome="aborted_deadline"}'] == 1

        until(told, 5)
        httpx.post(f"{url}/v1/rollouts", json={"prompts": [{"token_ids": [1]}], "sampling_params": {"max_tokens": 40}})
        found = numbers_of(httpx.get(f"{url}/metrics").text)
    phases = ("transfer", "prepare", "commit", "total")
    seconds = {phase: found[f'rollsync_weight_update_seconds_total{{phase="{phase}"}}'] for phase in phases}
    assert seconds["commit"] >= 1.2 and seconds["total"] == pytest.approx(sum(seconds.values()) - seconds["total"])
    assert seconds["commit"] <= found["rollsync_weight_update_last_stall_seconds"] <= seconds["total"]
    assert found["rollsync_weight_update_bytes_total"] == 4 and found["rollsync_weight_version"] == 3
    outcomes = {name: found[f'rollsync_weight_updates_total{{outcome="{name}"}}'] for name in ("committed", "aborted_request")}
    assert outcomes == {"committed": 1, "aborted_request": 1}
    assert found["rollsync_paused_seconds_total"] >= 0.2 and 0 < found["rollsync_weight_age_seconds"] < 60
    lags = {lag: found[f'rollsync_finished_tokens_by_lag_total{{lag="{lag}"}}'] for lag in ("0", "1", "2", "3", "4-7", "8+")}
    assert sum(lags.values()) == 80  # versions 0, 1, 2 of the fake's spans, of 16, 16 and 8 tokens: first while 0 is served, then 3
    assert (lags["3"], lags["2"], lags["1"]) == (16, 16, 8) and found["rollsync_finished_token_lag_versions_total"] == 16 * 3 + 16 * 2 + 8


def test_both_outputs_have_the_same_numbers() -> None:
    lags = TokenLags()
    lags.count([{"version": 1, "start": 0, "end": 5}, {"version": 9, "start": 5, "end": 7}], 10)
    numbers = live_numbers({"weight_version": 10}, lags)
    assert {n.key: n.value for n in numbers if n.value} == {
        "rollsync/finished_tokens_by_lag/8+": 5, "rollsync/finished_tokens_by_lag/1": 2,
        "rollsync/finished_token_lag_versions": 47, "rollsync/weight_version": 10,
    }  # fmt: skip
    assert len({(n.metric, *n.labels.values()) for n in numbers}) == len({n.key for n in numbers}) == len(numbers)


@pytest.mark.parametrize("child", ["raise SystemExit(3)", "import time; time.sleep(60)"])
def test_a_child_that_ends_or_hangs_holds_up_nobody(child: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "CLOSE_S", 0.3)
    reporter = Reporter([sys.executable, "-c", child])
    reporter.start({})
    began = time.monotonic()
    for _ in range(report.WAITING_ROWS * 100):
        reporter.add(live_numbers({}, TokenLags()))
    reporter.close()
    assert time.monotonic() - began < 5 and reporter._process is not None and reporter._process.returncode


@pytest.mark.parametrize("broken", ["begin", "log"])
def test_a_broken_wandb_is_one_warning(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Run:
        def log(self, row: Any) -> None:
            raise RuntimeError("the disk is full")

    def begin(config: Any) -> Any:
        if broken == "begin":
            raise OSError("no network")
        return Run()

    assert wandb_child.log_rows(["{}", "{}", "{}"], begin) == 1
    assert capsys.readouterr().err.count("warning: nothing more is reported to wandb") == 1


def test_a_wandb_that_is_not_there_is_said_at_start(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert main(["serve", "fake", "--port", "0", "--report-to", "wandb"]) == 2 and "rollsync[wandb]" in capsys.readouterr().err
    assert main(["serve", "fake", "--port", "0", "--report-to", "tensorboard"]) == 2 and "tensorboard" in capsys.readouterr().err


def test_a_server_reports_to_wandb_offline(serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a stand-in for the package; its rows are those of /metrics."""
    (tmp_path / "wandb.py").write_text(
        "import json, os\n"
        "class Settings(dict):\n    pass\n"
        "class Run:\n"
        "    def log(self, row):\n        print(json.dumps(row), file=open(os.environ['ROWS'], 'a'), flush=True)\n"
        "    def finish(self):\n        self.log({'finished': 1})\n"
        "def init(**how):\n    Run().log({'config': how['config']})\n    return Run()\n"
    )
    rows = tmp_path / "rows"
    rows.touch()
    monkeypatch.setenv("ROWS", str(rows))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with serving("--report-to", "wandb", factory="fake_live:build") as server:
        made = update(server.url, version=7)
        httpx.post(f"{server.url}/v1/weights/updates/{made}/commit")
        end = time.monotonic() + 10
        while '"rollsync/weight_version": 7' not in rows.read_text() and time.monotonic() < end:
            time.sleep(0.05)
        page = numbers_of(httpx.get(f"{server.url}/metrics").text)
    told = [json.loads(line) for line in rows.read_text().splitlines()]
    assert told[0]["config"]["model"] == "fake" and told[-1] == {"finished": 1}
    last = told[-2]
    assert last["rollsync/weight_updates/committed"] == page['rollsync_weight_updates_total{outcome="committed"}'] == 1
    assert last["rollsync/weight_update_seconds/total"] == page['rollsync_weight_update_seconds_total{phase="total"}']
