"""Device memory that two processes share: one pool by cudaMalloc, named by its raw IPC handle and its device's UUID.

The pool comes from the driver itself and not from torch's caching allocator. It so begins at its own base address, as an IPC handle
names it; and expandable segments, whose memory has no such handle, may be on or off in the trainer. Devices are matched by UUID:
two processes may number them differently (CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_DEVICE_TO_HOST = 2


class IpcError(ValueError):
    """Memory that cannot be shared or mapped; says on which device and why."""


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which travels by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


def load_cudart() -> Any:
    """The CUDA runtime that torch uses.

    Raises:
        IpcError: torch has no CUDA here, or its runtime library is not found.
    """
    if not torch.cuda.is_available():
        raise IpcError("this torch sees no CUDA device")
    torch.cuda.init()
    name = f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}"
    beside = sorted(Path(torch.__file__).parent.parent.glob(f"nvidia/*/lib/{name}"))
    for where in (name, *map(str, beside)):  # loaded already, in general
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(where)
            library.cudaGetErrorString.restype = ctypes.c_char_p
            return library
    raise IpcError(f"{name}, the CUDA runtime of torch {torch.__version__}, cannot be loaded")


def device_labels() -> list[str]:
    """UUIDs of the devices this process sees, by its own numbers."""
    return [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())]


class CudaRuntime:
    """The few runtime calls of sharing, with errors by name.

    Args:
        library: libcudart, or what stands in for it.
        labels: UUIDs of the visible devices, in this process's order.
    """

    def __init__(self, library: Any = None, labels: list[str] | None = None) -> None:
        self._library = load_cudart() if library is None else library
        self.labels = device_labels() if labels is None else labels

    def index(self, label: str) -> int:
        """This process's number of a device. IpcError if it does not see it: no other device stands in."""
        if label not in self.labels:
            raise IpcError(f"this process does not see device {label}; it sees {', '.join(self.labels) or 'none'}")
        return self.labels.index(label)

    def call(self, what: str, index: int, *args: Any) -> None:
        """Call a function with a device current. IpcError naming function, device and CUDA's error."""
        for name, given in (("cudaSetDevice", (ctypes.c_int(index),)), (what, args)):
            if code := getattr(self._library, name)(*given):
                words = self._library.cudaGetErrorString(code).decode()
                self._library.cudaGetLastError()  # so that no later call of torch's reports it
                raise IpcError(f"{name} on device {self.labels[index]}: CUDA error {code} ({words})")


class DevicePool:
    """The sending end: memory of one device that others may open.

    Args:
        device: cuda, by this process's number.
    """

    def __init__(self, nbytes: int, device: torch.device, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self.label, self.nbytes = runtime.labels[self._index], nbytes
        self._address = ctypes.c_void_p()
        handle = _Handle()
        runtime.call("cudaMalloc", self._index, ctypes.byref(self._address), ctypes.c_size_t(nbytes))
        try:
            runtime.call("cudaIpcGetMemHandle", self._index, ctypes.byref(handle), self._address)
        except IpcError as error:
            self.close()
            raise IpcError(f"memory of this device cannot be shared, use another transport (http, collective): {error}") from None
        self._handle = bytes(handle.reserved)

    def offer(self) -> dict[str, Any]:
        """What another process opens it by."""
        return {"handle": self._handle, "bytes": self.nbytes, "pid": os.getpid()}

    def buffer(self, offset: int, nbytes: int) -> Tensor:
        """A uint8 tensor over a part of it."""
        address = int(self._address.value or 0) + offset
        shown = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        array = type("_Bytes", (), {"__cuda_array_interface__": shown})()
        return torch.as_tensor(array, device=torch.device("cuda", self._index))

    def settle(self) -> None:
        """Wait until what was copied into it is there for others."""
        self._runtime.call("cudaDeviceSynchronize", self._index)

    def close(self) -> None:
        address, self._address = self._address, ctypes.c_void_p()
        if address.value:
            with contextlib.suppress(IpcError):  # the device is gone, and the memory with it
                self._runtime.call("cudaFree", self._index, address)


class DeviceMapping:
    """The receiving end: a pool of another process, opened once and closed once.

    Raises:
        IpcError: the device is not seen here, or the handle cannot be opened.
    """

    def __init__(self, label: str, handle: Any, nbytes: int, pid: int, runtime: CudaRuntime) -> None:
        if not isinstance(handle, bytes) or len(handle) != HANDLE_BYTES:
            raise IpcError(f"handle must be {HANDLE_BYTES} bytes (msgpack bin)")
        if pid == os.getpid():
            raise IpcError("device memory is not shared with its own process: use transport http in process")
        self._runtime, self._index, self.nbytes, self.pid = runtime, runtime.index(label), nbytes, pid
        self._address = ctypes.c_void_p()
        self._copying = threading.Lock()
        self._host = bytearray()
        raw = _Handle.from_buffer_copy(handle)
        runtime.call("cudaIpcOpenMemHandle", self._index, ctypes.byref(self._address), raw, ctypes.c_uint(_LAZY_PEER_ACCESS))

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A copy of a part of it, valid until the next call. It is complete on return, so the sender may reuse the memory then."""
        with self._copying:
            if not self._address.value:
                raise IpcError("the update is over")
            if len(self._host) < nbytes:
                self._host = bytearray(nbytes)
            into = (ctypes.c_ubyte * nbytes).from_buffer(self._host)
            source, size = ctypes.c_void_p(self._address.value + offset), ctypes.c_size_t(nbytes)
            self._runtime.call("cudaMemcpy", self._index, into, source, size, ctypes.c_int(_DEVICE_TO_HOST))
            return memoryview(self._host)[:nbytes]

    def close(self) -> None:
        with self._copying:
            address, self._address = self._address, ctypes.c_void_p()
            if address.value:
                with contextlib.suppress(IpcError):  # its process and the memory may be gone
                    self._runtime.call("cudaIpcCloseMemHandle", self._index, address)
