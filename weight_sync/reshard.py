"""Which slice goes from which trainer rank to which engine rank, when both sides are sharded. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .boxes import Box
from .manifest import DTYPE_BYTES, Manifest


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message between two ranks: the elements of `box` of a tensor, row-major."""

    sender: int
    receiver: int
    tensor: int
    """index into Manifest.tensors"""
    box: Box
    nbytes: int


def plan_reshard(manifest: Manifest, wanted: Sequence[Mapping[str, Sequence[Box]]]) -> tuple[Transfer, ...]:
    """What moves so that every engine rank gets just what it wants, with no gather anywhere.

    Args:
        manifest: who holds what; its slices tile every tensor once.
        wanted: per engine rank, boxes of whole tensors by name. A tensor nobody wants moves nowhere.

    Returns:
        Transfers by (tensor, sender, receiver, box): the order in which both ends post them, so that they meet.
    """
    transfers = []
    for index, tensor in enumerate(manifest.tensors):
        item = DTYPE_BYTES[tensor.dtype]
        for held in tensor.slices:
            for receiver, boxes in enumerate(wanted):
                for want in boxes.get(tensor.name, ()):
                    if (both := held.box.intersect(want)) is not None:
                        transfers.append(Transfer(held.sender, receiver, index, both, both.elements * item))
    return tuple(sorted(transfers, key=lambda t: (t.tensor, t.sender, t.receiver, t.box)))
