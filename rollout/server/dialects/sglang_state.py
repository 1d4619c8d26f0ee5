"""What SGLang's routes remember between calls: the weight update they have open, and what versions were called.

There an update is a row of calls with no beginning and no end of its own. Here it is a transaction that grows: it opens with the first
bucket, if `/begin_weight_update` did not open it, and is committed by `/end_weight_update`, by `/continue_generation`, or, if nobody
paused, by the bucket's own call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from ...errors import IllegalState, RollsyncError
from ..rollouts import RolloutService
from .version_names import VersionNames, names_of

OWNER = "sglang"
"""of leases and updates"""
COMMIT_S = 600.0
"""how long the engine may take for a commit, which waits for the step at hand"""


@dataclass(slots=True)
class Session:
    """An open update."""

    update_id: str
    begun: bool
    """by /begin_weight_update; False: by its first bucket"""
    text: str | None = None
    """what its version will be called"""
    tensors: int = 0


class SglangState:
    """One server's. Calls that change weights take turns (`turn`)."""

    def __init__(self, service: RolloutService, names: VersionNames) -> None:
        self._engine = service.engine
        self._turn = asyncio.Lock()
        self._names = names
        self._failed = False
        """a bucket was lost since generation last went on: what is committed next must be whole"""
        self.session: Session | None = None
        self.snapshot: dict[str, int] | None = None
        """digests by name, for /weights_checker"""

    # Versions

    @property
    def version(self) -> int:
        """That of the last the engine told of itself."""
        return int(self._engine.snapshot.stats.get("weight_version", 0))

    def version_text(self, version: int) -> str:
        """What a version was called by who brought it; else its number."""
        return self._names.text(version)

    def call_version(self, version: int, text: str | None) -> None:
        """Remember what a version is called; None takes back what it was called before."""
        self._names.call(version, text)

    async def state(self) -> dict[str, Any]:
        """The engine's own words about itself."""
        found: dict[str, Any] = await self._engine.command("state")
        return found

    # Updates

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One call at a time; a session whose update ended by itself is forgotten first."""
        async with self._turn:
            if self.session is not None and (await self.state())["weights"]["update"] != self.session.update_id:
                self._failed = self._failed or not self.session.begun
                self.session = None
            yield

    async def open(self, text: str | None, *, begun: bool, kv_policy: str = "recompute") -> Session:
        """A new update. A text that is a number becomes its version, if that is not below the one served."""
        weights = (await self.state())["weights"]
        number = int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else -1
        version = number if number >= weights["version"] else None
        mode = "full" if self._failed else None
        opened = await self._engine.command(
            "open_update", version=version, mode=mode, owner=OWNER, kv_policy=kv_policy, transport={"name": "mixed"}
        )
        self.session = Session(opened["id"], begun)
        return self.session

    async def bucket(
        self,
        tensors: list[dict[str, Any]],
        layout: dict[str, Any],
        places: list[dict[str, Any]],
        *,
        text: str | None,
        kv_policy: str,
        timeout_s: float,
    ) -> str:
        """Take tensors into the open update, or into one of their own. The message to reply with.

        Args:
            places: where the bytes of each chunk are (see links.MixedLink).

        Raises:
            RollsyncError: the whole update is dropped, and what was served serves on.
        """
        session = self.session or await self.open(text, begun=False, kv_policy=kv_policy)
        session.text = text if text is not None else session.text
        paused = (await self.state())["scheduling"]["state"] == "paused"
        try:
            if tensors:
                chunks = await self._engine.extend(session.update_id, tensors, layout)
                for (sender, sequence), where in zip(chunks, places, strict=True):
                    await self._engine.chunk(session.update_id, sender, sequence, where, timeout_s)
            session.tensors += len(tensors)
        except BaseException as error:
            await self._drop(session, error)
            self._failed = self._failed or (paused and not session.begun)
            raise
        if session.begun or paused:
            return f"{len(tensors)} tensors taken; /{'end_weight_update' if session.begun else 'continue_generation'} makes them current"
        return await self.commit()

    async def commit(self) -> str:
        """Make the open update current. If that is refused, it is dropped."""
        session = self.session
        assert session is not None
        if not session.tensors:
            await self.abort("no tensor came")
            return "no tensor came: the weights are what they were"
        try:
            done = await self._engine.command("commit_update", COMMIT_S, update_id=session.update_id)
        except BaseException as error:
            await self._drop(session, error)
            raise
        self.session, self._failed = None, False
        self.call_version(done["version"], session.text)
        return f"{session.tensors} tensors are current as weight version {self.version_text(done['version'])} ({done['mode']} update)"

    async def abort(self, reason: str) -> None:
        """Drop the open update, if there is one."""
        if self.session is not None:
            session, self.session = self.session, None
            await self._engine.command("abort_update", update_id=session.update_id, reason=reason)

    async def _drop(self, session: Session, error: BaseException) -> None:
        self.session = None
        with contextlib.suppress(RollsyncError):  # what is raised is what went wrong first
            await self._engine.command("abort_update", update_id=session.update_id, reason=f"{type(error).__name__}: {error}"[:500])

    async def continued(self) -> str:
        """Commit what was taken in since the pause. The message to reply with."""
        message = "generation goes on"
        if self.session is not None and not self.session.begun:
            message = f"{await self.commit()}; {message}"
        elif self._failed:
            self._failed = False
            message = f"{message} with weight version {self.version_text(self.version)}: the update before was dropped"
        return message

    def forgive(self) -> None:
        """A new row of buckets begins: those lost before do not matter to it."""
        self._failed = False

    def check_no_session(self, what: str) -> None:
        """IllegalState if an update is open."""
        if self.session is not None:
            raise IllegalState(
                f"{what}: weight update {self.session.update_id} is open with {self.session.tensors} tensors; end it, or drop it by "
                f"POST /v1/weights/updates/{self.session.update_id}/abort"
            )


def state_of(request: Request) -> SglangState:
    """The server's, made when it is first asked for."""
    kept = request.app.state
    if not hasattr(kept, "sglang"):
        kept.sglang = SglangState(kept.service, names_of(request))
    found: SglangState = kept.sglang
    return found


def kv_policy(got: Mapping[str, Any]) -> str:
    """What becomes of requests that run, if nobody paused: flush_cache means that no KV of older weights may be used on."""
    if got.get("abort_all_requests"):
        return "abort"
    return "recompute" if got.get("flush_cache", True) else "keep"
