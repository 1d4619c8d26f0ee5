"""What SGLang's routes remember between calls: the weight update they have open, and what versions were called.

There an update is a row of calls with no beginning and no end of its own. Here it is a transaction that grows: it opens with the first
bucket, if `/begin_weight_update` did not open it, and is committed by `/end_weight_update`, by `/continue_generation`, or, without a
`/pause_generation` before it, by the bucket's own call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from ...errors import IllegalState, RollsyncError
from .. import control
from ..rollouts import RolloutService
from .version_names import VersionNames, names_of

OWNER = "sglang"
"""of leases and updates"""
GROUP_S = 300.0
"""how long a group's ranks may take to meet, and a bucket to come"""


@dataclass(slots=True)
class Session:
    """An open update."""

    update_id: str
    begun: bool
    """by /begin_weight_update; False: by its first bucket"""
    text: str | None = None
    """what its version will be called"""
    tensors: int = 0
    groups: set[str] = field(default_factory=set)
    """those it was sent over"""


class SglangState:
    """One server's. Calls that change weights take turns (`turn`)."""

    def __init__(self, service: RolloutService, names: VersionNames) -> None:
        self._service, self._engine = service, service.engine
        self._turn = asyncio.Lock()
        self._names = names
        self._failed = False
        """a bucket was lost since generation last went on: what is committed next must be whole"""
        self.session: Session | None = None
        self.snapshot: dict[str, str] | None = None
        """digests by name, for /weights_checker"""
        self.announced: dict[str, Any] | None = None
        """tensors that AReaL's clients named and did not send yet"""

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

    def state(self) -> dict[str, Any]:
        """The engine's state as it last told it, which is before it answers the verb that changed it."""
        return control.state(self._service)

    # Updates

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One call at a time; a session whose update ended by itself is forgotten first."""
        async with self._turn:
            if self.session is not None and self.state()["weights"]["update"] != self.session.update_id:
                self._failed = self._failed or not self.session.begun
                self.session = None
            yield

    @staticmethod
    def number(text: str | None, current: int) -> int | None:
        """The version that a text says, if it is a number not below the one that is served; None takes the next."""
        number = int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else -1
        return number if number >= current else None

    async def open(self, text: str | None, *, begun: bool, kv_policy: str = "recompute", whole: bool = False) -> Session:
        """A new update; `whole`: it must bring every tensor."""
        version = self.number(text, self.state()["weights"]["version"])
        mode = "full" if self._failed or whole else None
        options = {"version": version, "mode": mode, "owner": OWNER, "kv_policy": kv_policy}
        opened = await self._engine.open("open_update", {**options, "transport": {"name": "mixed"}})
        self.session = Session(opened["id"], begun)
        return self.session

    async def begin(self, whole: bool = False) -> None:
        """Open an update that `commit` alone ends; one that is open is dropped. If that was begun and had tensors, this must be whole."""
        taken_over = self.session is not None and self.session.begun and self.session.tensors > 0
        await self.abort("another was begun")
        self._failed = taken_over
        await self.open(None, begun=True, whole=whole)

    async def bucket(
        self,
        tensors: list[dict[str, Any]],
        layout: dict[str, Any],
        places: list[dict[str, Any]],
        *,
        text: str | None,
        kv_policy: str,
        group: str | None = None,
    ) -> str:
        """Take tensors into the open update, or into one of their own. The message to reply with.

        Args:
            places: where the bytes of each chunk are (see links.MixedLink).

        Raises:
            RollsyncError: the whole update is dropped, and what was served serves on.
        """
        session = self.session or await self.open(text, begun=False, kv_policy=kv_policy)
        session.text = text if text is not None else session.text
        if group is not None:
            session.groups.add(group)
        paused = any(lease["owner"] == OWNER for lease in self.state()["scheduling"]["leases"])
        try:
            if tensors:
                chunks = await self._engine.extend(session.update_id, tensors, layout)
                for (sender, sequence), where in zip(chunks, places, strict=True):
                    await self._engine.chunk(session.update_id, sender, sequence, where, GROUP_S + 15.0)
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
            done = await self._engine.command("commit_update", control.COMMIT_S, update_id=session.update_id)
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

    async def forget_group(self, name: str) -> None:
        """A group is formed anew: what came over the old one is dropped. Waits for nobody's bucket, which ends with its group."""
        session = self.session
        if session is not None and name in session.groups:
            with contextlib.suppress(RollsyncError):
                await self._engine.command("abort_update", update_id=session.update_id, reason=f"group {name} is formed anew")

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
