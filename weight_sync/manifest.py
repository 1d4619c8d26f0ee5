"""The written plan of one weight update: every tensor, who holds which slice of it, and the buckets it travels in.

It is made once by the trainer, checked in full by the engine before a byte moves, and read by both sides from then on. Pure; it
travels as plain lists and dicts (`to_wire`), so JSON and msgpack both carry it.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .boxes import Box, tiling_faults

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""dtypes a tensor may travel in"""
ALIGN_BYTES = 64
"""where pieces begin within a bucket"""
DEFAULT_BUCKET_BYTES = 32 << 20
MAX_TENSORS = 1 << 17
MAX_BUCKETS = 1 << 17
"""what an engine takes in one manifest: more (a 300 B model in buckets of 4 MB is half of it) would keep its thread busy for seconds"""
MAX_SLICES = 1 << 13
"""of one tensor"""
_MAX_NAME, _MAX_SENDER = 512, 1 << 31


class ManifestError(ValueError):
    """A manifest that cannot be used; `problems` lists everything wrong with it."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        shown = "; ".join(self.problems[:20])
        more = f"; and {len(self.problems) - 20} more" if len(self.problems) > 20 else ""
        super().__init__(f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}: {shown}{more}")


class ChunkError(ValueError):
    """A chunk that does not belong to its update, or not as it came."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The part of a tensor that one sender holds."""

    sender: int
    box: Box


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor under its Hugging Face name, as it travels."""

    name: str
    dtype: str
    """one of DTYPE_BYTES"""
    shape: tuple[int, ...]
    """of the whole tensor, whoever holds it"""
    slices: tuple[TensorSlice, ...]
    """they tile the tensor exactly once"""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a slice inside a bucket: the elements of `box`, row-major, from byte `start` on."""

    tensor: int
    """index into Manifest.tensors"""
    box: Box
    start: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message: number `sequence` of those `sender` sends."""

    sender: int
    sequence: int
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything both sides must agree on before bytes move."""

    tensors: tuple[TensorEntry, ...]
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    buckets: tuple[Bucket, ...] = field(default=(), compare=False)
    """derived from the rest by `plan`: never sent, so it cannot disagree"""

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def senders(self) -> tuple[int, ...]:
        return tuple(sorted({s.sender for t in self.tensors for s in t.slices}))

    def buckets_of(self, sender: int) -> tuple[Bucket, ...]:
        return tuple(b for b in self.buckets if b.sender == sender)

    def grown(self, tensors: Sequence[TensorEntry], layout: Mapping[str, Any]) -> Manifest:
        """This manifest and more tensors, held whole by sender 0, in new buckets laid out as foreign senders cut their messages.

        Args:
            layout: kind "tensors" (a bucket each), "concatenated" (one bucket) or "packed" (closed once its size has reached "bytes").
                Without padding, so pieces may be unaligned.

        Raises:
            ManifestError: an unknown layout, or a name that came before.
        """
        if problems := _repeated([*self.tensors, *tensors]):
            raise ManifestError(problems)
        buckets, pieces, used = list(self.buckets), [], 0
        limit = _layout_limit(layout)
        for index, tensor in enumerate(tensors, len(self.tensors)):
            pieces.append(Piece(index, Box.whole(tensor.shape), used))
            used += tensor.nbytes
            if used >= limit:
                buckets.append(Bucket(0, len(buckets), used, tuple(pieces)))
                pieces, used = [], 0
        if pieces:
            buckets.append(Bucket(0, len(buckets), used, tuple(pieces)))
        return Manifest((*self.tensors, *tensors), self.bucket_bytes, tuple(buckets))

    def to_wire(self) -> dict[str, Any]:
        """Plain dicts and lists; `from_wire` is its inverse."""
        tensors = []
        for t in self.tensors:
            entry: dict[str, Any] = {"name": t.name, "dtype": t.dtype, "shape": list(t.shape)}
            if not (len(t.slices) == 1 and t.slices[0] == TensorSlice(0, Box.whole(t.shape))):
                entry["slices"] = [[s.sender, list(s.box.offset), list(s.box.length)] for s in t.slices]
            tensors.append(entry)
        return {"tensors": tensors, "bucket_bytes": self.bucket_bytes}

    @classmethod
    def from_wire(cls, wire: Any) -> Manifest:
        """Read and check a manifest; a tensor without "slices" is held whole by sender 0.

        Raises:
            ManifestError: something is malformed, a name comes twice, or slices do not tile their tensor. Lists everything.
        """
        if not isinstance(wire, Mapping) or not isinstance(wire.get("tensors"), list):
            raise ManifestError([f"manifest must be an object with a list of tensors, got {type(wire).__name__}"])
        if len(wire["tensors"]) > MAX_TENSORS:
            raise ManifestError([f"manifest.tensors must be at most {MAX_TENSORS}, got {len(wire['tensors'])}"])
        problems = [f"manifest.{str(key)[:80]} is not a known field" for key in wire if key not in ("tensors", "bucket_bytes")]
        bucket_bytes = wire.get("bucket_bytes", DEFAULT_BUCKET_BYTES)
        if not _is_int(bucket_bytes, 1) or bucket_bytes > 1 << 34:
            problems.append(f"manifest.bucket_bytes must be an int in [1, 2**34], got {bucket_bytes!r}")
        tensors = []
        for i, raw in enumerate(wire["tensors"]):
            try:
                tensors.append(_read_tensor(raw, f"tensors[{i}]"))
            except ManifestError as error:
                problems += error.problems
        problems += _repeated(tensors)
        if not problems and sum(t.nbytes for t in tensors) // bucket_bytes > MAX_BUCKETS:
            problems.append(f"manifest.bucket_bytes {bucket_bytes} makes more than {MAX_BUCKETS} chunks of these tensors")
        if problems:
            raise ManifestError(problems)
        return plan(tensors, bucket_bytes)


def _layout_limit(layout: Mapping[str, Any]) -> float:
    """Bytes from which on a foreign sender closes a message."""
    kind, size = layout.get("kind"), layout.get("bytes")
    if kind == "packed":
        if not _is_int(size, 1):
            raise ManifestError([f"layout.bytes must be an int >= 1, got {size!r}"])
        return float(size)  # type: ignore[arg-type]
    if kind not in ("tensors", "concatenated"):
        raise ManifestError([f"layout.kind must be one of tensors, concatenated, packed, got {kind!r}"])
    return 0.0 if kind == "tensors" else math.inf


def read_tensors(raw: Any) -> tuple[TensorEntry, ...]:
    """Tensors by name, dtype and shape, each held whole by sender 0 unless it says "slices".

    Raises:
        ManifestError: lists everything that is malformed.
    """
    return Manifest.from_wire({"tensors": raw}).tensors


def _show(value: Any) -> str:
    """What came, for a message, whatever its size and depth."""
    return reprlib.repr(value)[:120]


def _is_int(value: Any, low: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def bad_dtype(name: str, dtype: Any) -> str:
    """What to say of a dtype that is not in DTYPE_BYTES."""
    return f"{name}: dtype must be one of {', '.join(DTYPE_BYTES)}, got {_show(dtype)}"


def _ints(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_int(v) for v in value)


def _read_tensor(raw: Any, where: str) -> TensorEntry:
    if not isinstance(raw, Mapping):
        raise ManifestError([f"{where} must be an object, got {type(raw).__name__}"])
    name, dtype, shape = raw.get("name"), raw.get("dtype"), raw.get("shape")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise ManifestError([f"{where}.name must be a string of 1 to {_MAX_NAME} characters, got {_show(name)}"])
    problems = [f"{name}: {str(key)[:80]} is not a known field" for key in raw if key not in ("name", "dtype", "shape", "slices")]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        problems.append(bad_dtype(name, dtype))
    if not isinstance(shape, list | tuple) or not _ints(shape) or len(shape) > 8:
        raise ManifestError([*problems, f"{name}: shape must be a list of at most 8 ints >= 0, got {_show(shape)}"])
    whole = [[0, [0] * len(shape), list(shape)]]
    raw_slices = raw.get("slices", whole)
    if isinstance(raw_slices, list | tuple) and len(raw_slices) > MAX_SLICES:
        raise ManifestError([*problems, f"{name}: slices must be at most {MAX_SLICES}, got {len(raw_slices)}"])
    slices = []
    for s in raw_slices if isinstance(raw_slices, list | tuple) else [None]:
        if not (isinstance(s, list | tuple) and len(s) == 3 and _is_int(s[0]) and s[0] < _MAX_SENDER and _ints(s[1]) and _ints(s[2])):
            raise ManifestError([*problems, f"{name}: slices must be a list of [sender, offsets, lengths], got {_show(s)}"])
        slices.append(TensorSlice(s[0], Box(tuple(s[1]), tuple(s[2]))))
    problems += [f"{name}: {fault}" for fault in tiling_faults((s.box for s in slices), shape)]
    if problems:
        raise ManifestError(problems)
    return TensorEntry(name, str(dtype), tuple(shape), tuple(slices))


def _repeated(tensors: Sequence[TensorEntry]) -> list[str]:
    seen: set[str] = set()
    twice = [t.name for t in tensors if t.name in seen or seen.add(t.name)]  # type: ignore[func-returns-value]
    return [f"{name}: listed more than once" for name in twice]


def plan(tensors: Sequence[TensorEntry], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Manifest:
    """Distribute every sender's slices over buckets of at most `bucket_bytes`, in the tensors' order.

    A slice that does not fit into what is left of a bucket is cut along its first dimension, so only a single row wider than a
    bucket makes a larger one. The same tensors give the same plan everywhere.

    Raises:
        ManifestError: a name comes twice.
    """
    if problems := _repeated(tensors):
        raise ManifestError(problems)
    held: dict[int, list[tuple[int, Box]]] = {}
    for index, tensor in enumerate(tensors):
        for s in tensor.slices:
            held.setdefault(s.sender, []).append((index, s.box))
    buckets = [b for sender in sorted(held) for b in _fill(tensors, sender, held[sender], bucket_bytes)]
    return Manifest(tuple(tensors), bucket_bytes, tuple(buckets))


def _fill(tensors: Sequence[TensorEntry], sender: int, held: Sequence[tuple[int, Box]], bucket_bytes: int) -> list[Bucket]:
    """Buckets of one sender. `held`: (index of the tensor, box) of each of its slices."""
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    used = 0

    def close() -> None:
        nonlocal pieces, used
        if pieces:
            buckets.append(Bucket(sender, len(buckets), used, tuple(pieces)))
        pieces, used = [], 0

    for index, box in held:
        if not box.elements:
            continue
        item = DTYPE_BYTES[tensors[index].dtype]
        rows, row_bytes = (box.length[0], box.elements // box.length[0] * item) if box.length else (1, item)
        done = 0
        while done < rows:
            start = -(-used // ALIGN_BYTES) * ALIGN_BYTES
            fit = (bucket_bytes - start) // row_bytes
            if fit < 1 and pieces:
                close()
                continue
            count = min(max(fit, 1), rows - done)
            pieces.append(Piece(index, _rows_of(box, done, count), start))
            used, done = start + count * row_bytes, done + count
    close()
    return buckets


def _rows_of(box: Box, first: int, count: int) -> Box:
    if not box.length:
        return box
    return Box((box.offset[0] + first, *box.offset[1:]), (count, *box.length[1:]))
