"""Memory that trainer and engine share: real processes on the CPU; on CUDA the same classes over a runtime that stands in for libcudart."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from rollsync.weight_sync.manifest import Bucket
from rollsync.weight_sync.transports.cuda_ipc import CudaRuntime, IpcError
from rollsync.weight_sync.transports.ipc import MappedBuffers, SharedBuffers, host_label
from rollsync.weight_sync.transports.links import IpcLink

CHILD = """
import json, sys
from rollsync.weight_sync.transports.ipc import MappedBuffers, SharedBuffers
mapped = MappedBuffers(json.loads(sys.argv[1]))
buffers = SharedBuffers()
buffers.prepare(100_000)
buffers.buffer(1)[:5] = bytes(mapped.view(0, 5))
print(json.dumps({"offer": buffers.offer(), "offset": buffers._offset(1)}), flush=True)
sys.stdin.read()
"""


def held() -> tuple[list[str], int]:
    """What the system may be left with."""
    return sorted(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))


def test_host_memory_is_shared_and_gone_with_those_that_are_killed() -> None:
    before = held()
    mine = SharedBuffers()
    mine.prepare(64)
    mine.buffer(0)[:5] = b"hello"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(mine.offer())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    told = json.loads(child.stdout.readline())
    theirs = MappedBuffers(told["offer"])
    assert bytes(theirs.view(told["offset"], 5)) == b"hello"
    child.kill()  # a trainer to one of us, an engine to the other
    child.wait()
    assert bytes(theirs.view(told["offset"], 5)) == b"hello", "what is mapped stays until it is closed"
    with pytest.raises(IpcError, match=r"cannot be opened|not the one"):
        MappedBuffers(told["offer"])
    with pytest.raises(IpcError, match="not inside"):
        theirs.view(told["offset"], 1 << 20)
    theirs.close()
    mine.close()
    child.stdin.close()
    child.stdout.close()
    assert held() == before
    assert "rollsync-weights" not in Path("/proc/self/maps").read_text()


def test_memory_that_could_be_cut_off_under_its_reader_is_not_mapped() -> None:
    buffers = SharedBuffers()
    buffers.prepare(64)
    handle = buffers.offer()["handles"][host_label()]
    with pytest.raises(OSError):
        os.ftruncate(handle["fd"], 0)
    loose = os.memfd_create("rollsync-weights")
    os.ftruncate(loose, 4096)
    try:
        for change, words in (
            ({"fd": loose, "bytes": 4096}, "sealed"),
            ({"bytes": handle["bytes"] + 1}, "sealed"),
            ({"fd": 0}, "not memory that a rollsync sender offers|cannot be opened"),
            ({"started": "1"}, "not the one"),
            ({"pid": "x"}, "cannot be opened"),
        ):
            with pytest.raises(IpcError, match=words):
                MappedBuffers({"handles": {host_label(): {**handle, **change}}})
        with pytest.raises(IpcError, match="nothing was offered for this engine's device cpu-"):
            MappedBuffers({"handles": {"cpu-another host": handle}})
    finally:
        os.close(loose)
        buffers.close()


def test_each_of_several_senders_has_memory_of_its_own() -> None:
    before, senders = held(), [SharedBuffers() for _ in range(3)]
    for rank, buffers in enumerate(senders):
        buffers.prepare(100)
        buffers.buffer(1)[:1] = bytes([rank])  # type: ignore[index]
    link = IpcLink([b.offer() for b in senders], torch.device("cpu"))
    for rank in (2, 0, 1):
        assert bytes(link.view(Bucket(rank, 0, 1, ()), {"offset": senders[rank]._offset(1)})) == bytes([rank])
    with pytest.raises(ValueError, match="sender 3 offered no memory"):
        link.view(Bucket(3, 0, 1, ()), {"offset": 0})
    for buffers in senders:
        buffers.close()
    link.close()
    assert held() == before


class Driver:
    """What a GPU driver knows, beyond any process."""

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.handles: dict[bytes, int] = {}


class Cudart:
    """One process's libcudart: host memory for device memory, every call counted. `fail` makes a call return an error."""

    def __init__(self, driver: Driver, fail: str = "") -> None:
        self._driver, self._fail = driver, fail
        self.calls: Counter[str] = Counter()
        self.devices: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return 1 if name == self._fail else getattr(self, f"_{name}", lambda *a: 0)(*args)

        return call

    def _cudaSetDevice(self, index: ctypes.c_int) -> int:
        self.devices.append(index.value)
        return 0

    def _cudaGetErrorString(self, code: int) -> bytes:
        return b"invalid argument"

    def _cudaMalloc(self, out: Any, size: ctypes.c_size_t) -> int:
        block = ctypes.create_string_buffer(size.value)
        out._obj.value = ctypes.addressof(block)
        self._driver.memory[out._obj.value] = block
        return 0

    def _cudaFree(self, address: ctypes.c_void_p) -> int:
        del self._driver.memory[address.value or 0]
        return 0

    def _cudaIpcGetMemHandle(self, out: Any, address: ctypes.c_void_p) -> int:
        raw = os.urandom(64)
        ctypes.memmove(ctypes.addressof(out._obj), raw, 64)
        self._driver.handles[raw] = address.value or 0
        return 0

    def _cudaIpcOpenMemHandle(self, out: Any, handle: Any, flags: Any) -> int:
        out._obj.value = self._driver.handles[bytes(handle.reserved)]
        return 0

    def _cudaMemcpy(self, into: Any, source: ctypes.c_void_p, size: ctypes.c_size_t, kind: ctypes.c_int) -> int:
        assert kind.value == 2
        ctypes.memmove(into, source, size.value)
        return 0


LABELS = ["GPU-a", "GPU-b", "GPU-c"]


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> tuple[Driver, Cudart, SharedBuffers]:
    """A trainer on its cuda:1."""

    def over(array: Any, device: torch.device) -> torch.Tensor:
        shown = array.__cuda_array_interface__
        assert device == torch.device("cuda", 1) and shown["typestr"] == "|u1" and shown["data"][1] is False
        return torch.frombuffer((ctypes.c_char * shown["shape"][0]).from_address(shown["data"][0]), dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", over)
    driver = Driver()
    library = Cudart(driver)
    buffers = SharedBuffers("cuda:1", runtime=lambda: CudaRuntime(library, LABELS))
    buffers.prepare(1000)
    return driver, library, buffers


def told(buffers: SharedBuffers, **changes: Any) -> Any:
    """The offer as an engine of another process gets it."""
    offer = msgpack.unpackb(msgpack.packb(buffers.offer()))
    for handle in offer["handles"].values():
        handle |= {"pid": os.getpid() + 1, **changes}
    return offer


def test_device_memory_goes_by_uuid_whatever_the_numbers(trainer: tuple[Driver, Cudart, SharedBuffers]) -> None:
    driver, library, buffers = trainer
    for index in (0, 1):
        target = buffers.buffer(index)
        assert isinstance(target, torch.Tensor)
        target[:4] = torch.tensor([index, 2, 3, 4], dtype=torch.uint8)
        buffers.start(None, Bucket(0, 0, 4, ()), index)  # type: ignore[arg-type]
    assert library.calls["cudaDeviceSynchronize"] == 2, "before an engine is told"
    mine = Cudart(driver)
    shuffled = ["GPU-c", "GPU-a", "GPU-b"]
    mapped = MappedBuffers(told(buffers), "cuda:2", runtime=lambda: CudaRuntime(mine, shuffled))
    assert [bytes(mapped.view(buffers._offset(i), 4)) for i in (0, 1)] == [b"\x00\x02\x03\x04", b"\x01\x02\x03\x04"]
    assert set(mine.devices) == {2} and set(library.devices) == {1}
    mapped.close()
    mapped.close()
    assert mine.calls["cudaIpcOpenMemHandle"] == mine.calls["cudaIpcCloseMemHandle"] == 1
    with pytest.raises(IpcError, match="is over"):
        mapped.view(0, 4)
    for device, seen in ((0, shuffled), (0, ["GPU-x"])):  # another device of ours, and one that is not the trainer's
        with pytest.raises(IpcError, match=f"nothing was offered for this engine's device {seen[0]}; offered: GPU-b"):
            MappedBuffers(told(buffers), f"cuda:{device}", runtime=lambda seen=seen: CudaRuntime(mine, seen))
    assert mine.calls["cudaIpcOpenMemHandle"] == 1


def test_a_pool_is_kept_until_it_is_too_small_and_freed_once(trainer: tuple[Driver, Cudart, SharedBuffers]) -> None:
    driver, library, buffers = trainer
    first = buffers.offer()
    buffers.prepare(500)
    assert buffers.offer() == first
    buffers.prepare(1 << 20)
    assert buffers.offer() != first and len(driver.memory) == 1
    buffers.close()
    buffers.close()
    assert not driver.memory and library.calls["cudaMalloc"] == library.calls["cudaFree"] == 2


def test_what_two_senders_offer_alike_is_opened_once(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _, buffers = trainer
    mine = Cudart(driver)
    runtime = CudaRuntime(mine, LABELS)
    monkeypatch.setattr(MappedBuffers.__init__, "__kwdefaults__", {"runtime": lambda: runtime})
    link = IpcLink([told(buffers), told(buffers)], torch.device("cuda:1"))
    for sender in (0, 1):
        assert len(link.view(Bucket(sender, 0, 8, ()), {"offset": 0})) == 8
    link.close()
    assert mine.calls["cudaIpcOpenMemHandle"] == mine.calls["cudaIpcCloseMemHandle"] == 1


def test_errors_name_what_cuda_says_and_leave_nothing(trainer: tuple[Driver, Cudart, SharedBuffers]) -> None:
    driver, _, buffers = trainer
    offered = len(driver.memory)
    failing = SharedBuffers("cuda:0", runtime=lambda: CudaRuntime(Cudart(driver, "cudaIpcGetMemHandle"), LABELS))
    words = r"cannot be shared.*cudaIpcGetMemHandle on device GPU-a: CUDA error 1 \(invalid argument\)"
    with pytest.raises(IpcError, match=words):
        failing.prepare(100)
    assert len(driver.memory) == offered
    mine = Cudart(driver, "cudaIpcOpenMemHandle")
    with pytest.raises(IpcError, match=r"cudaIpcOpenMemHandle on device GPU-b: CUDA error 1"):
        MappedBuffers(told(buffers), "cuda:1", runtime=lambda: CudaRuntime(mine, LABELS))
    assert mine.calls["cudaGetLastError"] == 1, "torch's next call must not report it"
    for change, words in (({"handle": b"short"}, "64 bytes"), ({"handle": "x" * 64}, "64 bytes"), ({"pid": os.getpid()}, "own process")):
        with pytest.raises(IpcError, match=words):
            MappedBuffers(told(buffers, **change), "cuda:1", runtime=lambda: CudaRuntime(mine, LABELS))


def test_without_cuda_a_device_is_refused_in_words() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(IpcError, match="no CUDA device"):
        SharedBuffers("cuda")
