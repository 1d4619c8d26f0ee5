"""AReaL's routes for its vLLM servers: those for SGLang by other names, but the tensors of a broadcast are named by a call of their own.

Between /areal_pause_generation and /areal_continue_generation all that comes is one update. Generation is /v1/completions.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request

from ...errors import BadRequest, IllegalState
from ..checks import Field, object_schema, string
from .sglang_control import Message, continue_generation, controlled, fields, pause_generation
from .sglang_state import SglangState
from .sglang_weights import init_weights_update_group, list_of, receive, shape, update_weights_from_disk

META_FIELDS = (
    Field("names", list_of(string), "the tensors, in the order of their broadcasts", required=True),
    Field("dtypes", list_of(string), 'like "bfloat16" or "torch.bfloat16"', required=True),
    Field("shapes", list_of(shape), "of the whole tensors", required=True),
    Field("group_name", string, "the group they come over", required=True),
)

controlled("/areal_pause_generation", takes="SglangPause")(pause_generation)
controlled("/areal_continue_generation", takes="SglangContinue")(continue_generation)
controlled("/areal_init_weights_update_group", takes="SglangInitGroup")(init_weights_update_group)
controlled("/areal_update_weights", takes="SglangDisk")(update_weights_from_disk)


@controlled("/areal_set_update_weight_meta", takes="ArealMeta")
async def set_update_weight_meta(request: Request, state: SglangState) -> Message:
    """Name the tensors that the next /areal_update_weights_xccl receives."""
    got = await fields(request, META_FIELDS)
    if not len(got["names"]) == len(got["dtypes"]) == len(got["shapes"]):
        counts = ", ".join(str(len(got[name])) for name in ("names", "dtypes", "shapes"))
        raise BadRequest(f"names, dtypes and shapes must be of one length, got {counts}", field="names")
    state.announced = got
    return f"{len(got['names'])} tensors will come over group {got['group_name']}"


@controlled("/areal_update_weights_xccl", takes="Nothing")
async def update_weights_xccl(request: Request, state: SglangState) -> Message:
    """Receive the tensors named last, by one broadcast each; as /update_weights_from_distributed. They are named anew for each call."""
    await fields(request)
    body, state.announced = state.announced, None
    if body is None:
        raise IllegalState("no tensors are named: POST /areal_set_update_weight_meta")
    return await receive(request, state, body)


COMPONENTS: dict[str, Any] = {"ArealMeta": object_schema(META_FIELDS)}
