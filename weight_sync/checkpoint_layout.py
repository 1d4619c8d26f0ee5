"""The files of a checkpoint folder, as reader and writer agree on them: safetensors, an index, and a marker that comes last. Pure.

A folder is what `save_pretrained` of transformers writes (one `model.safetensors`, or shards and an index) plus `rollsync.json`, the
marker: the size of every file and the digest of every tensor. A name that ends in `.partial` belongs to a writer that is not done.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .manifest import DTYPE_BYTES, TensorEntry

MARKER = "rollsync.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PARTIAL = ".partial"
SHARD_BYTES = 4 << 30
HEADER_LIMIT_BYTES = 100_000_000
"""as the safetensors library has it"""
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
DTYPES = {code: name for name, code in CODES.items()}
OTHER_BYTES = dict.fromkeys(("F64", "I64", "U64"), 8) | dict.fromkeys(("I32", "U32"), 4) | dict.fromkeys(("I16", "U16"), 2)
OTHER_BYTES |= dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1)
"""dtypes that a file may hold and that are no weights'"""
assert CODES.keys() == DTYPE_BYTES.keys()


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor inside a safetensors file."""

    name: str
    code: str
    """dtype as the file calls it"""
    shape: tuple[int, ...]
    start: int
    """first byte, counted from the start of the file"""
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file that is to be written."""

    name: str
    header: bytes
    """what comes before the tensors: its length and the JSON"""
    places: dict[str, int]
    """first byte of each tensor in the file"""
    nbytes: int


def lay_out(tensors: Sequence[TensorEntry], shard_bytes: int = SHARD_BYTES) -> list[FileLayout]:
    """Distribute whole tensors over files of about `shard_bytes`, in their order. The same tensors give the same files everywhere."""
    groups: list[list[TensorEntry]] = [[]]
    used = 0
    for tensor in tensors:
        if groups[-1] and used + tensor.nbytes > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += tensor.nbytes
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return [_file(name, group) for name, group in zip(names, groups, strict=True)]


def _file(name: str, tensors: Sequence[TensorEntry]) -> FileLayout:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for tensor in sorted(tensors, key=lambda t: -DTYPE_BYTES[t.dtype]):  # wide ones first: each begins at a multiple of its item
        header[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        places[tensor.name] = end
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = struct.pack("<Q", len(text)) + text
    return FileLayout(name, raw, {n: len(raw) + at for n, at in places.items()}, len(raw) + end)


def index_text(files: Sequence[FileLayout]) -> str:
    """The index of several files, as transformers reads it."""
    total = sum(f.nbytes - len(f.header) for f in files)
    weight_map = {name: f.name for f in files for name in f.places}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)


def read_places(header: bytes, file_bytes: int) -> tuple[list[Place], list[str]]:
    """Tensors by the header of a safetensors file, in the order of their bytes, and everything that is wrong with it.

    Args:
        header: the JSON alone, without its length.
        file_bytes: size of the whole file; the tensors must fill it exactly.
    """
    try:
        items = json.loads(header, object_pairs_hook=_once)
        assert isinstance(items, dict)
    except (ValueError, RecursionError, AssertionError) as error:
        return [], [f"its header is no JSON object with each name once ({error or 'not an object'})"]
    places, problems = [], []
    base = 8 + len(header)
    for name, told in items.items():
        if name == "__metadata__":
            continue
        place = _place(name, told, base)
        if isinstance(place, str):
            problems.append(place)
        else:
            places.append(place)
    places.sort(key=lambda p: (p.start, p.nbytes))
    if not problems:
        end = base
        for place in places:
            if place.start != end:
                problems.append(f"{place.name} begins at byte {place.start - base}, the one before it ends at {end - base}")
            end = place.start + place.nbytes
        if end != file_bytes:
            problems.append(f"its header names {end} bytes, the file has {file_bytes}")
    return places, problems


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _place(name: str, told: Any, base: int) -> Place | str:
    """A tensor as the header tells of it, or what is wrong."""
    if not isinstance(told, dict) or told.keys() != {"dtype", "shape", "data_offsets"}:
        return f"{name} must have dtype, shape and data_offsets"
    code, shape, offsets = told["dtype"], told["shape"], told["data_offsets"]
    item = DTYPE_BYTES[DTYPES[code]] if code in DTYPES else OTHER_BYTES.get(code) if isinstance(code, str) else None
    if item is None:
        return f"{name} has the unknown dtype {code!r}"
    if not isinstance(shape, list) or len(shape) > 8 or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
        return f"{name} must have at most 8 sizes >= 0 as its shape"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and 0 <= n < 1 << 62 for n in offsets):
        return f"{name} must have two offsets"
    nbytes = math.prod(shape) * item
    if offsets[1] - offsets[0] != nbytes:
        return f"{name} {code} {shape} needs {nbytes} bytes, data_offsets {offsets} hold {offsets[1] - offsets[0]}"
    return Place(name, code, tuple(shape), base + offsets[0], nbytes)
