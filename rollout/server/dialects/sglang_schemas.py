"""What SGLang's routes take and reply: the components that their declarations name."""

from __future__ import annotations

from ..checks import Schema, nullable, object_schema, ref
from ..reply_schemas import ERROR
from ..schemas import BOOLEAN, COUNT, INTEGER, NUMBER, OBJECT, STRING, Item, array, reply_schema
from .sglang_control import (
    ABORT_FIELDS,
    CONTINUE_FIELDS,
    MEMORY_FIELDS,
    PAUSE_FIELDS,
    POST_PROCESS_FIELDS,
)
from .sglang_protocol import GENERATE_FIELDS, SAMPLING_FIELDS
from .sglang_weights import (
    BEGIN_FIELDS,
    CHECKER_FIELDS,
    DESTROY_FIELDS,
    DISK_FIELDS,
    DISTRIBUTED_FIELDS,
    GET_FIELDS,
    INIT_FIELDS,
    TENSOR_FIELDS,
)

_ROW = {"type": "array", "minItems": 3, "maxItems": 3, "items": {"type": ["number", "string", "null"]}}
"""[logprob, id, text]"""
_ROWS = array(_ROW)
_REASON = reply_schema(
    "",
    Item("type", {"type": "string", "enum": ["stop", "length", "abort"]}),
    Item("matched", {"type": ["integer", "string", "null"]}, "stop: the id or string", always=False),
    Item("length", COUNT, "length: tokens", always=False),
    Item("message", STRING, "abort: why", always=False),
)
_SPAN = reply_schema("", Item("version", STRING), Item("start", COUNT), Item("end", COUNT), Item("mixed_kv", BOOLEAN, always=False))
_META = reply_schema(
    "",
    Item("id", STRING, "the rid, given or made; of n samples rid_0, rid_1, ..."),
    Item("finish_reason", nullable(_REASON), "null in an event that ends nothing"),
    *(Item(name, COUNT) for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")),
    Item("weight_version", STRING, "of the last token; without a token, of the weights served"),
    Item("weight_versions", array(_SPAN), "which weights made which tokens"),
    Item("e2e_latency", NUMBER, "seconds"),
    Item("seed", COUNT, "the seed in effect; when it ends", always=False),
    Item("input_token_logprobs", _ROWS, "[logprob, id, text or null] from logprob_start_len on; the first logprob is null", always=False),
    Item("output_token_logprobs", _ROWS, "[logprob, id, text or null]: log_softmax(logits / temperature)", always=False),
    Item("output_token_logprobs_length", COUNT, always=False),
    Item("output_top_logprobs", array(_ROWS), "the likeliest, of the distribution drawn from", always=False),
    Item("output_token_sampling_mask", array(array(INTEGER)), "per token the ids it could be drawn from, ascending", always=False),
    Item("output_token_sampling_mask_length", COUNT, always=False),
    Item("top_p_token_ids", STRING, "with return_top_p_token_ids: those ids in a row, base64 of int32", always=False),
    Item("top_p_token_offsets", STRING, "likewise: where each token's begin, and the end", always=False),
    Item("output_token_sampling_logprobs", array(nullable(NUMBER)), "of each token, renormalised over those ids", always=False),
)
_SAMPLE = (
    Item("text", STRING, "left out if the model has no tokenizer", always=False),
    Item("output_ids", array(INTEGER), "exactly the ids drawn, the final EOS included"),
    Item("meta_info", _META),
    Item("prompt_token_ids", array(INTEGER), "with return_prompt_token_ids", always=False),
    Item("index", COUNT, "place in the list, in a stream of several", always=False),
)

COMPONENTS: dict[str, Schema] = {
    "SglangGenerate": object_schema(
        GENERATE_FIELDS, "Exactly one of text, input_ids.", anyOf=[{"required": ["text"]}, {"required": ["input_ids"]}]
    ),
    "SglangSampling": object_schema(SAMPLING_FIELDS),
    "SglangSample": reply_schema("One sample, or all there is of it so far.", *_SAMPLE),
    "SglangReply": {"anyOf": [ref("SglangSample"), array(ref("SglangSample"))], "description": "One sample, or one for each prompt and n."},
    "SglangPause": object_schema(PAUSE_FIELDS),
    "SglangContinue": object_schema(CONTINUE_FIELDS),
    "SglangAbort": object_schema(ABORT_FIELDS),
    "SglangMemory": object_schema(MEMORY_FIELDS),
    "SglangPostProcess": object_schema(POST_PROCESS_FIELDS),
    "SglangInitGroup": object_schema(INIT_FIELDS),
    "SglangDestroyGroup": object_schema(DESTROY_FIELDS),
    "SglangBegin": object_schema(BEGIN_FIELDS),
    "SglangDistributed": object_schema(DISTRIBUTED_FIELDS),
    "SglangTensors": object_schema(TENSOR_FIELDS),
    "SglangDisk": object_schema(DISK_FIELDS),
    "SglangChecker": object_schema(CHECKER_FIELDS),
    "SglangGet": object_schema(GET_FIELDS),
    "SglangDone": reply_schema(
        "What was done.",
        Item("success", BOOLEAN, "true"),
        Item("message", STRING),
        Item("status", STRING, "ok, of pause and continue", always=False),
        Item("rids", array(STRING), "of /abort_request: those ended", always=False),
        Item("num_paused_requests", COUNT, "of /update_weights_from_disk", always=False),
        Item("parameter", array({}), "of /get_weights_by_name: nested lists", always=False),
        Item("ranks", array(OBJECT), "of /weights_checker checksum: digests by tensor name", always=False),
        Item("per_engine_checksum", STRING, "of /weights_checker checksum: their sum", always=False),
    ),
    "SglangFailure": reply_schema(
        "What could not be done.", Item("success", BOOLEAN, "false"), Item("message", STRING), Item("error", ERROR, "by kind and field")
    ),
    "SglangInfo": {**OBJECT, "description": "Facts by name."},
}
