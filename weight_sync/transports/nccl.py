"""NCCL by its C interface, loaded when first used: a communicator that is set up, watched and aborted without blocking.

torch's own NCCL group ends the whole process when an operation times out; a rollout engine must outlive its trainer. Only bytes
travel, so one datatype is enough. The id of the communicator comes through the store, in whichever way rank 0 puts it there.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import pickletools
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .rendezvous import VLLM_ID_KEY, Store

ID_BYTES = 128
NATIVE_ID_KEY = "nccl_id"
TORCH_ID_KEY = "0"
"""where torch's NCCL group puts the id of its first communicator, at its first collective"""
_UINT8, _FLOAT32, _SUM = 1, 7, 0
_SUCCESS, _IN_PROGRESS = 0, 7
_UNDEFINED = -(1 << 31)
POLL_S = 0.0005


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.18; later ones read a shorter struct by its `size` and `version`."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
    ]


def _config() -> _Config:
    return _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21800, 0, _UNDEFINED, _UNDEFINED, _UNDEFINED, None, _UNDEFINED)


def load_library() -> Any:
    """libnccl as the nvidia-nccl wheel or the system has it. Raises RuntimeError where there is none."""
    places = ["libnccl.so.2"]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        places.insert(0, str(Path(folder) / "nccl" / "lib" / "libnccl.so.2"))
    for place in places:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(place)
            library.ncclGetErrorString.restype = ctypes.c_char_p
            return library
    raise RuntimeError(f"libnccl.so.2 cannot be loaded (tried {', '.join(places)})")


def id_of_pickle(raw: bytes) -> bytes:
    """The 128 bytes of an NCCL id in vLLM's pickle of it, found by reading its opcodes: nothing is unpickled.

    Raises:
        RuntimeError: it holds no such id.
    """
    try:
        for _, value, _ in pickletools.genops(raw):
            data = value.encode("latin-1") if isinstance(value, str) else value
            if isinstance(data, bytes | bytearray) and len(data) == ID_BYTES:
                return bytes(data)
    except (ValueError, UnicodeError):
        pass
    raise RuntimeError("what rank 0 put in the store is not an NCCL id")


class _Event:
    """An operation on the channel's stream. Keeps its tensor until it is over."""

    def __init__(self, channel: NcclChannel, event: Any, tensor: Tensor) -> None:
        self._channel, self._event, self._tensor = channel, event, tensor

    def wait(self, timeout_s: float) -> None:
        self._channel.poll(self._event.query, timeout_s)

    @property
    def is_over(self) -> bool:
        return bool(self._event.query())


class NcclChannel:
    """One rank's communicator, its id, and a stream of its own.

    Args:
        keys: the part of the store that the layout's ranks share.
        layout: native and plain make the communicator now. torch: at the first operation, since torch's rank 0 tells its id then.
        timeout_s: for setting it up.

    Raises:
        RuntimeError: NCCL's own words.
    """

    def __init__(
        self, store: Store, keys: Any, layout: str, rank: int, size: int, device: torch.device, timeout_s: float, library: Any = None
    ) -> None:
        self.device = device
        self._library = library or load_library()
        self._keys, self._layout, self._rank, self._size, self._timeout_s = keys, layout, rank, size, timeout_s
        self._comm: ctypes.c_void_p | None = None
        self._cut = False
        self._lock = threading.Lock()
        """held while NCCL is called: an abort frees the communicator under everybody else's feet"""
        self._stream = torch.cuda.Stream(device)
        if layout != "torch":
            self._connect()

    def _check(self, result: int) -> None:
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise RuntimeError(f"NCCL: {self._library.ncclGetErrorString(result).decode()}")

    def _id(self) -> bytes:
        key = {"native": NATIVE_ID_KEY, "plain": VLLM_ID_KEY, "torch": TORCH_ID_KEY}[self._layout]
        if self._rank == 0:
            own = _UniqueId()
            self._check(self._library.ncclGetUniqueId(ctypes.byref(own)))
            self._keys.set(key, bytes(own))
            return bytes(own)
        self.poll(lambda: self._keys.check([key]), self._timeout_s)
        raw: bytes = self._keys.get(key)
        return id_of_pickle(raw) if self._layout == "plain" else raw

    def _connect(self) -> None:
        raw = self._id()
        if len(raw) != ID_BYTES:
            raise RuntimeError(f"an NCCL id must be {ID_BYTES} bytes, rank 0 gave {len(raw)}")
        comm, config = ctypes.c_void_p(), _config()
        try:
            with torch.cuda.device(self.device):
                made = self._library.ncclCommInitRankConfig(
                    ctypes.byref(comm), self._size, _UniqueId.from_buffer_copy(raw), self._rank, ctypes.byref(config)
                )
                self._comm = comm
                self._check(made)
                self.poll(lambda: True, self._timeout_s)
            if self._layout == "plain":
                self._warm_up()
        except BaseException:
            self.cut()
            raise

    def _warm_up(self) -> None:
        """vLLM's communicators begin with a sum of one float over all ranks; whoever joins one has to take part."""
        one = torch.zeros(1, device=self.device)
        add = lambda data, size, stream: self._library.ncclAllReduce(data, data, ctypes.c_size_t(1), _FLOAT32, _SUM, self._comm, stream)  # noqa: E731
        self._run(one, add).wait(self._timeout_s)

    def poll(self, done: Any, timeout_s: float) -> None:
        """Until the communicator is at rest and `done()`. Raises RuntimeError with its asynchronous error, or at the deadline."""
        deadline = time.monotonic() + timeout_s
        while True:
            state = ctypes.c_int(_SUCCESS)
            with self._lock:
                if self._cut:
                    raise RuntimeError("the communicator was aborted")
                if self._comm is not None:
                    self._check(self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
                    self._check(state.value)
            if state.value == _SUCCESS and done():
                return
            if time.monotonic() >= deadline:
                raise RuntimeError("NCCL: it was not over in time")
            time.sleep(POLL_S)

    def _run(self, tensor: Tensor, call: Any) -> _Event:
        if self._comm is None:
            self._connect()
        with torch.cuda.device(self.device):
            # What wrote to (or still reads) the buffer comes first; who uses it next waits for the event.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            where = (ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), ctypes.c_void_p(self._stream.cuda_stream))
            with self._lock:
                if self._cut:
                    raise RuntimeError("the communicator was aborted")
                self._check(call(*where))
            self.poll(lambda: True, self._timeout_s)
            event = torch.cuda.Event()
            event.record(self._stream)
            tensor.record_stream(self._stream)
        return _Event(self, event, tensor)

    def broadcast(self, tensor: Tensor, root: int) -> _Event:
        return self._run(tensor, lambda data, size, stream: self._library.ncclBroadcast(data, data, size, _UINT8, root, self._comm, stream))

    def send(self, tensor: Tensor, peer: int) -> _Event:
        return self._run(tensor, lambda data, size, stream: self._library.ncclSend(data, size, _UINT8, peer, self._comm, stream))

    def recv(self, tensor: Tensor, peer: int) -> _Event:
        return self._run(tensor, lambda data, size, stream: self._library.ncclRecv(data, size, _UINT8, peer, self._comm, stream))

    def cut(self) -> None:
        with self._lock:
            self._cut = True
            comm, self._comm = self._comm, None
            if comm is not None:
                self._library.ncclCommAbort(comm)
