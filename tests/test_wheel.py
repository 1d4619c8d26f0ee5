"""The wheel: complete, with its kernels, and good neighbours with Hugging Face's `kernels`."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KEPT = ("kernels", "rollout", "weight_sync", "trainer_adapters")
COMPILERS = ("c++", "g++", "clang++")


def run(*command: str | Path, **options: object) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONSAFEPATH": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, env=env, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def packages() -> list[str]:
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that nothing left over in the checkout gets in. Compiled builds are taken along."""
    source = tmp_path_factory.mktemp("source") / "rollsync"
    source.mkdir()
    for name in ("__init__.py", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source / name)
    for name in KEPT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = source / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "rollsync" / "kernels" / "native"
    built.mkdir(parents=True)
    for library in (source / "kernels" / "native").glob("*.so"):
        library.rename(built / library.name)  # newer than their sources, they are not compiled again
        (built / library.name).touch()
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
    (found,) = out.glob("rollsync-*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh environment: `kernels` copied in, then the wheel; all else comes from this one's site-packages."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for file in importlib.metadata.files("kernels") or ():
        if ".." not in file.parts:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(str(file.locate()), site / file)
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "rest.pth").write_text("\n".join(sorted(here)))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    return python


def test_every_module_is_listed() -> None:
    """A folder with code that `packages` leaves out would be missing after an install."""
    folders = {file.parent.relative_to(ROOT) for name in KEPT for file in (ROOT / name).rglob("*.py")}
    assert set(packages()) >= {".".join(("rollsync", *folder.parts)) for folder in folders}


def test_the_wheel_holds_all_of_ours_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    ours = {name for name in names if ".dist-info/" not in name}
    assert all(name.startswith("rollsync/") for name in ours)
    wanted = {f"rollsync/{file.relative_to(ROOT).as_posix()}" for name in KEPT for file in (ROOT / name).rglob("*.py")}
    assert wanted <= ours
    assert not [name for name in ours if name.split("/")[1] in ("tests", "benchmarks", "examples", "docs", "build", "setup.py")]
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_it_lives_beside_the_kernels_of_hugging_face(python: Path) -> None:
    code = "import kernels, rollsync, rollsync.kernels.spec; kernels.get_kernel; print(kernels.__file__, rollsync.__file__)"
    theirs, ours = map(Path, run(python, "-c", code, cwd=ROOT).split())
    site = python.parent.parent
    assert theirs.is_relative_to(site) and ours.is_relative_to(site)
    assert (theirs.parent.name, ours.parent.name) == ("kernels", "rollsync")


def test_the_compiled_kernels_load_and_run(python: Path) -> None:
    code = """
import torch
from rollsync.kernels import native_lib
print(*(b for b in native_lib.BUILDS if native_lib.library_path(b)))
for b in native_lib.available_builds():
    native_lib.load_build(b)
"""
    built = run(python, "-c", code).split()
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler here, so no kernels in the wheel")
    assert built == ["amx", "avx512", "avx2"]


def test_the_command_runs(python: Path) -> None:
    import rollsync

    assert run(python.parent / "rollsync", "version").strip() == f"rollsync {rollsync.__version__}"
