"""Weight updates that are tied to a connection: when it drops before the commit, the update is aborted at once.

A trainer that dies thereby frees the engine within about a second, without waiting for the update's deadline. Several connections may
hold one update (each rank of a trainer); any of them that drops ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.requests import Request

from ..errors import RollsyncError
from ..wire import error_to_wire
from . import control
from .replies import ClientGone, StreamReply, until_disconnect, wants_msgpack
from .rollouts import RolloutService

TELL_S = 5.0
"""between two events of an update at work"""
GONE = "the connection that held it is gone"


async def opened(request: Request, service: RolloutService, opening: Coroutine[Any, Any, Any]) -> dict[str, Any]:
    """What `opening` replies. If the caller hangs up before it can be told, nobody knows the update, so it is aborted."""
    task = asyncio.create_task(opening)
    try:
        found: dict[str, Any] = await until_disconnect(request.receive, _wait(task))
        return found
    except (ClientGone, asyncio.CancelledError):
        task.add_done_callback(lambda late: None if late.cancelled() or late.exception() else drop(service, late.result()["id"]))
        raise


async def _wait(task: asyncio.Task[Any]) -> Any:
    return await asyncio.shield(task)


def drop(service: RolloutService, update_id: str) -> None:
    """Abort an update that may be over already; nobody waits."""
    task = asyncio.create_task(_drop(service, update_id))
    service.going_on.add(task)
    task.add_done_callback(service.going_on.discard)


async def _drop(service: RolloutService, update_id: str) -> None:
    with contextlib.suppress(RollsyncError):  # it was committed meanwhile, or the engine has ended
        await service.engine.command("abort_update", control.ABORT_S, update_id=update_id, reason=GONE, cause="connection")


def hold(request: Request, service: RolloutService, update: dict[str, Any]) -> StreamReply:
    """The reply that holds `update`: how it stands, again every TELL_S, then how it ended. A caller that hangs up before aborts it."""

    def leave(sent: bool) -> None:
        if not sent:
            drop(service, update["id"])

    return StreamReply(_events(service, update), leave, wants_msgpack(request))


async def _events(service: RolloutService, update: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    shown = update
    try:
        while shown["state"] == "open":
            yield {**shown, "event": "open"}
            until = asyncio.get_running_loop().time() + TELL_S
            while (left := until - asyncio.get_running_loop().time()) > 0 and _is_open(service, update["id"]):
                await service.engine.published(left)
            shown = await control.update_status(service, update["id"])
        yield {**shown, "event": shown["state"]}
    except RollsyncError as error:  # the engine has ended
        yield {"event": "error", "error": error_to_wire(error)}


def _is_open(service: RolloutService, update_id: str) -> bool:
    update = control.state(service)["update"]
    return update is not None and update["id"] == update_id
