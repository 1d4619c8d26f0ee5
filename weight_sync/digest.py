"""Digests of tensors that do not depend on who computes which part.

A tensor is read as its elements one behind the other (row-major), as little-endian signed words of 32 bits; 16-bit elements come two
to a word, the first one low. Word number w adds, modulo 2**64,

    word * KEYS[w % 128] * block_key(w // 128)

with 128 distinct odd KEYS below 2**14 (powers of a generator) and an odd 64-bit key for every block of 128 words (splitmix64). The sum
is linear in every element: shards of any shape add up, trainer and engine agree whatever is sharded or fused, one changed element or
two exchanged ones within a block always change it, and elements exchanged or moved further miss it by a chance below 2**-32. Zeros add
nothing; that all elements came at all is what the manifest's slices prove. It guards against faults, not against an adversary.

A block's sum stays below 2**53, so that float64 holds it exactly: here it is a matrix product. Kernels have the same in C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .boxes import Box

_MASK = (1 << 64) - 1
_BLOCK = 128
"""words"""
_BLOCKS_AT_ONCE = 256
"""so that what lies between stays in the cache"""
_SHORT = 1024
"""runs below this many elements are summed many at a time"""
_BITS = {torch.float32: (torch.int32, np.uint32), torch.bfloat16: (torch.int16, np.uint16), torch.float16: (torch.int16, np.uint16)}
KEYS = np.array([pow(10829, i + 1, 1 << 14) for i in range(_BLOCK)], np.int64)
_FLOAT_KEYS = KEYS.astype(np.float64)


def _block_keys(blocks: Any) -> Any:
    """Odd keys of blocks (uint64 numbers): the splitmix64 sequence."""
    x = (blocks + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31)) | np.uint64(1)


def _blocks_digest(words: Any, first: int) -> int:
    """Of whole blocks, from block `first` on. `words`: int32, a multiple of _BLOCK."""
    rows = words.reshape(-1, _BLOCK)
    total, exact = 0, np.empty((min(_BLOCKS_AT_ONCE, len(rows)), _BLOCK))
    for i in range(0, len(rows), _BLOCKS_AT_ONCE):
        part = rows[i : i + _BLOCKS_AT_ONCE]
        floats = exact[: len(part)]
        floats[:] = part
        sums = np.dot(floats, _FLOAT_KEYS).astype(np.int64).view(np.uint64)
        keys = _block_keys(np.arange(first + i, first + i + len(part), dtype=np.uint64))
        total += int((sums * keys).sum(dtype=np.uint64))
    return total


def _elements_digest(bits: Any, places: Any) -> int:
    """Of runs anywhere. `bits`: [R, N] uint16 or uint32; `places`: [R] row-major places of the runs' first elements."""
    place = places.astype(np.int64)[:, None] + np.arange(bits.shape[1])
    if bits.dtype == np.uint16:
        value = np.where(place % 2 == 1, bits.view(np.int16).astype(np.int64) << 16, bits.astype(np.int64))
        place //= 2
    else:
        value = bits.view(np.int32).astype(np.int64)
    terms = (value * KEYS[place % _BLOCK]).view(np.uint64) * _block_keys((place // _BLOCK).astype(np.uint64))
    return int(terms.sum(dtype=np.uint64))


def _run_digest(bits: Any, first: int) -> int:
    """Of elements that lie one behind the other, from row-major place `first` on. `bits`: their unsigned integers."""
    block = _BLOCK * 4 // bits.dtype.itemsize  # elements
    head = min(-first % block, len(bits))
    end = head + (len(bits) - head) // block * block
    total = _blocks_digest(bits[head:end].view(np.int32), (first + head) // block) if end > head else 0
    for a, b in ((0, head), (end, len(bits))):
        if b > a:
            total += _elements_digest(bits[None, a:b], np.array([first + a]))
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
    places, run = _runs(box, shape)
    if len(places) > 1 and run < _SHORT:
        rows, some = bits.reshape(-1, run), max(1, (1 << 16) // run)
        return sum(_elements_digest(rows[i : i + some], places[i : i + some]) for i in range(0, len(places), some)) & _MASK
    return sum(_run_digest(bits[i * run : (i + 1) * run], int(place)) for i, place in enumerate(places)) & _MASK


def _runs(box: Box, shape: Sequence[int]) -> tuple[Any, int]:
    """Row-major places [R] at which the box's runs begin, and the elements of each: those that lie one behind the other."""
    run, outer = 1, len(shape)
    while outer:  # dimensions, from the last, that the box takes whole; and the one before them
        outer -= 1
        run *= box.length[outer]
        if box.length[outer] != shape[outer]:
            break
    strides = [int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))]
    places = np.array([sum(o * s for o, s in zip(box.offset, strides, strict=True))], np.int64)
    for length, stride in zip(box.length[:outer], strides[:outer], strict=True):
        places = (places[:, None] + np.arange(length) * stride).reshape(-1)
    return places, run


def tensor_digest(values: Tensor) -> int:
    """Digest of a whole tensor; see `box_digest`."""
    return box_digest(values, Box.whole(values.shape), values.shape)


def combine(parts: Sequence[int]) -> int:
    """Digest of a tensor from those of boxes that tile it."""
    return sum(parts) & _MASK
