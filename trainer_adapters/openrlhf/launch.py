"""The launcher: stock OpenRLHF, its command line and its trainer, with engines of Rollsync where those of vLLM were."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ...rollout.engine.config import make_config
from ...rollout.errors import BadRequest, RollsyncError

CLI = "openrlhf.cli.train_ppo_ray"
HOOK = "rollsync.trainer_adapters.openrlhf.install"
NEXT_HOOK = "ROLLSYNC_OPENRLHF_NEXT_HOOK"
"""environment variable with the worker_process_setup_hook of the user's own runtime_env, which ours calls"""
RAY_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
RAY_OVERRIDE = "RAY_OVERRIDE_JOB_RUNTIME_ENV"
STOCK_ENV = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
"""what OpenRLHF gives its workers, unless the environment says otherwise"""
PREFIX = "--rollsync."
PARTIAL_KV = ("keep", "recompute")
HELP = """Rollsync's own arguments, before OpenRLHF's:
  --rollsync.NAME VALUE   an option of the engine, e.g. dtype, threads, device, memory_bytes, apply (`rollsync serve --help` lists them)
  --rollsync.partial_kv   keep or recompute: the KV of samples in flight while weights change (--train.partial_rollout_enable); default keep
"""


class OtherOpenRLHF(ImportError):
    """One whose calls this adapter does not answer."""


def split_arguments(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(`--rollsync.NAME` by name, OpenRLHF's arguments).

    Raises:
        BadRequest, ConfigError: an option the engine has not, or one without a value.
    """
    own: dict[str, Any] = {}
    rest: list[str] = []
    left = list(argv)
    while left:
        word = left.pop(0)
        if not word.startswith(PREFIX):
            rest.append(word)
            continue
        name, equals, value = word.removeprefix(PREFIX).partition("=")
        if not equals:
            if not left or left[0].startswith("--"):
                raise BadRequest(f"{word} needs a value", field=word)
            value = left.pop(0)
        own[name] = _value(value)
    if (partial_kv := own.get("partial_kv", "keep")) not in PARTIAL_KV:
        raise BadRequest(f"rollsync.partial_kv must be {' or '.join(PARTIAL_KV)}, got {partial_kv!r}", field="rollsync.partial_kv")
    if own.get("tp", 1) != 1:
        raise BadRequest(f"rollsync.tp must be 1, got {own['tp']!r:.100}: raise vllm.num_engines instead", field="rollsync.tp")
    make_config("a model", {name: value for name, value in own.items() if name != "partial_kv"})
    return own, rest


def _value(text: str) -> Any:
    """A number, true, false or null as JSON has them; else the text."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, int | float) or found is None else text


def check_arguments(rest: Sequence[str]) -> None:
    """Refuse at once what would fail after the models are loaded.

    Raises:
        BadRequest: naming the argument of OpenRLHF.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, default in (
        ("vllm.num_engines", 0),
        ("vllm.tensor_parallel_size", 1),
        ("ds.lora.rank", 0),
        ("data.max_images_per_prompt", 0),
    ):
        parser.add_argument(f"--{name}", dest=name, default=default)
    parser.add_argument("--ds.param_dtype", dest="ds.param_dtype", default="bf16")
    try:
        given = vars(parser.parse_known_args(list(rest))[0])
    except argparse.ArgumentError:
        return  # OpenRLHF's own parser says it better
    engines, shards, rank, images = (
        _whole(given[name]) for name in ("vllm.num_engines", "vllm.tensor_parallel_size", "ds.lora.rank", "data.max_images_per_prompt")
    )
    rules = (
        ("vllm.num_engines", engines is None or engines > 0, "at least 1: without engines there is nothing to take the place of"),
        ("vllm.tensor_parallel_size", shards in (None, 1), "1: raise vllm.num_engines instead"),
        ("ds.lora.rank", rank in (None, 0), "0: OpenRLHF sends adapters unmerged, and no engine can take them so"),
        ("data.max_images_per_prompt", images in (None, 0), "0: text only"),
        ("ds.param_dtype", given["ds.param_dtype"] == "bf16", "bf16: engines compute in bfloat16 or float32"),
    )
    if bad := [f"{name} must be {allowed}; got {given[name]}" for name, good, allowed in rules if not good]:
        raise BadRequest("; ".join(bad), field=bad[0].partition(" ")[0])


def _whole(given: Any) -> int | None:
    """As OpenRLHF's own parser reads it; None is left for that to refuse."""
    try:
        return int(given)
    except ValueError:
        return None


def _job(environ: Mapping[str, str]) -> dict[str, Any]:
    """The runtime_env that `ray job submit` left for this job. BadRequest: it is none, and where it differs."""
    text = environ.get(RAY_JOB) or "{}"
    try:
        config = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"{RAY_JOB} must be a JSON object, got {text:.100}: {error}", field=RAY_JOB) from None
    job = (config.get("runtime_env") or {}) if isinstance(config, dict) else config
    env_vars = (job.get("env_vars") or {}) if isinstance(job, dict) else job
    for what, value in (("", config), (": runtime_env", job), (": runtime_env.env_vars", env_vars)):
        if not isinstance(value, dict):
            raise BadRequest(f"{RAY_JOB}{what} must be a JSON object, got {value!r:.100}", field=RAY_JOB)
    if wrong := [name for name, value in env_vars.items() if not isinstance(value, str)]:
        raise BadRequest(f"{RAY_JOB}: runtime_env.env_vars.{wrong[0]} must be text, got {env_vars[wrong[0]]!r:.100}", field=RAY_JOB)
    return {**job, "env_vars": env_vars}


def runtime_env(environ: Mapping[str, str]) -> dict[str, Any]:
    """What every worker gets: the user's own (of `ray job submit`), what OpenRLHF adds, and our hook, which calls the user's."""
    job = _job(environ)
    job_vars = dict(job["env_vars"])
    theirs = job_vars.pop(RAY_HOOK, None) or job.get("worker_process_setup_hook")
    env_vars = {name: environ.get(name, default) for name, default in STOCK_ENV.items()} | job_vars | {RAY_HOOK: HOOK}
    if theirs and theirs != HOOK:
        if not isinstance(theirs, str) or "::" in theirs or "." not in theirs:
            raise BadRequest(
                f"worker_process_setup_hook must be a name like package.function, got {theirs!r}", field="worker_process_setup_hook"
            )
        env_vars[NEXT_HOOK] = theirs
    return {**job, "env_vars": env_vars, "worker_process_setup_hook": HOOK}


def main(argv: Sequence[str] | None = None) -> None:
    """Run OpenRLHF's command line. What is wrong with the arguments ends it with one line, most of it before Ray is started."""
    argv = sys.argv[1:] if argv is None else list(argv)
    wants_help = "-h" in argv or "--help" in argv
    try:
        own, rest = split_arguments(argv)
        if not wants_help:
            check_arguments(rest)
        _prepare(own)
        if wants_help:
            print(HELP)
        else:
            _start_ray()
        sys.argv = [CLI, *rest]
        runpy.run_module(CLI, run_name="__main__", alter_sys=True)
    except (RollsyncError, ModuleNotFoundError, OtherOpenRLHF) as error:
        sys.exit(f"rollsync.trainer_adapters.openrlhf: error: {error}")


def _prepare(own: Mapping[str, Any]) -> None:
    """Put the engines in their place, in this process."""
    from . import install
    from .contract import MADE_FOR, differences, find_openrlhf

    if found := differences(find_openrlhf()):
        raise OtherOpenRLHF(f"this OpenRLHF calls engines in other ways than {MADE_FOR}, for which this is made: {'; '.join(found)}")
    install(own)


def _start_ray() -> None:
    import ray

    if ray.is_initialized():
        raise BadRequest("Ray is initialised already, without the hook that workers need: let the launcher do it", field="ray")
    env = runtime_env(os.environ)
    if os.environ.get(RAY_JOB):
        os.environ[RAY_OVERRIDE] = "1"  # `env` holds all of the job's
    ray.init(runtime_env=env)
