"""A rank's share of an update on its way: each piece copied into the next free buffer, and the buffer handed to every engine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .control import UpdateError
from .digest import combine
from .fill import Fill
from .manifest import Bucket, Manifest
from .receiver import TORCH_DTYPES
from .replicas import Flights, Replica
from .sources import WeightSource
from .transports.base import Transport
from .transports.runs import SendingRun


def stream(
    manifest: Manifest,
    source: WeightSource,
    transport: Transport,
    flights: Flights,
    ids: Mapping[str, str],
    fill: Fill,
    *,
    rank: int,
    drain: bool,
) -> dict[str, int]:
    """Pack and hand over the buckets of one rank, a buffer ahead of the engines; digest parts by name.

    Args:
        ids: of the engines' updates, by address.
        drain: read the source to its end though no engine is left: other ranks need this one for theirs.
    """

    parts: dict[str, int] = {}
    buckets = manifest.buckets_of(rank)
    pieces = _pieces(manifest, source, rank, buckets)
    with contextlib.ExitStack() as runs:
        hand_over = _hand_over(transport, flights, ids, rank, len(buckets), runs)
        for number, bucket in enumerate(buckets):
            index = number % transport.num_buffers
            flights.land(index)  # the buffer is free again
            if not flights.still:
                break
            buffer = transport.buffer(index)
            for piece in bucket.pieces:
                tensor = manifest.tensors[piece.tensor]
                target = _typed(buffer, TORCH_DTYPES[tensor.dtype], piece.start, piece.box.elements).view(piece.box.length)
                part = fill(target, next(pieces), piece.box, tensor.shape)
                parts[tensor.name] = combine([parts.get(tensor.name, 0), part])
            for replica in flights.still:
                transport.start(replica.control, bucket, index)
            flights.launch(index, functools.partial(hand_over, bucket, index))
        flights.land_all()
    if drain or flights.still:
        for _ in pieces:
            pass
    return parts


def _hand_over(
    transport: Transport, flights: Flights, ids: Mapping[str, str], rank: int, count: int, runs: contextlib.ExitStack
) -> Callable[[Bucket, int, Replica], Callable[[], Any]]:
    """Begins to hand a packed buffer to an engine, and returns what waits for the end of that. `runs` is closed when all is over."""
    made: dict[str, SendingRun] = {}
    for replica in flights.still:
        if (run := transport.run(replica.control, replica.submit, ids[replica.address], rank, count)) is not None:
            made[replica.address] = run
            runs.callback(run.close)

    def hand_over(bucket: Bucket, index: int, replica: Replica) -> Callable[[], Any]:
        if (run := made.get(replica.address)) is None:
            return replica.submit(transport.send, replica.control, ids[replica.address], bucket, index).result
        run.hand_over(bucket, index)
        return functools.partial(run.wait, bucket)

    return hand_over


def _pieces(manifest: Manifest, source: WeightSource, rank: int, buckets: Sequence[Bucket]) -> Iterator[Tensor]:
    """Values of every piece of these buckets, in order, out of the source's boxes."""
    wanted = [p for b in buckets for p in b.pieces]
    at = 0
    for name, values in source:
        while at < len(wanted) and manifest.tensors[wanted[at].tensor].name == name:
            piece = wanted[at]
            mine = (s.box for s in manifest.tensors[piece.tensor].slices if s.sender == rank)
            held = next(box for box in mine if box.intersect(piece.box) is not None)
            yield values[piece.box.within(held).slices()]
            at += 1
            if held.end == piece.box.end:
                break  # this box is through; the source goes on with the next
    if at < len(wanted):
        raise UpdateError(f"the source ended before {manifest.tensors[wanted[at].tensor].name}")


def _typed(buffer: memoryview | Tensor, dtype: torch.dtype, start: int, count: int) -> Tensor:
    """`count` elements of a buffer from byte `start` on."""
    if isinstance(buffer, Tensor):
        return buffer[start : start + count * dtype.itemsize].view(dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=start)
