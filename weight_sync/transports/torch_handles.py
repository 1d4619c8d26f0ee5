"""Tensors that another process shares by torch's own handles: named shared memory, or CUDA IPC. From plain data; nothing is unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from ..manifest import Bucket, ChunkError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "uint8": torch.uint8}


def open_tensor(handle: Mapping[str, Any]) -> Tensor:
    """The tensor of a handle, over the other process's memory; it is let go with the tensor.

    Args:
        handle: kind (empty, shm or cuda), dtype, shape, stride, offset (elements), storage_bytes; of shm: manager and segment, the names
            of torch's shared memory; of cuda: device (number or UUID), handle, storage_at, counter, counter_at, event, event_sync.

    Raises:
        ChunkError: the memory is not to be had, or the tensor does not lie in it.
    """
    dtype, shape = DTYPES[handle["dtype"]], torch.Size(handle["shape"])
    try:
        if handle["kind"] == "cuda":
            return _open_cuda(handle, dtype, shape)
        if handle["kind"] == "empty":
            return torch.empty(shape, dtype=dtype)
        names = handle["manager"].encode(), handle["segment"].encode()
        storage = reductions.rebuild_storage_filename(torch.UntypedStorage, *names, handle["storage_bytes"])
        return torch.empty(0, dtype=dtype).set_(storage, handle["offset"], shape, tuple(handle["stride"]))
    except (RuntimeError, OSError, ValueError) as error:
        raise ChunkError(f"a shared tensor could not be opened: {str(error).splitlines()[0]}") from None


def _open_cuda(handle: Mapping[str, Any], dtype: torch.dtype, shape: torch.Size) -> Tensor:
    tensor: Tensor = reductions.rebuild_cuda_tensor(
        torch.Tensor,
        shape,
        tuple(handle["stride"]),
        handle["offset"],
        torch.UntypedStorage,
        dtype,
        _device_index(handle["device"]),
        handle["handle"],
        handle["storage_bytes"],
        handle["storage_at"],
        False,
        handle["counter"],
        handle["counter_at"],
        handle["event"],
        handle["event_sync"],
    )
    return tensor


def _device_index(device: int | str) -> int:
    """Processes may number devices differently: a UUID says which is meant."""
    if isinstance(device, int):
        return device
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == device:
            return index
    raise ValueError(f"no CUDA device here has the UUID {device}")


_PLACE = ("kind", "manager", "segment", "device", "handle", "storage_at", "storage_bytes", "offset", "dtype", "shape", "stride")
"""what says where a buffer lies: several may lie in one allocation, which has one handle"""


class KeptBuffers:
    """Buffers of bytes that many chunks lie in, opened once each: torch counts every opening, and whoever shares one counts on one."""

    def __init__(self) -> None:
        self._open: dict[Any, Tensor] = {}

    def tensor(self, handle: Mapping[str, Any]) -> Tensor:
        """The tensor that lies `begin` bytes into the buffer whose handle is `buffer`, contiguous."""
        buffer = handle["buffer"]
        key = repr([buffer.get(name) for name in _PLACE])
        if key not in self._open:
            self._open[key] = open_tensor(buffer)
        dtype, shape, begin = DTYPES[handle["dtype"]], torch.Size(handle["shape"]), handle["begin"]
        if begin < 0:
            raise ChunkError(f"a tensor begins at byte {begin} of the shared buffer")
        row = self._open[key][begin : begin + shape.numel() * dtype.itemsize]
        if row.storage_offset() % dtype.itemsize:
            raise ChunkError(f"a tensor of {handle['dtype']} begins at byte {begin} of the shared buffer, not aligned to it")
        if row.nbytes != shape.numel() * dtype.itemsize:
            raise ChunkError(f"a tensor reaches beyond the shared buffer of {self._open[key].nbytes} bytes")
        return row.view(dtype).view(shape)

    def close(self) -> None:
        self._open.clear()


def bytes_of(handle: Mapping[str, Any], bucket: Bucket, kept: KeptBuffers) -> memoryview:
    """The bytes of a chunk that one shared tensor, or a part of a kept buffer, holds, row-major.

    Raises:
        ChunkError: as `open_tensor`; or the tensor is of another size.
    """
    tensor = kept.tensor(handle) if "buffer" in handle else open_tensor(handle)
    if tensor.nbytes != bucket.nbytes:
        raise ChunkError(f"chunk {bucket.sequence} must be {bucket.nbytes} bytes, the shared tensor has {tensor.nbytes}")
    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return memoryview(flat)
