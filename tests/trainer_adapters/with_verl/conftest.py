"""A tiny model, and a Ray of one's own. Needs verl, which has an environment of its own: `make test-adapters FRAMEWORKS=verl`."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from frameworks import leave_out

ROOT = Path(__file__).resolve().parents[3]
GROUP = "verl.plugins"
if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a file here is left out."""
    return (collection_path.name.startswith("test_") and leave_out(config, Path(__file__).parent, "ray", "verl")) or None


def _install_entry_points(folder: Path) -> None:
    """What pip writes of pyproject's entry points, where a checkout is used without being installed; for this process and its children."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"{declared['name']}-{declared['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: {declared['version']}\n")
    lines = [f"{name} = {value}" for name, value in declared["entry-points"][GROUP].items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))
    sys.path.append(str(folder))
    importlib.invalidate_caches()


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports verl, and for Ray's workers."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray keeps a token in the home folder


@pytest.fixture(scope="session", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rollsync's entry point can be found, as after `pip install`."""
    if not any(point.name == "rollsync" for point in importlib.metadata.entry_points(group=GROUP)):
        _install_entry_points(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from rollsync.rollout.verl_command import write_tiny

    return write_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(plugin: None) -> Iterator[None]:
    """A Ray of this module's own, whose GPUs are only counted: verl asks for one per worker, also where there is none."""
    import ray

    with tempfile.TemporaryDirectory(prefix="rs-ray-") as folder:  # sockets below it: the path must be short
        limits = {"num_cpus": 8, "num_gpus": 4, "object_store_memory": 100 << 20}
        ray.init(address="local", include_dashboard=False, log_to_driver=False, _temp_dir=folder, configure_logging=False, **limits)
        yield
        ray.shutdown()


@pytest.fixture
def run() -> Callable[[Awaitable[Any]], Any]:
    """Run a coroutine to its end, at most two minutes."""

    async def within(work: Awaitable[Any]) -> Any:
        async with asyncio.timeout(120):
            return await work

    return lambda work: asyncio.run(within(work))


def read_json(path: str) -> Any:
    return json.loads(Path(path).read_text())
