"""vLLM's weight transfer: its session of start, update, finish is one of our updates, which grows with every announcement.

The trainer hosts the group and broadcasts from rank 0; the engine's ranks follow. What fails leaves the old weights serving, and the
group is torn down with it: what the trainer still sends in it must not be taken for the next update's bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...engine.update_record import DEFAULT_UPDATE_S
from ...errors import BadRequest, IllegalState, NotSupported, RollsyncError, UpdateRefused
from .. import control
from ..checks import Field, boolean, check, choice, described_by, fail, integer, mapping, object_schema, read, seconds, string, strings
from ..engine_client import EngineProcess
from ..openai_protocol import accept_any, only
from ..replies import reply, until_disconnect
from ..rollouts import RolloutService
from ..schemas import BOOLEAN, COUNT, STRING, Item, array, reply_schema
from .version_names import names_of
from .vllm import OWNER, fields, service_of, vllm, world_size
from .vllm_state import VllmState, state_of

router = APIRouter()
GROUP = "vllm"
JOIN_S = 120.0
"""how long a trainer's group may take to form, if the trainer does not say"""
RECEIVE_S = 300.0
"""how long one message may take to come"""
PACKED_BYTES = 1 << 30
_NO_HANDLES = "handles of another process's GPU memory are not taken; send by a group, or with rollsync's WeightSender"
_NO_PICKLES = "nothing that comes over HTTP is unpickled"

INIT_FIELDS = (
    Field("master_address", string, "host where the trainer, rank 0, lets the group meet", required=True),
    Field("master_port", integer(1, 65535), "and its port", required=True),
    Field("rank_offset", integer(1, 1 << 20), "rank of this server's first worker", required=True),
    Field("world_size", integer(2, 1 << 20), "ranks of the group, the trainer's included", required=True),
    Field("packed", boolean, "whether tensors come joined into messages", False),
    Field("packed_buffer_size_bytes", integer(1, 1 << 40), "a message ends with the tensor that takes it past this", PACKED_BYTES),
    Field("packed_num_buffers", integer(1, 64), "accepted: how many buffers the sender keeps shows in no byte"),
    Field("timeout_s", seconds, "how long the group may take to form", JOIN_S),
    Field("nccl_unique_id_b64", only(why="give master_address and master_port"), "refused"),
)
START_FIELDS = (Field("is_checkpoint_format", only(True, why="tensors come by their names in the checkpoint"), "only true"),)


_SIZE = {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}


@check({"type": "array", "items": {"type": "array", "items": _SIZE}})
def _shapes(path: str, value: Any) -> list[list[int]]:
    if not isinstance(value, list):
        raise fail(path, "a list of shapes", value)
    size = integer(0, (1 << 63) - 1, "an int >= 0")
    for i, shape in enumerate(value):
        if not isinstance(shape, list):
            raise fail(f"{path}[{i}]", "a list of ints", shape)
        for k, length in enumerate(shape):
            size(f"{path}[{i}][{k}]", length)
    return value


TENSOR_FIELDS = (
    Field("names", strings, "the tensors that follow in the group, by their names in the checkpoint", required=True),
    Field("dtype_names", strings, "their dtypes: bfloat16, float16, float32", required=True),
    Field("shapes", _shapes, "their shapes", required=True),
    Field("packed", boolean, "older trainers say it here; else as told at the start of the group"),
    Field("packed_buffer_size_bytes", integer(1, 1 << 40), "likewise"),
    Field("packed_num_buffers", integer(1, 64), "likewise"),
    Field("is_checkpoint_format", only(True, why="tensors come by their names in the checkpoint"), "only true"),
    Field("ipc_handles", only(why=_NO_HANDLES), "refused"),
    Field("ipc_handles_pickled", only(why=_NO_PICKLES), "refused"),
    Field("tensor_sizes", only(why=_NO_HANDLES), "refused"),
    Field("num_updates_list", only(why="whole tensors only"), "refused"),
)
UPDATE_FIELDS = (
    Field("update_info", accept_any("object"), "the tensors that the trainer broadcasts meanwhile; a list has one per rank, all alike"),
    Field("weight_dir", string, "or: a checkpoint folder below --weights-root, loaded and made current by this call alone"),
)
FINISH_FIELDS = (Field("weight_version", string, "what to call these weights; the engine's own number is the last one plus 1"),)
CHECK_FIELDS = (
    Field("action", choice("checksum", "compare", "reset"), "reset is refused: served weights are never overwritten", required=True),
    Field("baseline", mapping, "compare: checksums by tensor name, as the action checksum gave them"),
)


def _packing(told: dict[str, Any], layout: dict[str, Any] | None = None) -> dict[str, Any]:
    """How tensors are cut into messages; `layout` is what holds if `told` is silent."""
    if layout is not None and "packed" not in told:
        return layout
    if not told.get("packed", False):
        return {"kind": "tensors"}
    return {"kind": "packed", "bytes": told.get("packed_buffer_size_bytes", PACKED_BYTES) + 1}  # past it, not at it


# The group


async def _drop(request: Request, reason: str) -> None:
    """End the open update, if there is one, and the group. Never raises: whoever calls has an error of its own to tell."""
    state, engine = state_of(request), service_of(request).engine
    update_id, state.update_id, state.layout, state.finished, state.ended = state.update_id, None, None, None, reason
    state.turn += 1
    with contextlib.suppress(RollsyncError):
        if update_id is not None:
            await control.abort_update(service_of(request), update_id, {"reason": reason[:500]})
    with contextlib.suppress(RollsyncError):
        await engine.aside(f"leave {GROUP}", "leave_group", name=GROUP)


@contextlib.asynccontextmanager
async def _or_drop(request: Request) -> Any:
    """What fails inside, a caller who hangs up among it, ends the update and the group; a fault of the transfer is told as a 4xx."""
    turn = state_of(request).turn
    try:
        yield
    except BaseException as error:
        words = "the caller hung up" if not isinstance(error, RollsyncError) else str(error)
        if state_of(request).turn == turn:
            await asyncio.shield(_drop(request, words))
        if isinstance(error, RollsyncError) and error.status >= 500 and service_of(request).engine.dead is None:
            raise UpdateRefused(words) from error  # repeating the call cannot mend it
        raise


@router.post("/init_weight_transfer_engine", openapi_extra=vllm(takes="VllmInit", gives="VllmMessage"))
async def init_weight_transfer_engine(request: Request) -> Response:
    """Join the group that a trainer hosts; answered once it is formed. One that was formed before is torn down, its update dropped."""
    body = await fields(request, (Field("init_info", mapping, "", required=True),))
    if "master_address" not in body["init_info"] and "nccl_unique_id_b64" not in body["init_info"]:
        raise BadRequest(f"init_info.master_address is missing: groups only, {_NO_HANDLES}", field="init_info.master_address")
    told = read(body["init_info"], INIT_FIELDS, "init_info")
    service = service_of(request)
    first, ranks = told["rank_offset"], world_size(service)
    if first + ranks > told["world_size"]:
        words = f"at least {first + ranks} (rank_offset {first} and this server's {ranks} ranks), got {told['world_size']}"
        raise BadRequest(f"init_info.world_size must be {words}", field="init_info.world_size")
    await _drop(request, "the trainer's group is formed anew: start another")
    timeout_s = told.get("timeout_s", JOIN_S)
    where = {"host": told["master_address"], "port": told["master_port"], "rank": first, "world_size": told["world_size"]}
    lane = f"join {GROUP} {secrets.token_hex(8)}"  # one that waits holds up neither the next one nor its own end
    join = service.engine.run_aside(lane, "join_group", {"name": GROUP, "timeout_s": timeout_s, **where}, timeout_s + 15.0)
    state = state_of(request)
    turn = state.turn
    async with _or_drop(request):
        await until_disconnect(request.receive, join)
    if state.turn != turn:
        raise IllegalState(f"the group was left while it was formed ({state.ended})")
    state.layout = _packing(told)
    return reply(request, {"message": "Weight transfer initialized"})


@router.post("/shutdown_weight_transfer_engine", openapi_extra=vllm(gives="VllmMessage"))
async def shutdown_weight_transfer_engine(request: Request) -> Response:
    """Leave the trainer's group. An update that is open is dropped; the old weights serve on."""
    await fields(request)
    await _drop(request, "weight transfer was shut down: start another")
    return reply(request, {"message": "Weight transfer shut down"})


# One update


def _check_none_open(service: RolloutService, state: VllmState) -> None:
    """IllegalState if the update that these routes opened is still open."""
    if state.update_id is not None and control.state(service)["weights"]["update"] == state.update_id:
        raise IllegalState(
            f"update {state.update_id} is open: finish it, or drop it by POST /shutdown_weight_transfer_engine "
            f"or /v1/weights/updates/{state.update_id}/abort"
        )


@router.post("/start_weight_update", openapi_extra=vllm(takes="VllmStart", gives="VllmMessage"))
async def start_weight_update(request: Request) -> Response:
    """Open an update. Nothing that is served changes before it is finished."""
    await fields(request, START_FIELDS)
    return reply(request, {"message": "Weight update started", "update": await start(request)})


async def start(request: Request) -> str:
    """Open an update; its id."""
    state, service = state_of(request), service_of(request)
    _check_none_open(service, state)
    if state.layout is None:
        raise IllegalState(f"no trainer's group is formed ({state.ended}): POST /init_weight_transfer_engine")
    opened = await service.engine.open("open_update", {"owner": OWNER, "transport": {"name": "collective", "group": GROUP}})
    state.update_id, state.finished = opened["id"], None
    return str(opened["id"])


@router.post("/update_weights", openapi_extra=vllm(takes="VllmUpdate", gives="VllmMessage"))
async def update_weights(request: Request) -> Response:
    """Receive the tensors that the trainer broadcasts; answered once all of them are taken in. Or load a folder."""
    body = await fields(request, UPDATE_FIELDS)
    if len(body) != 1:
        raise BadRequest(f"give exactly one of update_info, weight_dir; got {', '.join(body) or 'none'}", field="update_info")
    if "weight_dir" in body:
        return await _load_folder(request, body["weight_dir"])
    await receive_update(request, body["update_info"])
    return reply(request, {"message": "Weights updated"})


async def receive_update(request: Request, told: Any) -> None:
    """Take in what an update_info names."""
    state = state_of(request)
    if state.update_id is None:
        _announced(told, None)  # what is wrong with it anyway comes first
        raise IllegalState(f"no update is open ({state.ended})")
    async with _or_drop(request):
        tensors, layout = _announced(told, state.layout)
        await until_disconnect(request.receive, _receive(service_of(request).engine, state.update_id, tensors, layout))


def _announced(told: Any, layout: dict[str, Any] | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(tensors, how they are cut) of an update_info."""
    if isinstance(told, list):
        if not told or any(one != told[0] for one in told):
            raise NotSupported("update_info must be the same for every rank, and not empty", field="update_info")
        told = told[0]
    got = read(told, TENSOR_FIELDS, "update_info")
    for name in ("dtype_names", "shapes"):
        if len(got[name]) != len(got["names"]):
            where, count = f"update_info.{name}", len(got["names"])
            raise BadRequest(f"{where} must have one entry per name ({count}), got {len(got[name])}", field=where)
    rows = zip(got["names"], got["dtype_names"], got["shapes"], strict=True)
    return [{"name": n, "dtype": d, "shape": s} for n, d, s in rows], _packing(got, layout)


async def _receive(engine: EngineProcess, update_id: str, tensors: list[dict[str, Any]], layout: dict[str, Any]) -> None:
    for sender, sequence in await engine.extend(update_id, tensors, layout):
        await engine.chunk(update_id, sender, sequence, {}, RECEIVE_S)


async def _load_folder(request: Request, folder: str) -> Response:
    engine = service_of(request).engine
    try:
        done = await engine.aside(f"folder {OWNER}", "open_folder", DEFAULT_UPDATE_S + 60.0, folder=folder, commit=True, owner=OWNER)
    except BadRequest as error:
        raise type(error)(str(error).replace("transport.folder", "weight_dir"), field="weight_dir") from None
    return reply(request, {"message": "Weights updated", "status": "ok", "version": done["version"]})


@router.post("/finish_weight_update", openapi_extra=vllm(takes="VllmFinish", gives="VllmMessage"))
async def finish_weight_update(request: Request) -> Response:
    """Make what came current between two steps, all of it or nothing. Repeated, it answers the same."""
    label = (await fields(request, FINISH_FIELDS)).get("weight_version")
    return reply(request, {"message": "Weight update finished", "version": await finish(request, label)})


async def finish(request: Request, label: str | None) -> int:
    """Commit the open update; its version, which is called `label` if that is given."""
    state, engine = state_of(request), service_of(request).engine
    if state.update_id is None and state.finished is None:
        raise IllegalState(f"no update is open ({state.ended})")
    if state.update_id is not None:
        async with _or_drop(request):
            done = await engine.command("commit_update", control.COMMIT_S, update_id=state.update_id)
        state.update_id, state.finished, state.ended = None, done["version"], "the last one is finished: start another"
    assert state.finished is not None
    if label is not None:
        names_of(request).call(state.finished, label)
    return state.finished


# Versions and checksums


@router.get("/weight_info", openapi_extra=vllm("traffic", takes=None, gives="VllmWeights"))
async def weight_info(request: Request) -> Response:
    """What the weights that are served are called, and the engine's own number of them."""
    version = control.state(service_of(request))["weights"]["version"]
    return reply(request, {"weight_version": names_of(request).text(version), "version": version})


@router.post("/weight_checker", openapi_extra=vllm(takes="VllmCheck", gives="VllmChecked"))
async def weight_checker(request: Request) -> Response:
    """Checksums of the live weights: the digests of /v1/weights/digests, by tensor name, whatever the sharding."""
    got = await fields(request, CHECK_FIELDS)
    if got["action"] == "reset":
        raise NotSupported("action reset is not supported: served weights are never overwritten", field="action")
    if got["action"] == "compare" and "baseline" not in got:
        raise BadRequest("baseline is missing: compare needs one", field="baseline")
    found = await service_of(request).engine.aside("digests", "digests", 120.0)
    if got["action"] == "checksum":
        return reply(request, {"checksums": found})
    theirs = got["baseline"]
    differ = sorted(name for name in found.keys() | theirs.keys() if found.get(name) != theirs.get(name))
    return reply(request, {"match": not differ, "mismatches": differ})


_TEXTS = {"type": "object", "additionalProperties": STRING}
COMPONENTS = {
    "VllmInit": object_schema((Field("init_info", described_by("VllmInitInfo"), "the group", required=True),)),
    "VllmInitInfo": object_schema(INIT_FIELDS),
    "VllmStart": object_schema(START_FIELDS),
    "VllmUpdate": object_schema(
        (Field("update_info", described_by("VllmUpdateInfo"), UPDATE_FIELDS[0].doc), UPDATE_FIELDS[1]),
        "Exactly one of update_info, weight_dir.",
    ),
    "VllmUpdateInfo": object_schema(TENSOR_FIELDS),
    "VllmFinish": object_schema(FINISH_FIELDS),
    "VllmCheck": object_schema(CHECK_FIELDS),
    "VllmMessage": reply_schema(
        "", Item("message", STRING), Item("update", STRING, "start: its id", always=False),
        Item("version", COUNT, "the engine's number of the new weights", always=False),
        Item("status", STRING, "weight_dir: ok", always=False),
    ),
    "VllmWeights": reply_schema("", Item("weight_version", STRING), Item("version", COUNT)),
    "VllmChecked": reply_schema(
        "", Item("checksums", _TEXTS, "checksum", always=False), Item("match", BOOLEAN, "compare", always=False),
        Item("mismatches", array(STRING), "compare: names that differ, or that only one side has", always=False),
    ),
}  # fmt: skip
