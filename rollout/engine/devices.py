"""Where a runner computes: which kernels there are, what memory there is, and what weights, pages and programs lie in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ...kernels import native_lib
from ...kernels.fingerprint import failed_probes, numerics_fingerprint
from ...kernels.kv import KvLayout, NativeKv, ReferenceKv
from ...kernels.program import NativeProgram, Program
from ...kernels.rank_program import Group, NativeRankProgram, ReferenceRankProgram
from ...kernels.reference_program import ReferenceProgram
from ...kernels.step import StepArrays, StepLimits
from ...kernels.weights import NativeWeights, ReferenceWeights, Weights, WeightSpec
from ..errors import ConfigError
from . import host_memory
from .config import EngineConfig
from .weight_keeper import FileKeeper, Keeper

log = logging.getLogger(__name__)


class Kv(Protocol):
    """A pool of pages."""

    layout: KvLayout

    def release(self) -> None:
        """Give its memory to the system; what it held is lost."""

    def resume(self) -> None:
        """Have memory again."""

    def close(self) -> None:
        """Free it. Nothing reads it after this."""


class Device(Protocol):
    """What a runner asks of the place it computes at. The runner calls `weights`, `kv` and `program` once each, in this order."""

    name: str
    """cpu, cuda:0, ..."""
    kernels: str
    """build in use"""
    fingerprint: str
    """numerics fingerprint of the build"""
    pool_fraction: float | None
    """part of the free memory that the KV pool takes by default, measured once the weights are loaded; None: a quarter of it, at most
    2 GiB, measured before"""

    def available_bytes(self) -> int:
        """Memory that can be had now."""

    def total_bytes(self) -> int:
        """Memory there could ever be."""

    def held_bytes(self) -> int:
        """Memory this process holds here, as the system counts it."""

    def arrays(self, limits: StepLimits) -> StepArrays:
        """What steps are written to."""

    def weights(self, specs: Mapping[str, WeightSpec], dtype: torch.dtype) -> Weights:
        """Memory for one copy of the weights."""

    def kv(self, layout: KvLayout) -> Kv:
        """The KV pool."""

    def program(self, arrays: StepArrays, *, group: Group | None, vocab_size: int, threads: int, **fields: Any) -> Program:
        """An empty program over all of these; `fields` as NativeProgram takes them."""

    def keeper(self) -> Keeper:
        """Where the weights are kept while they sleep."""


def open_device(config: EngineConfig, rank: int = 0) -> Device:
    """The device that `config` names, or the best there is, its kernels checked.

    Raises:
        ConfigError: it is not there, or its kernels are not, or they compute something else than the specification.
    """
    numerics = config.numerics
    wanted = config.device or ("cuda" if numerics.kernels is None and torch.cuda.is_available() else "cpu")
    if wanted == "cpu":
        return CpuDevice(numerics.kernels, numerics.k_shards, numerics.head_dtype)
    if not torch.cuda.is_available():
        raise ConfigError(f"device {wanted!r}: torch {torch.__version__} finds no CUDA device here; device = cpu runs on the CPU")
    from .gpu_device import GpuDevice  # Triton comes with it

    index = int(wanted.partition(":")[2] or 0) + rank
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device {wanted!r}: rank {rank} would be on cuda:{index}, and there are {torch.cuda.device_count()} devices")
    return GpuDevice(torch.device("cuda", index), numerics.k_shards, numerics.head_dtype, graphs=numerics.cuda_graphs)


class CpuDevice:
    """The native kernels of this machine, or plain torch.

    Args:
        kernels: build to use; None: the best that runs.
    """

    name = "cpu"
    pool_fraction: float | None = None

    def __init__(self, kernels: str | None, k_shards: int, head_dtype: str | None) -> None:
        self.kernels = choose_kernels(kernels)
        self.fingerprint = check_build(self.kernels, k_shards, head_dtype)
        self._library = None if self.kernels == "reference" else native_lib.load_build(self.kernels)

    def available_bytes(self) -> int:
        return host_memory.available_memory()

    def total_bytes(self) -> int:
        return host_memory.total_memory()

    def held_bytes(self) -> int:
        return host_memory.resident_bytes()

    def arrays(self, limits: StepLimits) -> StepArrays:
        return StepArrays(limits)

    def weights(self, specs: Mapping[str, WeightSpec], dtype: torch.dtype) -> NativeWeights | ReferenceWeights:
        self._weights = ReferenceWeights(specs, dtype) if self._library is None else NativeWeights(self._library, specs, dtype)
        return self._weights

    def kv(self, layout: KvLayout) -> NativeKv | ReferenceKv:
        self._kv = ReferenceKv(layout) if self._library is None else NativeKv(layout)
        return self._kv

    def program(
        self,
        arrays: StepArrays,
        *,
        group: Group | None,
        vocab_size: int,
        threads: int,
        **fields: Any,
    ) -> Program:
        if group is not None:
            fields |= {"group": group, "vocab_size": vocab_size}
        weights: Any = self._weights
        kv: Any = self._kv
        if self._library is None:
            return (ReferenceRankProgram if group else ReferenceProgram)(weights, arrays, kv, **fields)
        return (NativeRankProgram if group else NativeProgram)(self._library, weights, arrays, kv, threads=threads, **fields)

    def keeper(self) -> FileKeeper:
        return FileKeeper()


def choose_kernels(wanted: str | None) -> str:
    """The kernel build to use.

    Raises:
        ConfigError: `wanted` is not compiled or does not run on this CPU.
    """
    available = native_lib.available_builds()
    for build in available if wanted is None else ():
        try:
            return native_lib.load_build(build).build
        except OSError as error:
            log.warning("not using the %s kernels: %s", build, error)
    if wanted is None:
        log.warning(
            "no native CPU kernels: running the reference in plain torch, far slower. Install a C++ compiler and reinstall rollsync."
        )
        return "reference"
    if wanted != "reference" and wanted not in available:
        raise ConfigError(f"kernels {wanted!r} do not run here (available: {', '.join([*available, 'reference'])})")
    if wanted != "reference":
        try:
            native_lib.load_build(wanted)
        except OSError as error:
            raise ConfigError(f"kernels {wanted!r} do not run here: {error}") from error
    return wanted


def check_build(kernels: str, k_shards: int, head_dtype: str | None = None) -> str:
    """The numerics fingerprint of a build, once it is known to compute what the specification says.

    Raises:
        ConfigError: it computes something else; names the ops, and the builds to take instead.
    """
    library = None if kernels == "reference" else native_lib.load_build(kernels)
    if wrong := failed_probes(library):
        others = [build for build in (*native_lib.available_builds(), "reference") if build != kernels]
        raise ConfigError(
            f"the {kernels} kernels give other bits than the specification in {', '.join(wrong)}: rebuild them, or choose others "
            f"with --kernels (available: {', '.join(others)})"
        )
    return numerics_fingerprint(library, k_shards, head_dtype)
