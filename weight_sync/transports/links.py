"""The engine's ends of transports, by name: what an update's open call offers, and where a chunk's bytes then lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from ..manifest import Bucket
from ..names import TRANSPORTS
from .collective import Group
from .disk import DiskLink
from .groups import CollectiveLink, Groups, ReshardLink
from .ipc import MappedBuffers
from .runs import OneByOne, TakingRun
from .torch_handles import KeptBuffers, bytes_of


class LinkError(ValueError):
    """A transport that is not known, or cannot be set up from what the sender offered."""


class Link(Protocol):
    """One update's transport, seen from one engine rank."""

    def view(self, bucket: Bucket, where: Mapping[str, Any]) -> memoryview:
        """The bytes of a chunk, by what its message says of their place; valid until the next call.

        Waits for the sender if the transport does, no longer than its deadline. Raises ValueError if they are not to be had.
        """

    def run(self, sender: int, where: Mapping[str, Any]) -> TakingRun:
        """For a call that brings several chunks of a sender. Raises ValueError if the transport needs one for each."""

    def lost(self) -> str | None:
        """Why nothing can come any more (its sender is gone); None while it can. From any thread."""

    def close(self) -> None:
        """From any thread; a `view` that waits in another ends soon."""


class BodyLink(OneByOne):
    """Chunks bring their bytes along."""

    def view(self, bucket: Bucket, where: Mapping[str, Any]) -> memoryview:
        data = where.get("data")
        if not isinstance(data, bytes | bytearray | memoryview):
            raise LinkError("the chunk brought no bytes: send them as the body")
        return memoryview(data)

    def lost(self) -> str | None:
        return None

    def close(self) -> None:
        return None


class IpcLink:
    """Memory of each sender, mapped at open. What several offer alike is mapped once."""

    def __init__(self, offers: Any, device: torch.device) -> None:
        if not isinstance(offers, list) or not offers:
            raise LinkError("transport.offers must hold one offer per sender")
        self._mapped: list[MappedBuffers] = []
        try:
            for number, offer in enumerate(offers):
                first = offers.index(offer)
                self._mapped.append(MappedBuffers(offer, device) if first == number else self._mapped[first])
        except BaseException:
            self.close()
            raise

    def view(self, bucket: Bucket, where: Mapping[str, Any]) -> memoryview:
        offset, mapped = where.get("offset"), self._of(bucket.sender)
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise LinkError(f"offset must be an int, got {offset!r}")
        return mapped.view(offset, bucket.nbytes)

    def _of(self, sender: int) -> MappedBuffers:
        mapped = self._mapped
        if not 0 <= sender < len(mapped):
            raise LinkError(f"sender {sender} offered no memory")
        return mapped[sender]

    def run(self, sender: int, where: Mapping[str, Any]) -> TakingRun:
        notes = where.get("notes")
        if not isinstance(notes, dict):
            raise LinkError("notes is missing: by them the sender says where each of the chunks lies")
        return self._of(sender).run(notes)

    def lost(self) -> str | None:
        return None

    def close(self) -> None:
        mapped, self._mapped = self._mapped, []
        for one in {id(m): m for m in mapped}.values():
            one.close()


class MixedLink(OneByOne):
    """Every chunk says for itself how it comes: {"data"}, the next broadcast of a {"group"}, or {"handles"} of shared tensors, by rank.

    For trainers that name tensors as they send them, and may send some over one group and some over another.
    """

    def __init__(self, groups: Groups, bucket: Callable[[int, int], Bucket], rank: int) -> None:
        self._groups, self._bucket, self._rank = groups, bucket, rank
        self._body, self._kept = BodyLink(), KeptBuffers()
        self._line: tuple[Group, int, CollectiveLink] | None = None
        """the group that chunks come over, the number of the next, and its receiving end"""
        self._over = False

    def view(self, bucket: Bucket, where: Mapping[str, Any]) -> memoryview:
        if "group" in where:
            return self._receive(bucket, self._groups.get(where["group"]))
        if "handles" in where:
            return bytes_of(where["handles"][self._rank], bucket, self._kept)
        return self._body.view(bucket, where)

    def _receive(self, bucket: Bucket, group: Group) -> memoryview:
        line = self._line
        if line is None or line[:2] != (group, bucket.sequence):
            line = group, bucket.sequence, CollectiveLink([group], self._bucket, bucket.sequence)
        self._line = group, bucket.sequence + 1, line[2]
        if self._over:  # `close` may have come before this line
            line[2].close()
        return line[2].view(bucket, where={})

    def lost(self) -> str | None:
        return None  # a group that is left between two chunks has brought all that was named

    def close(self) -> None:
        self._over = True
        self._kept.close()
        if self._line is not None:
            self._line[2].close()


def make_link(transport: Any, groups: Groups | None = None, bucket: Callable[[int, int], Bucket] | None = None, rank: int = 0) -> Link:
    """The receiving end of `{"name", "offers"}`; None means the bytes come with the chunks.

    Args:
        groups: those this rank is in, for `collective`: `{"name", "group"}` of the only sender, or an offer `{"group"}` of each.
        bucket: what is known of a chunk, by sender and sequence; raises ChunkError for one that is not.
        rank: of the engine's ranks.

    Raises:
        LinkError (or another ValueError of the transport): it cannot be set up.
    """
    if transport is None:
        return BodyLink()
    name = transport.get("name") if isinstance(transport, dict) else None
    if name == "http":
        return BodyLink()
    if name == "ipc":
        return IpcLink(transport.get("offers"), groups.device if groups is not None else torch.device("cpu"))
    if name == "disk" and "files" in transport:  # what CheckpointFolder.link made; callers name a folder, and it is checked first
        return DiskLink(transport)
    if name == "collective" and groups is not None and bucket is not None:
        return CollectiveLink([groups.get(group) for group in _group_names(transport)], bucket)
    if name == "mixed" and groups is not None and bucket is not None:
        return MixedLink(groups, bucket, rank)
    if name == "reshard" and groups is not None and bucket is not None:
        names = _group_names(transport)
        if len(set(names)) > 1:
            raise LinkError(f"all senders of reshard share one group, got {', '.join(names)}")
        return ReshardLink(groups.get(names[0]), bucket)
    raise LinkError(f"transport.name must be one of {', '.join(TRANSPORTS)}, got {name!r}")


def _group_names(transport: Mapping[str, Any]) -> list[str]:
    offers = transport.get("offers", [{"group": transport.get("group")}])
    given = [offer.get("group") if isinstance(offer, dict) else None for offer in offers] if isinstance(offers, list) else []
    names = [name for name in given if isinstance(name, str)]
    if not names or len(names) < len(given):
        raise LinkError("a transport over groups needs transport.group, or one offer with a group per sender")
    return names
