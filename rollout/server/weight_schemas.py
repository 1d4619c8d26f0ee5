"""What the routes of weights.py take and give."""

from __future__ import annotations

from typing import Any

from ...weight_sync.manifest import MAX_TENSORS
from ...weight_sync.names import TRANSPORTS
from ..engine.lifecycle import MEMORY_TAGS, PAUSE_MODES, WEIGHTS_ASLEEP
from ..engine.pauses import MAX_NAMED
from ..engine.types import VERSION_LIMIT
from ..engine.update_record import DEFAULT_UPDATE_S, KV_POLICIES, MODES
from ..errors import BadRequest
from .checks import (
    Field,
    boolean,
    check,
    choice,
    described_by,
    fail,
    integer,
    mapping,
    names,
    nullable,
    object_schema,
    seconds,
    string,
)
from .reply_schemas import FACTS
from .schemas import BOOLEAN, COUNT, INTEGER, NUMBER, OBJECT, STRING, Item, array, reply_schema


@check({"type": "array", "minItems": 1, "items": {"type": "object"}})
def offers(path: str, value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise fail(path, "a list of one object per sender", value)
    return [mapping(f"{path}[{i}]", offer) for i, offer in enumerate(value)]


@check(mapping.schema)
def few_tensors(path: str, value: Any) -> Any:
    """What would keep the event loop and the engine busy for seconds goes no further; all else of a manifest is the engine's to judge."""
    tensors = mapping(path, value).get("tensors")
    if isinstance(tensors, list) and len(tensors) > MAX_TENSORS:
        raise BadRequest(f"{path}.tensors must be at most {MAX_TENSORS}, got {len(tensors)}", field=f"{path}.tensors")
    return value


OPEN_FIELDS = (
    Field("manifest", few_tensors, "the tensors: {tensors: [{name, dtype, shape, slices?}], bucket_bytes?}; a folder brings its own"),
    Field("version", integer(0, VERSION_LIMIT), "of the new weights; left out: the current one plus 1"),
    Field("base_version", integer(0, VERSION_LIMIT), "what a partial update builds on; refused on any other"),
    Field("transport", described_by("UpdateTransport"), "how the bytes come; left out: http"),
    Field("commit", boolean, "disk: also commit, once all is read; the reply comes then"),
    Field("mode", choice(*MODES), "full: every tensor; partial: those named"),
    Field("apply", choice("staged", "in_place"), "staged: a second copy; in_place: the engine pauses; left out: as the server was started"),
    Field("kv_policy", choice(*KV_POLICIES), "what becomes of running requests at the commit"),
    Field("owner", string, "who sends, for the log"),
    Field("deadline_s", seconds, f"after this the update is dropped; default {DEFAULT_UPDATE_S:g}"),
    Field("refuse_nonfinite", boolean, "whether NaN or infinity refuses the commit; default true"),
    Field("force", boolean, "allow a version below the current one"),
    Field("hold", boolean, "the reply is a stream, and the update is aborted if its connection drops; default false"),
)
TRANSPORT_FIELDS = (
    Field("name", choice(*TRANSPORTS), "http: as bodies of the chunks' calls", required=True),
    Field("offers", offers, "what each sender has for the engine; http: nothing is in them"),
    Field("group", string, "collective, reshard: the group that the only sender is in, instead of offers"),
    Field("folder", string, "disk: a checkpoint below --weights-root: its path, or its name there"),
)
_OF_GROUPS = ("offers", "group")
NAMED_BY = {"http": ("offers",), "ipc": ("offers",), "collective": _OF_GROUPS, "reshard": _OF_GROUPS, "disk": ("folder",)}
"""by transport: fields that it has besides its name"""
CHUNK_FIELDS = (
    Field("sender", integer(0, 1 << 31), "rank that sends"),
    Field("sequence", integer(0, 1 << 31), "number of the bucket among its sender's"),
    Field("offset", integer(0, VERSION_LIMIT), "ipc: where the bucket begins in the memory offered"),
    Field("count", integer(1, 1 << 31), "ipc, collective: take up to so many buckets, from this one on"),
    Field("notes", mapping, "ipc with count: {ready, taken}, each [descriptor, inode] of a pipe of the sender's; instead of offset"),
)
COMMIT_FIELDS = (Field("digests", mapping, "digest by tensor name as 16 hexadecimal digits, compared with what came"),)
DIGEST_FIELDS = (Field("compare", mapping, "digests by tensor name as 16 hexadecimal digits"),)
ABORT_UPDATE_FIELDS = (Field("reason", string, "for the log and for whoever asks"),)
PAUSE_FIELDS = (
    Field("mode", choice(*PAUSE_MODES), "keep, recompute, abort or drain; default keep"),
    Field("owner", string, "whose lease; default operator"),
    Field("ttl_s", seconds, "the lease expires after this; left out: --default-pause-ttl-s, or never"),
    Field("timeout_s", seconds, "drain: how long it may take"),
    Field("at_timeout", choice("abort", "keep"), "drain: what becomes of the rest then; default abort"),
)
SLEEP_FIELDS = (
    Field("tags", names(*MEMORY_TAGS), "which memory; left out: all of it"),
    Field("weights", choice(*WEIGHTS_ASLEEP), "offload: kept in a file; discard: invalid until a full update commits; default offload"),
)
WAKE_FIELDS = (Field("tags", names(*MEMORY_TAGS), "which memory; left out: all of it"),)
RESUME_FIELDS = (Field("owner", string, "whose lease; default operator"),)

_UPDATE = reply_schema(
    "A weight update, open or over.",
    Item("id", STRING),
    Item("state", {"type": "string", "enum": ["open", "committed", "aborted"]}),
    Item("reason", {"anyOf": [STRING, {"type": "null"}]}, "why it was aborted"),
    Item("mode", {"anyOf": [STRING, {"type": "null"}]}, "full or partial; null while an update grows"),
    *(Item(name, STRING) for name in ("apply", "kv_policy", "owner")),
    Item("version", INTEGER, "of the new weights"),
    Item("bytes", COUNT, "of all tensors"),
    Item("tensors", COUNT, "how many it brings; while it grows, so far"),
    Item("received_bytes", COUNT, "while open", always=False),
    Item("missing_chunks", COUNT, "while open", always=False),
    Item("phase", {"type": "string", "enum": ["receiving", "checking", "switching"]}, "while open", always=False),
    Item("elapsed_s", NUMBER, "while open: since it was opened", always=False),
    Item("deadline_in_s", NUMBER, "while open", always=False),
    Item("pending", BOOLEAN, "of an abort: the engine is in a long step or command, and ends the update after it", always=False),
    Item("epoch", COUNT, "once committed: number of commits so far", always=False),
    Item("recompute_tokens", COUNT, "once committed: tokens of running requests that are prefilled again", always=False),
    Item("aborted", COUNT, "once committed with kv_policy abort: samples ended", always=False),
    Item("outdated", COUNT, "once committed: samples ended by max_version_lag or min_version", always=False),
    Item("kept_by_pause", COUNT, "once committed: requests that a pause had frozen, so that they kept their KV", always=False),
    Item("seconds", NUMBER, "once committed: since it was opened", always=False),
    Item("names", array(STRING), f"once committed, partial: its tensors, the first {MAX_NAMED}", always=False),
    Item("changed", BOOLEAN, "false for a call that found its work done", always=False),
)
_HELD_EVENTS = ("open", "committed", "aborted", "error")
_STATE = reply_schema(
    "Three facts, never inferred from each other.",
    *FACTS,
    Item("why_not_running", nullable(STRING), "null: requests are served"),
)
COMPONENTS = {
    "OpenUpdate": object_schema(OPEN_FIELDS, anyOf=[{"required": ["manifest"]}, {"required": ["transport"]}]),
    "UpdateTransport": object_schema(TRANSPORT_FIELDS),
    "Chunk": object_schema(CHUNK_FIELDS),
    "CommitUpdate": object_schema(COMMIT_FIELDS),
    "AbortUpdate": object_schema(ABORT_UPDATE_FIELDS),
    "Pause": object_schema(PAUSE_FIELDS),
    "Resume": object_schema(RESUME_FIELDS),
    "Sleep": object_schema(SLEEP_FIELDS),
    "Wake": object_schema(WAKE_FIELDS),
    "Slept": reply_schema(
        "", Item("changed", BOOLEAN), Item("freed_bytes", OBJECT, "by tag"), Item("recompute_tokens", COUNT, "to feed again", always=False)
    ),
    "Woken": reply_schema(
        "",
        Item("changed", BOOLEAN),
        Item("asleep", array(STRING), "tags that still are"),
        Item("running", BOOLEAN),
        Item("reason", {"anyOf": [STRING, {"type": "null"}]}, "why it is not running"),
    ),
    "Nothing": object_schema(()),
    "CacheReset": reply_schema("", Item("changed", BOOLEAN), Item("blocks", COUNT, "blocks forgotten; those in use go on being used")),
    "Update": _UPDATE,
    "UpdateEvent": {**_UPDATE, "properties": {**_UPDATE["properties"], "event": {"type": "string", "enum": list(_HELD_EVENTS)}}},
    "State": _STATE,
    "Compare": object_schema(DIGEST_FIELDS),
    "Digests": reply_schema(
        "",
        Item("digests", {"type": "object", "additionalProperties": STRING}, "by tensor name"),
        Item("differ", array(STRING), "names compared whose digest here is another, or that are not here"),
    ),
    "ChunkTaken": reply_schema(
        "What is left.",
        Item("changed", BOOLEAN),
        Item("received_bytes", COUNT),
        Item("missing_chunks", COUNT),
        Item("chunks", COUNT, "of a call with count: how many it took", always=False),
    ),
    "Paused": reply_schema(
        "What became of the requests.",
        Item("changed", BOOLEAN, "whether the owner had no lease before"),
        Item("mode", STRING),
        *(Item(name, COUNT, "samples") for name in ("aborted", "recomputed", "kept", "drained", "queued")),
        Item("request_ids", OBJECT, "of calls, by kind: aborted, recomputed, kept, drained; not all of very many"),
        Item("recompute_tokens", COUNT, "mode recompute: to feed again", always=False),
        Item("draining", BOOLEAN, "always false here"),
        Item("resumed", BOOLEAN, "drain: the lease was given back or expired before it was over", always=False),
        Item("superseded", BOOLEAN, "drain: its owner paused anew before it was over", always=False),
    ),
    "Resumed": reply_schema("", Item("changed", BOOLEAN), Item("running", BOOLEAN), Item("reason", {"anyOf": [STRING, {"type": "null"}]})),
}
