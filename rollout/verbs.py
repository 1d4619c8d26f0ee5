"""What both clients do to the engine beside sampling: pause, sleep, weights. docs/api.md tells of the routes (Control, Weights).

Replies are the server's objects as they come. Errors are those of `rollout.errors` by name: IllegalState for a move that the engine's
state does not allow, Unauthorized without the control token, ProtocolMismatch if the server is too old to know the verb.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from .results import Call, abort_call, get

T = TypeVar("T")
Reply = dict[str, Any]


def post(path: str, **body: Any) -> Call[Reply]:
    """What is None is left out."""
    return Call("POST", path, {name: value for name, value in body.items() if value is not None}, dict)


def revoke_call(owner: str) -> Call[Reply]:
    return Call("DELETE", f"/v1/engine/leases?owner={quote(owner, safe='')}", None, dict)


def needs_of(call: Call[Any]) -> str:
    """The capability a server lists if it knows this call: of "/v1/engine/pause", engine.pause."""
    return ".".join(call.path.partition("?")[0].split("/")[2:4])


class ControlVerbs:
    """Part of `RolloutClient`."""

    if TYPE_CHECKING:

        def _verb(self, call: Call[T]) -> T: ...

    def status(self) -> Reply:
        """The engine's facts, counters and memory."""
        return self._verb(get("/v1/engine/status"))

    def abort(self, **which: Any) -> Reply:
        """End calls by `request_id=`, `group=`, `session=` or `all=True`; their own replies carry the partial outputs."""
        return self._verb(abort_call(which))

    def pause(self, mode: str | None = None, owner: str | None = None, ttl_s: float | None = None, **options: Any) -> Reply:
        """Stop the engine under a lease of `owner`'s; returns once it stands still, saying what became of the requests.

        Args:
            mode: keep (default), recompute, abort or drain.
            ttl_s: the lease expires after so many seconds; None: when it is given back.
            options: timeout_s and at_timeout, for drain.
        """
        return self._verb(post("/v1/engine/pause", mode=mode, owner=owner, ttl_s=ttl_s, **options))

    def resume(self, owner: str | None = None) -> Reply:
        """Give `owner`'s lease back. "running" says whether the engine goes on, else "reason" who else stops it."""
        return self._verb(post("/v1/engine/resume", owner=owner))

    def sleep(self, tags: Sequence[str] | None = None, weights: str | None = None) -> Reply:
        """Give memory to the system: "freed_bytes" by tag. `tags`: weights, kv_cache, or both; `weights`: offload or discard."""
        return self._verb(post("/v1/engine/sleep", tags=None if tags is None else list(tags), weights=weights))

    def wake(self, tags: Sequence[str] | None = None) -> Reply:
        """Have memory back."""
        return self._verb(post("/v1/engine/wake", tags=None if tags is None else list(tags)))

    def reset_prefix_cache(self) -> Reply:
        """Forget cached prefixes; a commit of weights does not need it."""
        return self._verb(post("/v1/engine/reset_prefix_cache"))

    def renew_lease(self, owner: str | None = None, ttl_s: float | None = None) -> Reply:
        """Let a pause live on, from now for `ttl_s`, or as long as it was given first."""
        return self._verb(post("/v1/engine/leases", owner=owner, ttl_s=ttl_s))

    def revoke_lease(self, owner: str) -> Reply:
        """End somebody's pause who will not come back."""
        return self._verb(revoke_call(owner))

    def leases(self) -> list[Reply]:
        """Who stops the engine: owner, mode, expires_in_s."""
        return list(self._verb(get("/v1/engine/status"))["scheduling"]["leases"])

    def weights(self) -> Reply:
        """Scheduling, memory, weights (version, epoch, valid) and the open update, none inferred from another."""
        return self._verb(get("/v1/weights"))

    def digests(self, compare: Mapping[str, str] | None = None) -> Reply:
        """"digests" of every live tensor by name, and the names that "differ" from those given."""
        return self._verb(post("/v1/weights/digests", compare=None if compare is None else dict(compare)))

    def update_status(self, update_id: str) -> Reply:
        """How far a weight update is, or how it ended. UnknownUpdate."""
        return self._verb(get(f"/v1/weights/updates/{quote(update_id, safe='')}"))

    def abort_update(self, update_id: str, reason: str | None = None) -> Reply:
        """Drop a weight update."""
        return self._verb(post(f"/v1/weights/updates/{quote(update_id, safe='')}/abort", reason=reason))


class AsyncControlVerbs:
    """Part of `AsyncRolloutClient`: the same, awaited."""

    if TYPE_CHECKING:

        def _verb(self, call: Call[T]) -> Awaitable[T]: ...

    async def status(self) -> Reply:
        return await self._verb(get("/v1/engine/status"))

    async def abort(self, **which: Any) -> Reply:
        return await self._verb(abort_call(which))

    async def pause(self, mode: str | None = None, owner: str | None = None, ttl_s: float | None = None, **options: Any) -> Reply:
        return await self._verb(post("/v1/engine/pause", mode=mode, owner=owner, ttl_s=ttl_s, **options))

    async def resume(self, owner: str | None = None) -> Reply:
        return await self._verb(post("/v1/engine/resume", owner=owner))

    async def sleep(self, tags: Sequence[str] | None = None, weights: str | None = None) -> Reply:
        return await self._verb(post("/v1/engine/sleep", tags=None if tags is None else list(tags), weights=weights))

    async def wake(self, tags: Sequence[str] | None = None) -> Reply:
        return await self._verb(post("/v1/engine/wake", tags=None if tags is None else list(tags)))

    async def reset_prefix_cache(self) -> Reply:
        return await self._verb(post("/v1/engine/reset_prefix_cache"))

    async def renew_lease(self, owner: str | None = None, ttl_s: float | None = None) -> Reply:
        return await self._verb(post("/v1/engine/leases", owner=owner, ttl_s=ttl_s))

    async def revoke_lease(self, owner: str) -> Reply:
        return await self._verb(revoke_call(owner))

    async def leases(self) -> list[Reply]:
        return list((await self._verb(get("/v1/engine/status")))["scheduling"]["leases"])

    async def weights(self) -> Reply:
        return await self._verb(get("/v1/weights"))

    async def digests(self, compare: Mapping[str, str] | None = None) -> Reply:
        return await self._verb(post("/v1/weights/digests", compare=None if compare is None else dict(compare)))

    async def update_status(self, update_id: str) -> Reply:
        return await self._verb(get(f"/v1/weights/updates/{quote(update_id, safe='')}"))

    async def abort_update(self, update_id: str, reason: str | None = None) -> Reply:
        return await self._verb(post(f"/v1/weights/updates/{quote(update_id, safe='')}/abort", reason=reason))
