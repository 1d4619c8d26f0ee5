"""vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...errors import BadRequest
from ..checks import Field, boolean, check_vocabulary, object_schema, read, string, template_variables, text, token_ids
from ..openai import check_model
from ..openai_protocol import chat_messages, objects, only
from ..replies import give, take
from ..schemas import COUNT, INTEGER, STRING, Item, array, reply_schema
from .vllm import service_of, vllm

router = APIRouter()
TOKENIZE_FIELDS = (
    Field("prompt", text, "what to tokenise; give exactly one of prompt, messages"),
    Field("messages", chat_messages, "a chat, rendered by the model's template"),
    Field("model", string, "the served model's name; it need not be given"),
    Field("add_special_tokens", boolean, "prompt: add BOS where the model has one; default true for a prompt, only false for a chat"),
    Field("return_token_strs", boolean, "add the tokens as the vocabulary spells them", False),
    Field("add_generation_prompt", boolean, "messages: end with the header of an assistant's turn", True),
    Field("continue_final_message", boolean, "messages: end inside the last one, to go on with it", False),
    Field("tools", objects, "messages: given to the template"),
    Field("chat_template_kwargs", template_variables, "messages: variables for the template"),
    Field("chat_template", only(why="the model's template is used"), "refused"),
    Field("media_io_kwargs", only({}, why="this server takes text only"), "only empty"),
    Field("mm_processor_kwargs", only({}, why="this server takes text only"), "only empty"),
)
DETOKENIZE_FIELDS = (
    Field("tokens", token_ids, "what to make text of", required=True),
    Field("model", string, "the served model's name; it need not be given"),
)
_CHAT_ONLY = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


def parse_tokenize(body: Any) -> dict[str, Any]:
    got = read(body, TOKENIZE_FIELDS, "")
    if ("prompt" in got) == ("messages" in got):
        raise BadRequest("the body must have exactly one of prompt, messages", field="prompt")
    misplaced = next((name for name in _CHAT_ONLY if name in got and "prompt" in got), None)
    if misplaced is not None:
        raise BadRequest(f"{misplaced} needs messages", field=misplaced)
    if "messages" in got and got.get("add_special_tokens"):
        raise BadRequest("add_special_tokens needs a prompt: a template writes the special tokens itself", field="add_special_tokens")
    if got.get("continue_final_message") and got.get("add_generation_prompt"):
        raise BadRequest("continue_final_message and add_generation_prompt exclude each other", field="continue_final_message")
    return got


@router.post("/tokenize", openapi_extra=vllm("traffic", takes="VllmTokenize", gives="VllmTokens"))
async def tokenize(request: Request) -> Response:
    """Ids of a text or a chat."""
    got = await take(request, parse_tokenize)
    service = service_of(request)
    check_model(request, got.get("model"))
    if "messages" in got:
        variables = {name: got[name] for name in _CHAT_ONLY[:3] if name in got}
        if got.get("continue_final_message"):
            variables.setdefault("add_generation_prompt", False)
        ids = await service.text.render(got["messages"], {**variables, **got.get("chat_template_kwargs", {})})
    else:
        ids = await service.text.encode(got["prompt"], got.get("add_special_tokens", True))
    spelled = None
    if got.get("return_token_strs"):
        tokenizer: Any = await service.text.tokenizer()
        spelled = await asyncio.to_thread(lambda: [tokenizer.backend.id_to_token(i) for i in ids])
    room = service.engine.snapshot.info.get("max_model_len")
    return await give(request, {"count": len(ids), "max_model_len": room, "tokens": list(ids), "token_strs": spelled})


@router.post("/detokenize", openapi_extra=vllm("traffic", takes="VllmDetokenize", gives="VllmText"))
async def detokenize(request: Request) -> Response:
    """Text of ids, special tokens included."""
    got = await take(request, lambda body: read(body, DETOKENIZE_FIELDS, ""))
    service = service_of(request)
    check_model(request, got.get("model"))
    check_vocabulary("tokens", got["tokens"], await service.text.num_ids())
    return await give(request, {"prompt": await service.text.decode(got["tokens"], False, False)})


COMPONENTS = {
    "VllmTokenize": object_schema(TOKENIZE_FIELDS, "Exactly one of prompt, messages."),
    "VllmDetokenize": object_schema(DETOKENIZE_FIELDS),
    "VllmTokens": reply_schema(
        "", Item("count", COUNT), Item("max_model_len", COUNT), Item("tokens", array(INTEGER)),
        Item("token_strs", {"type": ["array", "null"], "items": STRING}, "with return_token_strs"),
    ),
    "VllmText": reply_schema("", Item("prompt", STRING)),
}  # fmt: skip
