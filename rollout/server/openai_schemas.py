"""What OpenAI's routes take and reply: the components that their `route(...)` declarations name."""

from __future__ import annotations

from .checks import Schema, nullable, object_schema, ref
from .openai_protocol import CHAT_FIELDS, COMPLETION_FIELDS
from .schemas import COUNT, INTEGER, NUMBER, OBJECT, STRING, Item, array, reply_schema

ERRORS = (404, 409, 503)

_ERROR = reply_schema(
    "",
    Item("message", STRING, "what came, what is allowed, what to do"),
    Item("type", STRING, "OpenAI's class of error"),
    Item("param", nullable(STRING), "the field that is wrong"),
    Item("code", STRING, "the kind of error, as on the other routes"),
)
_SPAN = reply_schema("", Item("version", INTEGER), Item("start", COUNT), Item("end", COUNT))
SPAN_OF_TEXT = reply_schema("", Item("version", STRING), Item("start", COUNT), Item("end", COUNT))
_END = (
    Item("index", COUNT, "prompt index x n + choice"),
    Item("finish_reason", nullable({"type": "string", "enum": ["stop", "length", "abort"]}), "null in a chunk that ends nothing"),
    Item("stop_reason", {"type": ["integer", "string", "null"]}, "which id or string ended it", always=False),
    Item("abort_reason", STRING, "why it was aborted", always=False),
    Item("weight_versions", array(_SPAN), "which weights made which of its tokens; when it ends", always=False),
    Item("seed", COUNT, "the seed in effect; when it ends", always=False),
    Item("token_ids", array(INTEGER), "exactly the ids drawn, the final EOS included; with return_token_ids", always=False),
    Item("prompt_token_ids", array(INTEGER), "the prompt as the model saw it; with return_token_ids", always=False),
    Item("prompt_logprobs", array(nullable(OBJECT)), "null, or {id: {logprob, rank, decoded_token}}; with prompt_logprobs", always=False),
)
_LISTS = reply_schema(
    "One entry per token in each list. Values that are not finite are null.",
    Item("tokens", array(STRING)),
    Item("token_logprobs", array(nullable(NUMBER))),
    Item("top_logprobs", array(nullable(OBJECT)), "the likeliest by text, and the token itself"),
    Item("text_offset", array(COUNT), "where the token's text begins"),
)
_ENTRY = (Item("token", STRING), Item("logprob", nullable(NUMBER)), Item("bytes", array(COUNT)))
_CONTENT = reply_schema(
    "One entry per token.",
    Item("content", array(reply_schema("", *_ENTRY, Item("top_logprobs", array(reply_schema("", *_ENTRY)), "likeliest first")))),
    Item("refusal", {"type": "null"}),
)
_USAGE = reply_schema(
    "Token counts of one call.",
    Item("prompt_tokens", COUNT, "each prompt once, however many choices it has"),
    Item("completion_tokens", COUNT),
    Item("total_tokens", COUNT),
    Item("prompt_tokens_details", reply_schema("", Item("cached_tokens", COUNT, "came from the prefix cache"))),
)
_HEAD = (
    Item("id", STRING, "ends with the request_id, given or made"),
    Item("object", STRING),
    Item("created", COUNT),
    Item("model", STRING),
    Item("system_fingerprint", nullable(STRING), "of the numerics"),
    Item("usage", nullable(ref("OpenAIUsage")), "in a stream: in its last chunk, if include_usage asks for it", always=False),
)
_PROMPT = tuple(i for i in _END if i.name.startswith("prompt_"))
_MESSAGE = reply_schema("", Item("role", STRING), Item("content", STRING), Item("refusal", {"type": "null"}))
_DELTA = reply_schema("", Item("role", STRING, always=False), Item("content", STRING, always=False))
_CHAT_END = tuple(i for i in _END if not i.name.startswith("prompt_"))


def _choices(*items: Item) -> Item:
    return Item("choices", array(reply_schema("", *items)))


_MODEL = reply_schema(
    "A model that is served.",
    Item("id", STRING, "the name to give as model"),
    Item("object", STRING),
    Item("created", COUNT),
    Item("owned_by", STRING),
    Item("root", STRING, "where it was loaded from"),
    Item("max_model_len", nullable(COUNT), "tokens of prompt and output together; null while the engine loads"),
)

COMPONENTS: dict[str, Schema] = {
    "Completion": object_schema(COMPLETION_FIELDS),
    "Chat": object_schema(CHAT_FIELDS),
    "CompletionReply": reply_schema(
        "The choices of all prompts, or a chunk of them.", *_HEAD, _choices(Item("text", STRING), Item("logprobs", nullable(_LISTS)), *_END)
    ),
    "ChatReply": reply_schema(
        "The choices.", *_HEAD, *_PROMPT, _choices(Item("message", _MESSAGE), Item("logprobs", nullable(_CONTENT)), *_CHAT_END)
    ),
    "ChatChunk": reply_schema(
        "Part of one choice. The stream ends with `data: [DONE]`, or with an error.",
        *_HEAD,
        Item("prompt_token_ids", array(INTEGER), "in the first chunk, with return_token_ids", always=False),
        _choices(Item("delta", _DELTA), Item("logprobs", nullable(_CONTENT)), *_CHAT_END),
    ),
    "OpenAIUsage": _USAGE,
    "OpenAIError": reply_schema("A refusal, as OpenAI writes it.", Item("error", _ERROR)),
    "Model": _MODEL,
    "Models": reply_schema("", Item("object", STRING), Item("data", array(ref("Model")))),
}
