"""What the native routes reply: the components their `route(...)` declarations name."""

from __future__ import annotations

from ..engine.types import FINISH_REASONS, SampleOutput
from ..fields import field_docs
from ..wire import COLUMNS
from .checks import Schema, nullable, ref
from .schemas import BOOLEAN, COUNT, INTEGER, NUMBER, OBJECT, STRING, Item, array, column, reply_schema

_DOCS = field_docs(SampleOutput)
_SPAN = reply_schema(
    "",
    Item("version", INTEGER),
    Item("start", COUNT),
    Item("end", COUNT),
    Item("mixed_kv", COUNT, "1: drawn on KV that older weights made in part", always=False),
)
ERROR = {"$ref": "#/components/schemas/Error/properties/error"}
IDS = {"type": "array", "items": INTEGER, "x-msgpack-array": "<i4"}
_PROMPT_INDEX = Item("prompt_index", COUNT, "which of the prompts sent, from 0")

SAMPLE = reply_schema(
    "One finished sample. Columns have equal length; the final EOS or stop id is in them.",
    Item("index", COUNT, "first_sample + i"),
    Item("token_ids", column("token_ids"), "the output"),
    Item("logprobs", column("logprobs"), _DOCS["logprobs"]),
    *(Item(name, column(name), _DOCS[name], always=False) for name in COLUMNS if name not in ("token_ids", "logprobs")),
    Item("prompt_logprobs_start", COUNT, "the prompt token that prompt_logprobs begins with; with prompt_logprobs", always=False),
    Item("text", STRING, 'the output as text; only if "include" names it', always=False),
    Item("finish_reason", {"type": "string", "enum": list(FINISH_REASONS)}, "why it ended"),
    Item("stop_reason", {"type": ["integer", "string", "null"]}, "which id or string ended it"),
    Item("abort_reason", nullable(STRING), "why it was aborted"),
    Item("error", STRING, 'what failed, with finish_reason "error"', always=False),
    Item("weight_versions", array(_SPAN), _DOCS["weight_versions"]),
    Item("seed", COUNT, _DOCS["seed"]),
    Item("cached_tokens", nullable(COUNT), _DOCS["cached_tokens"]),
)

DELTA = reply_schema(
    "New tokens of a running sample. Counted from the sample's first token: `start`, and the spans of weight_versions.",
    Item("index", COUNT, "of the sample"),
    Item("start", COUNT, "the first of these tokens"),
    Item("token_ids", column("token_ids"), "those after the last delta"),
    *(Item(name, column(name), always=name == "logprobs") for name in COLUMNS if name not in ("token_ids", "prompt_logprobs")),
    Item("text", STRING, "what became readable; a character is never broken", always=False),
    Item("weight_versions", array(_SPAN), "of these tokens"),
    Item("finish_reason", {"type": "null"}),
)

USAGE = reply_schema(
    "Token counts of one call.",
    Item("prompt_tokens", COUNT, "over the prompts that were served, each once"),
    Item("completion_tokens", COUNT, "over all samples"),
    Item("cached_tokens", COUNT, "prompt tokens that came from the prefix cache, over all samples"),
    Item("samples", COUNT),
)

PROMPT_RESULT = reply_schema(
    "One prompt: its samples by index, or the error that refused it.",
    _PROMPT_INDEX,
    Item("prompt_token_ids", IDS, "the prompt as the model saw it", always=False),
    Item("samples", array(ref("Sample")), always=False),
    Item("error", ERROR, "then prompt_token_ids and samples are not there", always=False),
)

HEAD = (
    Item("id", STRING, "the request_id, given or made"),
    Item("model", STRING),
    Item("dtype", STRING, "of the model as it runs: bfloat16 or float32"),
    Item("fingerprint", STRING, "of the numerics: equal fingerprints, dtypes and weights give equal bits"),
)

ROLLOUTS_REPLY = reply_schema(
    "All prompts, in the order sent.",
    *HEAD,
    Item("results", array(ref("PromptResult"))),
    Item("usage", ref("Usage")),
)

ALL_REFUSED = reply_schema(
    "Nothing of a list was served; the status is that of the first error.",
    Item("error", ERROR, "that of the first"),
    Item("results", array(OBJECT), "as in the reply with status 200, each with its own error"),
    *(Item(i.name, i.schema, always=False) for i in HEAD),
    Item("usage", ref("Usage"), always=False),
)
IF_ALL_FAIL: dict[int, str | tuple[str, ...]] = dict.fromkeys((400, 503), ("Error", "AllRefused"))
"""statuses of routes that take lists, for their `route(also=...)`"""

_ACCEPTED = reply_schema("", _PROMPT_INDEX, Item("prompt_token_ids", IDS))
ROLLOUT_EVENT = reply_schema(
    "One event of a stream: start; delta (of a call that streams tokens), sample and error as they come; done. "
    "An error without prompt_index ends the stream.",
    Item("event", {"type": "string", "enum": ["start", "delta", "sample", "error", "done"]}),
    Item("id", STRING, "with start and done", always=False),
    *(Item(i.name, i.schema, "with start", always=False) for i in HEAD[1:]),
    Item("prompts", array(_ACCEPTED), "with start: those accepted", always=False),
    Item("prompt_index", COUNT, "with delta and sample, and with an error of one prompt", always=False),
    Item("sample", {"anyOf": [ref("Sample"), ref("Delta")]}, "with sample and delta", always=False),
    Item("error", ERROR, "with error", always=False),
    Item("usage", ref("Usage"), "with done", always=False),
)

_SCHEDULING = reply_schema("", Item("state", {"type": "string", "enum": ["running", "paused"]}), Item("leases", array(OBJECT)))
FACTS = (
    Item("scheduling", nullable(_SCHEDULING), "whether steps may run, and who holds a lease that stops them"),
    Item("memory", nullable(OBJECT), "by tag: resident, offloaded or discarded"),
    Item("weights", nullable(OBJECT), "version, epoch (of this instance), valid or the reason why not, the open update's id"),
    Item("update", nullable(OBJECT), "the open weight update: phase, bytes, received_bytes, elapsed_s, deadline_in_s, owner, ..."),
    Item("legal", array(STRING), "moves that would not be refused now"),
)
"""of the engine's state; null while it loads"""

ABORT_REPLY = reply_schema(
    "What was ended; with nothing to end, nothing changed.",
    Item("changed", BOOLEAN, "whether there was anything to end"),
    Item("request_ids", array(STRING), "the calls ended"),
    Item("samples", COUNT, "samples ended in the engine"),
    Item("pending", BOOLEAN, "the engine is in a long step or command, and ends them after it", always=False),
)

LIVE = reply_schema(
    "Whether the engine's loop moves or idles.",
    Item("live", BOOLEAN),
    Item("phase", STRING, "what the loop is doing"),
    Item("reason", STRING, "why it is not live", always=False),
)

READY = reply_schema(
    "Whether a request would be served now.",
    Item("ready", BOOLEAN),
    Item("reason", STRING, "why not", always=False),
    Item("progress", NUMBER, "of loading, 0 to 1", always=False),
)

VERSION = reply_schema(
    "What a client checks before it speaks.",
    Item("version", STRING, "of the package"),
    Item("protocol_version", INTEGER, "of the wire; a client refuses another"),
    Item("capabilities", array(STRING), "what this server can do"),
    Item("model", STRING),
    Item("fingerprint", STRING, "of the numerics; empty while the engine loads"),
)

STATUS = reply_schema(
    "The last snapshot the engine sent; asking never waits for a step.",
    Item("state", {"type": "string", "enum": ["loading", "running", "dead"]}),
    Item("reason", nullable(STRING), "why it is not live"),
    Item("phase", STRING, "what the loop is doing"),
    Item("phase_age_s", NUMBER, "for how long"),
    Item("progress", reply_schema("", Item("phase", STRING), Item("fraction", NUMBER)), "of loading"),
    Item("steps", COUNT, "forward passes so far"),
    Item("calls_in_flight", COUNT, "those unread included"),
    Item("calls_unread", COUNT, "that go on, or are kept, after their connection was lost (detach_s)"),
    Item("info", OBJECT, "facts of the engine: model, dtype, kernels, num_blocks, max_model_len, vocab_size, ..."),
    Item("stats", OBJECT, "counters and gauges, those of /metrics"),
    *FACTS,
    Item("memory_bytes", OBJECT, "of the front and of the engine process, by kind"),
    Item("engine_pid", nullable(INTEGER)),
)

COMPONENTS: dict[str, Schema] = {
    "RolloutsReply": ROLLOUTS_REPLY,
    "AllRefused": ALL_REFUSED,
    "PromptResult": PROMPT_RESULT,
    "Sample": SAMPLE,
    "Delta": DELTA,
    "Usage": USAGE,
    "RolloutEvent": ROLLOUT_EVENT,
    "AbortReply": ABORT_REPLY,
    "Live": LIVE,
    "Ready": READY,
    "Version": VERSION,
    "Status": STATUS,
}
