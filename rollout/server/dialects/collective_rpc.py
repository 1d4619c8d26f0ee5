"""vLLM's `/collective_rpc`: there it calls any method of the workers; here it stands for the few that trainers call to bring weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...errors import BadRequest, NotSupported
from ..checks import Field, mapping, object_schema, read, seconds, string
from ..openai_protocol import accept_any
from ..replies import reply
from ..schemas import Item, array, reply_schema
from .checkpoint_engine import follow, sockets
from .sglang_state import GROUP_S, state_of
from .vllm import fields, service_of, vllm
from .vllm_weights import FINISH_FIELDS, START_FIELDS, finish, receive_update, start

router = APIRouter()
RPC_FIELDS = (
    Field("method", string, "what to do; one of those named above", required=True),
    Field("args", accept_any("array"), "its arguments by position"),
    Field("kwargs", mapping, "its arguments by name"),
    Field("timeout", seconds, "how long to wait for the sender", GROUP_S),
)
SOCKETS = (Field("zmq_handles", sockets, "sockets by device", required=True),)
INFO = (Field("update_info", mapping, "the tensors", required=True),)
Call = Callable[[Request, dict[str, Any], float], Awaitable[Any]]


async def _from_parameter_server(request: Request, got: dict[str, Any], timeout_s: float) -> Any:
    await follow(request, state_of(request), got["zmq_handles"], None, timeout_s)


async def _start(request: Request, got: dict[str, Any], timeout_s: float) -> Any:
    await start(request)


async def _receive(request: Request, got: dict[str, Any], timeout_s: float) -> Any:
    await receive_update(request, got["update_info"])


async def _finish(request: Request, got: dict[str, Any], timeout_s: float) -> Any:
    await finish(request, got.get("weight_version"))


async def _nothing(request: Request, got: dict[str, Any], timeout_s: float) -> Any:
    await service_of(request).engine.command("status")


METHODS: dict[str, tuple[tuple[Field, ...], Call]] = {
    "update_weights_from_ipc": (SOCKETS, _from_parameter_server),
    "skyrl_start_weight_update": (START_FIELDS, _start),
    "update_weights_nccl": (INFO, _receive),
    "skyrl_finish_weight_update": (FINISH_FIELDS, _finish),
    "liveness_probe": ((), _nothing),
}
REFUSED = {
    "update_weights_ipc": "its handles of GPU memory are not taken: let SkyRL send by broadcast (generator.weight_sync_backend), "
    "or use rollsync's WeightSender",
    "update_weights_from_path": "POST /update_weights takes weight_dir",
}


@router.post("/collective_rpc", openapi_extra=vllm(takes="VllmRpc", gives="VllmRpcReply"))
async def collective_rpc(request: Request) -> Response:
    """What trainers call of a vLLM server's workers: `update_weights_from_ipc` (checkpoint-engine: as /update_weights_from_ipc),
    `skyrl_start_weight_update`, `update_weights_nccl`, `skyrl_finish_weight_update` (SkyRL: as /start_weight_update and those after it),
    and `liveness_probe`. Any other is refused by name: nothing else of the engine is called from outside."""
    got = await fields(request, RPC_FIELDS)
    method, args = got["method"], got.get("args", [])
    if method in REFUSED:
        raise NotSupported(f"method {method} is not supported: {REFUSED[method]}", field="method")
    if method not in METHODS:
        raise BadRequest(f"method must be one of {', '.join(METHODS)}, got {method[:80]!r}", field="method")
    table, call = METHODS[method]
    if not isinstance(args, list) or len(args) > len(table):
        raise BadRequest(f"args must be a list of at most {len(table)} values for {method}", field="args")
    for named in (f.name for f in table[: len(args)]):
        if named in got.get("kwargs", {}):
            raise BadRequest(f"kwargs.{named} is given in args, too", field=f"kwargs.{named}")
    given = {**dict(zip((f.name for f in table), args, strict=False)), **got.get("kwargs", {})}
    await call(request, read(given, table, "kwargs" if "kwargs" in got else "args"), got.get("timeout", GROUP_S))
    return reply(request, {"results": [None] * service_of(request).engine.config.tp})


COMPONENTS = {
    "VllmRpc": object_schema(RPC_FIELDS),
    "VllmRpcReply": reply_schema("", Item("results", array({"type": "null"}), "null of each rank")),
}
