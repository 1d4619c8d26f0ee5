"""`/v1/weights/groups…`: where a trainer and the engine's ranks meet to move weights over gloo or NCCL. All of it beside the steps."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...weight_sync.names import BACKENDS, LAYOUTS
from ..errors import BadRequest
from .audit import note
from .checks import Field, Schema, choice, integer, object_schema, read, seconds, string
from .replies import reply, take
from .rollouts import RolloutService
from .schemas import BOOLEAN, COUNT, INTEGER, OBJECT, STRING, Item, array, reply_schema, route

router = APIRouter()
MAX_RANKS = 1 << 16
DEFAULT_JOIN_S = 60.0
LONGEST_JOIN_S = 3600.0

BIND_FIELDS = (
    Field("name", string, 'what the group is called; one of that name is torn down first. Default "default"'),
    Field("host", string, "address to listen on; left out: the one this call came in by"),
    Field("port", integer(0, 65535), "0 (default): a free one, told in the reply"),
    Field("senders", integer(1, MAX_RANKS), "ranks below the engine's; default 1"),
)
JOIN_FIELDS = (
    Field("timeout_s", seconds, f"for joining, and later for every transfer; default {DEFAULT_JOIN_S:g}"),
    Field("host", string, "where another hosts the group; left out: where this engine bound it"),
    Field("port", integer(1, 65535), "likewise"),
    Field("rank", integer(0, MAX_RANKS), "of the engine's first rank; default 1"),
    Field("world_size", integer(1, MAX_RANKS), "of all ranks; default: the engine's and those below them"),
    Field("backend", choice(*BACKENDS), "left out: what fits the engine's device"),
    Field("layout", choice(*LAYOUTS), "how the ranks find each other in the store; left out: found out"),
)


def _service(request: Request) -> RolloutService:
    service: RolloutService = request.app.state.service
    return service


def _lane() -> str:
    """A lane of its own: a join that waits holds up neither the next one nor its own end."""
    return f"group {secrets.token_hex(8)}"


def _name(name: str) -> str:
    if not 0 < len(name) <= 200 or not name.isprintable() or "/" in name:
        raise BadRequest(f"name must be 1 to 200 printable characters without a slash, got {name[:80]!r}", field="name")
    return name


async def _fields(request: Request, table: tuple[Field, ...]) -> dict[str, Any]:
    return await take(request, lambda body: read(body, table, ""), empty={})


def _here(request: Request) -> str:
    """The address by which this caller reaches us."""
    server = request.scope.get("server")
    return server[0] if server and server[0] else "127.0.0.1"


@router.post("/v1/weights/groups", openapi_extra=route("Weights", "control", takes="BindGroup", gives="GroupPlace", errors=(409,)))
async def bind(request: Request) -> Response:
    """Choose where a group will meet, and host that place. Answered at once; then senders and engine join, at the same time."""
    got = await _fields(request, BIND_FIELDS)
    name = _name(got.pop("name", "default"))
    note(request, {"kind": name})
    got.setdefault("host", _here(request))
    return reply(request, await _service(request).engine.aside(_lane(), "bind_group", name=name, **got))


@router.post("/v1/weights/groups/{name}/join", openapi_extra=route("Weights", "control", takes="JoinGroup", gives="Group", errors=(409,)))
async def join(request: Request, name: str) -> Response:
    """Join a group; answered once it is formed. 409 names host, port, who is missing and the backend's words."""
    got = await _fields(request, JOIN_FIELDS)
    if ("host" in got) != ("port" in got):
        raise BadRequest("host and port go together", field="port" if "host" in got else "host")
    timeout_s = got.setdefault("timeout_s", DEFAULT_JOIN_S)
    if not 0 < timeout_s <= LONGEST_JOIN_S:
        raise BadRequest(f"timeout_s must be in (0, {LONGEST_JOIN_S:g}], got {timeout_s:g}", field="timeout_s")
    note(request, {"kind": _name(name)})
    return reply(request, await _service(request).engine.run_aside(_lane(), "join_group", {"name": name, **got}, timeout_s + 15.0))


@router.delete("/v1/weights/groups/{name}", openapi_extra=route("Weights", "control", gives="GroupLeft", errors=(400,)))
async def leave(request: Request, name: str) -> Response:
    """Tear a group down; what waits on it fails. Its port is free again."""
    note(request, {"kind": _name(name)})
    return reply(request, await _service(request).engine.aside(_lane(), "leave_group", name=name))


@router.get("/v1/weights/groups", openapi_extra=route("Weights", "control", gives="Groups"))
async def groups(request: Request) -> Response:
    """The groups this engine is in, or is joining."""
    return reply(request, {"groups": await _service(request).engine.aside(_lane(), "groups")})


@router.get("/v1/weights/shards", openapi_extra=route("Weights", "control", gives="Shards"))
async def shards(request: Request) -> Response:
    """What each rank of the engine keeps of every tensor: what transport reshard sends to it."""
    return reply(request, {"ranks": await _service(request).engine.aside(_lane(), "shards")})


_GROUP: Schema = reply_schema(
    "A group as the engine's first rank sees it.",
    Item("name", STRING),
    Item("state", {"type": "string", "enum": ["forming", "formed", "closed"]}),
    Item("host", STRING, "where its ranks meet"),
    Item("port", INTEGER),
    Item("rank", COUNT, "of the engine's first rank", always=False),
    Item("size", COUNT, "ranks in all", always=False),
    Item("backend", STRING, always=False),
    Item("reason", STRING, "why it is closed", always=False),
)
COMPONENTS = {
    "BindGroup": object_schema(BIND_FIELDS),
    "JoinGroup": object_schema(JOIN_FIELDS),
    "GroupPlace": reply_schema(
        "Where a group meets.",
        Item("name", STRING),
        Item("host", STRING),
        Item("port", INTEGER),
        Item("rank", COUNT, "of the engine's first rank; senders are those below"),
        Item("world_size", COUNT, "ranks in all"),
        Item("backend", STRING),
    ),
    "Group": _GROUP,
    "Shards": reply_schema("", Item("ranks", array(OBJECT), "by rank: by tensor name, boxes as [offsets, lengths]")),
    "GroupLeft": reply_schema("", Item("changed", BOOLEAN, "false if there was none of that name")),
    "Groups": reply_schema("", Item("groups", OBJECT, "by name: state, host, port, rank, size, backend, reason")),
}
