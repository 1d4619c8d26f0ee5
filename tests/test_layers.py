"""Who may import whom, over every import statement: also those inside functions, and in folders that import-linter does not see."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "weight_sync", "rollout", "trainer_adapters")
TOP = (
    "rollout/cli.py", "rollout/replay_command.py", "rollout/parity_command.py", "rollout/parity_server.py", "rollout/parity_trainer.py",
    "rollout/verl_command.py", "rollout/selftest",
)  # fmt: skip
"""may import any layer, and are imported by none"""
LEAVES = (
    "rollout/errors.py", "rollout/fields.py", "rollout/wire.py", "rollout/metrics.py", "rollout/live_numbers.py", "kernels/sampling_mask.py"
)  # fmt: skip
"""shared by all of rollout and the adapters; import only each other"""
LAYERS = (
    ("trainer_adapters", "rollout/server"),
    ("rollout/fleet.py", "rollout/pieces.py", "rollout/client.py", "rollout/verbs.py", "rollout/transport.py", "rollout/results.py"),
    ("rollout/replay.py",),
    ("rollout/trace.py",),
    ("rollout/engine",),
    ("rollout/models",),
    ("weight_sync", "kernels"),
)
"""each may import itself and what stands below it, not its neighbour"""
TOGETHER = {"rollout/fleet.py", "rollout/pieces.py", "rollout/client.py", "rollout/verbs.py", "rollout/transport.py", "rollout/results.py"}
ONLY_IN = {
    "fastapi": ("rollout/server",),
    "starlette": ("rollout/server",),
    "pydantic": ("rollout/server",),
    "uvicorn": ("rollout/server",),
    "triton": ("kernels",),
    "trl": ("trainer_adapters",),
    "verl": ("trainer_adapters",),
    "openrlhf": ("trainer_adapters",),
    "ray": ("trainer_adapters",),
    "wandb": ("rollout/server/wandb_child.py",),
    "asyncio": ("rollout/server", "rollout/client.py", "rollout/fleet.py", "rollout/engine/async_engine.py", "trainer_adapters"),
}


def sources() -> list[Path]:
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def imports(file: Path, root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """(line, what) of every import: a path below the root ("rollout/engine/types") for ours, else the distribution's name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                yield node.lineno, "/".join(parts[1:]) if parts[0] == "rollsync" else parts[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            parts = node.module.split(".")
            for alias in node.names:
                yield node.lineno, "/".join([*parts[1:], alias.name]) if parts[0] == "rollsync" else parts[0]
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1].relative_to(root)
            for alias in node.names:
                yield node.lineno, "/".join([*base.parts, *(node.module or "").split("."), alias.name]).replace("//", "/")


def within(what: str, place: str) -> bool:
    place = place.removesuffix(".py")
    return what == place or what.startswith(place + "/")


def layer(what: str) -> tuple[int, str] | None:
    """(depth, name) of the layer that `what` belongs to."""
    return next(((depth, name) for depth, names in enumerate(LAYERS) for name in names if within(what, name)), None)


def objection(importer: str, what: str) -> str | None:
    """Why `importer` (a path) may not import `what`, or None."""
    distribution = what.split("/")[0]
    if distribution in ONLY_IN:
        allowed = ONLY_IN[distribution]
        return None if any(within(importer, place) for place in allowed) else f"{distribution} only in {', '.join(allowed)}"
    if distribution not in FOLDERS:
        return None
    if any(within(importer, place) for place in TOP):
        return None
    if any(within(what, place) for place in TOP):
        return "nothing imports the command line or the self-test"
    if any(within(importer, place) for place in LEAVES):
        return None if any(within(what, place) for place in LEAVES) else "a shared leaf imports only leaves"
    mine, theirs = layer(importer), layer(what)
    if theirs is None:
        is_leaf = any(within(what, place) for place in LEAVES)
        above = any(within(importer, place) for place in ("rollout", "trainer_adapters"))
        return None if is_leaf and distribution == "rollout" and above else "not a layer one may import"
    if mine is None:
        return "this file belongs to no layer: add it to LAYERS"
    if mine[1] == theirs[1] or {mine[1], theirs[1]} <= TOGETHER:
        return None
    return None if mine[0] < theirs[0] else f"{mine[1]} stands below or beside {theirs[1]}"


def broken() -> list[str]:
    found = []
    for file in sources():
        importer = file.relative_to(ROOT).with_suffix("").as_posix()
        for line, what in imports(file):
            reason = objection(importer, what)
            if reason is not None:
                found.append(f"{importer}.py:{line} imports {what}: {reason}")
    return found


def test_no_import_leaves_its_layer() -> None:
    assert not broken()


@pytest.mark.parametrize(
    ("importer", "what", "allowed"),
    [
        ("kernels/program", "rollout/errors", False),
        ("kernels/program", "weight_sync/manifest", False),
        ("kernels/program", "triton", True),
        ("weight_sync/sender", "rollout/client", False),
        ("rollout/models/loader", "kernels/weights", True),
        ("rollout/models/loader", "rollout/engine/types", False),
        ("rollout/models/loader", "rollout/errors", True),
        ("rollout/engine/engine", "asyncio", False),
        ("rollout/engine/async_engine", "asyncio", True),
        ("rollout/engine/engine", "triton", False),
        ("rollout/engine/process", "fastapi", False),
        ("rollout/client", "rollout/engine/types", True),
        ("rollout/client", "rollout/server/app", False),
        ("rollout/server/app", "fastapi", True),
        ("rollout/server/app", "trainer_adapters/trl", False),
        ("rollout/wire", "rollout/engine/types", False),
        ("rollout/wire", "kernels/sampling_mask", True),
        ("rollout/wire", "kernels/step", False),
        ("rollout/engine/engine", "rollout/cli", False),
        ("rollout/cli", "rollout/server/launcher", True),
        ("trainer_adapters/trl", "rollout/client", True),
    ],
)
def test_the_rules(importer: str, what: str, allowed: bool) -> None:
    assert (objection(importer, what) is None) == allowed


def test_imports_are_read_wherever_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "rollout" / "engine" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "from ..errors import A\nfrom . import types\nimport rollsync.kernels.kv\ndef f():\n from ...kernels import kv\n import zmq.z\n"
    )
    found = {what for _, what in imports(file, tmp_path)}
    assert found == {"rollout/errors/A", "rollout/engine/types", "kernels/kv", "zmq"}


def test_kernels_is_no_package_of_its_own() -> None:
    """Then a checkout on sys.path never shadows the distribution `kernels` of Hugging Face."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_the_front_and_the_client_import_no_torch() -> None:
    code = "import sys, rollsync.rollout.server.launcher, rollsync.rollout.client; print(*{'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
