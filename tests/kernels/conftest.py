"""The modules of this folder that tests share; a folder of tests is no package, so they are loaded by path."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rollsync.kernels.native_lib import BUILDS, available_builds, load_build
from rollsync.kernels.native_ops import NativeOps
from torch import Tensor


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


@pytest.fixture(scope="session", params=BUILDS)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    """The ops of every native build in turn, on one thread."""
    if request.param not in available_builds():
        pytest.skip(f"the {request.param} kernels are not compiled, or this CPU lacks their instructions")
    return NativeOps(load_build(request.param))


@pytest.fixture(scope="session")
def same() -> Callable[[Tensor, Tensor], None]:
    """Asserts that two tensors have the same bits; any NaN equals any other."""

    def check(got: Tensor, want: Tensor) -> None:
        assert got.shape == want.shape and got.dtype == want.dtype
        kind = torch.int16 if want.dtype == torch.bfloat16 else torch.int32
        differ = (got.contiguous().view(kind) != want.contiguous().view(kind)) & ~(got.isnan() & want.isnan())
        if differ.any():
            at = differ.nonzero()[0].tolist()
            raise AssertionError(f"{int(differ.sum())} of {differ.numel()} differ, first at {at}: {got[tuple(at)]} for {want[tuple(at)]}")

    return check


@pytest.fixture(scope="session")
def once() -> Callable[[Any, Callable[[], Any]], Any]:
    """Makes a thing once, by its key: the reference is slow, and every build is held to the same results."""
    made: dict[Any, Any] = {}

    def get(key: Any, make: Callable[[], Any]) -> Any:
        if key not in made:
            made[key] = make()
        return made[key]

    return get


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
