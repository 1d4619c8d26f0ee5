"""An NVIDIA GPU as a device: plain weights, pages and programs of Triton kernels. Triton is imported with this."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from ...kernels.gpu.arrays import DeviceArrays
from ...kernels.gpu.graphs import Graphs, graph_sizes
from ...kernels.gpu.launch import TRITON_VERSION
from ...kernels.gpu.pool import GpuKv
from ...kernels.gpu.program import GpuProgram
from ...kernels.gpu.queue import CudaQueue, Queue
from ...kernels.gpu.rank_program import GpuRankProgram
from ...kernels.gpu.weights import GpuWeights
from ...kernels.kv import KvLayout
from ...kernels.rank_program import Group
from ...kernels.spec import SPEC_VERSION
from ...kernels.step import StepArrays, StepLimits
from ...kernels.weights import Weights, WeightSpec
from ..errors import ConfigError
from . import host_memory

POOL_FRACTION = 0.9
"""of what is free beside the weights; the rest is for activations, captured graphs and others"""


class HostKeeper:
    """Weights in host memory."""

    def __init__(self) -> None:
        self._data: torch.Tensor | None = None

    def keep(self, weights: Weights) -> None:
        assert isinstance(weights, GpuWeights)
        free = host_memory.available_memory()
        if weights.nbytes > free:
            raise MemoryError(f"{weights.nbytes} bytes of host memory are needed to keep them, {free} are free")
        self._data = weights.copy_to_host()

    def restore(self, weights: Weights) -> None:
        assert isinstance(weights, GpuWeights)
        if self._data is not None:
            weights.copy_from_host(self._data)

    def drop(self) -> None:
        self._data = None


class GpuDevice:
    """One CUDA device.

    Args:
        graphs: capture decode steps.
        queue: where to launch; None: a stream of the device.
    """

    kernels = "triton"

    def __init__(
        self, device: torch.device, k_shards: int, head_dtype: str | None, *, graphs: bool = True, queue: Queue | None = None
    ) -> None:
        self._device, self._wants_graphs = device, graphs
        self._queue: Queue = queue or CudaQueue(device)
        self.name = str(device)
        self.fingerprint = fingerprint(device, k_shards, head_dtype)
        self.pool_fraction: float | None = POOL_FRACTION
        self._graphs = Graphs(self._queue, ())

    def available_bytes(self) -> int:
        if self._device.type == "cpu":
            return host_memory.available_memory()
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)

    def total_bytes(self) -> int:
        return host_memory.total_memory() if self._device.type == "cpu" else torch.cuda.mem_get_info(self._device)[1]

    def held_bytes(self) -> int:
        """What torch's allocator holds here for this process."""
        return host_memory.resident_bytes() if self._device.type == "cpu" else torch.cuda.memory_reserved(self._device)

    def arrays(self, limits: StepLimits) -> DeviceArrays:
        if self._wants_graphs:
            self._graphs = Graphs(self._queue, graph_sizes(min(limits.slots, limits.tokens)))
        return DeviceArrays(limits, self._queue)

    def weights(self, specs: Mapping[str, WeightSpec], dtype: torch.dtype) -> GpuWeights:
        self._weights = GpuWeights(specs, dtype, self._queue, self._drop_graphs)
        return self._weights

    def kv(self, layout: KvLayout) -> GpuKv:
        try:
            self._kv = GpuKv(layout, self._queue, self._drop_graphs)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return self._kv

    def _drop_graphs(self) -> None:
        self._graphs.release()

    def program(self, arrays: StepArrays, *, group: Group | None, vocab_size: int, threads: int, **fields: Any) -> GpuProgram:
        assert isinstance(arrays, DeviceArrays)
        args = (self._weights, arrays, self._kv, self._queue)
        if group is None:
            return GpuProgram(*args, self._graphs, **fields)
        return GpuRankProgram(*args, Graphs(self._queue, ()), group=group, vocab_size=vocab_size, **fields)

    def keeper(self) -> HostKeeper:
        return HostKeeper()


def fingerprint(device: torch.device, k_shards: int, head_dtype: str | None) -> str:
    """Of what the bits of these kernels depend on: device model, versions, settings. Equal ones promise equal bits."""
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    parts = ("triton", model, torch.__version__, TRITON_VERSION, SPEC_VERSION, k_shards, head_dtype or "model dtype")
    return "gpu-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
