"""`/v1/weights/…` and `/v1/engine/{pause,resume}`: what a trainer does to a live engine. Checked here, carried out between steps."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...weight_sync.manifest import MAX_TENSORS
from ..engine.control import DEFAULT_UPDATE_S, KV_POLICIES, MODES
from ..engine.lifecycle import MEMORY_TAGS, PAUSE_MODES, WEIGHTS_ASLEEP
from ..errors import BadRequest
from . import control, hold
from .audit import note
from .checks import Field, boolean, check, choice, integer, mapping, names, nullable, object_schema, read, seconds, string
from .engine_client import EngineProcess
from .replies import body_of, reply, take
from .reply_schemas import FACTS
from .rollouts import RolloutService
from .schemas import BOOLEAN, COUNT, INTEGER, NUMBER, OBJECT, STRING, Item, array, parameter, reply_schema, route

router = APIRouter()
U64 = 1 << 64
VERSION_LIMIT = (1 << 63) - 1
CHUNK_TYPE = "application/octet-stream"


@check(mapping.schema)
def few_tensors(path: str, value: Any) -> Any:
    """What would keep the event loop and the engine busy for seconds goes no further; all else of a manifest is the engine's to judge."""
    tensors = mapping(path, value).get("tensors")
    if isinstance(tensors, list) and len(tensors) > MAX_TENSORS:
        raise BadRequest(f"{path}.tensors must be at most {MAX_TENSORS}, got {len(tensors)}", field=f"{path}.tensors")
    return value


OPEN_FIELDS = (
    Field("manifest", few_tensors, "the tensors: {tensors: [{name, dtype, shape, slices?}], bucket_bytes?}; a folder brings its own"),
    Field("version", integer(0, VERSION_LIMIT), "of the new weights; left out: the current one plus 1"),
    Field("base_version", integer(0, VERSION_LIMIT), "what a partial update builds on; refused on any other"),
    Field("transport", mapping, "how the bytes come: {name: http | ipc | collective, offers} or {name: disk, folder}; left out: http"),
    Field("commit", boolean, "disk: also commit, once all is read; the reply comes then"),
    Field("mode", choice(*MODES), "full: every tensor; partial: those named"),
    Field("apply", choice("staged", "in_place"), "staged: a second copy; in_place: the engine pauses; left out: as the server was started"),
    Field("kv_policy", choice(*KV_POLICIES), "what becomes of running requests at the commit"),
    Field("owner", string, "who sends, for the log"),
    Field("deadline_s", seconds, f"after this the update is dropped; default {DEFAULT_UPDATE_S:g}"),
    Field("refuse_nonfinite", boolean, "whether NaN or infinity refuses the commit; default true"),
    Field("force", boolean, "allow a version below the current one"),
    Field("hold", boolean, "the reply is a stream, and the update is aborted if its connection drops; default false"),
)
DISK_FIELDS = (
    Field("name", choice("disk"), "disk"),
    Field("folder", string, "a checkpoint below --weights-root: its path, or its name there"),
)
CHUNK_FIELDS = (
    Field("sender", integer(0, 1 << 31), "rank that sends"),
    Field("sequence", integer(0, 1 << 31), "number of the bucket among its sender's"),
    Field("offset", integer(0, VERSION_LIMIT), "ipc: where the bucket begins in the memory offered"),
)
COMMIT_FIELDS = (Field("digests", mapping, "digest by tensor name as 16 hexadecimal digits, compared with what came"),)
DIGEST_FIELDS = (Field("compare", mapping, "digests by tensor name as 16 hexadecimal digits"),)
ABORT_UPDATE_FIELDS = (Field("reason", string, "for the log and for whoever asks"),)
PAUSE_FIELDS = (
    Field("mode", choice(*PAUSE_MODES), "keep, recompute, abort or drain; default keep"),
    Field("owner", string, "whose lease; default operator"),
    Field("ttl_s", seconds, "the lease expires after this; left out: --default-pause-ttl-s, or never"),
    Field("timeout_s", seconds, "drain: how long it may take"),
    Field("at_timeout", choice("abort", "keep"), "drain: what becomes of the rest then; default abort"),
)
SLEEP_FIELDS = (
    Field("tags", names(*MEMORY_TAGS), "which memory; left out: all of it"),
    Field("weights", choice(*WEIGHTS_ASLEEP), "offload: kept in a file; discard: invalid until a full update commits; default offload"),
)
WAKE_FIELDS = (Field("tags", names(*MEMORY_TAGS), "which memory; left out: all of it"),)
RESUME_FIELDS = (Field("owner", string, "whose lease; default operator"),)


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
    if got.get("transport", {}).get("name") == "disk":
        opening = _open_folder(service.engine, got)
    elif "commit" in got:
        raise BadRequest("commit is for the disk transport: others commit by a call of its own", field="commit")
    elif "manifest" not in got:
        raise BadRequest("manifest is missing: name the tensors", field="manifest")
    else:
        opening = service.engine.command("open_update", **got)
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


async def _open_folder(engine: EngineProcess, got: dict[str, Any]) -> Any:
    """An update from a folder: the engine checks its headers, opens, and reads it by itself."""
    told = read(got.pop("transport"), DISK_FIELDS, "transport")
    if "folder" not in told:
        raise BadRequest("transport.folder is missing: name the checkpoint", field="transport.folder")
    if "manifest" in got:
        raise BadRequest("manifest must be left out: the folder's headers are the manifest", field="manifest")
    patience_s = got.get("deadline_s", DEFAULT_UPDATE_S) + 60.0 if got.get("commit") else 60.0
    return await engine.aside(f"folder {uuid.uuid4().hex}", "open_folder", patience_s, folder=told["folder"], **got)


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
    repeat changes nothing."""
    engine = _service(request).engine
    if CHUNK_TYPE in request.headers.get("content-type", ""):
        sender, sequence = _number(request, "sender"), _number(request, "sequence")
        async with body_of(request) as data:
            return reply(request, await engine.chunk(update_id, sender, sequence, {"data": data}))
    where = await _fields(request, CHUNK_FIELDS)
    for name in ("sender", "sequence"):
        if name not in where:
            raise BadRequest(f"{name} is missing", field=name)
    return reply(request, await engine.chunk(update_id, where.pop("sender"), where.pop("sequence"), where))


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
    return reply(request, await _service(request).engine.command("commit_update", update_id=update_id, digests=digests))


def _digest(name: Any, value: Any) -> int:
    if not isinstance(name, str) or not isinstance(value, str) or len(value) != 16 or not all(c in "0123456789abcdef" for c in value):
        raise BadRequest(f"digests[{name!r}] must be 16 hexadecimal digits, got {value!r}", field="digests")
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
    return reply(request, await control.pause(_service(request), got.get("timeout_s", 3600.0) + 30.0, **got))


@router.post("/v1/engine/resume", openapi_extra=route("Control", "control", takes="Resume", gives="Resumed", errors=(409,)))
async def resume(request: Request) -> Response:
    """Give a lease back; the engine goes on once none is left."""
    return reply(request, await _service(request).engine.command("resume", **await _fields(request, RESUME_FIELDS)))


@router.post("/v1/engine/sleep", openapi_extra=route("Control", "control", takes="Sleep", gives="Slept", errors=(409,)))
async def sleep(request: Request) -> Response:
    """Give memory to the system; the reply says how much, as the system counts it. Requests wait, and are computed anew."""
    return reply(request, await _service(request).engine.run("sleep", await _fields(request, SLEEP_FIELDS), 120.0))


@router.post("/v1/engine/wake", openapi_extra=route("Control", "control", takes="Wake", gives="Woken", errors=(409,)))
async def wake(request: Request) -> Response:
    """Have memory back. A pause that somebody took before survives."""
    return reply(request, await _service(request).engine.run("wake", await _fields(request, WAKE_FIELDS), 120.0))


@router.post("/v1/engine/reset_prefix_cache", openapi_extra=route("Control", "control", takes="Nothing", gives="CacheReset"))
async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached prefix. No update needs it: a block is never found by other weights than those that made it."""
    await _fields(request, ())
    return reply(request, await _service(request).engine.command("reset_prefix_cache"))


_UPDATE = reply_schema(
    "A weight update, open or over.",
    Item("id", STRING),
    Item("state", {"type": "string", "enum": ["open", "committed", "aborted"]}),
    Item("reason", {"anyOf": [STRING, {"type": "null"}]}, "why it was aborted"),
    Item("mode", {"anyOf": [STRING, {"type": "null"}]}, "full or partial; null while an update grows"),
    *(Item(name, STRING) for name in ("apply", "kv_policy", "owner")),
    Item("version", INTEGER, "of the new weights"),
    Item("bytes", COUNT, "of all tensors"),
    Item("received_bytes", COUNT, "while open", always=False),
    Item("missing_chunks", COUNT, "while open", always=False),
    Item("phase", {"type": "string", "enum": ["receiving", "checking", "switching"]}, "while open", always=False),
    Item("elapsed_s", NUMBER, "while open: since it was opened", always=False),
    Item("deadline_in_s", NUMBER, "while open", always=False),
    Item("pending", BOOLEAN, "of an abort: the engine is in a long step or command, and ends the update after it", always=False),
    Item("epoch", COUNT, "once committed: number of commits so far", always=False),
    Item("recompute_tokens", COUNT, "once committed: tokens of running requests that are prefilled again", always=False),
    Item("aborted", COUNT, "once committed with kv_policy abort: samples ended", always=False),
    Item("seconds", NUMBER, "once committed: since it was opened", always=False),
    Item("changed", BOOLEAN, "false for a call that found its work done", always=False),
)
_HELD_EVENTS = ("open", "committed", "aborted", "error")
_STATE = reply_schema(
    "Three facts, never inferred from each other.",
    *FACTS,
    Item("why_not_running", nullable(STRING), "null: requests are served"),
)
COMPONENTS = {
    "OpenUpdate": {**object_schema(OPEN_FIELDS), "required": ["manifest"]},
    "Chunk": object_schema(CHUNK_FIELDS),
    "CommitUpdate": object_schema(COMMIT_FIELDS),
    "AbortUpdate": object_schema(ABORT_UPDATE_FIELDS),
    "Pause": object_schema(PAUSE_FIELDS),
    "Resume": object_schema(RESUME_FIELDS),
    "Sleep": object_schema(SLEEP_FIELDS),
    "Wake": object_schema(WAKE_FIELDS),
    "Slept": reply_schema(
        "", Item("changed", BOOLEAN), Item("freed_bytes", OBJECT, "by tag"), Item("recompute_tokens", COUNT, "to feed again", always=False)
    ),
    "Woken": reply_schema(
        "",
        Item("changed", BOOLEAN),
        Item("asleep", array(STRING), "tags that still are"),
        Item("running", BOOLEAN),
        Item("reason", {"anyOf": [STRING, {"type": "null"}]}, "why it is not running"),
    ),
    "Nothing": object_schema(()),
    "CacheReset": reply_schema("", Item("changed", BOOLEAN), Item("blocks", COUNT, "blocks forgotten; those in use go on being used")),
    "Update": _UPDATE,
    "UpdateEvent": {**_UPDATE, "properties": {**_UPDATE["properties"], "event": {"type": "string", "enum": list(_HELD_EVENTS)}}},
    "State": _STATE,
    "Compare": object_schema(DIGEST_FIELDS),
    "Digests": reply_schema(
        "",
        Item("digests", {"type": "object", "additionalProperties": STRING}, "by tensor name"),
        Item("differ", array(STRING), "names compared whose digest here is another, or that are not here"),
    ),
    "ChunkTaken": reply_schema("What is left.", Item("changed", BOOLEAN), Item("received_bytes", COUNT), Item("missing_chunks", COUNT)),
    "Paused": reply_schema(
        "What became of the requests.",
        Item("changed", BOOLEAN, "whether the owner had no lease before"),
        Item("mode", STRING),
        *(Item(name, COUNT, "samples") for name in ("aborted", "recomputed", "kept", "drained", "queued")),
        Item("request_ids", OBJECT, "of calls, by kind: aborted, recomputed, kept, drained; not all of very many"),
        Item("recompute_tokens", COUNT, "mode recompute: to feed again", always=False),
        Item("draining", BOOLEAN, "always false here"),
        Item("resumed", BOOLEAN, "drain: the lease was given back or expired before it was over", always=False),
        Item("superseded", BOOLEAN, "drain: its owner paused anew before it was over", always=False),
    ),
    "Resumed": reply_schema("", Item("changed", BOOLEAN), Item("running", BOOLEAN), Item("reason", {"anyOf": [STRING, {"type": "null"}]})),
}
