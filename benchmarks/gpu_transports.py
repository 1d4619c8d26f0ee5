"""Sections of gpu_check.py about weights that another process sends: shared device memory, and NCCL with two ranks on one GPU.

The trainer is this module run as a program: it says what it offers in one line of JSON, and ends with its standard input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgpack  # type: ignore[import-untyped]
import torch

if TYPE_CHECKING:
    from .gpu_check import Context

MULTI_RANK = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
"""lets two ranks share a device, from NCCL 2.30 on"""


@contextmanager
def _trainer(*arguments: str) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "rollsync.benchmarks.gpu_transports", *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **MULTI_RANK})
    assert child.stdout is not None and child.stdin is not None
    try:
        line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"the trainer ended with code {child.wait(10)}; its words are on stderr")
        yield json.loads(line), child
    finally:
        child.kill()  # all it had to send is here
        child.wait()
        child.stdin.close()
        child.stdout.close()


def _value(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """What the trainer holds of a tensor: the same numbers in both processes."""
    generator = torch.Generator().manual_seed(len(name) * 1000 + sum(shape))
    return (torch.randn(shape, generator=generator) * 0.05).to(device)


def _manifest(shapes: dict[str, tuple[int, ...]]) -> Any:
    from rollsync.weight_sync.boxes import Box
    from rollsync.weight_sync.manifest import TensorEntry, TensorSlice, plan

    return plan([TensorEntry(n, "float32", s, (TensorSlice(0, Box.whole(s)),)) for n, s in shapes.items()], 1 << 30)


def ipc(c: Context) -> None:
    """A whole update whose bytes lie in the trainer's memory on the same device."""
    from rollsync.rollout.models.config import load_decoder_config
    from rollsync.rollout.models.params import hf_shapes

    from .gpu_engine import _cancelling, engine

    with tempfile.TemporaryDirectory() as root:
        folder = _cancelling(root, c)
        with engine(c, folder) as opened, _trainer("ipc", str(c.device), folder) as (said, _):
            offer = msgpack.unpackb(bytes.fromhex(said["offer"]))
            shapes = {name: tuple(shape) for name, shape in hf_shapes(load_decoder_config(folder)).items()}
            manifest = _manifest(shapes)
            update = opened.control.open_update(manifest, transport={"name": "ipc", "offers": [offer]})
            start = time.perf_counter()
            opened.control.take_chunk(update.id, 0, 0, {"offset": said["offset"]})
            took = time.perf_counter() - start
            opened.control.commit_update(update.id, {name: int(value) for name, value in said["digests"].items()})
            c.add("ipc: update committed with the trainer's digests", 1, "== 1")
            c.add("ipc: GB/s taken in", manifest.nbytes / took / 1e9)


def nccl(c: Context) -> None:
    """Broadcast, as the collective transport has it, and point to point, as reshard has it: two ranks on this one device."""
    from rollsync.weight_sync.transports.collective import form
    from rollsync.weight_sync.transports.rendezvous import Store

    backend = "gloo" if c.device.type == "cpu" else "nccl"
    if backend == "nccl":
        version = _nccl_version()
        c.add("NCCL", ".".join(map(str, version)))
        if version < (2, 30):
            return
        os.environ.update(MULTI_RANK)
    size = 1 << 16 if c.tiny else 256 << 20
    store = Store.bind("check", "127.0.0.1")
    with _trainer("group", str(c.device), str(store.port), backend, str(size)):
        group = form(store, 1, 2, backend=backend, device=c.device if backend == "nccl" else None, timeout_s=15)
        try:
            room = torch.zeros(size, dtype=torch.uint8, device=c.device)
            want = _pattern(size, c.device)
            for what, begin in (("broadcast", group.broadcast), ("send and receive", group.recv)):
                room.zero_()
                start = time.perf_counter()
                begin(room, 0).wait()
                took = time.perf_counter() - start
                c.add(f"{backend}, two ranks on one device, {what}: bytes came whole", int(torch.equal(room, want)), "== 1")
                c.add(f"{backend}, two ranks on one device, {what}: GB/s", size / took / 1e9)
        finally:
            group.close()


def _nccl_version() -> tuple[int, ...]:
    module: Any = torch.cuda.nccl
    return tuple(module.version())


def _pattern(size: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(size, device=device) % 251).to(torch.uint8)


def _offer(device: str, folder: str) -> None:
    from rollsync.rollout.models.config import load_decoder_config
    from rollsync.rollout.models.params import hf_shapes
    from rollsync.weight_sync.digest import tensor_digest
    from rollsync.weight_sync.transports.ipc import SharedBuffers

    shapes = {name: tuple(shape) for name, shape in hf_shapes(load_decoder_config(folder)).items()}
    manifest, buffers = _manifest(shapes), SharedBuffers(device)
    (bucket,) = manifest.buckets
    buffers.prepare(bucket.nbytes)
    target: Any = buffers.buffer(0)
    if not isinstance(target, torch.Tensor):
        target = torch.frombuffer(target, dtype=torch.uint8)
    digests = {}
    for piece in bucket.pieces:
        tensor = manifest.tensors[piece.tensor]
        values = _value(tensor.name, tensor.shape, torch.device(device))
        flat = values.flatten().view(torch.uint8)
        target[piece.start : piece.start + flat.numel()].copy_(flat)
        digests[tensor.name] = str(tensor_digest(values.cpu()))
    buffers.start(None, bucket, 0)  # type: ignore[arg-type]
    print(json.dumps({"offer": msgpack.packb(buffers.offer()).hex(), "offset": 0, "digests": digests}), flush=True)
    sys.stdin.read()
    os._exit(0)  # views of the pool are alive


def _send(device: str, port: str, backend: str, size: str) -> None:
    from rollsync.weight_sync.transports.collective import form
    from rollsync.weight_sync.transports.rendezvous import Store

    print(json.dumps({"backend": backend}), flush=True)
    place = torch.device(device)
    store = Store.connect("check", "127.0.0.1", int(port), 2, 15)
    group = form(store, 0, 2, backend=backend, device=place if backend == "nccl" else None, timeout_s=15)
    data = _pattern(int(size), place)
    group.broadcast(data, 0).wait()
    group.send(data, 1).wait()
    sys.stdin.read()


if __name__ == "__main__":
    role: Any = {"ipc": _offer, "group": _send}[sys.argv[1]]
    role(*sys.argv[2:])
