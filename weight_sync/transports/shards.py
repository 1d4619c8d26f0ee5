"""The sending end of the `reshard` transport: every trainer rank sends every engine rank just the slices it wants. No gather anywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..boxes import Box
from ..control import UpdateControl, UpdateError
from ..digest import box_digest, combine
from ..fill import Fill
from ..manifest import Bucket, Manifest, Piece
from ..names import GroupError
from ..ranks import Ranks, together
from ..receiver import TORCH_DTYPES
from ..replicas import Flights, Replica
from ..reshard import Round, Wanted, plan_rounds
from ..sources import WeightSource
from .broadcast import GroupTransport, meet_engine


class Reshard(GroupTransport):
    """Point to point, in rounds: one buffer holds a message for every engine rank, and another one is being packed meanwhile.

    One group joins all trainer ranks and the ranks of one engine. All engines of a sender must be sharded alike.
    """

    name = "reshard"

    def __init__(self, group: str = "reshard", **options: Any) -> None:
        super().__init__(group, **options)
        self._places: dict[str, Mapping[str, Any] | None] = {}
        self._ranks: Ranks | None = None
        self._wanted: Wanted = ()

    def arrange(self, replicas: Sequence[Replica], ranks: Ranks, failed: dict[str, str]) -> None:
        """Ranks agree on which engines are still connected; the first one asks the others for a place to meet. Called on every rank.

        Rank 0 notes in `failed` those that do not answer, and those that are sharded in another way than the first.
        """
        self._ranks = ranks
        alive = ranks.gather([r.address for r in replicas if self.is_up(r.control)])
        up = set(alive[0]).intersection(*alive)

        def lead() -> tuple[dict[str, Any], list[Any]]:
            bind = {"name": self._name, "port": self._port, "senders": ranks.size}
            places: dict[str, Any] = {}
            first: tuple[str, list[Any]] | None = None
            for replica in replicas:
                engine = replica.control
                try:
                    place = None if engine.address in up and self.is_up_there(engine) else engine.bind_group(bind)
                    shards = engine.shards()
                    first = first or (engine.address, shards)
                    if shards != first[1]:
                        raise UpdateError(f"{engine.address} is sharded in another way than {first[0]}: use a sender for each")
                    places[engine.address] = place
                except UpdateError as error:
                    failed[engine.address] = replica.words(error)
            return places, first[1] if first is not None else []

        self._places, wanted = together(ranks, "connect", lead, lead=True)
        self._wanted = [{n: [Box(tuple(o), tuple(s)) for o, s in boxes] for n, boxes in rank.items()} for rank in wanted]

    def connect(self, control: UpdateControl, rank: int) -> None:
        assert self._ranks is not None
        place = self._places[control.address]
        if place is None:
            return
        if (old := self._groups.get(control.address)) is not None:
            old.close("it is formed anew")
        self._groups[control.address] = meet_engine(
            control, self._name, rank=rank, senders=self._ranks.size, place=place, timeout_s=self._timeout_s, device=self._gpu
        )

    def begin(self, control: UpdateControl, made: Round, index: int) -> None:
        """Start a packed round's messages."""
        assert self._ranks is not None
        key, group, operations = (control.address, made.buckets[0].sequence), self._groups[control.address], []
        try:
            for receiver, bucket in enumerate(made.buckets):
                if bucket.nbytes:
                    data = self._buffers[index][made.starts[receiver] :][: bucket.nbytes]
                    operations.append(group.send(data, self._ranks.size + receiver, what=f"bucket {bucket.sequence}"))
            self._under_way[key] = operations
        except GroupError as error:
            self._under_way[key] = error

    def stream(
        self, manifest: Manifest, source: WeightSource, flights: Flights, ids: Mapping[str, str], fill: Fill
    ) -> dict[str, int]:
        """Read this rank's shards once, in their order, and send each piece to who wants it; digest parts by name."""
        assert self._ranks is not None
        rank = self._ranks.rank
        rounds = plan_rounds(manifest, self._wanted).get(rank, ())
        self.prepare(max((r.nbytes for r in rounds), default=1))
        packer = _Packer(manifest, rounds, self._buffers, fill)
        parts: dict[str, int] = {}
        packer.free = flights.land
        for index, box, values in _held(manifest, source, rank):
            tensor = manifest.tensors[index]
            for made, buffer in packer.take(index, box, values):
                for replica in flights.still:
                    self.begin(replica.control, made, buffer)
                flights.launch(buffer, functools.partial(self._hand_over, ids, made.buckets[0], buffer))
            parts[tensor.name] = combine([parts.get(tensor.name, 0), packer.digest(index, box, values)])
        flights.land_all()
        if not packer.is_done:
            raise UpdateError("the source ended before all of this rank's slices had come")
        return parts

    def _hand_over(self, ids: Mapping[str, str], bucket: Bucket, index: int, replica: Replica) -> Callable[[], None]:
        return replica.submit(self.send, replica.control, ids[replica.address], bucket, index).result


def _held(manifest: Manifest, source: WeightSource, rank: int) -> Iterator[tuple[int, Box, Tensor]]:
    """(tensor, box, values) of each slice that the source yields, in the manifest's order of this rank's slices."""
    slices = [(i, s.box) for i, t in enumerate(manifest.tensors) for s in t.slices if s.sender == rank]
    at = 0
    for name, values in source:
        if at >= len(slices) or manifest.tensors[slices[at][0]].name != name:
            raise UpdateError(f"the source yields {name}, which it did not name in that place")
        yield (*slices[at], values)
        at += 1
    if at < len(slices):
        raise UpdateError(f"the source ended before {manifest.tensors[slices[at][0]].name}")


class _Packer:
    """Puts the pieces of shards into the buffers of rounds."""

    def __init__(self, manifest: Manifest, rounds: Sequence[Round], buffers: Sequence[Tensor], fill: Fill) -> None:
        self._manifest, self._rounds, self._buffers, self._fill = manifest, rounds, buffers, fill
        self._copied: dict[int, tuple[int, int]] = {}
        """of the slice at hand, by receiver: elements, and what they add to the tensor's digest"""
        self._round = self._read = 0
        self.free: Callable[[int], None] = lambda index: None
        """waits until a buffer may be written"""

    @property
    def is_done(self) -> bool:
        return self._round == len(self._rounds)

    def take(self, tensor: int, box: Box, values: Tensor) -> Iterator[tuple[Round, int]]:
        """Copy what of a slice is wanted; (round, buffer) of each round that is complete by that."""
        self._copied = {}
        while self._round < len(self._rounds):
            made = self._rounds[self._round]
            receiver, piece = made.reads[self._read]
            if piece.tensor != tensor or piece.box.intersect(box) != piece.box:
                return
            index = self._round % len(self._buffers)
            if self._read == 0:
                self.free(index)
            self._copy(made, receiver, piece, index, values[piece.box.within(box).slices()])
            self._read += 1
            if self._read == len(made.reads):
                self._round, self._read = self._round + 1, 0
                yield made, index

    def _copy(self, made: Round, receiver: int, piece: Piece, index: int, values: Tensor) -> None:
        tensor = self._manifest.tensors[piece.tensor]
        dtype, start = TORCH_DTYPES[tensor.dtype], made.starts[receiver] + piece.start
        place = self._buffers[index][start : start + values.numel() * dtype.itemsize].view(dtype).view(values.shape)
        elements, digest = self._copied.get(receiver, (0, 0))
        part = self._fill(place, values, piece.box, tensor.shape)
        self._copied[receiver] = elements + values.numel(), combine([digest, part])

    def digest(self, tensor: int, box: Box, values: Tensor) -> int:
        """What the slice just taken adds to its tensor's digest: each element once, however many ranks want it."""
        copied = list(self._copied.values())
        if sum(elements for elements, _ in copied) == box.elements:  # shared out
            return combine([part for _, part in copied])
        for elements, part in copied:
            if elements == box.elements:  # each gets all of it
                return part
        entry = self._manifest.tensors[tensor]
        return box_digest(values.to(TORCH_DTYPES[entry.dtype]), box, entry.shape)
