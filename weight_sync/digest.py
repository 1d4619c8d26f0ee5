"""Digests of tensors that do not depend on who computes which part.

The digest of a tensor is a sum, modulo 2**64, over its elements. With `bits` the element as an unsigned integer and `position` its
row-major index in the whole tensor, an element adds

    ((bits * 0x85EBCA6B + low) mod 2**32) * (high | 1)      high, low: halves of (position + 1) * 0x9E3779B97F4A7C15 mod 2**64

So shards add up, one changed element always changes the sum, and trainer and engine agree whatever is sharded or fused. It guards
against faults, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .boxes import Box

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SPREAD = np.uint32(0x85EBCA6B)
_MASK = (1 << 64) - 1
_CHUNK = 1 << 14
"""elements at a time, so that what lies between stays in the cache"""
_BITS = {torch.float32: (torch.int32, np.uint32), torch.bfloat16: (torch.int16, np.uint16), torch.float16: (torch.int16, np.uint16)}
_STEPS = np.arange(1, _CHUNK + 1, dtype=np.uint64) * _GOLDEN


def _run_digest(bits: Any, first: int) -> int:
    """Of elements that lie one behind the other, from row-major place `first` on. `bits`: their unsigned integers."""
    total = 0
    for i in range(0, len(bits), _CHUNK):
        part = bits[i : i + _CHUNK]
        key = _STEPS[: len(part)] + np.uint64((first + i) * int(_GOLDEN) & _MASK)
        value = part.astype(np.uint32) * _SPREAD + key.astype(np.uint32)
        total += int((value * (key >> np.uint64(32) | np.uint64(1))).sum(dtype=np.uint64))
    return total


def box_digest(values: Tensor, box: Box, shape: Sequence[int]) -> int:
    """The part of a tensor's digest that `box` contributes, in [0, 2**64).

    Args:
        values: the elements of `box`, of its shape; float32, bfloat16 or float16, on any device.
        box: where they lie.
        shape: of the whole tensor.

    Raises:
        ValueError: `values` is not of the box's shape, or of a dtype that has no digest.
    """
    if tuple(values.shape) != box.length or values.dtype not in _BITS:
        raise ValueError(f"values must be {list(box.length)} of {', '.join(map(str, _BITS))}; got {list(values.shape)} {values.dtype}")
    if values.numel() == 0:
        return 0
    dtype, unsigned = _BITS[values.dtype]
    bits = values.detach().cpu().contiguous().view(-1).view(dtype).numpy().view(unsigned)
    run, strides = 1, [1]
    for size in reversed(shape):
        strides.insert(0, strides[0] * size)
    whole = len(shape)  # dimensions that the box takes whole, from the last
    while whole and box.length[whole - 1] == shape[whole - 1]:
        whole -= 1
        run *= box.length[whole]
    if whole:
        run *= box.length[whole - 1]
    total = 0
    for number, outer in enumerate(np.ndindex(*box.length[: max(whole - 1, 0)])):
        place = sum((o + i) * s for o, i, s in zip(box.offset, (*outer, *(0,) * (len(shape) - len(outer))), strides[1:], strict=True))
        total += _run_digest(bits[number * run : (number + 1) * run], place)
    return total & _MASK


def tensor_digest(values: Tensor) -> int:
    """Digest of a whole tensor; see `box_digest`."""
    return box_digest(values, Box.whole(values.shape), values.shape)


def combine(parts: Sequence[int]) -> int:
    """Digest of a tensor from those of boxes that tile it."""
    return sum(parts) & _MASK
