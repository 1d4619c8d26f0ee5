"""Routes that both dialects have, told apart by what was sent, if it makes a difference."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from .. import control
from ..checks import Field, boolean, object_schema, read, string
from ..replies import reply, take
from ..schemas import BOOLEAN, STRING, Item, reply_schema, route
from . import sglang_control, vllm
from .query import query_parameters
from .version_names import names_of

router = APIRouter()
NAMING_FIELDS = (
    Field("new_version", string, "what the weights that are served are called from now on", required=True),
    Field("abort_all_requests", boolean, "end what runs. vLLM's clients cannot say it, so it must be said", False),
)


@router.get(
    "/server_info",
    openapi_extra=route(
        "vLLM", "traffic", gives="ServerInfo", errors=(400,), error="VllmError", parameters=query_parameters(vllm.INFO_QUERY)
    ),
)
async def server_info(request: Request) -> Response:
    """The settings that clients read: where vLLM's configuration has them if config_format is given, else where SGLang's has them."""
    if request.query_params:
        return reply(request, vllm.server_info(request))
    return await sglang_control.server_info(request)


@router.post(
    "/update_weight_version",
    openapi_extra=route("vLLM", "control", takes="NewVersion", gives="VersionNamed", error="SglangFailure"),
)
async def update_weight_version(request: Request) -> Response:
    """Name the weights that are served. It is echoed; the number that counts them stays."""
    got = await take(request, lambda body: read(body, NAMING_FIELDS, ""))
    service = vllm.service_of(request)
    if got.get("abort_all_requests"):
        await control.abort(service, "all", True, "weight version updated")
    names_of(request).call((await service.engine.command("state"))["weights"]["version"], got["new_version"])
    return reply(request, {"success": True, "new_version": got["new_version"]})


COMPONENTS = {
    "ServerInfo": {"anyOf": [{"$ref": "#/components/schemas/VllmInfo"}, {"$ref": "#/components/schemas/SglangInfo"}]},
    "NewVersion": object_schema(NAMING_FIELDS),
    "VersionNamed": reply_schema("", Item("success", BOOLEAN), Item("new_version", STRING)),
}
