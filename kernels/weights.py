"""Weights as the kernels read them: packed for the native builds, plain for the reference. Written slice by slice, in any order.

N outputs and K inputs of a linear layer, V vocabulary, D width.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .memory import Region, trim
from .native_lib import NativeLibrary

DTYPES = {torch.bfloat16: 0, torch.float32: 1}
"""as the native library counts them"""
LAYOUTS = ("linear", "gate_up", "rows", "vector", "bias")
_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One parameter. Logical shape [n, k] ([n] for a vector or bias), whatever the layout."""

    n: int
    k: int
    layout: str
    """linear: packed [N, K]; gate_up: the same with gate row i beside up row i; rows: plain, looked up by row;
    vector: plain [n]; bias: [n] kept in float32"""

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")


class Weights(Protocol):
    """What a loader or a live update writes to, and a program reads."""

    dtype: torch.dtype
    specs: Mapping[str, WeightSpec]
    nbytes: int

    def write(self, param: str, dst_row: int, dst_col: int, tensor: Tensor, *, shadow: bool = False) -> None:
        """Copy a 1-D or 2-D slice of the logical parameter to (dst_row, dst_col)."""

    def read(self, param: str, *, shadow: bool = False) -> Tensor:
        """The logical parameter, bit for bit as written."""

    def map_shadow(self) -> None:
        """Reserve addresses for a second copy; memory comes with its first use. Twice is fine."""

    def reserve_shadow(self) -> None:
        """Have a second copy to write to while the live one is read. Twice is fine."""

    def seed_shadow(self, param: str) -> None:
        """Make the shadow of a parameter equal to its live side, before only a part of it is written."""

    def flip(self, params: Iterable[str]) -> None:
        """Shadow becomes live and live shadow, between two steps. The only thing a commit does to weights."""

    def live_bytes(self) -> Iterator[memoryview]:
        """Memory of every live parameter as it lies, to be saved and put back; without those that are lent."""

    def lend(self, param: str) -> Tensor | None:
        """The logical parameter where it lies, for a trainer to keep its own there; None where the layout is another, or two copies are.

        From then on it is the borrower's: nothing here gives its memory away, and it outlives `close`.
        """

    def release(self) -> None:
        """Give the memory of both sides to the system, but for what is lent; what they held is lost."""

    def resume(self) -> None:
        """Have memory again, all zeros."""

    def close(self) -> None:
        """Free the memory. Nothing reads it after this."""


def _check_slice(name: str, spec: WeightSpec, row: int, col: int, tensor: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    rows, cols = (tensor.shape[0], 1) if tensor.ndim == 1 else (tensor.shape[0], tensor.shape[1])
    width = 1 if spec.layout in ("vector", "bias") else spec.k
    if tensor.dtype != dtype or row < 0 or col < 0 or row + rows > spec.n or col + cols > width:
        raise ValueError(f"{name} is [{spec.n}, {width}] {dtype}; cannot write [{rows}, {cols}] {tensor.dtype} at row {row}, column {col}")
    return rows, cols


def _zeros(specs: Mapping[str, WeightSpec], dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {name: (s.n,) if s.layout in ("vector", "bias") else (s.n, s.k) for name, s in specs.items()}
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


class ReferenceWeights:
    """Plain tensors by name."""

    def __init__(self, specs: Mapping[str, WeightSpec], dtype: torch.dtype) -> None:
        self.specs, self.dtype = specs, dtype
        self.tensors = _zeros(specs, dtype)
        self.nbytes = sum(t.numel() * t.element_size() for t in self.tensors.values())
        self._shadow: dict[str, Tensor] = {}
        self._lent: set[str] = set()

    def write(self, param: str, dst_row: int, dst_col: int, tensor: Tensor, *, shadow: bool = False) -> None:
        rows, cols = _check_slice(param, self.specs[param], dst_row, dst_col, tensor, self.dtype)
        target = (self._shadow if shadow else self.tensors)[param]
        if target.ndim == 1:
            target[dst_row : dst_row + rows] = tensor
        else:
            target[dst_row : dst_row + rows, dst_col : dst_col + cols] = tensor.view(rows, cols)

    def read(self, param: str, *, shadow: bool = False) -> Tensor:
        return (self._shadow if shadow else self.tensors)[param].clone()

    def map_shadow(self) -> None:
        return None  # torch takes memory as tensors are made

    def reserve_shadow(self) -> None:
        if not self._shadow:
            self._shadow = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}

    def seed_shadow(self, param: str) -> None:
        self._shadow[param].copy_(self.tensors[param])

    def flip(self, params: Iterable[str]) -> None:
        for name in params:
            self.tensors[name], self._shadow[name] = self._shadow[name], self.tensors[name]

    def live_bytes(self) -> Iterator[memoryview]:
        for name in self.specs:  # in one order: what is saved is put back by it
            if name in self._lent:
                continue
            flat: Any = self.tensors[name].view(-1).view(torch.uint8).numpy()
            yield memoryview(flat)

    def lend(self, param: str) -> Tensor | None:
        if self._shadow:
            return None
        self._lent.add(param)
        return self.tensors[param]

    def release(self) -> None:
        for name in self.tensors.keys() - self._lent:
            del self.tensors[name]
        self._shadow.clear()
        trim()

    def resume(self) -> None:
        self.tensors.update(_zeros({name: spec for name, spec in self.specs.items() if name not in self.tensors}, self.dtype))

    def close(self) -> None:
        self.tensors.clear()
        self._shadow.clear()


class NativeWeights:
    """All parameters in one region, packed by a native library; `table` holds their addresses in the order of `specs`.

    A program refers to weights by index in `table`, so that a parameter's shadow can take its place between two steps.
    """

    def __init__(self, library: NativeLibrary, specs: Mapping[str, WeightSpec], dtype: torch.dtype) -> None:
        self.specs, self.dtype, self.library = specs, dtype, library
        self._code = DTYPES[dtype]
        sizes = {name: self._size(spec) for name, spec in specs.items()}
        self.nbytes = sum(-(-size // _ALIGN) * _ALIGN for size in sizes.values())
        self._sizes = sizes
        self._region = Region(self.nbytes)
        self._shadow_region: Region | None = None
        self._shadow_is_backed = False
        self._lent: set[str] = set()
        self.table = (ctypes.c_void_p * len(specs))()
        self._shadow: dict[str, int] = {}
        self.index: dict[str, int] = {}
        for i, (name, offset) in enumerate(self._offsets()):
            self.table[i] = self._region.address + offset
            self.index[name] = i

    def _offsets(self) -> Iterator[tuple[str, int]]:
        offset = 0
        for name, size in self._sizes.items():
            yield name, offset
            offset += -(-size // _ALIGN) * _ALIGN

    def _size(self, spec: WeightSpec) -> int:
        item = self.dtype.itemsize
        if spec.layout in ("linear", "gate_up"):
            return self.library.packed_elems(self._code, spec.n, spec.k, spec.layout == "gate_up") * item
        if spec.layout == "bias":
            return -(-spec.n // 32) * 32 * 4
        return spec.n * (spec.k if spec.layout == "rows" else 1) * item + 64

    def address(self, param: str, shadow: bool = False) -> int:
        """Where a parameter lies. ValueError: nowhere any more."""
        found = self._shadow[param] if shadow else int(self.table[self.index[param]] or 0)
        if not found:
            raise ValueError(f"{param} is gone: the weights are closed")
        return found

    def map_shadow(self) -> None:
        if self._shadow_region is None:
            self._shadow_region = Region(self.nbytes)
            self._shadow = {name: self._shadow_region.address + offset for name, offset in self._offsets()}

    def reserve_shadow(self) -> None:
        self.map_shadow()
        if not self._shadow_is_backed:
            assert self._shadow_region is not None
            self._shadow_region.populate(0, self.nbytes)
            self._shadow_is_backed = True

    def seed_shadow(self, param: str) -> None:
        ctypes.memmove(self.address(param, shadow=True), self.address(param), self._sizes[param])

    def flip(self, params: Iterable[str]) -> None:
        for name in params:
            live = self.address(name)
            self.table[self.index[name]] = self._shadow[name]
            self._shadow[name] = live

    def _plain(self, param: str, shadow: bool) -> Tensor:
        spec = self.specs[param]
        dtype = torch.float32 if spec.layout == "bias" else self.dtype
        count = spec.n * (spec.k if spec.layout == "rows" else 1)
        raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(self.address(param, shadow))
        flat = torch.frombuffer(raw, dtype=dtype)
        return flat.view(spec.n, spec.k) if spec.layout == "rows" else flat

    def write(self, param: str, dst_row: int, dst_col: int, tensor: Tensor, *, shadow: bool = False) -> None:
        spec = self.specs[param]
        rows, cols = _check_slice(param, spec, dst_row, dst_col, tensor, self.dtype)
        if spec.layout in ("linear", "gate_up"):
            source = tensor.contiguous()
            self.library.pack(
                self._code,
                self.address(param, shadow),
                source.data_ptr(),
                cols,
                spec.n,
                spec.k,
                spec.layout == "gate_up",
                dst_row,
                rows,
                dst_col,
                cols,
            )
        elif spec.layout == "rows":
            self._plain(param, shadow)[dst_row : dst_row + rows, dst_col : dst_col + cols] = tensor.view(rows, cols)
        else:
            self._plain(param, shadow)[dst_row : dst_row + rows] = tensor.view(rows)

    def takes(self, values: Tensor) -> bool:
        """Whether `take` has a kernel for a slice like `values`."""
        return values.ndim == 2 and values.is_contiguous() and values.dtype in (self.dtype, torch.float32)

    def take(
        self, param: str, dst_row: int, dst_col: int, values: Tensor, place: int, width: int, *, shadow: bool = False
    ) -> tuple[int, int]:
        """`write` a slice of a 2-D parameter and digest it (see `NativeLibrary.digest`), in one pass over its memory.

        Args:
            values: what `takes` allows; float32 is rounded to nearest for bfloat16 weights.
            place, width: row-major place of its first element in its whole tensor, and from row to row there.
        """
        spec = self.specs[param]
        rows, cols = values.shape
        if dst_row < 0 or dst_col < 0 or dst_row + rows > spec.n or dst_col + cols > spec.k:
            raise ValueError(f"{param} is [{spec.n}, {spec.k}]; cannot write [{rows}, {cols}] at row {dst_row}, column {dst_col}")
        layout = ("linear", "gate_up", "rows").index(spec.layout)
        address = self.address(param, shadow)
        if values.dtype == self.dtype and address + (dst_row * spec.k + dst_col) * values.itemsize == values.data_ptr():
            return self.library.digest(values, place, width)  # lent: it lies there already
        return self.library.take(self._code, layout, address, values, spec.n, spec.k, dst_row, dst_col, place, width)

    def read(self, param: str, *, shadow: bool = False) -> Tensor:
        spec = self.specs[param]
        if spec.layout not in ("linear", "gate_up"):
            return self._plain(param, shadow).to(self.dtype, copy=True)
        out = torch.empty(spec.n, spec.k, dtype=self.dtype)
        self.library.unpack(
            self._code, self.address(param, shadow), out.data_ptr(), spec.k, spec.n, spec.k, spec.layout == "gate_up", 0, spec.n, 0, spec.k
        )
        return out

    def live_bytes(self) -> Iterator[memoryview]:
        for name, size in self._sizes.items():
            if name not in self._lent:
                yield memoryview((ctypes.c_char * size).from_address(self.address(name))).cast("B")

    def lend(self, param: str) -> Tensor | None:
        spec = self.specs[param]
        packed = spec.layout in ("linear", "gate_up") or (spec.layout == "bias" and self.dtype != torch.float32)
        if packed or self._shadow_region is not None:
            return None
        self._lent.add(param)
        shape = (spec.n, spec.k) if spec.layout == "rows" else (spec.n,)
        size = math.prod(shape) * self.dtype.itemsize
        return torch.frombuffer(self._region.view(self.address(param) - self._region.address, size), dtype=self.dtype).view(shape)

    def release(self) -> None:
        self._shadow_is_backed = False
        if self._shadow_region is not None:
            self._shadow_region.release()
        if not self._lent:
            return self._region.release()
        for name, offset in self._offsets():
            if name not in self._lent:
                self._region.release(offset, self._sizes[name])
        return None

    def resume(self) -> None:
        return None  # the addresses stand; memory comes with the first write

    def close(self) -> None:
        if self._lent:
            self.release()  # who borrowed keeps the region
        self._shadow = dict.fromkeys(self._shadow, 0)
        ctypes.memset(self.table, 0, ctypes.sizeof(self.table))
        self._region.close()
        if self._shadow_region is not None:
            self._shadow_region.close()
