"""`/v1/engine/leases`: who has paused the engine; renew a pause, or take it away from an owner who will not come back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from . import control
from .checks import Field, object_schema, read, seconds, string
from .dialects.query import query_parameters, read_query
from .replies import reply, take
from .rollouts import RolloutService
from .schemas import BOOLEAN, NUMBER, STRING, Item, array, reply_schema, route

router = APIRouter()

RENEW_FIELDS = (
    Field("owner", string, "whose lease; default operator"),
    Field("ttl_s", seconds, "it expires after this, from now; left out: as long as it was given first"),
)
REVOKE_FIELDS = (Field("owner", string, "whose lease", required=True),)


def _service(request: Request) -> RolloutService:
    service: RolloutService = request.app.state.service
    return service


@router.get("/v1/engine/leases", openapi_extra=route("Control", "traffic", gives="Leases"))
async def leases(request: Request) -> Response:
    """Who keeps the engine from running, and for how long yet."""
    return reply(request, {"leases": control.state(_service(request))["scheduling"]["leases"]})


@router.post("/v1/engine/leases", openapi_extra=route("Control", "control", takes="RenewLease", gives="LeaseRenewed", errors=(409,)))
async def renew(request: Request) -> Response:
    """Let a lease live on. 409 if its owner has none: it expired or was revoked, and the engine may have run since."""
    got = await take(request, lambda body: read(body, RENEW_FIELDS, ""), empty={})
    return reply(request, await _service(request).engine.run("renew_lease", got))


@router.delete(
    "/v1/engine/leases",
    openapi_extra=route("Control", "control", gives="Resumed", errors=(400, 409), parameters=query_parameters(REVOKE_FIELDS)),
)
async def revoke(request: Request) -> Response:
    """Take a lease away from whoever holds it. "changed" is false if nobody does."""
    return reply(request, await _service(request).engine.run("revoke_lease", read_query(request, REVOKE_FIELDS)))


_LEASE = reply_schema(
    "",
    Item("owner", STRING),
    Item("mode", STRING),
    Item("expires_in_s", {"anyOf": [NUMBER, {"type": "null"}]}, "null: it does not"),
)
COMPONENTS: dict[str, Any] = {
    "RenewLease": object_schema(RENEW_FIELDS),
    "Leases": reply_schema("", Item("leases", array(_LEASE))),
    "LeaseRenewed": reply_schema("", Item("changed", BOOLEAN), Item("lease", _LEASE)),
}
