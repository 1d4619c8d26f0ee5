"""Digests by the compiled kernels: what an engine checks an update with, and what a trainer on such a machine may send with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.native_lib import NativeLibrary, available_builds, load_build
from ...weight_sync.boxes import Box
from ...weight_sync.digest import KEYS as DIGEST_KEYS
from ...weight_sync.fill import Fill, fill
from ...weight_sync.receiver import inspect as inspect_plain

Inspect = Callable[[Tensor, Box, tuple[int, ...]], tuple[int, int]]
"""(values, where they lie, shape of the whole tensor) -> (part of the digest, elements that are not finite)"""


def native_inspect(library: NativeLibrary) -> Inspect:
    """Digest and finite check in one pass by `library`."""

    def inspect(values: Tensor, box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
        if values.device.type != "cpu" or len(box.length) not in (1, 2):
            return inspect_where_they_lie(values, box, shape)
        if len(box.length) == 1:
            return library.digest(values.contiguous().view(1, -1), box.offset[0], 0)
        rows = values if values.stride(1) == 1 else values.contiguous()
        return library.digest(rows, box.offset[0] * shape[1] + box.offset[1], shape[1])

    return inspect


def inspect_where_they_lie(values: Tensor, box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """Digest and finite check without a copy to the host, for values on another device."""
    if values.device.type == "cpu" or len(box.length) not in (1, 2):
        return inspect_plain(values, box, shape)
    return device_digest(values, box, shape), values.numel() - int(torch.isfinite(values).sum())


_PIECE = 1 << 24
"""elements at once: each takes some ten words on the way"""


def device_digest(values: Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """`weight_sync.digest.box_digest` of 1-D or 2-D values, in int64 arithmetic of their device, which wraps as the digest does."""
    if len(box.length) == 1:
        values, first, width = values.reshape(1, -1), box.offset[0], values.numel()
    else:
        first, width = box.offset[0] * shape[1] + box.offset[1], shape[1]
    rows = max(1, _PIECE // max(values.shape[1], 1))
    columns = torch.arange(values.shape[1], device=values.device)
    keys = torch.from_numpy(DIGEST_KEYS).to(values.device)
    total = 0
    for row in range(0, values.shape[0], rows):
        part = values[row : row + rows].contiguous()
        places = first + (row + torch.arange(len(part), device=values.device))[:, None] * width + columns
        if part.dtype == torch.float32:
            words = part.view(torch.int32).long()
        else:
            half = part.view(torch.int16).long()
            words = torch.where(places % 2 == 1, half << 16, half & 0xFFFF)
            places = places // 2
        terms = words * keys[places % len(keys)] * _block_keys(places // len(keys))
        total += int(terms.sum())
    return total % (1 << 64)


def _block_keys(blocks: Tensor) -> Tensor:
    """The digest's odd keys of blocks, as signed int64."""
    x = (blocks + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31) | 1


def _signed(constant: int) -> int:
    return constant - (1 << 64)


def _shifted(x: Tensor, count: int) -> Tensor:
    """x >> count, zeros coming in from above."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def fast_fill() -> Fill:
    """What to give `WeightSender(fill=...)`: this machine's kernels where they are compiled, else what it does anyway.

    The digests are the same; this takes about half the time.
    """
    builds = available_builds()
    if not builds:
        return fill
    library = load_build(builds[0])

    def native_fill(target: Tensor, values: Tensor, box: Box, shape: tuple[int, ...]) -> int:
        cast = (values.dtype, target.dtype) == (torch.float32, torch.bfloat16)
        plain = values.device.type == target.device.type == "cpu" and values.is_contiguous() and (cast or values.dtype == target.dtype)
        if not plain or not box.length or (len(box.length) != 2 and box.length[1:] != shape[1:]):
            return fill(target, values, box, shape)
        width = math.prod(shape[1:])
        rows, cols = box.length[0], math.prod(box.length[1:])
        first = box.offset[0] * width + (box.offset[1] if len(shape) == 2 else 0)
        if len(shape) == 1:
            rows, cols, width = 1, rows, 0
        return library.copy(target.view(rows, cols), values.view(rows, cols), first, width)[0]

    return native_fill
