"""A piece of a tensor copied to where it travels from, and digested: block by block, so that the digest finds it in the cache."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .boxes import Box
from .digest import box_digest, combine

Fill = Callable[[Tensor, Tensor, Box, tuple[int, ...]], int]
"""a function like `fill`"""

BLOCK_BYTES = 512 << 10
"""copied, then digested"""
_ALIGN = 256
"""elements after which a digest begins anew: blocks that begin there are cheapest"""
_ALONE = (1 << 15) - 1
"""elements that torch copies without its other threads, which an engine on the same cores would keep it waiting for"""


def fill(target: Tensor, values: Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """Copy `values` to `target`, cast to its dtype; the part of the tensor's digest that `target` then has.

    Args:
        target: contiguous, in this host's memory, of the box's shape.
        values: of the box's shape, on any device.
        shape: of the whole tensor that `box` is of.
    """
    if not box.length:
        target.copy_(values)
        return box_digest(target, box, shape)
    parts = []
    for first, count in _blocks(box, shape, target.element_size()):
        part = Box((box.offset[0] + first, *box.offset[1:]), (count, *box.length[1:]))
        to = target[first : first + count]
        _copy(to, values[first : first + count])
        parts.append(box_digest(to, part, shape))
    return combine(parts)


def _blocks(box: Box, shape: Sequence[int], item: int) -> list[tuple[int, int]]:
    """(first row, rows) of blocks that make up the box."""
    width = math.prod(box.length[1:])
    step = _ALIGN // math.gcd(math.prod(shape[1:]), _ALIGN)  # rows from one aligned row to the next
    many = max(step, BLOCK_BYTES // max(width * item, 1) // step * step)
    ends = range(many - box.offset[0] % step, box.length[0], many)
    cuts = [0, *ends, box.length[0]]
    return [(a, b - a) for a, b in itertools.pairwise(cuts)]


def _copy(target: Tensor, values: Tensor) -> None:
    if values.device.type != "cpu" or target.device.type != "cpu" or not values.is_contiguous():
        target.copy_(values)
    elif values.dtype == target.dtype:
        to: Any = target.view(-1).view(torch.uint8).numpy()
        to[:] = values.detach().view(-1).view(torch.uint8).numpy()  # one memcpy
    else:
        for to, part in zip(target.view(-1).split(_ALONE), values.detach().view(-1).split(_ALONE), strict=True):
            to.copy_(part)
