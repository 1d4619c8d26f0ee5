"""O1 and O6: OpenRLHF's modules import, its command line runs through the launcher, and Ray's workers have the engines too."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import ray
from openrlhf_helpers import STAND_INS

pytestmark = pytest.mark.adapters
MODULES = (
    "openrlhf.utils.agent", "openrlhf.utils.deepspeed", "openrlhf.models", "openrlhf.trainer.ray", "openrlhf.trainer.ray.ppo_actor",
    "openrlhf.trainer.ppo_utils.samples_generator", "openrlhf.trainer.ppo_trainer_async", "openrlhf.cli.train_ppo_ray",
)  # fmt: skip
LAUNCH = ("-m", "rollsync.trainer_adapters.openrlhf")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, timeout=120, env=env)


def test_the_command_line_is_openrlhfs_own() -> None:
    done = run(*LAUNCH, "--help")
    assert done.returncode == 0, done.stderr
    assert "--rollsync.partial_kv" in done.stdout and "--vllm.num_engines" in done.stdout


def test_all_of_its_modules_import() -> None:
    done = run(
        "-c",
        f"import importlib, sys; from rollsync.trainer_adapters.openrlhf import install; install(); "
        f"[importlib.import_module(name) for name in {MODULES}]; "
        f"import vllm, openrlhf.trainer.ray as r; print(r.create_vllm_engines.func.__module__, vllm.SamplingParams.__module__)",
    )
    assert done.stdout.split() == ["rollsync.trainer_adapters.openrlhf.engines", "rollsync.trainer_adapters.openrlhf.stub"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vllm.num_engines", "1", "--rollsync.dtyp", "float32"], "unknown engine option 'dtyp'"),
        (["--vllm.num_engines", "2", "--ds.lora.rank", "8"], "ds.lora.rank must be 0"),
    ],
)
def test_a_wrong_argument_ends_it_with_one_line(arguments: list[str], words: str) -> None:
    done = run(*LAUNCH, *arguments)
    assert done.returncode == 1 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_workers_have_the_engines_and_the_users_own_hook(cluster: Any) -> None:
    @ray.remote(num_cpus=0)
    def look() -> list[str | None]:
        import openrlhf.trainer.ray as their
        import vllm

        modules = [their.batch_vllm_engine_call.__module__, vllm.SamplingParams.__module__]
        return [*modules, os.environ.get("OWN_HOOK_RAN"), os.environ.get("OF_THE_JOB")]

    ours = "rollsync.trainer_adapters.openrlhf"
    assert ray.get(look.remote(), timeout=60) == [f"{ours}.engines", f"{ours}.stub", "yes", "1"]
    from vllm import SamplingParams

    sent = ray.get(ray.put(SamplingParams(temperature=0.5, stop=["a"])))
    assert (type(sent), sent.temperature, sent.stop) == (SamplingParams, 0.5, ["a"])


def test_openrlhfs_own_engine_asks_for_nothing_that_ours_lacks() -> None:
    from rollsync.trainer_adapters.openrlhf.contract import differences, find_openrlhf

    assert differences(find_openrlhf()) == []
