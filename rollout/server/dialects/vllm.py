"""vLLM's routes that steer the engine: pause, sleep, abort, caches, and what a client asks about the server."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...engine.lifecycle import MEMORY_TAGS
from ...errors import BadRequest
from .. import control
from ..checks import Field, boolean, choice, integer, names, object_schema, read, strings
from ..openai import served_names
from ..replies import reply, take
from ..rollouts import RolloutService
from ..schemas import BOOLEAN, COUNT, OBJECT, STRING, Item, array, reply_schema, route
from .query import query_parameters, read_query

router = APIRouter()
OWNER = "vllm"
"""whose lease /pause takes and /resume gives back"""
SLEEP_OWNER = "vllm sleep"
"""whose lease a sleep of level 0 takes and /wake_up gives back"""
MODES = {"abort": "abort", "wait": "drain", "keep": "keep"}
PREFIXES = ("generate-tokens-", "chatcmpl-", "cmpl-")
"""of the ids that replies show"""
COUNTS = ("aborted", "recomputed", "kept", "drained")
"""what became of requests"""
DRAIN_S = 3600.0

_MODE = Field("mode", choice(*MODES), "abort: requests end with what they have; wait: they finish first; keep: they freeze", "abort")
PAUSE_QUERY = (
    _MODE,
    Field("clear_cache", boolean, "keep: true computes their KV anew under the weights they go on with; false keeps it", True),
)
SLEEP_QUERY = (
    Field("level", integer(0, 2), "0: pause only; 1: weights are kept in a file; 2: they are discarded. 1 and 2 free the KV pool too", 1),
    _MODE,
    Field("tags", names(*MEMORY_TAGS), "which memory; left out: all of it"),
)
WAKE_QUERY = (Field("tags", names(*MEMORY_TAGS, "scheduling"), "what to have back; left out: everything"),)
RESET_QUERY = (
    Field("reset_running_requests", boolean, "accepted: running requests keep their own blocks, which nobody else finds any more", False),
    Field("reset_external", boolean, "accepted: there is no cache outside the engine", False),
)
WORLD_QUERY = (Field("include_dp", boolean, "accepted: this server is one replica", True),)
INFO_QUERY = (Field("config_format", choice("text", "json"), "text: the configuration as one string", "text"),)


ABORT_FIELDS = (Field("request_ids", strings, "the calls to end; left out or empty: all"),)


def service_of(request: Request) -> RolloutService:
    service: RolloutService = request.app.state.service
    return service


async def fields(request: Request, table: tuple[Field, ...] = ()) -> dict[str, Any]:
    """The body's fields; no body is an empty one."""
    return await take(request, lambda body: read(body, table, ""), empty={})


def vllm(needs: Any = "control", *, takes: str | None = "Nothing", query: tuple[Field, ...] = (), gives: Any = None) -> dict[str, Any]:
    """`route` with vLLM's errors."""
    errors = (409, 422) if takes else (400,) if query else ()
    return route("vLLM", needs, takes=takes, gives=gives, errors=errors, error="VllmError", parameters=query_parameters(query))


# Pause


@router.post("/pause", openapi_extra=vllm(query=PAUSE_QUERY, gives="VllmPaused"))
async def pause(request: Request) -> Response:
    """Stop the engine under a lease; answered once it is at rest."""
    got = read_query(request, PAUSE_QUERY)
    await fields(request)
    mode = MODES[got.get("mode", "abort")]
    if mode == "keep" and got.get("clear_cache", True):
        mode = "recompute"
    report = await control.pause(service_of(request), DRAIN_S, mode=mode, owner=OWNER)
    return reply(request, {"status": "paused", **{name: report[name] for name in ("changed", "mode", *COUNTS) if name in report}})


@router.post("/resume", openapi_extra=vllm(gives="VllmResumed"))
async def resume(request: Request) -> Response:
    """Give back the lease that /pause took. Status is "paused" if somebody else still holds one."""
    await fields(request)
    report = await service_of(request).engine.command("resume", owner=OWNER)
    return reply(request, {"status": "resumed" if report["running"] else "paused", **report})


def is_paused(state: dict[str, Any]) -> bool:
    return bool(state["scheduling"]["state"] == "paused")


def asleep(state: dict[str, Any]) -> list[str]:
    return [tag for tag, where in state["memory"].items() if where != "resident"]


@router.get("/is_paused", openapi_extra=vllm("traffic", takes=None, gives=reply_schema("", Item("is_paused", BOOLEAN))))
async def paused(request: Request) -> Response:
    """Whether anybody keeps the engine from running."""
    return reply(request, {"is_paused": is_paused(control.state(service_of(request)))})


@router.post("/abort_requests", openapi_extra=vllm(takes="VllmAbort", gives="VllmAborted"))
async def abort_requests(request: Request) -> Response:
    """End calls by id, or all; their own replies carry what they have. `aborted` counts those that were in flight."""
    ids = (await fields(request, ABORT_FIELDS)).get("request_ids")
    found = await (_abort(request, ids) if ids else control.abort(service_of(request), "all", True, "aborted by request"))
    return reply(request, _aborted(found))


def _aborted(found: dict[str, Any]) -> dict[str, Any]:
    return {"status": "aborted", "aborted": len(found["request_ids"]), "request_ids": found["request_ids"]}


async def _abort(request: Request, ids: list[str]) -> dict[str, Any]:
    """End calls by the ids that callers gave, or by those that replies showed."""
    service, ended = service_of(request), []
    for given in ids:
        bare = next((given.removeprefix(p) for p in PREFIXES if given.startswith(p)), given)
        chosen = given if given in service.in_flight else bare
        ended += (await control.abort(service, "request_id", chosen, "aborted by request"))["request_ids"]
    return {"request_ids": sorted(set(ended))}


@router.post("/inference/v1/abort_requests", openapi_extra=vllm(takes="VllmAbortThese", gives="VllmAborted"))
async def abort_these(request: Request) -> Response:
    """End calls by id."""
    got = await fields(request, ABORT_FIELDS)
    if "request_ids" not in got:
        raise BadRequest("request_ids is missing: name the calls", field="request_ids")
    return reply(request, _aborted(await _abort(request, got["request_ids"])))


# Sleep


@router.post("/sleep", openapi_extra=vllm(query=SLEEP_QUERY, gives="VllmSlept"))
async def sleep(request: Request) -> Response:
    """Give memory to the system. Weights of level 2 are invalid until a full update commits."""
    got = read_query(request, SLEEP_QUERY)
    await fields(request)
    service, level = service_of(request), got.get("level", 1)
    report: dict[str, Any] = {"freed_bytes": {}}
    lasts = False
    try:
        await control.pause(service, DRAIN_S, mode=MODES[got.get("mode", "abort")], owner=SLEEP_OWNER)
        if level:
            report = await service.engine.command("sleep", tags=got.get("tags"), weights="discard" if level == 2 else "offload")
        lasts = not level
    finally:
        if not lasts:  # a sleep has a lease of its own; one that failed leaves none
            await service.engine.command("resume", owner=SLEEP_OWNER)
    return reply(request, {"status": "sleeping", "level": level, "freed_bytes": report["freed_bytes"]})


@router.post("/wake_up", openapi_extra=vllm(query=WAKE_QUERY, gives="VllmWoken"))
async def wake_up(request: Request) -> Response:
    """Have memory back. A pause that was taken apart from the sleep survives."""
    tags = read_query(request, WAKE_QUERY).get("tags")
    await fields(request)
    engine = service_of(request).engine
    memory = None if tags is None else [tag for tag in tags if tag != "scheduling"]
    if memory is None or memory:
        await engine.command("wake", tags=memory)
    left = asleep(await engine.command("state"))
    if not left:
        await engine.command("resume", owner=SLEEP_OWNER)
    return reply(request, {"status": "sleeping" if left else "awake", "tags": tags, "asleep": left})


@router.get("/is_sleeping", openapi_extra=vllm("traffic", takes=None, gives=reply_schema("", Item("is_sleeping", BOOLEAN))))
async def sleeping(request: Request) -> Response:
    """As vLLM says it: whether any memory is away, or the engine is paused."""
    state = control.state(service_of(request))
    return reply(request, {"is_sleeping": bool(asleep(state)) or is_paused(state)})


@router.post("/release_kv_cache_memory", openapi_extra=vllm(gives="VllmReleased"))
async def release_kv_cache_memory(request: Request) -> Response:
    """Give the KV pool to the system; /wake_up?tags=kv_cache has it back. Requests wait, and are computed anew."""
    await fields(request)
    report = await service_of(request).engine.command("sleep", tags=["kv_cache"])
    return reply(request, {"status": "kv_cache_released", "freed_bytes": report["freed_bytes"]})


@router.post(
    "/reset_prefix_cache", openapi_extra=vllm(takes="VllmReset", query=RESET_QUERY, gives=reply_schema("", Item("success", BOOLEAN)))
)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached prefix. No update needs it: a block is never found by other weights than those that made it."""
    read_query(request, RESET_QUERY)
    await fields(request, RESET_QUERY)  # SkyRL gives them in the body
    await service_of(request).engine.command("reset_prefix_cache")
    return reply(request, {"success": True})


# About the server


@router.get("/get_world_size", openapi_extra=vllm("traffic", takes=None, query=WORLD_QUERY, gives="VllmWorld"))
async def get_world_size(request: Request) -> Response:
    """Ranks that join a trainer's group."""
    read_query(request, WORLD_QUERY)
    return reply(request, {"world_size": world_size(service_of(request))})


def world_size(service: RolloutService) -> int:
    return service.engine.config.tp


def server_info(request: Request) -> dict[str, Any]:
    """The settings that clients read, where vLLM's own configuration has them."""
    service = service_of(request)
    info = service.engine.snapshot.info
    dtype = f"torch.{info.get('dtype', 'bfloat16')}"
    found = {
        "model_config": {
            "model": service.model,
            "served_model_name": served_names(service, request.app.state.served_model_name)[0],
            "dtype": dtype,
            "max_model_len": info.get("max_model_len"),
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": 20,
        },
        "parallel_config": {
            "tensor_parallel_size": world_size(service),
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "world_size": world_size(service),
        },
        "cache_config": {"block_size": info.get("block_tokens"), "num_gpu_blocks": info.get("num_blocks"), "enable_prefix_caching": True},
        "weight_transfer_config": {"backend": "nccl"},
        "lora_config": None,
    }
    as_text = read_query(request, INFO_QUERY).get("config_format", "text") == "text"
    return {"vllm_config": json.dumps(found) if as_text else found, "vllm_env": {}, "system_env": {}}


@router.get("/load", openapi_extra=vllm("traffic", takes=None, gives=reply_schema("", Item("server_load", COUNT))))
async def load(request: Request) -> Response:
    """Calls in flight."""
    return reply(request, {"server_load": len(service_of(request).in_flight)})


@router.get("/ping", openapi_extra=route("vLLM", "open", gives="Ready", also={503: "Ready"}, error="VllmError"))
async def ping(request: Request) -> Response:
    """As /health: 200 also while the engine is paused or asleep."""
    return reply(request, *control.health(service_of(request)))


_FREED = Item("freed_bytes", OBJECT, "by tag")
COMPONENTS = {
    "VllmInfo": reply_schema(
        "", Item("vllm_config", {"type": ["object", "string"]}, "or its text"), Item("vllm_env", OBJECT), Item("system_env", OBJECT),
    ),
    "VllmError": reply_schema(
        "",
        Item(
            "error",
            reply_schema(
                "",
                Item("message", STRING, "what came, what is allowed, what to do"),
                Item("type", STRING, "vLLM's class of error"),
                Item("param", {"type": ["string", "null"]}, "the field that is wrong"),
                Item("code", COUNT, "the HTTP status"),
            ),
        ),
    ),
    "VllmReset": object_schema(RESET_QUERY),
    "VllmAbort": object_schema(ABORT_FIELDS),
    "VllmAbortThese": object_schema(ABORT_FIELDS, required=["request_ids"]),
    "VllmAborted": reply_schema("", Item("status", STRING), Item("aborted", COUNT), Item("request_ids", array(STRING))),
    "VllmWorld": reply_schema("", Item("world_size", COUNT)),
    "VllmPaused": reply_schema(
        "", Item("status", STRING), Item("changed", BOOLEAN), Item("mode", STRING, "the engine's name of it"),
        *(Item(name, COUNT, always=False) for name in COUNTS),
    ),
    "VllmResumed": reply_schema(
        "", Item("status", STRING, "resumed, or paused if somebody else holds a lease"), Item("changed", BOOLEAN), Item("running", BOOLEAN),
        Item("reason", {"type": ["string", "null"]}, "why it is not running"),
    ),
    "VllmSlept": reply_schema("", Item("status", STRING), Item("level", COUNT), _FREED),
    "VllmReleased": reply_schema("", Item("status", STRING), _FREED),
    "VllmWoken": reply_schema(
        "", Item("status", STRING, "awake or sleeping"), Item("tags", {"type": ["array", "null"], "items": STRING}),
        Item("asleep", array(STRING), "tags that still are"),
    ),
}  # fmt: skip
