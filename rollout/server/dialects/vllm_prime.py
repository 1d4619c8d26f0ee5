"""prime-rl's routes beside vLLM's. It sends a folder for each step, which POST /update_weights {"weight_dir"} loads."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...errors import NotSupported, RollsyncError
from ..checks import Field, boolean, integer, object_schema, seconds, string
from ..replies import reply
from ..schemas import STRING, Item, reply_schema, route
from .vllm import fields, service_of, vllm

router = APIRouter()
LIVENESS_S = 30.0
BROADCASTER_FIELDS = (
    Field("host", string, "where the trainer, rank 0, lets the group meet", required=True),
    Field("port", integer(1, 65535), "and its port", required=True),
    Field("rank_offset", integer(0, 1 << 20), "of this server among the inference ranks", required=True),
    Field("inference_world_size", integer(1, 1 << 20), "inference ranks in all", required=True),
    Field("timeout", seconds, "how long the group may take to form"),
    Field("quantize_in_weight_transfer", boolean, "refused as the rest"),
    Field("session_id", string, "of a NIXL transfer"),
)


@router.get("/liveness", openapi_extra=route("vLLM", "traffic", gives="VllmAlive", also={503: "VllmAlive"}, error="VllmError"))
async def liveness(request: Request) -> Response:
    """200 once the engine's loop has answered a call that does nothing; 503 if it does not within 30 s, or is gone."""
    try:
        async with asyncio.timeout(LIVENESS_S):
            await service_of(request).engine.command("status")
    except (TimeoutError, RollsyncError):
        return reply(request, {"status": "engine_unresponsive"}, 503)
    return reply(request, {"status": "ok"})


@router.post("/init_broadcaster", openapi_extra=vllm(takes="VllmBroadcaster", gives="VllmAlive"))
async def init_broadcaster(request: Request) -> Response:
    """Refused: what prime-rl broadcasts names its tensors in pickles of its own between the tensors. Its filesystem broadcast works."""
    await fields(request, BROADCASTER_FIELDS)
    raise NotSupported(
        "prime-rl's NCCL and NIXL broadcasts are not taken, since they name their tensors in pickles; set weight_broadcast.type to "
        '"filesystem" and start this server with --weights-root at the run\'s output folder'
    )


COMPONENTS = {
    "VllmBroadcaster": object_schema(BROADCASTER_FIELDS),
    "VllmAlive": reply_schema("", Item("status", STRING, "ok, or engine_unresponsive")),
}
