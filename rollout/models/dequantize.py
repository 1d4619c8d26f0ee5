"""GGML block formats to float32, vectorised over blocks. Layouts: ggml-quants.h and ggml-common.h of llama.cpp.

Each function takes [n, bytes per block] uint8 and returns [n, elements per block] float32, by the operations of llama.cpp's
reference (no fused multiply-add), so the bits are those of the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedModel

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def _f16(blocks: Bytes, start: int) -> Floats:
    """The half-precision number at byte `start` of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles, then high nibbles: [..., k] -> [..., 2k]."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """32 bits at byte `start`, lowest first, each as 0 or 16: [n, 32]."""
    return np.unpackbits(blocks[:, start : start + 4], axis=-1, bitorder="little") << np.uint8(4)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _half(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 2:]).astype(np.float32)
    return _f16(blocks, 0) * (quants - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 4:]).astype(np.float32)
    return _f16(blocks, 0) * quants + _f16(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    quants = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.float32)
    return _f16(blocks, 0) * (quants - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    quants = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).astype(np.float32)
    return _f16(blocks, 0) * quants + _f16(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _f16(blocks, 0)


def _q4_k(blocks: Bytes) -> Floats:
    """8 groups of 32; scale and minimum of a group in 6 bits each, packed into 12 bytes."""
    n = len(blocks)
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=-1).astype(np.float32)
    minima = np.concatenate([mid & 0x3F, (high >> 4) | ((mid >> 2) & 0x30)], axis=-1).astype(np.float32)
    quants = _nibbles(blocks[:, 16:].reshape(n, 4, 32)).reshape(n, 8, 32).astype(np.float32)
    step, offset = _f16(blocks, 0) * scales, _f16(blocks, 2) * minima
    return (step[:, :, None] * quants - offset[:, :, None]).reshape(n, 256)


def _q6_k(blocks: Bytes) -> Floats:
    """16 groups of 16; 4 low bits, 2 high bits, an int8 scale a group."""
    n = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(n, 2, 64)).reshape(n, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(n, 2, 1, 32) >> shifts) & 0x03
    quants = (low | (high << 4)).reshape(n, 16, 16).astype(np.float32) - np.float32(32)
    step = _f16(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (step[:, :, None] * quants).reshape(n, 256)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One GGML tensor type."""

    name: str
    elements: int
    """elements per block"""
    bytes: int
    """bytes per block"""
    dequantize: Callable[[Any], Floats]


FORMATS = {
    0: BlockFormat("F32", 1, 4, _f32),
    1: BlockFormat("F16", 1, 2, _half),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, _bf16),
}
"""by GGML type number"""

_OTHER_NAMES = {10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL"}
_OTHER_NAMES |= {21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}


def block_format(ggml_type: int, tensor: str) -> BlockFormat:
    """The format of a GGML type number, or an UnsupportedModel that names type and tensor and lists what is supported."""
    if ggml_type not in FORMATS:
        name = _OTHER_NAMES.get(ggml_type, f"number {ggml_type}")
        known = ", ".join(f.name for f in FORMATS.values())
        raise UnsupportedModel(f"GGUF tensor {tensor} has type {name}, which is not supported (supported: {known})")
    return FORMATS[ggml_type]


def dequantize(data: Bytes, fmt: BlockFormat) -> Floats:
    """[rows, bytes per row] uint8 -> [rows, columns] float32."""
    rows = len(data)
    return fmt.dequantize(np.ascontiguousarray(data).reshape(-1, fmt.bytes)).reshape(rows, -1)
