"""The modules of this folder that tests share; a folder of tests is no package, so they are loaded by path."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kernel_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def data() -> ModuleType:
    """Makers of test inputs."""
    return _load("data")


@pytest.fixture(scope="session")
def literal() -> ModuleType:
    """The specification, one scalar after another."""
    return _load("literal")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
