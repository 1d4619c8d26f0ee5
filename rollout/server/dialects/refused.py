"""Routes that trainers of other engines may call and that are not here: each is refused with its reason, so that nobody has to guess from a
404 whether a server is of another version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...errors import NotSupported
from ..checks import Schema
from ..schemas import reply_schema, route

router = APIRouter()
_ADAPTERS = "adapters are not served: send the merged weights (rollsync.weight_sync.sources.weights_from merges them while it streams)"
_EXPERTS = "routed experts are not recorded; without them POST /inference/v1/generate does the same"
_SEED = "engines do not read weights from each other: have the trainer send to each, or start from a folder"
_PROFILE = "profile from outside, e.g. py-spy or nsys on the pids of GET /v1/engine/status"
REASONS = {
    "/load_lora_adapter": _ADAPTERS,
    "/unload_lora_adapter": _ADAPTERS,
    "/v1/load_lora_adapter": _ADAPTERS,
    "/v1/unload_lora_adapter": _ADAPTERS,
    "/skyrl/v1/load_lora_adapter": _ADAPTERS,
    "/areal_update_weights_lora": _ADAPTERS,
    "/areal_set_update_weight_meta_lora": _ADAPTERS,
    "/areal_update_weights_lora_xccl": _ADAPTERS,
    "/skyrl/v1/generate": _EXPERTS,
    "/v1/chat/completions/render": "media are not taken; POST /tokenize renders a chat's text to ids",
    "/start_draft_weight_update": "there is no draft model",
    "/pull_weights": "the engine does not fetch deltas: put a whole folder below --weights-root and POST /update_weights_from_disk",
    "/init_weights_send_group_for_remote_instance": _SEED,
    "/send_weights_to_remote_instance": _SEED,
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
}
"""by path; all are POST"""


def _refuse(path: str, why: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise NotSupported(f"{path} is not supported: {why}")

    refuse.__doc__ = f"Refused with 400: {why}."
    return refuse


_DECLARED = route("Refused", "traffic", takes="RefusedBody", gives=reply_schema("Never given."))
for _path, _why in REASONS.items():
    router.add_api_route(_path, _refuse(_path, _why), methods=["POST"], openapi_extra=_DECLARED)

COMPONENTS: dict[str, Schema] = {"RefusedBody": {"type": "object", "description": "Whatever it is: it is not read."}}
