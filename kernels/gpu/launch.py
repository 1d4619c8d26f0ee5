"""How every kernel here is launched, and what is asked of its tensors.

A `Variant` is one compiled binary: a kernel, the types of its arguments, its constants and its options. Launching goes through it, and the
compile test builds the same list without a GPU, so what is tested is what runs. Pointers are 16-byte aligned, integers that
depend on the batch are not specialised, and floating-point contraction is always off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

TRITON_VERSION: str = triton.__version__
"""of the compiler, whatever its distribution is called"""
ALIGN = 16
TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8",
}  # fmt: skip
"""as Triton writes a pointer to each"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Variant:
    """One binary of a kernel. What it is compiled from holds nothing that depends on the batch."""

    name: str
    """for tables and test names: the op and what tells this variant from its others"""
    fn: Any
    """the kernel, a `triton.jit` function"""
    types: Mapping[str, str]
    """of every argument that is no constant, in order: "*bf16" and the like, "i32", "fp32" """
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 1

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}

    @property
    def aligned(self) -> list[str]:
        """Arguments that are multiples of 16."""
        return [name for name, kind in self.types.items() if kind.startswith("*")]


def launch(variant: Variant, grid: tuple[int, ...], *args: Any) -> None:
    """Start `variant` on the current stream of its first tensor's device."""
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            variant.fn[grid](*args, **variant.constants, **variant.options)
    elif 0 not in grid:
        variant.fn[grid](*args, **variant.constants, **variant.options)


def pointer(dtype: torch.dtype) -> str:
    return TYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """bf16 or fp32.

    Raises:
        ValueError: the kernels do not take this dtype.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"GPU kernels take bfloat16 and float32, got {dtype}")
    return TYPES[dtype][1:]


def check(op: str, ok: bool, problem: str) -> None:
    if not ok:
        raise ValueError(f"{op}: {problem}")


def check_rows(op: str, **tensors: Tensor | None) -> None:
    """Each tensor is contiguous in its last dimension and each of its rows begins at a multiple of 16 bytes.

    Raises:
        ValueError: names the tensor and what is wrong. Kernels are compiled for aligned rows and cannot read others.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        size, address = tensor.element_size(), tensor.data_ptr()
        check(op, address % ALIGN == 0, f"{name} begins at address {address:#x}, not a multiple of {ALIGN}")
        if tensor.ndim:
            check(op, tensor.stride(-1) == 1 or tensor.shape[-1] <= 1, f"{name} is not contiguous: strides {tensor.stride()}")
        for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            bytes_ = stride * size
            aligned = length <= 1 or bytes_ % ALIGN == 0
            check(op, aligned, f"rows of {name} {[*tensor.shape]} lie {bytes_} bytes apart, not a multiple of {ALIGN}")


def check_vectors(op: str, **tensors: Tensor | None) -> None:
    """Each tensor is contiguous and begins at a multiple of 16 bytes; its rows may lie as they come.

    Raises:
        ValueError: names the tensor and what is wrong.
    """
    for name, tensor in tensors.items():
        if tensor is not None:
            check(op, tensor.is_contiguous(), f"{name} is not contiguous: shape {[*tensor.shape]}, strides {tensor.stride()}")
            check(op, tensor.data_ptr() % ALIGN == 0, f"{name} begins at address {tensor.data_ptr():#x}, not a multiple of {ALIGN}")


def units(tensor: Tensor, dim: int = 0) -> int:
    """Stride of a dimension in units of 16 bytes: multiplied back in the kernel, so that the compiler knows rows are aligned."""
    return tensor.stride(dim) * tensor.element_size() // ALIGN


def aligned_room(m: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised [m, n] whose rows begin at multiples of 16 bytes."""
    unit = ALIGN // dtype.itemsize
    return torch.empty(m, cdiv(n, unit) * unit, dtype=dtype, device=device)[:, :n]


def rows_like(x_MN: Tensor) -> Tensor:
    """An uninitialised tensor of the shape and dtype of `x_MN` whose rows begin at multiples of 16 bytes."""
    m, n = x_MN.shape
    return aligned_room(m, n, x_MN.dtype, x_MN.device)


def aligned_rows(x_MN: Tensor) -> Tensor:
    """`x_MN` itself if its rows begin at multiples of 16 bytes and are contiguous, else a copy whose rows do."""
    size = x_MN.element_size()
    fits = x_MN.shape[1] <= 1 or x_MN.stride(1) == 1
    if fits and x_MN.data_ptr() % ALIGN == 0 and x_MN.stride(0) * size % ALIGN == 0:
        return x_MN
    return rows_like(x_MN).copy_(x_MN)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two >= both."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
