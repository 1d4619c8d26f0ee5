"""SGLang's routes that steer the engine or ask about it: pause, abort, caches, memory, health. Replies say {"success", "message"}."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...engine.lifecycle import MEMORY_TAGS
from ...errors import BadRequest, IllegalState, RollsyncError
from .. import control
from ..checks import Field, boolean, choice, names, read, seconds, text
from ..openai import served_names
from ..protocol import Naming, PromptSpec, RolloutCall
from ..replies import error_reply, reply, take
from ..rollouts import RolloutService
from ..schemas import Needs, route
from .query import query_parameters, read_query
from .sglang_protocol import sampling_params
from .sglang_state import OWNER, SglangState, state_of

router = APIRouter()
PAUSE_MODES = {"abort": "abort", "retract": "recompute", "in_place": "keep"}
FLUSH_POLL_S = 0.1
MAX_FLUSH_S = 3600.0
HEALTH_S = 20.0
"""how long the token of /health_generate may take"""
NO_OP_TAGS = ("cuda_graph",)
"""memory that is not there: moving it changes nothing"""

PAUSE_FIELDS = (
    Field("mode", choice(*PAUSE_MODES), "abort: requests end with what they have; retract: their KV is freed; in_place: kept", "abort"),
)
CONTINUE_FIELDS = (Field("torch_empty_cache", boolean, "accepted; nothing is cached"),)
ABORT_FIELDS = (
    Field("rid", text, "the request of exactly this name, or all prompts of the list that was sent under it", ""),
    Field("abort_all", boolean, "every request", False),
    Field("abort_message", text, "what the partial outputs say"),
)
MEMORY_FIELDS = (Field("tags", names(*MEMORY_TAGS, *NO_OP_TAGS), "which memory; left out or empty: all. cuda_graph: goes with these"),)
FLUSH_QUERY = (Field("timeout", seconds, "seconds to wait for requests to end"), Field("timeout_s", seconds, "the same"))
POST_PROCESS_FIELDS = (
    Field("restore_weights_before_load", boolean, "accepted: parameters are always loadable"),
    Field("post_process_quantization", boolean, "accepted: nothing is quantised"),
)
LOADS_QUERY = (Field("include", text, "accepted: the reply is the same"), Field("dp_rank", text, "accepted: there is one engine"))

Message = str | tuple[str, dict[str, Any]]
"""what was done, and further fields of the reply"""
Work = Callable[[Request, SglangState], Awaitable[Message]]
Answer = Callable[[Request], Awaitable[Response]]
Query = tuple[Field, ...]


def service_of(request: Request) -> RolloutService:
    service: RolloutService = request.app.state.service
    return service


async def fields(request: Request, table: tuple[Field, ...] = ()) -> dict[str, Any]:
    """The body's fields; no body is an empty one."""
    return await take(request, lambda body: read(body, table, ""), empty={})


def controlled(*paths: str, takes: str | None = None, query: Query = (), get: bool = False) -> Callable[[Work], Work]:
    """Decorator: a control route. What the work returns is replied with success; what it raises, without: 400 if it cannot ever work."""
    declared = {
        method: route(
            "SGLang",
            "control",
            takes=takes if method == "POST" else None,
            gives="SglangDone",
            errors=(400,),
            error="SglangFailure",
            parameters=query_parameters(query),
        )
        for method in ("GET", "POST")
    }

    def wrap(work: Work) -> Work:
        @functools.wraps(work, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        async def run(request: Request) -> Response:
            try:
                done = await work(request, state_of(request))
            except RollsyncError as error:
                return error_reply(request, error, 400 if error.status in (404, 409, 422) else error.status)
            message, more = done if isinstance(done, tuple) else (done, {})
            return reply(request, {"success": True, "message": message, **more})

        del run.__wrapped__  # FastAPI is to see the signature that it calls
        for path in paths:
            for method in ("GET", "POST") if get else ("POST",):
                router.add_api_route(path, run, methods=[method], openapi_extra=declared[method])
        return work

    return wrap


async def pause_engine(service: RolloutService, mode: str) -> dict[str, Any]:
    """Take the dialect's lease; the engine stands still once this returns."""
    if mode == "abort":  # also what is still on its way to the engine
        for ticket in list(service.in_flight.values()):
            ticket.mark_aborted("paused")
    report: dict[str, Any] = await service.engine.command("pause", mode=mode, owner=OWNER)
    return report


@controlled("/pause_generation", takes="SglangPause")
async def pause_generation(request: Request, state: SglangState) -> Message:
    """Stop, under a lease of these routes; answered once the engine is at rest. New /generate calls wait meanwhile.

    A pause begins an update anew: buckets that came without /begin_weight_update before it are dropped.
    """
    mode = PAUSE_MODES[(await fields(request, PAUSE_FIELDS)).get("mode", "abort")]
    async with state.turn():
        if state.session is not None and not state.session.begun:
            await state.abort("paused again")
        state.forgive()
        report = await pause_engine(service_of(request), mode)
    counts = ", ".join(f"{report[name]} {name}" for name in ("aborted", "recomputed", "kept") if report.get(name))
    return f"generation is paused{f': {counts}' if counts else ''}", {"status": "ok"}


@controlled("/continue_generation", takes="SglangContinue")
async def continue_generation(request: Request, state: SglangState) -> Message:
    """Go on. Buckets that came without /begin_weight_update are made current first; if that is refused, the engine stays paused, the
    old weights are served on, and the next /continue_generation goes on with them."""
    await fields(request, CONTINUE_FIELDS)
    async with state.turn():
        message = await state.continued()
        resumed = await service_of(request).engine.command("resume", owner=OWNER)
    return message if resumed["running"] else f"{message}, but for this: {resumed['reason']}", {"status": "ok"}


@controlled("/abort_request", takes="SglangAbort")
async def abort_request(request: Request, state: SglangState) -> Message:
    """End requests; their own replies carry what they have. Names are compared whole, not by their beginning."""
    got = await fields(request, ABORT_FIELDS)
    rid, service = got.get("rid", ""), service_of(request)
    if not rid and not got.get("abort_all"):
        raise BadRequest("rid must name a request, or abort_all be true", field="rid")
    reason = got.get("abort_message") or "aborted by request"
    if got.get("abort_all"):
        found = [await control.abort(service, "all", True, reason)]
    else:
        found = [await control.abort(service, kind, rid, reason) for kind in ("request_id", "group")]
    ids = sorted({i for one in found for i in one["request_ids"]})
    return f"{len(ids)} requests ended", {"rids": ids}


async def _is_busy(service: RolloutService) -> str:
    """What runs or waits; empty if nothing does."""
    stats = await service.engine.command("status")
    on_the_way = sum(bool(t.open_request_ids) for t in service.in_flight.values())
    running, waiting = stats["running"], stats["waiting"]
    return f"{running} samples are running, {waiting} requests are waiting" if running or waiting or on_the_way else ""


@controlled("/flush_cache", takes="Nothing", query=FLUSH_QUERY, get=True)
async def flush_cache(request: Request, state: SglangState) -> Message:
    """Forget every cached prefix. No update needs it: blocks are keyed by the weights that made them. 400 while requests run or wait,
    unless the engine is paused, for clients that wait for it to idle this way."""
    got, service = read_query(request, FLUSH_QUERY), service_of(request)
    await fields(request)
    wait_s = got.get("timeout", got.get("timeout_s", 0.0))
    if wait_s > MAX_FLUSH_S:
        raise BadRequest(f"timeout must be at most {MAX_FLUSH_S:g} seconds, got {wait_s:g}", field="timeout")
    end = time.monotonic() + wait_s
    while state.state()["scheduling"]["state"] != "paused" and (busy := await _is_busy(service)):
        if time.monotonic() >= end:
            raise IllegalState(f"the cache is flushed only when idle or paused: {busy}")
        await asyncio.sleep(FLUSH_POLL_S)
    dropped = await service.engine.command("reset_prefix_cache")
    return f"{dropped['blocks']} cached blocks forgotten"


def _tags(got: dict[str, Any]) -> tuple[list[str] | None, str]:
    """Tags of memory that is there (None: all of it), and words on those that are not."""
    asked = got.get("tags") or [*MEMORY_TAGS, *NO_OP_TAGS]
    real = [tag for tag in MEMORY_TAGS if tag in asked]
    absent = [tag for tag in NO_OP_TAGS if tag in asked and got.get("tags")]
    return real, "".join(f"; {tag}: there is none, nothing to do" for tag in absent)


@controlled("/release_memory_occupation", takes="SglangMemory", get=True)
async def release_memory_occupation(request: Request, state: SglangState) -> Message:
    """Give memory to the system. Weights are kept in a file, so what is resumed is what was released; requests wait."""
    tags, absent = _tags(await fields(request, MEMORY_FIELDS))
    if not tags:
        return absent.removeprefix("; ")
    report = await service_of(request).engine.command("sleep", tags=tags, weights="offload")
    freed = ", ".join(f"{tag} {size >> 20} MiB" for tag, size in report["freed_bytes"].items()) or "all was released before"
    return f"released: {freed}{absent}"


@controlled("/resume_memory_occupation", takes="SglangMemory", get=True)
async def resume_memory_occupation(request: Request, state: SglangState) -> Message:
    """Have memory back; what was not released stays as it is."""
    tags, absent = _tags(await fields(request, MEMORY_FIELDS))
    if not tags:
        return absent.removeprefix("; ")
    report = await service_of(request).engine.command("wake", tags=tags)
    return f"resumed: {', '.join(tags)}{absent}{'; still released: ' + ', '.join(report['asleep']) if report['asleep'] else ''}"


@controlled("/post_process_weights", takes="SglangPostProcess")
async def post_process_weights(request: Request, state: SglangState) -> Message:
    """Accepted from clients that know quantised engines: here is nothing to restore or to repack."""
    await fields(request, POST_PROCESS_FIELDS)
    return "nothing to do: parameters are not quantised"


def _asks(
    *paths: str,
    gives: str = "SglangInfo",
    needs: Needs = "traffic",
    also: dict[int, str | tuple[str, ...]] | None = None,
    query: Query = (),
) -> Callable[[Answer], Answer]:
    """Decorator: a route that asks and changes nothing."""
    declared = route("SGLang", needs, gives=gives, errors=(400,) if query else (), also=also, parameters=query_parameters(query))

    def wrap(work: Answer) -> Answer:
        for path in paths:
            router.add_api_route(path, work, methods=["GET"], openapi_extra=declared)
        return work

    return wrap


def _current(state: SglangState) -> str:
    return state.version_text(state.state()["weights"]["version"])


def _names(request: Request) -> dict[str, Any]:
    """What both kinds of information say of the model."""
    service = service_of(request)
    return {
        "model_path": service.model,
        "tokenizer_path": service.engine.config.tokenizer or service.model,
        "served_model_name": served_names(service, request.app.state.served_model_name)[0],
    }


@_asks("/model_info", "/get_model_info")
async def model_info(request: Request) -> Response:
    """What is served, as SGLang tells it."""
    service = service_of(request)
    info = service.engine.snapshot.info
    found = {
        **_names(request),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": _current(state_of(request)),
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "max_context_length": info.get("max_model_len"),
    }
    return reply(request, found)


@_asks("/get_weight_version")
async def get_weight_version(request: Request) -> Response:
    """What the weights that are served are called."""
    return reply(request, {"weight_version": _current(state_of(request))})


@_asks("/get_server_info")
async def server_info(request: Request) -> Response:
    """Settings and load, where SGLang's have them."""
    service = service_of(request)
    info, stats = service.engine.snapshot.info, service.engine.snapshot.stats
    tp = service.engine.config.tp
    found = {
        **_names(request),
        "tp_size": tp,
        **dict.fromkeys(("pp_size", "dp_size", "ep_size"), 1),
        "num_gpus": tp,
        "disaggregation_mode": "null",
        "dtype": info.get("dtype"),
        "context_length": info.get("max_model_len"),
        "max_total_num_tokens": int(info.get("num_blocks", 0)) * int(info.get("block_tokens", 0)),
        "weight_version": _current(state_of(request)),
        "version": f"rollsync {request.app.version}",
        "internal_states": [stats],
    }
    return reply(request, found)


@_asks("/v1/loads", query=LOADS_QUERY)
async def loads(request: Request) -> Response:
    """Requests that run and wait, counted between two steps."""
    read_query(request, LOADS_QUERY)
    stats = await service_of(request).engine.command("status")
    running, waiting = stats["running"], stats["waiting"]
    load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting, "num_total_reqs": running + waiting}
    total = {"total_running_reqs": running, "total_waiting_reqs": waiting, "total_reqs": running + waiting}
    return reply(request, {"dp_rank_count": 1, "loads": [load], "aggregate": total})


@_asks("/ready", gives="Ready", needs="open", also={503: "Ready"})
async def ready(request: Request) -> Response:
    """As /health/ready: 503 also while the engine is paused."""
    return reply(request, *control.ready(service_of(request)))


@_asks("/health_generate", gives="Ready", also={503: "Ready"})
async def health_generate(request: Request) -> Response:
    """200 once a token has really been made; of an engine that is paused or asleep, as /health. 503 otherwise."""
    service = service_of(request)
    found, status = control.health(service)
    if found["ready"]:
        try:
            async with asyncio.timeout(HEALTH_S):
                await _one_token(service)
        except (TimeoutError, RollsyncError) as error:
            found, status = {"ready": False, "reason": f"no token within {HEALTH_S:g} s {error}".strip()}, 503
    return reply(request, found, status)


async def _one_token(service: RolloutService) -> None:
    params, _ = sampling_params({"max_new_tokens": 1, "temperature": 0.0}, "sampling_params")
    spec = PromptSpec(ids=(0,), text=None, messages=None, chat_template_kwargs={}, params=params, first_sample=0)
    call = RolloutCall(
        prompts=[spec], naming=Naming(), include=(), request_id=None, group=None, session=None, priority=0, stream="", deadline_s=None
    )
    ticket = service.open(call)
    try:
        async for _, item in ticket.events():
            if isinstance(item, RollsyncError):
                raise item
    finally:
        ticket.close()
