"""The GPU ops' own tests. With TRITON_INTERPRET=1 kernels run in Python on CPU tensors (tests/gpu/test_gpu.py starts that); without it
they need a device and are marked `gpu`.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not INTERPRETED:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> str:
    torch.set_num_threads(1)
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if INTERPRETED and request.param == "bfloat16":
        pytest.skip("the interpreter computes bfloat16 wrongly")
    found: torch.dtype = getattr(torch, request.param)
    return found


def load(name: str) -> ModuleType:
    """A helper module of tests/kernels."""
    path = Path(__file__).parents[2] / "kernels" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"gpu_ops_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def data() -> ModuleType:
    """Inputs that show a change of summation order."""
    return load("data")


@pytest.fixture(scope="session")
def sampling() -> ModuleType:
    """Sampler rows of every kind."""
    return load("test_native_sampler")
