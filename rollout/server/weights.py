"""`/v1/weights/…` and `/v1/engine/{pause,resume}`: what a trainer does to a live engine. Checked here, carried out between steps."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..engine.lifecycle import MEMORY_TAGS
from ..engine.loop import COMMAND_S
from ..engine.update_record import DEFAULT_UPDATE_S
from ..errors import BadRequest, show
from . import control, hold
from .audit import note
from .checks import Field, read
from .engine_client import EngineProcess
from .replies import body_of, reply, take
from .rollouts import RolloutService
from .schemas import parameter, route
from .weight_schemas import (
    ABORT_UPDATE_FIELDS,
    CHUNK_FIELDS,
    COMMIT_FIELDS,
    DIGEST_FIELDS,
    NAMED_BY,
    OPEN_FIELDS,
    PAUSE_FIELDS,
    RESUME_FIELDS,
    SLEEP_FIELDS,
    TRANSPORT_FIELDS,
    WAKE_FIELDS,
)

router = APIRouter()
CHUNK_TYPE = "application/octet-stream"
OPEN_S = 2 * COMMAND_S + 30.0
"""for an open: longer than the engine's own patience with a step, so that its reply is never missed"""


def _service(request: Request) -> RolloutService:
    service: RolloutService = request.app.state.service
    return service


async def _fields(request: Request, table: tuple[Field, ...]) -> dict[str, Any]:
    return await take(request, lambda body: read(body, table, ""), empty={})


@router.post(
    "/v1/weights/updates",
    openapi_extra=route("Weights", "control", takes="OpenUpdate", gives="Update", events="UpdateEvent", errors=(409, 422)),
)
async def open_update(request: Request) -> Response:
    """Begin a weight update. 422 lists every tensor that does not fit; nothing that is served changes before the commit.

    With the transport disk there is no manifest and are no chunks: the engine checks the folder, reads it by itself, and commits if told.
    With "hold" the reply is a stream that lasts as long as the update: its first event is the reply, its last says how it ended. If the
    connection drops before the commit, the update is aborted at once. Without, a caller that dies leaves it open until its deadline.
    """
    got = await _fields(request, OPEN_FIELDS)
    held = got.pop("hold", False)
    service = _service(request)
    if "transport" in got:
        got["transport"] = _transport(got["transport"])
    if "folder" in got.get("transport", {}):
        opening = _open_folder(service.engine, got)
    elif "commit" in got:
        raise BadRequest("commit is for the disk transport: others commit by a call of its own", field="commit")
    elif "manifest" not in got:
        raise BadRequest("manifest is missing: name the tensors", field="manifest")
    else:
        opening = service.engine.open("open_manifest", got, OPEN_S, f"open {uuid.uuid4().hex}")
    opened = await hold.opened(request, service, opening)
    note(request, {"update": opened["id"], "version": opened["version"]})
    return hold.hold(request, service, opened) if held else reply(request, opened)


@router.get(
    "/v1/weights/updates/{update_id}/hold", openapi_extra=route("Weights", "control", gives="Update", events="UpdateEvent", errors=(404,))
)
async def hold_update(request: Request, update_id: str) -> Response:
    """Tie an update to this connection too, for a trainer's other ranks: a stream as that of an open call with "hold"."""
    service = _service(request)
    return hold.hold(request, service, await control.update_status(service, update_id))


def _transport(raw: Any) -> dict[str, Any]:
    """A transport with the fields that it has, and no other's."""
    told = read(raw, TRANSPORT_FIELDS, "transport")
    for name in told:
        if name != "name" and name not in NAMED_BY[told["name"]]:
            raise BadRequest(f"transport.{name} is none of the transport {told['name']}'s fields", field=f"transport.{name}")
    if told["name"] == "disk" and "folder" not in told:
        raise BadRequest("transport.folder is missing: name the checkpoint", field="transport.folder")
    return told


async def _open_folder(engine: EngineProcess, got: dict[str, Any]) -> Any:
    """An update from a folder: the engine checks its headers, opens, and reads it by itself."""
    told = got.pop("transport")
    if "manifest" in got:
        raise BadRequest("manifest must be left out: the folder's headers are the manifest", field="manifest")
    patience_s = OPEN_S + (got.get("deadline_s", DEFAULT_UPDATE_S) if got.get("commit") else 0.0)
    return await engine.open("open_folder", {"folder": told["folder"], **got}, patience_s, f"folder {uuid.uuid4().hex}")


@router.get("/v1/weights/updates/{update_id}", openapi_extra=route("Weights", "control", gives="Update", errors=(404,)))
async def update_status(request: Request, update_id: str) -> Response:
    """How far an update is."""
    return reply(request, await control.update_status(_service(request), update_id))


@router.post(
    "/v1/weights/updates/{update_id}/chunks",
    openapi_extra=route(
        "Weights",
        "control",
        takes="Chunk",
        gives="ChunkTaken",
        errors=(404, 409),
        parameters=(
            parameter("sender", {"type": "integer"}, f"rank that sends, if the body is {CHUNK_TYPE}"),
            parameter("sequence", {"type": "integer"}, "number of the bucket, likewise"),
        ),
    ),
)
async def chunk(request: Request, update_id: str) -> Response:
    """Take in one bucket: its bytes as the body (application/octet-stream), or its place in offered memory. Once is enough: a
    repeat changes nothing. With `count`, take buckets as they come, until so many are taken, the sender has none ready, or a second
    has passed; the reply says how many it were."""
    engine = _service(request).engine
    if CHUNK_TYPE in request.headers.get("content-type", ""):
        sender, sequence = _number(request, "sender"), _number(request, "sequence")
        async with body_of(request) as data:
            return reply(request, await engine.chunk(update_id, sender, sequence, {"data": data}))
    where = await _fields(request, CHUNK_FIELDS)
    for name in ("sender", "sequence"):
        if name not in where:
            raise BadRequest(f"{name} is missing", field=name)
    count = where.pop("count", None)
    return reply(request, await engine.chunk(update_id, where.pop("sender"), where.pop("sequence"), where, count=count))


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise BadRequest(f"{name} must be an int >= 0, got {text[:40]!r}", field=name)
    return int(text)


@router.post(
    "/v1/weights/updates/{update_id}/commit",
    openapi_extra=route("Weights", "control", takes="CommitUpdate", gives="Update", errors=(404, 409, 422)),
)
async def commit(request: Request, update_id: str) -> Response:
    """Check all that came and make it current between two steps. 422 says what is missing or differs; the update stays open."""
    got = await _fields(request, COMMIT_FIELDS)
    digests = {name: _digest(name, value) for name, value in got["digests"].items()} if "digests" in got else None
    return reply(request, await _service(request).engine.command("commit_update", control.COMMIT_S, update_id=update_id, digests=digests))


def _digest(name: Any, value: Any) -> int:
    if not isinstance(name, str) or not isinstance(value, str) or len(value) != 16 or not all(c in "0123456789abcdef" for c in value):
        raise BadRequest(f"digests[{show(name)}] must be 16 hexadecimal digits, got {show(value)}", field="digests")
    return int(value, 16)


@router.post(
    "/v1/weights/updates/{update_id}/abort",
    openapi_extra=route("Weights", "control", takes="AbortUpdate", gives="Update", errors=(404, 409)),
)
async def abort_update(request: Request, update_id: str) -> Response:
    """Drop an update. Staged, nothing has happened; in place, weights half written are refused until a full update commits."""
    got = await _fields(request, ABORT_UPDATE_FIELDS)
    return reply(request, await control.abort_update(_service(request), update_id, got))


@router.get("/v1/weights", openapi_extra=route("Weights", "traffic", gives="State"))
async def weights(request: Request) -> Response:
    """Version, epoch and validity of the weights, beside the other facts of the engine's state."""
    return reply(request, control.state(_service(request)))


@router.post("/v1/weights/digests", openapi_extra=route("Weights", "control", takes="Compare", gives="Digests", errors=(409,)))
async def digests(request: Request) -> Response:
    """Digest of every live tensor by name, in the engine's dtype; given others to compare with, what differs."""
    got = await _fields(request, DIGEST_FIELDS)
    theirs = {name: f"{_digest(name, value):016x}" for name, value in got.get("compare", {}).items()}
    found = await _service(request).engine.aside("digests", "digests", 120.0)
    differ = sorted(name for name, value in theirs.items() if found.get(name) != value)
    return reply(request, {"digests": found, "differ": differ})


@router.post("/v1/engine/pause", openapi_extra=route("Control", "control", takes="Pause", gives="Paused"))
async def pause(request: Request) -> Response:
    """Take a lease that stops the engine; answered once it is at rest, saying what became of each kind of request."""
    got = await _fields(request, PAUSE_FIELDS)
    for name in ("timeout_s", "at_timeout"):
        if name in got and got.get("mode") != "drain":
            raise BadRequest(f"{name} is for mode drain", field=name)
    if "at_timeout" in got and "timeout_s" not in got:
        raise BadRequest("at_timeout needs timeout_s: without it a drain waits for as long as it takes", field="at_timeout")
    return reply(request, await control.pause(_service(request), got.get("timeout_s", 3600.0) + 30.0, **got))


@router.post("/v1/engine/resume", openapi_extra=route("Control", "control", takes="Resume", gives="Resumed", errors=(409,)))
async def resume(request: Request) -> Response:
    """Give a lease back; the engine goes on once none is left."""
    return reply(request, await _service(request).engine.command("resume", **await _fields(request, RESUME_FIELDS)))


@router.post("/v1/engine/sleep", openapi_extra=route("Control", "control", takes="Sleep", gives="Slept", errors=(409,)))
async def sleep(request: Request) -> Response:
    """Give memory to the system; the reply says how much, as the system counts it. Requests wait, and are computed anew."""
    got = await _fields(request, SLEEP_FIELDS)
    if "weights" in got and "weights" not in got.get("tags", MEMORY_TAGS):
        raise BadRequest("weights says what becomes of them, and tags leaves them where they are", field="weights")
    return reply(request, await _service(request).engine.run("sleep", got))


@router.post("/v1/engine/wake", openapi_extra=route("Control", "control", takes="Wake", gives="Woken", errors=(409,)))
async def wake(request: Request) -> Response:
    """Have memory back. A pause that somebody took before survives."""
    return reply(request, await _service(request).engine.run("wake", await _fields(request, WAKE_FIELDS)))


@router.post("/v1/engine/reset_prefix_cache", openapi_extra=route("Control", "control", takes="Nothing", gives="CacheReset"))
async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached prefix. No update needs it: a block is never found by other weights than those that made it."""
    await _fields(request, ())
    return reply(request, await _service(request).engine.command("reset_prefix_cache"))
