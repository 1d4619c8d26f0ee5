"""The HTTP application: routes, and nothing behind them but the services they are given."""

from __future__ import annotations

import asyncio
import functools
import html
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute

from .. import metrics
from ..errors import NoSuchRoute, RollsyncError
from . import control, groups, leases, openai, openai_schemas, reply_schemas, token_routes, weight_schemas, weights
from .access import Access
from .audit import AuditLog
from .dialects import (
    areal,
    checkpoint_engine,
    collective_rpc,
    refused,
    sglang,
    sglang_control,
    sglang_schemas,
    shared,
    vllm,
    vllm_generate,
    vllm_prime,
    vllm_tokens,
    vllm_weights,
)
from .dialects.version_names import VersionNames
from .dialects.vllm_state import VllmState
from .encoding import encode_aside
from .engine_client import EngineProcess
from .guard import Guard, RouteNeeds
from .openapi import document
from .protocol import parse_abort, parse_rollouts, parse_stream, schemas
from .replies import BodyRoom, ClientGone, StreamReply, WholeReply, error_reply, reply, take, until_disconnect, wants_msgpack
from .reply_schemas import IF_ALL_FAIL
from .rollouts import RolloutService, Ticket
from .schemas import STRING, parameter, route
from .text import TextService

DEFAULT_MAX_BODY_BYTES = 256 << 20
BODIES_BYTES = 1 << 30
"""of all bodies being read or decoded; at least four of the largest"""
router = APIRouter()
ID = parameter("id", STRING, "the request_id, given or told by the start event", "path")
STREAM = parameter("stream", {"type": "string", "enum": ["false", "true", "samples", "tokens"]}, "as in the body of POST /v1/rollouts")


def _service(request: Request) -> RolloutService:
    service: RolloutService = request.app.state.service
    return service


@router.post(
    "/v1/rollouts",
    openapi_extra=route(
        "Sampling", "traffic", takes="Rollouts", gives="RolloutsReply", events="RolloutEvent", errors=(409,), also=IF_ALL_FAIL
    ),
)
async def rollouts(request: Request) -> Response:
    """Sample from prompts. JSON or msgpack by Content-Type and Accept; whole, or streamed by sample.

    200 if at least one prompt was served; a prompt that failed has "error" in its place. If all failed, the status is that
    of the first error and the body still lists every one.
    """
    service = _service(request)
    call = await take(request, parse_rollouts)
    if "text" in call.include:
        await service.text.tokenizer()
    return await _answer(request, service.open(call))


@router.get(
    "/v1/rollouts/{id:path}",
    openapi_extra=route(
        "Sampling", "traffic", gives="RolloutsReply", events="RolloutEvent", errors=(404, 409), also=IF_ALL_FAIL, parameters=(ID, STREAM)
    ),
)
async def reattach(request: Request, id: str) -> Response:
    """Read the reply of a call with detach_s whose connection was lost, from its beginning, as soon as it is there.

    404 if no such call is in flight or kept, 409 while another connection reads it. If this connection drops too, it is kept for
    another detach_s. A reply that was sent to its end is kept for half a minute more (or detach_s, if that is shorter): what a
    dying connection still delivered cannot be known. By then its request_id may be used again.
    """
    stream = parse_stream(dict(request.query_params))
    await _service(request).find(id).until_left()
    ticket = _service(request).find(id)
    ticket.attach(stream)
    return await _answer(request, ticket)


async def _answer(request: Request, ticket: Ticket) -> Response:
    """The reply to a call that this connection reads."""
    service = _service(request)
    binary = wants_msgpack(request)
    if ticket.stream:
        return StreamReply(service.streamed(ticket), ticket.leave, binary)
    try:
        body, status = await until_disconnect(request.receive, _packed(service, ticket, binary))
        return WholeReply(body, status, binary, ticket.leave)
    except BaseException as error:
        ticket.leave(sent=not isinstance(error, ClientGone | asyncio.CancelledError))
        raise


async def _packed(service: RolloutService, ticket: Ticket, binary: bool) -> tuple[bytes, int]:
    body, status = await service.whole(ticket)
    return await encode_aside(body, binary), status


@router.post("/v1/engine/abort", openapi_extra=route("Control", "control", takes="Abort", gives="AbortReply", errors=(503,)))
async def abort(request: Request) -> Response:
    """End calls by request_id, group, session, or all; their own replies carry the partial outputs."""
    return reply(request, await control.abort(_service(request), *await take(request, parse_abort)))


@router.get("/v1/engine/status", openapi_extra=route("Control", "traffic", gives="Status"))
async def status(request: Request) -> Response:
    """State, engine facts and counters, from the last snapshot."""
    return reply(request, control.status(_service(request)))


@router.get("/health/live", openapi_extra=route("Health", "open", gives="Live", also={503: "Live"}))
async def health_live(request: Request) -> Response:
    """200 while the engine's loop moves or idles, else 503 with the reason."""
    return reply(request, *control.live(_service(request)))


@router.get("/health", openapi_extra=route("Health", "open", gives="Ready", also={503: "Ready"}))
async def health(request: Request) -> Response:
    """200 once the model is loaded, while the engine lives, also paused or asleep; the body says whether it is ready, and why not."""
    return reply(request, *control.health(_service(request)))


@router.get("/health/ready", openapi_extra=route("Health", "open", gives="Ready", also={503: "Ready"}))
async def health_ready(request: Request) -> Response:
    """200 if a request would be served now, else 503 with the reason: it loads, is paused or asleep, or its weights are invalid."""
    return reply(request, *control.ready(_service(request)))


@router.get("/version", openapi_extra=route("Health", "open", gives="Version"))
async def version(request: Request) -> Response:
    """Version, protocol version and capabilities."""
    return reply(request, control.version(_service(request), request.app.version, routes()))


@router.get("/metrics", openapi_extra=route("Health", "traffic", gives={"type": "string"}, kinds=("text/plain",)))
async def metrics_page(request: Request) -> Response:
    """Prometheus text."""
    engine = _service(request).engine
    is_live, is_ready = engine.why_not_live() is None, control.ready(_service(request))[1] == 200
    page = metrics.render(engine.counters, engine.snapshot.stats, engine.snapshot.memory, is_live, is_ready)
    return Response(page, media_type="text/plain; version=0.0.4")


def _pages() -> list[str]:
    """What a browser can open."""
    gets = [r.path for r in routes() if isinstance(r, APIRoute) and "GET" in (r.methods or ())]
    return [path for path in dict.fromkeys(gets) if path != "/" and "{" not in path] + ["/openapi.json"]


@router.get("/", include_in_schema=False, openapi_extra=route("Health", "open"))
async def index(request: Request) -> Response:
    """What this is, for a person with a browser."""
    service = _service(request)
    state = control.status(service)
    links = " · ".join(f'<a href="{path}">{path}</a>' for path in _pages())
    facts = f"{html.escape(service.model)}: {state['state']}, {state['calls_in_flight']} calls in flight"
    return HTMLResponse(f"<!doctype html><title>Rollsync</title><h1>Rollsync {request.app.version}</h1><p>{facts}</p><p>{links}</p>")


VLLM = (vllm_generate, vllm, vllm_weights, vllm_prime, collective_rpc, vllm_tokens, shared, refused)
ROUTERS = (
    router,
    token_routes.router,
    openai.router,
    weights.router,
    groups.router,
    leases.router,
    sglang.router,
    sglang_control.router,
    *(module.router for module in VLLM),
)
_PARTS = (reply_schemas, token_routes, openai_schemas, weight_schemas, groups, leases, sglang_schemas, areal, checkpoint_engine, *VLLM)
COMPONENTS = {**schemas(), **{name: schema for part in _PARTS for name, schema in part.COMPONENTS.items()}}
"""schemas by name, of bodies and replies of every router"""


def routes() -> list[BaseRoute]:
    """Those of every router."""
    return [r for each in ROUTERS for r in each.routes]


def openapi(version: str) -> dict[str, Any]:
    """The OpenAPI document of every route."""
    return document(routes(), version, COMPONENTS)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_reply(request, error)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{error.detail}: {request.method} {request.url.path} (routes: /openapi.json)"
    return error_reply(request, NoSuchRoute(text), error.status_code, error.headers)


Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]


def create_app(
    engine: EngineProcess,
    text: TextService,
    access: Access,
    version: str,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    served_model_name: str | None = None,
    audit: AuditLog | None = None,
    allow_tensor_pickle: bool = False,
) -> FastAPI:
    """The application over one engine process. It starts and stops nothing."""
    handlers: dict[Any, Handler] = {RollsyncError: _on_error, HTTPException: _on_http_error, ClientGone: _on_client_gone}
    app = FastAPI(title="Rollsync", version=version, docs_url=None, redoc_url=None, exception_handlers=handlers)
    app.state.service = RolloutService(engine, text)
    app.state.bodies = BodyRoom(max_body_bytes, max(BODIES_BYTES, 4 * max_body_bytes))
    app.state.served_model_name = served_model_name
    app.state.allow_tensor_pickle = allow_tensor_pickle
    app.state.started = int(time.time())
    app.state.version_names = VersionNames()
    app.state.vllm = VllmState()
    for each in ROUTERS:
        app.include_router(each)
    app.openapi = functools.cache(lambda: openapi(version))  # type: ignore[method-assign]
    app.add_middleware(Guard, access=access, responses=engine.counters.responses, routes=RouteNeeds(routes()), audit=audit)
    return app
