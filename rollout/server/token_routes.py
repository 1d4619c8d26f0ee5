"""Tokens without sampling: `/v1/logprobs` scores given ones; `/v1/tokenize`, `/v1/detokenize`, `/v1/render`: text to ids and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..engine.params import SamplingParams
from ..engine.score import SCORED
from ..errors import BadRequest, RollsyncError, error_classes
from ..wire import error_to_wire, pack_array
from .checks import (
    Field,
    Schema,
    boolean,
    check_vocabulary,
    described_by,
    integer,
    messages,
    number,
    object_schema,
    objects,
    read,
    ref,
    seconds,
    string,
    template_variables,
    text,
    token_ids,
)
from .protocol import TEXT_FIELDS, VERSION_FIELDS, Naming, PromptSpec, RolloutCall, check_kind, version_fields
from .replies import give, take, until_disconnect
from .reply_schemas import ERROR, HEAD, IDS, IF_ALL_FAIL, SAMPLE
from .rollouts import RolloutService
from .schemas import COUNT, STRING, Item, array, column, reply_schema, route

router = APIRouter()
MAX_ITEMS = 65536

_KWARGS = Field("chat_template_kwargs", template_variables, "variables for the template (only with messages)")
SCORED_PROMPT_FIELDS = (
    Field("token_ids", token_ids, "the prompt as ids; give exactly one of token_ids, text, messages"),
    Field("text", text, "the prompt as text; no special token is added"),
    Field("messages", messages, "a chat, rendered by the model's template"),
    _KWARGS,
)
CONTINUATION_FIELDS = (
    Field("token_ids", token_ids, "as ids; give exactly one of token_ids, text"),
    Field("text", text, "as text, tokenised by itself and put behind the prompt's ids"),
)
SCORED_ITEM_FIELDS = (
    Field("prompt", described_by("ScoredPrompt"), "what stands before", required=True),
    Field("continuation", described_by("Continuation"), "what is scored, to its end, whatever it holds", required=True),
)
LOGPROBS_FIELDS = (
    Field("items", objects("ScoredItem", "items"), "one or more prompts with a continuation each", required=True),
    Field("temperature", number(1e-6, 1e6), "asks for temperature_logprobs too: log_softmax(logits / temperature)"),
    Field("request_id", string, "name of this call, for abort; 409 while one of that name is in flight"),
    Field("group", string, "name shared by calls that are aborted together"),
    Field("session", string, "name of the conversation or worker this belongs to, for abort"),
    Field("priority", integer(-(1 << 31), 1 << 31, "an int"), "lower is admitted earlier and preempted later", default=0),
    Field("deadline_s", seconds, 'seconds until the rest ends with abort_reason "deadline"'),
    *VERSION_FIELDS,
)
_NAMING = Naming(
    "items",
    (
        ("prompt_token_ids", "prompt.token_ids"),
        ("forced_token_ids", "continuation.token_ids"),
        ("continuation", "continuation.text"),
        ("messages", "prompt.messages"),
        ("text", "prompt.text"),
    ),
)


def _scored(value: Any, path: str, params: SamplingParams) -> PromptSpec:
    got = read(value, SCORED_ITEM_FIELDS, path)
    prompt = read(got["prompt"], SCORED_PROMPT_FIELDS, f"{path}.prompt")
    check_kind(prompt, f"{path}.prompt")
    continuation = read(got["continuation"], CONTINUATION_FIELDS, f"{path}.continuation")
    check_kind(continuation, f"{path}.continuation", ("token_ids", "text"))
    return PromptSpec(
        ids=prompt.get("token_ids"),
        text=prompt.get("text"),
        messages=prompt.get("messages"),
        chat_template_kwargs=prompt.get("chat_template_kwargs", {}),
        params=params,
        first_sample=0,
        forced_token_ids=continuation.get("token_ids", ()),
        continuation=continuation.get("text"),
        score_only=True,
    )


def parse_logprobs(body: Any) -> RolloutCall:
    """A body of `POST /v1/logprobs` as a call whose samples are the continuations."""
    got = read(body, LOGPROBS_FIELDS, "")
    if len(got["items"]) > MAX_ITEMS:
        raise BadRequest(f"items must hold at most {MAX_ITEMS} items, got {len(got['items'])}", field="items")
    # Nothing is drawn; a seed keeps the engine from using one up.
    params = SamplingParams(temperature=got.get("temperature", 1.0), seed=0)
    return RolloutCall(
        prompts=[_scored(item, f"items[{i}]", params) for i, item in enumerate(got["items"])],
        include=SCORED if "temperature" in got else SCORED[:1],
        request_id=got.get("request_id"),
        group=got.get("group"),
        session=got.get("session"),
        priority=got.get("priority", 0),
        stream="",
        deadline_s=got.get("deadline_s"),
        naming=_NAMING,
        **version_fields(got),
    )


def _scores(result: dict[str, Any]) -> dict[str, Any]:
    """One item of the reply, from a prompt's result."""
    head = {"item_index": result["prompt_index"]}
    if "error" in result:
        return {**head, "error": result["error"]}
    (sample,) = result["samples"]
    if sample["finish_reason"] == "error":
        return {**head, "error": error_to_wire(RollsyncError(sample.get("error") or "scoring failed"))}
    names = ("token_ids", *SCORED, "finish_reason", "abort_reason", "weight_versions", "cached_tokens")
    return {**head, "prompt_token_ids": result["prompt_token_ids"], **{name: sample[name] for name in names if name in sample}}


@router.post(
    "/v1/logprobs",
    openapi_extra=route("Tokens", "traffic", takes="Logprobs", gives="LogprobsReply", errors=(409,), also=IF_ALL_FAIL),
)
async def logprobs(request: Request) -> Response:
    """Log-probabilities of given continuations under given prompts.

    Continuations are scored by the rows and bits that sampling them has. An item that fails has "error" in its place; if all
    failed, the status is that of the first error.
    """
    service: RolloutService = request.app.state.service
    ticket = service.open(await take(request, parse_logprobs))
    try:
        body, status = await until_disconnect(request.receive, service.whole(ticket))
    finally:
        ticket.close()
    results = [_scores(result) for result in body.pop("results")]
    if status == 200 and all("error" in result for result in results):
        code = results[0]["error"]["code"]
        body, status = {**body, "error": results[0]["error"]}, next(cls.status for cls in error_classes() if cls.code == code)
    return await give(request, {**body, "results": results}, status)


def _items(component: str) -> Field:
    return Field("items", objects(component, "items"), "several at once; then nothing else. One that fails has its own error")


TOKENIZE_FIELDS = (
    Field("text", text, "what to tokenise; give exactly one of text, messages, items"),
    Field("messages", messages, "a chat, rendered by the model's template"),
    _KWARGS,
    Field("add_special_tokens", boolean, "add what the model's tokenizer adds, such as BOS; rollouts do not", default=False),
    _items("TokenizeItem"),
)
DETOKENIZE_FIELDS = (
    Field("token_ids", token_ids, "what to make text of; give exactly one of token_ids, items"),
    *TEXT_FIELDS,
    _items("DetokenizeItem"),
)
RENDER_FIELDS = (Field("messages", messages, "the chat; give exactly one of messages, items"), _KWARGS, _items("RenderItem"))


def _parser(table: tuple[Field, ...]) -> Callable[[Any], tuple[list[dict[str, Any]], bool]]:
    """Of a body that is one object, or {"items": [objects]}: (the objects, whether it was a list)."""
    own = table[:-1]
    kinds = tuple(f.name for f in own if f.name in ("token_ids", "text", "messages"))

    def one(value: Any, path: str) -> dict[str, Any]:
        got = read(value, own, path)
        check_kind(got, path, kinds)
        if "messages" in got and got.get("add_special_tokens"):
            where = f"{path}.add_special_tokens".lstrip(".")
            raise BadRequest(f"{where} needs text: a template writes the special tokens itself", field=where)
        return got

    def parse(body: Any) -> tuple[list[dict[str, Any]], bool]:
        got = read(body, table, "")
        if "items" not in got:
            return [one(body, "")], False
        if len(got) > 1:
            raise BadRequest(f"items stands alone: give {', '.join(n for n in got if n != 'items')} in each item", field="items")
        if len(got["items"]) > MAX_ITEMS:
            raise BadRequest(f"items must hold at most {MAX_ITEMS} items, got {len(got['items'])}", field="items")
        return [one(item, f"items[{i}]") for i, item in enumerate(got["items"])], True

    return parse


def _named(error: Exception, i: int) -> Exception:
    """The same error, its field as the caller wrote it."""
    if not isinstance(error, BadRequest):
        return error
    where = f"items[{i}]"
    if error.field is None:
        return type(error)(f"{where}: {error}", field=where)
    return type(error)(f"{where}.{error}" if str(error).startswith(error.field) else f"{where}: {error}", field=f"{where}.{error.field}")


async def _each(request: Request, parsed: tuple[list[dict[str, Any]], bool], work: Callable[[Any], Awaitable[Any]]) -> Response:
    """What `work` makes of the one object, or of each: one that fails has its own error; if all did, the first gives the status."""
    items, is_list = parsed

    async def run() -> tuple[Any, int]:
        if not is_list:
            return await work(items[0]), 200
        results: list[dict[str, Any]] = []
        errors: list[BaseException] = []
        for i, item in enumerate(items):
            try:
                results.append({"item_index": i, **await work(item)})
            except Exception as error:  # one item's fault must not take the others along
                errors.append(_named(error, i))
                results.append({"item_index": i, "error": error_to_wire(errors[-1])})
        if len(errors) < len(items):
            return {"results": results}, 200
        return {"results": results, "error": results[0]["error"]}, getattr(errors[0], "status", 500)

    return await give(request, *await until_disconnect(request.receive, run()))


def _ids(ids: tuple[int, ...]) -> dict[str, Any]:
    return {"token_ids": pack_array("<i4", ids)}


@router.post("/v1/tokenize", openapi_extra=route("Tokens", "traffic", takes="Tokenize", gives="TokensReply", also=IF_ALL_FAIL))
async def tokenize(request: Request) -> Response:
    """Ids of a text or a chat, as a rollout's prompt would have them."""
    service: RolloutService = request.app.state.service

    async def work(item: dict[str, Any]) -> dict[str, Any]:
        if "messages" in item:
            return _ids(await service.text.render(item["messages"], item.get("chat_template_kwargs", {})))
        return _ids(await service.text.encode(item["text"], item.get("add_special_tokens", False)))

    return await _each(request, await take(request, _parser(TOKENIZE_FIELDS)), work)


@router.post("/v1/detokenize", openapi_extra=route("Tokens", "traffic", takes="Detokenize", gives="TextReply", also=IF_ALL_FAIL))
async def detokenize(request: Request) -> Response:
    """Text of ids of the tokenizer, as a rollout with "text" in its include would have it. Bytes that are no UTF-8 become U+FFFD."""
    service: RolloutService = request.app.state.service

    async def work(item: dict[str, Any]) -> dict[str, Any]:
        check_vocabulary("token_ids", item["token_ids"], await service.text.num_ids())
        spaces = item.get("spaces_between_special_tokens", False)
        return {"text": await service.text.decode(item["token_ids"], item.get("skip_special_tokens", True), spaces)}

    return await _each(request, await take(request, _parser(DETOKENIZE_FIELDS)), work)


@router.post("/v1/render", openapi_extra=route("Tokens", "traffic", takes="Render", gives="RenderReply", also=IF_ALL_FAIL))
async def render(request: Request) -> Response:
    """The text that the model's chat template makes of messages, and its ids."""
    service: RolloutService = request.app.state.service

    async def work(item: dict[str, Any]) -> dict[str, Any]:
        rendered = await service.text.rendered(item["messages"], item.get("chat_template_kwargs", {}))
        return {"text": rendered, **_ids(await service.text.encode(rendered))}

    return await _each(request, await take(request, _parser(RENDER_FIELDS)), work)


def _results(*items: Item, index: str = "item_index") -> Schema:
    which = Item(index, COUNT, "which of the items sent, from 0")
    optional = [Item(i.name, i.schema, i.doc, always=False) for i in items]
    return array(reply_schema("", which, *optional, Item("error", ERROR, "then nothing else is there", always=False)))


def _one_or_more(doc: str, *items: Item) -> Schema:
    optional = [Item(i.name, i.schema, i.doc, always=False) for i in items]
    return reply_schema(doc, *optional, Item("results", _results(*items), "with items", always=False))


_TOKENS = Item("token_ids", IDS)
_TEXT = Item("text", STRING)
_SCORES = (
    Item("prompt_token_ids", IDS, "the prompt as the model saw it"),
    Item("token_ids", column("token_ids"), "the continuation"),
    Item("model_logprobs", column("model_logprobs"), "of each token of it"),
    Item("temperature_logprobs", column("temperature_logprobs"), "with a temperature"),
    *(Item(n, SAMPLE["properties"][n]) for n in ("finish_reason", "abort_reason", "weight_versions", "cached_tokens")),
)


def _any(*names: str) -> list[Schema]:
    return [{"required": [name]} for name in names]


_KINDS = ("token_ids", "text", "messages")
COMPONENTS: dict[str, Schema] = {
    "Logprobs": object_schema(LOGPROBS_FIELDS),
    "ScoredItem": object_schema(SCORED_ITEM_FIELDS),
    "ScoredPrompt": object_schema(SCORED_PROMPT_FIELDS, "Exactly one of token_ids, text, messages.", anyOf=_any(*_KINDS)),
    "Continuation": object_schema(CONTINUATION_FIELDS, "Exactly one of token_ids, text.", anyOf=_any("token_ids", "text")),
    "LogprobsReply": reply_schema("All items, in the order sent.", *HEAD, Item("results", _results(*_SCORES)), Item("usage", ref("Usage"))),
    "Tokenize": object_schema(TOKENIZE_FIELDS, "Exactly one of text, messages, items.", anyOf=_any("text", "messages", "items")),
    "TokenizeItem": object_schema(TOKENIZE_FIELDS[:-1], "Exactly one of text, messages.", anyOf=_any("text", "messages")),
    "TokensReply": _one_or_more("The ids.", _TOKENS),
    "Detokenize": object_schema(DETOKENIZE_FIELDS, "Exactly one of token_ids, items.", anyOf=_any("token_ids", "items")),
    "DetokenizeItem": object_schema(DETOKENIZE_FIELDS[:-1], required=["token_ids"]),
    "TextReply": _one_or_more("The text.", _TEXT),
    "Render": object_schema(RENDER_FIELDS, "Exactly one of messages, items.", anyOf=_any("messages", "items")),
    "RenderItem": object_schema(RENDER_FIELDS[:-1], required=["messages"]),
    "RenderReply": _one_or_more("The text and its ids.", _TEXT, _TOKENS),
}
