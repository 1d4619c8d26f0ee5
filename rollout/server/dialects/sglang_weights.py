"""SGLang's routes that bring new weights: by a trainer's group, from a folder, as handles of tensors. See sglang_state.py for what is
made of them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import secrets
from typing import Any

from fastapi import Request

from ...errors import BadRequest, IllegalState, NotSupported, RollsyncError, show
from ...wire import is_array
from ..audit import note
from ..checks import Check, Field, boolean, check, choice, fail, integer, read, string
from ..openai_protocol import only
from ..replies import take
from .sglang_control import Message, controlled, fields, service_of
from .sglang_state import GROUP_S, OWNER, SglangState, kv_policy
from .tensor_pickle import Budget, Parcel, read_parcel

GROUP = "weight_update_group"
"""SGLang's default name"""
FOLDER_S = 1800.0
MAX_TENSORS = 1 << 17
ACTIONS = ("checksum", "snapshot", "reset_tensors", "compare")


@check({"type": ["integer", "string"], "minimum": 1, "maximum": 65535})
def port(path: str, value: Any) -> Any:
    """A port, which some clients send as a string."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 5:
        value = int(value)
    if type(value) is not int or not 0 < value <= 65535:
        raise fail(path, "a port in [1, 65535]", value)
    return value


def list_of(inner: Check, most: int = MAX_TENSORS) -> Check:
    @check({"type": "array", "items": inner.schema, "maxItems": most})
    def run(path: str, value: Any) -> Any:
        if not isinstance(value, list) or len(value) > most:
            raise fail(path, f"a list of at most {most}", value)
        return [inner(f"{path}[{i}]", v) for i, v in enumerate(value)]

    return run


@check({"type": "array", "maxItems": 8, "items": {"type": "integer", "minimum": 0, "maximum": 1 << 40}})
def shape(path: str, value: Any) -> Any:
    if not isinstance(value, list) or is_array(value) or len(value) > 8:
        raise fail(path, "a list of at most 8 ints", value)
    return [_size(f"{path}[{i}]", v) for i, v in enumerate(value)]


_size = integer(0, 1 << 40, "an int >= 0")
_name = Field("group_name", string, "the group", GROUP)
_common = (
    Field("flush_cache", boolean, "if nobody paused: true computes the KV of running requests anew, false keeps it", True),
    Field("abort_all_requests", boolean, "if nobody paused: end running requests with what they have", False),
    Field("weight_version", string, "what the new weights are called; a number not below the current version becomes the version"),
    Field("torch_empty_cache", boolean, "accepted; nothing is cached"),
)
_selector = Field("selector", choice("all", "target"), "accepted: there is one model")

INIT_FIELDS = (
    Field("master_address", string, "host at which the group meets", required=True),
    Field("master_port", port, "its port", required=True),
    Field("rank_offset", integer(1, 1 << 16), "rank of the engine's first rank", required=True),
    Field("world_size", integer(2, 1 << 16), "ranks in all", required=True),
    _name,
    Field("backend", choice("nccl", "gloo"), "must be what fits the engine's device; left out: that"),
    Field("pp_rank", only(0, why="there is one pipeline stage"), "only 0"),
)
DESTROY_FIELDS = (_name,)
DISTRIBUTED_FIELDS = (
    Field("names", list_of(string), "the tensors, in the order of their broadcasts", required=True),
    Field("dtypes", list_of(string), 'like "bfloat16" or "torch.bfloat16"', required=True),
    Field("shapes", list_of(shape), "of the whole tensors", required=True),
    _name,
    *_common,
    Field("load_format", choice("flattened_bucket"), "null: one broadcast per tensor; flattened_bucket: one of all, as bytes"),
    _selector,
)
TENSOR_FIELDS = (
    Field("serialized_named_tensors", list_of(string, 64), "one pickle for each rank, in base64", required=True),
    *_common,
    Field("load_format", choice("flattened_bucket"), "null: names and tensors; flattened_bucket: one tensor of bytes and what lies where"),
    Field("disable_draft_model", boolean, "accepted: there is none"),
    _selector,
)
DISK_FIELDS = (
    Field("model_path", string, "a checkpoint below --weights-root: its path, or its name there", required=True),
    Field("load_format", choice("auto", "safetensors"), "accepted: it is safetensors"),
    *_common,
    Field("abort_all_request", boolean, "as abort_all_requests, for clients that spell it so"),
    Field("is_async", boolean, "accepted: the reply comes once it is done"),
    Field("token_step", integer(0, 1 << 62), "accepted; nothing is done with it"),
    Field("keep_pause", boolean, "accepted: only /continue_generation ends a pause"),
    Field("recapture_cuda_graph", boolean, "accepted: graphs go on reading the new weights"),
    Field("manifest", only({}, why="the folder's headers are the manifest"), "only {}"),
)
BEGIN_FIELDS = (_selector,)
CHECKER_FIELDS = (
    Field("action", choice(*ACTIONS), "see the route", "checksum"),
    Field("allow_quant_error", boolean, "accepted: nothing is quantised, digests are exact"),
    Field("skip_tensor_list", list_of(string), "names that are not compared"),
    _selector,
)
GET_FIELDS = (
    Field("name", string, "the tensor's Hugging Face name", required=True),
    Field("truncate_size", integer(1, 1 << 16), "rows at most", 100),
)


def _lane() -> str:
    return f"sglang {secrets.token_hex(8)}"


@controlled("/init_weights_update_group", takes="SglangInitGroup")
async def init_weights_update_group(request: Request, state: SglangState) -> Message:
    """Join a trainer's group (torch.distributed); answered once it is formed, or at its deadline with who is missing."""
    got = await fields(request, INIT_FIELDS)
    name = got.get("group_name", GROUP)
    await state.forget_group(name)
    joined = {
        "name": name,
        "host": got["master_address"].strip("[]"),
        "port": got["master_port"],
        "rank": got["rank_offset"],
        "world_size": got["world_size"],
        "backend": got.get("backend"),
        "layout": "torch",
        "timeout_s": GROUP_S,
    }
    await service_of(request).engine.run_aside(_lane(), "join_group", joined, GROUP_S + 15.0)
    return f"group {name} is formed"


@controlled("/destroy_weights_update_group", takes="SglangDestroyGroup")
async def destroy_weights_update_group(request: Request, state: SglangState) -> Message:
    """Leave a group. 400 if there is none of that name."""
    name = (await fields(request, DESTROY_FIELDS)).get("group_name", GROUP)
    left = await service_of(request).engine.aside(_lane(), "leave_group", name=name)
    if not left["changed"]:
        raise IllegalState(f"there is no group {name!r}")
    return f"group {name} is left"


@controlled("/begin_weight_update", takes="SglangBegin")
async def begin_weight_update(request: Request, state: SglangState) -> Message:
    """Open an update; what comes from now on is made current by /end_weight_update. One that is open is dropped: whoever began it is gone.

    If tensors had come for that one, the new one must bring the whole model: a rank that begins twice does not commit a half.
    """
    await fields(request, BEGIN_FIELDS)
    async with state.turn():
        await state.begin()
    return "weight update begun"


@controlled("/end_weight_update", takes="Nothing")
async def end_weight_update(request: Request, state: SglangState) -> Message:
    """Make current what came since /begin_weight_update, or since the first bucket. If that is refused, the update is dropped."""
    await fields(request)
    async with state.turn():
        if state.session is None:
            raise IllegalState("no weight update is open: begin one, or send a bucket")
        return await state.commit()


@controlled("/update_weights_from_distributed", takes="SglangDistributed")
async def update_weights_from_distributed(request: Request, state: SglangState) -> Message:
    """Receive tensors that rank 0 of a group broadcasts. If one does not fit or does not come, the whole update is dropped, the old
    weights serve on, and the group is closed: what its sender had begun to broadcast must not be taken for what comes next."""
    (body,) = await take(request, lambda body: (body,))  # not read yet: whatever is wrong with it, its group is closed
    return await receive(request, state, body)


async def receive(request: Request, state: SglangState, body: Any) -> str:
    """Take what a body of /update_weights_from_distributed names."""
    name = body.get("group_name") if isinstance(body, dict) else None
    name = name if isinstance(name, str) and name else GROUP
    try:
        got = read(body, DISTRIBUTED_FIELDS, "")
        note(request, got)
        tensors, places, layout = _announced(got, name)
        async with state.turn():
            return await state.bucket(tensors, layout, places, text=got.get("weight_version"), kv_policy=kv_policy(got), group=name)
    except RollsyncError as error:
        with contextlib.suppress(RollsyncError):
            if (await service_of(request).engine.aside(_lane(), "leave_group", name=name))["changed"]:
                error.args = (f"{error}; group {name} is closed: form it anew",)
        raise


def _announced(got: dict[str, Any], group: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Tensors, where each message's bytes are, and how they are cut into messages."""
    names, dtypes, shapes = got["names"], got["dtypes"], got["shapes"]
    if not len(names) == len(dtypes) == len(shapes):
        raise BadRequest(f"names, dtypes and shapes must be of one length, got {len(names)}, {len(dtypes)}, {len(shapes)}", field="names")
    tensors = [{"name": n, "dtype": d.removeprefix("torch."), "shape": s} for n, d, s in zip(names, dtypes, shapes, strict=True)]
    flat = got.get("load_format") == "flattened_bucket"
    places = [{"group": group}] * (min(1, len(tensors)) if flat else len(tensors))
    return tensors, places, {"kind": "concatenated" if flat else "tensors"}


def _parcels(serialized: list[str], load_format: str | None) -> list[Parcel]:
    found, budget = [], Budget()
    for rank, text in enumerate(serialized):
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            field = f"serialized_named_tensors[{rank}]"
            raise BadRequest(f"{field} must be base64, got {show(text)}", field=field) from None
        found.append(read_parcel(data, load_format, rank, budget))
    for rank, parcel in enumerate(found):
        if (parcel.tensors, parcel.layout) != (found[0].tensors, found[0].layout):
            raise BadRequest(f"serialized_named_tensors[{rank}] holds other tensors than [0]", field=f"serialized_named_tensors[{rank}]")
    return found


@controlled("/update_weights_from_tensor", takes="SglangTensors")
async def update_weights_from_tensor(request: Request, state: SglangState) -> Message:
    """Take tensors that the trainer shares by torch's handles (named shared memory for CPU tensors; CUDA IPC, not run on a GPU yet).

    The handles come in pickles, of which only handles are read, and nothing is called or imported; off without --allow-tensor-pickle.
    """
    got = await fields(request, TENSOR_FIELDS)
    if not request.app.state.allow_tensor_pickle:
        raise NotSupported(
            "serialized_named_tensors are pickles, which are not read unless the server is started with --allow-tensor-pickle",
            field="serialized_named_tensors",
        )
    service = service_of(request)
    ranks = service.engine.config.tp
    serialized = got["serialized_named_tensors"]
    if len(serialized) != ranks:
        raise BadRequest(
            f"serialized_named_tensors must hold one pickle for each of {ranks} ranks, got {len(serialized)}",
            field="serialized_named_tensors",
        )
    parcels = await asyncio.to_thread(_parcels, serialized, got.get("load_format"))
    places = [{"handles": list(handles)} for handles in zip(*(parcel.handles for parcel in parcels), strict=True)]
    async with state.turn():
        first = parcels[0]
        return await state.bucket(first.tensors, first.layout, places, text=got.get("weight_version"), kv_policy=kv_policy(got))


@controlled("/update_weights_from_disk", takes="SglangDisk")
async def update_weights_from_disk(request: Request, state: SglangState) -> Message:
    """Load a whole checkpoint from a folder below --weights-root and make it current. A pause stays."""
    got = await fields(request, DISK_FIELDS)
    got.setdefault("abort_all_requests", got.get("abort_all_request", False))
    text = got.get("weight_version")
    service = service_of(request)
    async with state.turn():
        if state.session is not None and not state.session.begun:
            await state.abort("a folder is loaded instead")
        state.check_no_session("a folder cannot be loaded")
        before = state.state()
        options = {"version": state.number(text, before["weights"]["version"]), "kv_policy": kv_policy(got), "owner": OWNER}
        loaded = {"folder": got["model_path"], "commit": True, "mode": "full", **options}
        done = await service.engine.run_aside(_lane(), "open_folder", loaded, FOLDER_S)
        state.forgive()
        state.call_version(done["version"], text)
    paused = int(service.engine.snapshot.stats.get("running", 0)) if before["scheduling"]["state"] == "paused" else 0
    return f"weight version {state.version_text(done['version'])} is current", {"num_paused_requests": paused}


@controlled("/weights_checker", takes="SglangChecker", get=True)
async def weights_checker(request: Request, state: SglangState) -> Message:
    """Whether every tensor arrives. snapshot remembers the digests of all tensors; reset_tensors drops the weights, which are then
    refused until a full update is current; compare names what differs from the snapshot; checksum returns the digests."""
    got = await fields(request, CHECKER_FIELDS)
    action, service = got.get("action", "checksum"), service_of(request)
    if action == "reset_tensors":
        async with state.turn():
            state.check_no_session("the weights cannot be dropped")
            if state.state()["memory"]["weights"] != "resident":
                raise IllegalState("the weights are released: resume them first")
            await service.engine.command("sleep", tags=["weights"], weights="discard")
            await service.engine.command("wake", tags=["weights"])
        return "the weights are dropped: nothing is generated until a full update is current"
    found: dict[str, str] = await service.engine.aside("digests", "digests", 120.0)
    skipped = set(got.get("skip_tensor_list", ()))
    if action == "snapshot":
        state.snapshot = found
        return f"digests of {len(found)} tensors are remembered"
    if action == "compare":
        if state.snapshot is None:
            raise IllegalState("there is no snapshot to compare with: take one first")
        differ = sorted(name for name, value in state.snapshot.items() if name not in skipped and found.get(name) != value)
        if differ:
            raise IllegalState(
                f"{len(differ)} tensors differ from the snapshot: {', '.join(differ[:20])}{', ...' if len(differ) > 20 else ''}"
            )
        return f"{len(found) - len(skipped & found.keys())} tensors are as in the snapshot"
    whole = f"{sum(int(value, 16) for value in found.values()) % (1 << 64):016x}"
    tp = service.engine.config.tp
    rank = {"checksums": found, "per_gpu_checksum": whole, "parallelism_info": {"tp_size": tp, "dp_size": 1, "pp_size": 1}}
    return f"digests of {len(found)} tensors", {"ranks": [rank], "per_engine_checksum": whole}


@controlled("/get_weights_by_name", takes="SglangGet")
async def get_weights_by_name(request: Request, state: SglangState) -> Message:
    """The first rows of a tensor that is served, as nested lists."""
    got = await fields(request, GET_FIELDS)
    rows = got.get("truncate_size", 100)
    found = await service_of(request).engine.run_aside("digests", "weight_values", {"name": got["name"], "rows": rows}, 60.0)
    return f"{got['name']} {found['shape']}", {"parameter": found["values"]}
