"""A tiny model, and a Ray of one's own. Needs verl, which has an environment of its own: `make test-adapters FRAMEWORKS=verl`."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a file here is left out."""
    return (collection_path.name.startswith("test_") and leave_out(config, Path(__file__).parent, "ray", "verl")) or None


def _install_entry_points(folder: Path) -> None:
    """What pip writes of pyproject's entry points, where a checkout is used without being installed."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"{declared['name']}-{declared['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: {declared['version']}\n")
    lines = [f"{name} = {value}" for name, value in declared["entry-points"][GROUP].items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    _add_path(folder)
    importlib.invalidate_caches()


def _add_path(folder: Path) -> None:
    """For this process and its children."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports verl, and for Ray's workers: Rollsync's entry point can be found, as after `pip install`."""
    for name, value in {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}.items():
        os.environ.setdefault(name, value)
    _add_path(Path(__file__).parent)  # verl_cases
    if not any(point.name == "rollsync" for point in importlib.metadata.entry_points(group=GROUP)):
        folder = tempfile.TemporaryDirectory(prefix="rs-site-")
        config.add_cleanup(folder.cleanup)
        _install_entry_points(Path(folder.name))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from rollsync.rollout.verl_command import write_tiny

    return write_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A Ray of these tests' own."""
    from rollsync.trainer_adapters.verl.check import own_ray

    with own_ray(num_cpus=7):
        yield


@pytest.fixture
def run() -> Callable[[Awaitable[Any]], Any]:
    """Run a coroutine to its end, at most two minutes."""

    async def within(work: Awaitable[Any]) -> Any:
        async with asyncio.timeout(120):
            return await work

    return lambda work: asyncio.run(within(work))
