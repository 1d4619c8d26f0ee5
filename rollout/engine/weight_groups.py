"""Calls about a trainer's groups (see weight_sync/transports/collective.py): checked here, carried out by every rank. From any thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ...weight_sync.names import DEFAULT_TIMEOUT_S, GroupError
from ..errors import BadRequest, IllegalState

Value = TypeVar("Value")


class GroupsLike(Protocol):
    """The groups of the ranks. One rank here (`Groups`); several answer as one."""

    num_ranks: int

    @property
    def backend(self) -> str:
        """gloo or nccl: what fits the ranks' devices."""

    def bind(self, name: str, host: str, port: int) -> tuple[str, int]:
        """Rank 0 hosts the place where a group will meet."""

    def join(
        self, name: str, *, host: str, port: int, rank: int, world_size: int, backend: str | None, timeout_s: float, layout: str | None
    ) -> Any:
        """Every rank joins, the engine's first as rank `rank`; returns once all have, or raises the first error. Blocks."""

    def leave(self, name: str) -> bool:
        """Every rank leaves. False if there was none of that name."""

    def status(self) -> dict[str, dict[str, Any]]:
        """Rank 0's view, by name."""


def _told(work: Callable[[], Value]) -> Value:
    try:
        return work()
    except GroupError as error:
        raise IllegalState(str(error)) from None


class GroupCalls:
    """`control.groups`. Raises IllegalState with the group's error: host, port, peer, seconds and the backend's words."""

    def __init__(self, groups: Callable[[], GroupsLike]) -> None:
        self._groups = groups

    def bind(self, name: str, host: str, port: int = 0, senders: int = 1) -> dict[str, Any]:
        """Choose where a group will meet; answered at once. One of that name is torn down, whoever was in it."""
        groups = self._groups()
        host, port = _told(lambda: groups.bind(name, host, port))
        size = senders + groups.num_ranks
        return {"name": name, "host": host, "port": port, "rank": senders, "world_size": size, "backend": groups.backend}

    def join(
        self,
        name: str,
        host: str | None = None,
        port: int | None = None,
        rank: int = 1,
        world_size: int | None = None,
        backend: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        layout: str | None = None,
    ) -> dict[str, Any]:
        """Join a group; answered once it is formed. Without host and port: where it was bound.

        Args:
            rank: of the engine's first rank; senders are those below it.
            layout: native, plain or torch; None finds out. NCCL groups of torch.distributed have to be named: their trainer writes
                nothing until its first operation.
        """
        groups = self._groups()
        if backend not in (None, groups.backend):
            raise BadRequest(f"backend must be {groups.backend}, which fits this engine's device, got {backend}", field="backend")
        if host is None or port is None:
            bound = groups.status().get(name)
            if bound is None:
                raise IllegalState(f"group {name!r} is not bound: choose its place first")
            host, port = bound["host"], bound["port"]
        least = rank + groups.num_ranks
        size = least if world_size is None else world_size
        if size < least:
            held = f"this engine holds {groups.num_ranks} from {rank} on"
            raise BadRequest(f"world_size must be at least {least} ({held}), got {size}", field="world_size")
        facts: dict[str, Any] = {"host": host, "port": port, "rank": rank, "world_size": size}
        facts |= {"backend": backend, "timeout_s": timeout_s, "layout": layout}
        _told(lambda: groups.join(name, **facts))
        return {"name": name, **groups.status().get(name, {})}

    def leave(self, name: str) -> dict[str, Any]:
        """Tear a group down; an update that comes over it fails."""
        return {"changed": self._groups().leave(name)}

    def status(self) -> dict[str, dict[str, Any]]:
        return self._groups().status()
