"""The engine's end of one weight update: chunks in, each once, in any order, into a `WeightTarget`.

It knows no transport, no engine and no thread: whoever receives bytes calls `chunk`, whoever commits calls `verify`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .boxes import Box
from .digest import box_digest, combine
from .manifest import DTYPE_BYTES, Bucket, ChunkError, Manifest

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
assert TORCH_DTYPES.keys() == DTYPE_BYTES.keys()


class WeightTarget(Protocol):
    """Where one rank's weights go."""

    def take(self, name: str, box: Box, values: Tensor, shape: tuple[int, ...]) -> tuple[int, int]:
        """Take in the elements of `box` of the tensor `name`, whose whole shape is `shape`; in the box's shape and the manifest's dtype.

        Returns:
            What they add to the tensor's digest, and how many of them are not finite.
        """


def _tensor_over(raw: memoryview, dtype: torch.dtype) -> Tensor:
    """A tensor over memory that nobody is to write to; valid while `raw` is. (torch warns of read-only buffers.)"""
    address = np.frombuffer(raw, np.uint8).ctypes.data
    if address % dtype.itemsize:
        return torch.frombuffer(bytearray(raw), dtype=dtype)
    return torch.frombuffer((ctypes.c_char * raw.nbytes).from_address(address), dtype=dtype)


def inspect(values: Tensor, box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """Digest part and number of values that are not finite, without kernels."""
    return box_digest(values, box, shape), values.numel() - int(torch.isfinite(values).sum())


class Receiver:
    """Bookkeeping of one update on one rank. Threads may deliver chunks of different senders at the same time.

    Args:
        manifest: what will come.
        target: where it goes.
    """

    def __init__(self, manifest: Manifest, target: WeightTarget) -> None:
        self.manifest, self.total_bytes = manifest, manifest.nbytes
        self._target = target
        self._buckets = {(b.sender, b.sequence): b for b in manifest.buckets}
        self._state: dict[tuple[int, int], str] = {}
        self._lock = threading.Lock()
        self._digests: list[list[int]] = [[] for _ in manifest.tensors]
        self._nonfinite = [0] * len(manifest.tensors)
        self._num_done = 0
        self.received_bytes = 0
        self.touched = False
        """whether any byte has gone to the target"""

    def grow(self, manifest: Manifest) -> list[tuple[int, int]]:
        """Expect a `grown` manifest; (sender, sequence) of the buckets it has more."""
        with self._lock:
            fresh = manifest.buckets[len(self.manifest.buckets) :]
            more = len(manifest.tensors) - len(self.manifest.tensors)
            self.manifest, self.total_bytes = manifest, manifest.nbytes
            self._buckets.update({(b.sender, b.sequence): b for b in fresh})
            self._digests += [[] for _ in range(more)]
            self._nonfinite += [0] * more
        return [(b.sender, b.sequence) for b in fresh]

    def bucket(self, sender: int, sequence: int) -> Bucket:
        """Raises ChunkError if there is none."""
        bucket = self._buckets.get((sender, sequence))
        if bucket is None:
            raise ChunkError(f"there is no chunk (sender {sender}, sequence {sequence}) in this update: {self._known(sender)}")
        return bucket

    def has(self, sender: int, sequence: int) -> bool:
        """Whether that chunk has been taken in."""
        with self._lock:
            return self._state.get((sender, sequence)) == "done"

    def chunk(self, sender: int, sequence: int, data: Any) -> bool:
        """Take in one bucket. False if it had come before: a retry changes nothing.

        Args:
            data: exactly the bucket's bytes, a contiguous buffer; not kept.

        Raises:
            ChunkError: no such bucket, of another size, or being taken in at this moment. It may be sent again.
        """
        bucket = self.bucket(sender, sequence)
        raw = memoryview(data).cast("B")
        if raw.nbytes != bucket.nbytes:
            raise ChunkError(f"chunk (sender {sender}, sequence {sequence}) must be {bucket.nbytes} bytes, got {raw.nbytes}")
        with self._lock:
            state = self._state.get((sender, sequence))
            if state == "done":
                return False
            if state == "busy":
                raise ChunkError(f"chunk (sender {sender}, sequence {sequence}) is being taken in: wait for that reply")
            self._state[sender, sequence] = "busy"
        try:
            parts = self._take(bucket, raw)
        except BaseException:
            with self._lock:
                del self._state[sender, sequence]
            raise
        with self._lock:
            for index, digest, nonfinite in parts:
                self._digests[index].append(digest)
                self._nonfinite[index] += nonfinite
            self._state[sender, sequence] = "done"
            self._num_done += 1
            self.received_bytes += bucket.nbytes
        return True

    def _take(self, bucket: Bucket, raw: memoryview) -> list[tuple[int, int, int]]:
        parts = []
        for piece in bucket.pieces:
            tensor = self.manifest.tensors[piece.tensor]
            end = piece.start + piece.box.elements * DTYPE_BYTES[tensor.dtype]
            values = _tensor_over(raw[piece.start : end], TORCH_DTYPES[tensor.dtype]).view(piece.box.length)
            self.touched = True
            parts.append((piece.tensor, *self._target.take(tensor.name, piece.box, values, tensor.shape)))
        return parts

    def _known(self, sender: int) -> str:
        count = len(self.manifest.buckets_of(sender))
        return f"sender {sender} has {count} chunks" if count else f"senders are {', '.join(map(str, self.manifest.senders))}"

    @property
    def num_missing(self) -> int:
        """Chunks that have not come."""
        return len(self._buckets) - self._num_done

    def missing(self) -> list[tuple[int, int]]:
        """(sender, sequence) of the chunks that have not come."""
        with self._lock:
            return [key for key in self._buckets if self._state.get(key) != "done"]

    def digests(self) -> dict[str, int]:
        """Digest by name of what has come; of whole tensors once nothing is missing."""
        with self._lock:
            return {t.name: combine(parts) for t, parts in zip(self.manifest.tensors, self._digests, strict=True)}

    def problems(self, expected: Mapping[str, int] | None, *, refuse_nonfinite: bool) -> list[str]:
        """Why this must not be committed: chunks missing, digests that differ, values that are not finite. Empty if nothing is wrong.

        Args:
            expected: digests by name as the trainer computed them; None or an absent name is not compared.
        """
        if missing := self.missing():
            shown = ", ".join(f"{sender}/{sequence}" for sender, sequence in missing[:8]) + (", ..." if len(missing) > 8 else "")
            return [f"{len(missing)} of {len(self._buckets)} chunks have not come (sender/sequence {shown})"]
        found = self.digests()
        unknown = [f"{name}: a digest was given, but the tensor is not in this update" for name in expected or () if name not in found]
        differ = [
            f"{name}: digest {value:016x} arrived, the sender says {expected[name]:016x}"
            for name, value in found.items()
            if expected is not None and name in expected and expected[name] != value
        ]
        broken = [
            f"{t.name}: {count} values are not finite"
            for t, count in zip(self.manifest.tensors, self._nonfinite, strict=True)
            if count and refuse_nonfinite
        ]
        return unknown + differ + broken
