"""Boxes: axis-aligned pieces of a tensor, by offset and length per dimension. What shards, slices and writes are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Elements [offset, offset + length) along every dimension of a tensor. A scalar has no dimensions."""

    offset: tuple[int, ...]
    length: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.length)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether this is a box of a tensor of `shape`, with nothing sticking out."""
        if len(self.offset) != len(shape) or len(self.length) != len(shape):
            return False
        return all(o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(self.offset, self.length, shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """What both hold; None if that is nothing."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        mine, theirs = self.end, other.end
        length = tuple(min(a, b) - o for a, b, o in zip(mine, theirs, offset, strict=True))
        return Box(offset, length) if all(n > 0 for n in length) else None

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.length, strict=True))

    def within(self, outer: Box) -> Box:
        """The same elements, by offsets counted from the start of `outer`."""
        return Box(tuple(o - b for o, b in zip(self.offset, outer.offset, strict=True)), self.length)

    def slices(self) -> tuple[slice, ...]:
        """For indexing a tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.length, strict=True))


def tiling_faults(boxes: Iterable[Box], shape: Sequence[int], limit: int = 3) -> list[str]:
    """Why `boxes` do not cover a tensor of `shape` exactly once; empty if they do.

    Args:
        limit: faults of one kind listed at most.
    """
    held = [box for box in boxes if box.elements]
    faults = [f"slice {_show(box)} is not inside {list(shape)}" for box in held if not box.inside(shape)][:limit]
    if faults:
        return faults
    overlaps = []
    # Sweep over the dimension that is cut most: only boxes that still reach where a box begins can overlap it.
    dim = max(range(len(shape)), key=lambda d: len({box.offset[d] for box in held}), default=-1)
    active: list[Box] = []
    for box in sorted(held, key=lambda b: b.offset[dim:] + b.offset):
        active = [other for other in active if dim < 0 or other.end[dim] > box.offset[dim]]
        overlaps += [f"slices {_show(other)} and {_show(box)} overlap" for other in active if other.intersect(box) is not None]
        active.append(box)
        if len(overlaps) >= limit:
            return overlaps[:limit]
    if overlaps:
        return overlaps
    covered, wanted = sum(box.elements for box in held), math.prod(shape)
    return [f"slices cover {covered} of {wanted} elements"] if covered != wanted else []


def _show(box: Box) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.length, strict=True)) + "]"
