"""What `rollsync verl-check` looks at. verl hides a plugin's errors, and a job then says no more than that it knows no rollsync."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import NAME

GROUP = "verl.plugins"
PLUGIN = f"{__package__}.plugin"
PACKAGES: dict[str, tuple[str, str | None]] = {
    "verl": ("0.9.1", "0.10"),
    "ray": ("2.41", None),
    "transformers": ("5.5.3", "5.11"),
    "torch": ("2.6", None),
    "uvicorn": ("0.30", None),
    "fastapi": ("0.115", None),
    "cachetools": ("0", None),
}
"""at least, below; the last three are of verl's extra `verl-core`, which `pip install verl` leaves out and `import verl.workers` needs"""
WORKER_S = 240.0
REACH_S = 60.0
"""how long a running cluster may take to let a process in"""
INSTALL = "pip install 'rollsync[verl]'"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    words: str
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def packages() -> Finding:
    """Whether what verl needs is there, in versions that fit."""
    found, problems = [], []
    for name, (low, high) in PACKAGES.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{name} is not installed: {INSTALL}")
            continue
        found.append(f"{name} {version}")
        if _release(version) < _release(low) or (high is not None and _release(version) >= _release(high)):
            fits = f"{low} or newer" + (f", below {high}" if high else "")
            problems.append(f"{name} {version} does not fit, {fits} does: {INSTALL}")
    return Finding("packages", ", ".join(found), tuple(problems))


def _release(version: str) -> tuple[int, ...]:
    """(5, 10, 4) of "5.10.4.dev0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def registered() -> Finding:
    """Whether verl, imported in this process, has the plugin."""
    where = f"process {os.getpid()}"
    try:
        importlib.import_module("verl")
    except Exception as error:
        return Finding("plugin", where, (f"import verl fails: {type(error).__name__}: {error}",))
    return Finding("plugin", where, tuple(_lacking() if PLUGIN in sys.modules else [_why_not()]))


def _why_not() -> str:
    """Why verl did not load the plugin, with what it swallowed."""
    points = [p for p in importlib.metadata.entry_points(group=GROUP) if p.value == PLUGIN]
    if not points:
        words = f"no installed package brings {PLUGIN} in the entry point group {GROUP}: install Rollsync there (a checkout on PYTHONPATH"
        return f"{words} does not count), or set VERL_USE_EXTERNAL_MODULES={PLUGIN}"
    policy, name = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip(), points[0].name
    if policy.lower() != "auto" and name not in (part.strip() for part in policy.split(",")):
        return f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading it: add {name}, or leave that variable out"
    try:
        points[0].load()
    except Exception as error:
        return f"it does not load: {type(error).__name__}: {error}"
    return "it loads now, but did not when verl was imported: was verl imported before Rollsync was installed?"


def _lacking() -> list[str]:
    """Names of ours that verl does not know, though the plugin was loaded."""
    problems = list(sys.modules[PLUGIN].problems)
    looks: dict[str, Callable[[], Any]] = {
        "rollout.name": lambda: importlib.import_module("verl.workers.rollout.replica").RolloutReplicaRegistry.get(NAME),
        "rollout": lambda: importlib.import_module("verl.workers.rollout.base").get_rollout_class(NAME, "async"),
        "checkpoint_engine.backend": lambda: importlib.import_module("verl.checkpoint_engine").CheckpointEngineRegistry.get(NAME),
    }
    for setting, look in looks.items():
        try:
            look()
        except Exception as error:
            problems.append(f"{setting}={NAME} is not to be had: {type(error).__name__}: {error}")
    return problems


@contextmanager
def own_ray(num_cpus: int = 4, num_gpus: int = 2) -> Iterator[Any]:
    """A Ray on this machine that ends with the block. Where there is no GPU it only counts some: verl asks for one per worker.

    Args:
        num_cpus: as Ray counts them. It starts as many processes at once, so no more than needed.
    """
    import ray
    import torch

    gpus = torch.cuda.device_count()
    hidden = None if gpus else os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray counts no more than are named there
    with tempfile.TemporaryDirectory(prefix="rs-ray-") as folder:  # sockets lie below it: the path must be short
        quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        ray.init(address="local", num_cpus=num_cpus, num_gpus=gpus or num_gpus, object_store_memory=100 << 20, _temp_dir=folder, **quiet)
        try:
            yield ray
        finally:
            ray.shutdown()
            if hidden is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = hidden


def reached(address: str) -> Finding:
    """Whether a process gets into the Ray cluster at `address`: tried in one of its own, since `ray.init` waits for minutes."""
    what = f"the Ray cluster at {address}"
    if place := re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d{1,5})", address):
        try:
            socket.create_connection((place[1], int(place[2])), timeout=min(REACH_S, 10.0)).close()
        except (OSError, OverflowError) as error:
            return Finding(what, "", (f"nobody answers there: {error}",))
    script = (
        "import sys; from rollsync.rollout.engine.lifeline import killed_with_parent; killed_with_parent(int(sys.argv[2])); import ray; "
        "ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False); ray.shutdown()"
    )
    try:
        tried = subprocess.run([sys.executable, "-c", script, address, str(os.getpid())], capture_output=True, text=True, timeout=REACH_S)
    except subprocess.TimeoutExpired:
        return Finding(what, "", (f"it let no process in within {REACH_S:g} s",))
    if tried.returncode == 0:
        return Finding(what, "it answers")
    return Finding(what, "", ((tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1],))


def in_workers(ray: Any) -> list[Finding]:
    """`registered`, as a worker on every node of a Ray cluster has it."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(_look)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    asked = [look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(n["NodeID"], soft=False)).remote() for n in nodes]
    found = []
    for node, reference in zip(nodes, asked, strict=True):
        what = f"a Ray worker on {node['NodeManagerAddress']}"
        try:
            words, problems = ray.get(reference, timeout=WORKER_S)
        except Exception as error:  # one that cannot import Rollsync cannot run this either
            words, problems = "", [f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"]
        found.append(Finding(what, words, tuple(problems)))
    return found


def _look() -> tuple[str, list[str]]:
    found = registered()
    return found.words, list(found.problems)


def run(model: str, address: str | None = None) -> Iterator[Finding]:
    """Everything, one after another, up to the first that has problems.

    Args:
        model: folder of a small model with a tokenizer, for a replica that generates and takes an update.
        address: of a running Ray cluster, whose nodes are looked at as well.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for look in (packages, registered):
        found = look()
        yield found
        if not found.ok:
            return
    if address is not None:
        found = reached(address)
        yield found
        if not found.ok:
            return
        import ray

        ray.init(address=address, log_to_driver=False, configure_logging=False)
        try:
            nodes = in_workers(ray)
        finally:
            ray.shutdown()
        yield from nodes
        if not all(found.ok for found in nodes):
            return
    with own_ray() as ray:
        workers = in_workers(ray)
        yield from workers
        if all(found.ok for found in workers):
            from .trial import trial

            yield trial(model)
