"""verl finds the plugin by itself, in the driver and in Ray's workers; `rollsync verl-check` says so, or why not."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import ray
from rollsync.trainer_adapters.verl import check

pytestmark = pytest.mark.adapters


def checked(*arguments: str, **environment: str) -> tuple[int, str]:
    command = [sys.executable, "-W", "ignore", "-m", "rollsync.rollout.cli", "verl-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **environment})
    return done.returncode, done.stdout


def test_a_plugin_that_verl_did_not_load_is_explained() -> None:
    code, told = checked(VERL_USE_EXTERNAL_PLUGINS="none")
    assert code == 1 and "VERL_USE_EXTERNAL_PLUGINS=none keeps verl from loading it" in told


def test_driver_and_workers_have_it(cluster: None) -> None:
    assert check.registered().problems == ()
    (worker,) = check.in_workers(ray)
    assert worker.problems == () and worker.words != check.registered().words


def test_the_check_runs_a_replica_to_its_end(cluster: None) -> None:
    code, told = checked("--address", ray.get_runtime_context().gcs_address)
    assert code == 0, told
    assert "tensors arrived bit for bit" in told and told.count("ok  a Ray worker on") == 2


def test_what_verl_swallowed_is_told(monkeypatch: Any) -> None:
    import verl  # noqa: F401

    monkeypatch.setattr(sys.modules[check.PLUGIN], "problems", ["checkpoint_engine: ImportError: no gloo"])
    assert check.registered().problems == ("checkpoint_engine: ImportError: no gloo",)
    from verl.workers.rollout import base

    monkeypatch.delitem(base._ROLLOUT_REGISTRY, ("rollsync", "async"))
    assert "rollout=rollsync is not to be had" in check.registered().problems[1]
