"""Which slice goes from which trainer rank to which engine rank, when both sides are sharded. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .boxes import Box
from .manifest import ALIGN_BYTES, DTYPE_BYTES, Bucket, Manifest, Piece

Wanted = Sequence[Mapping[str, Sequence[Box]]]
"""per engine rank: boxes of whole tensors by name"""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What moves between two ranks: the elements of `box` of a tensor, row-major."""

    sender: int
    receiver: int
    tensor: int
    """index into Manifest.tensors"""
    box: Box
    nbytes: int


def plan_reshard(manifest: Manifest, wanted: Wanted) -> tuple[Transfer, ...]:
    """What moves so that every engine rank gets just what it wants, with no gather anywhere.

    Args:
        manifest: who holds what; its slices tile every tensor once.
        wanted: per engine rank. A tensor nobody wants moves nowhere.

    Returns:
        Transfers by (tensor, sender, held slice, receiver, box): the order in which a sender's shards are read.
    """
    transfers = []
    for index, tensor in enumerate(manifest.tensors):
        item = DTYPE_BYTES[tensor.dtype]
        for held in sorted(tensor.slices, key=lambda s: s.sender):  # stable: a sender's slices keep their order
            for receiver, boxes in enumerate(wanted):
                parts = sorted(filter(None, (held.box.intersect(want) for want in boxes.get(tensor.name, ()))))
                transfers += [Transfer(held.sender, receiver, index, part, part.elements * item) for part in parts]
    return tuple(transfers)


@dataclass(frozen=True, slots=True)
class Round:
    """What one sender sends at a time: a message to each engine rank, side by side in one buffer."""

    buckets: tuple[Bucket, ...]
    """by receiver; empty for one that gets nothing"""
    starts: tuple[int, ...]
    """by receiver: where its message begins in the buffer"""
    nbytes: int
    """of the buffer"""
    reads: tuple[tuple[int, Piece], ...]
    """(receiver, piece) in the order in which the sender's shards are read"""


def plan_rounds(manifest: Manifest, wanted: Wanted) -> dict[int, tuple[Round, ...]]:
    """The messages of every sender, by `manifest.bucket_bytes` for all its receivers together. Same input, same plan everywhere.

    Only a single row wider than that makes a larger buffer.
    """
    rounds: dict[int, tuple[Round, ...]] = {}
    transfers = plan_reshard(manifest, wanted)
    for sender in manifest.senders:
        made: list[Round] = []
        reads: list[tuple[int, Piece]] = []
        used = [0] * len(wanted)
        for transfer in (t for t in transfers if t.sender == sender):
            rows = transfer.box.length[0] if transfer.box.length else 1
            row_bytes, done = transfer.nbytes // rows, 0
            while done < rows:
                start = _aligned(used[transfer.receiver])
                fit = (manifest.bucket_bytes - sum(map(_aligned, used)) + _aligned(used[transfer.receiver]) - start) // row_bytes
                if fit < 1 and reads:
                    made.append(_round(sender, len(made), reads, used))
                    reads, used = [], [0] * len(wanted)
                    continue
                count = min(max(fit, 1), rows - done)
                reads.append((transfer.receiver, Piece(transfer.tensor, _rows(transfer.box, done, count), start)))
                used[transfer.receiver], done = start + count * row_bytes, done + count
        if reads:
            made.append(_round(sender, len(made), reads, used))
        rounds[sender] = tuple(made)
    return rounds


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _rows(box: Box, first: int, count: int) -> Box:
    return Box((box.offset[0] + first, *box.offset[1:]), (count, *box.length[1:])) if box.length else box


def _round(sender: int, sequence: int, reads: list[tuple[int, Piece]], used: list[int]) -> Round:
    buckets = tuple(
        Bucket(sender, sequence, nbytes, tuple(piece for to, piece in reads if to == receiver)) for receiver, nbytes in enumerate(used)
    )
    starts, end = [], 0
    for nbytes in used:
        starts.append(end)
        end = _aligned(end + nbytes)
    return Round(buckets, tuple(starts), end, tuple(reads))


def received_by(manifest: Manifest, wanted: Wanted, receiver: int) -> Manifest:
    """The same tensors in the messages that one engine rank gets. Every rank has the same (sender, sequence), some of them empty."""
    return replace(manifest, buckets=tuple(r.buckets[receiver] for rounds in plan_rounds(manifest, wanted).values() for r in rounds))
