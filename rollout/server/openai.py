"""OpenAI's routes: completions, chat completions, models. A translation: the work is RolloutService's, as for any other route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import BadRequest, ModelNotFound, PromptTooLong, RollsyncError, show
from ..wire import MSGPACK
from .openai_errors import error_body
from .openai_protocol import OpenAIRequest, parse_chat, parse_completion
from .openai_replies import Prompt, Reply
from .openai_schemas import ERRORS
from .protocol import Naming, PromptSpec, RolloutCall, check_num_samples
from .replies import ClientGone, frame, give, reply, take, until_disconnect, wants_msgpack
from .rollouts import RolloutService, Ticket
from .schemas import SSE, route
from .text import INLINE_TOKENS
from .ticket import name_prompt

router = APIRouter()
ErrorShape = Callable[[BaseException], dict[str, Any]]


def served_names(service: RolloutService, alias: str | None) -> list[str]:
    """The names a body may give as `model`; the first is the one that is listed."""
    path = PurePath(service.model)
    return list(dict.fromkeys(name for name in (alias, service.model, path.name, path.stem if path.suffix == ".gguf" else "") if name))


def check_model(request: Request, asked: str | None) -> str:
    """The model's name as the reply shows it. ModelNotFound if `asked` is another."""
    names = served_names(request.app.state.service, request.app.state.served_model_name)
    if asked is not None and asked not in names:
        raise ModelNotFound(f"model {show(asked)} is not served here; served: {', '.join(names)}", field="model")
    return asked or names[0]


def _name(request: OpenAIRequest, i: int) -> str:
    """Prompt `i` as the caller wrote it."""
    return "messages" if request.chat else request.prompt_field if len(request.prompts) == 1 else f"{request.prompt_field}[{i}]"


def _rename(error: RollsyncError, i: int, request: OpenAIRequest) -> RollsyncError:
    """The same error with the field named as the caller wrote it."""
    if not isinstance(error, BadRequest) or error.field is None:
        return error
    ids = _name(request, i)

    def renamed(path: str) -> str:
        own = path.removeprefix(f"prompts[{i}].").removeprefix(f"prompts[{i}]")
        if own.startswith(("token_ids", "text", " ", ":")) or not own:
            return ids + own.removeprefix("token_ids").removeprefix("text")
        return own

    return type(error)(renamed(str(error)), field=renamed(error.field))


class Call:
    """One call on its way: ids first, then a ticket, then a reply."""

    def __init__(self, service: RolloutService, request: OpenAIRequest, model: str, make_reply: Callable[..., Reply]) -> None:
        self.service, self.request, self.model = service, request, model
        self._make_reply = make_reply

    async def open(self) -> None:
        """Register, and have the prompts tokenised and submitted. Raises BadRequest for one that cannot be served: it fails the call."""
        request, service = self.request, self.service
        tokenizer: Any = await service.text.tokenizer() if request.needs_tokenizer else None
        self.ticket: Ticket = service.open(self._rollout_call())
        try:
            prompts = await self._prompts()
        except BaseException:
            self.ticket.close()
            raise
        head = {
            "id": request.id_prefix + self.ticket.id,
            "model": self.model,
            "system_fingerprint": service.fingerprint or None,
        }
        self.reply = self._make_reply(request, prompts, head, tokenizer, service.engine.snapshot.info.get("eos_token_ids", ()))

    async def _prompts(self) -> list[Prompt]:
        request, ticket, found = self.request, self.ticket, []
        await ticket.start()
        if ticket.refused is not None:
            i, error = ticket.refused
            raise _rename(name_prompt(error, i, ticket.call.naming), i, request)
        max_model_len = self.service.engine.snapshot.info.get("max_model_len")
        for i, (spec, ids) in enumerate(zip(ticket.call.prompts, ticket.prompt_ids, strict=True)):
            room = None if max_model_len is None else max_model_len - (request.params.max_tokens != 0)
            if ids and room is not None and len(ids) > room:  # here, before a stream of its neighbours has begun
                name = _name(request, i)
                raise PromptTooLong(f"{name} must hold at most {room} tokens, got {len(ids)}", field=name)
            found.append(Prompt(ids or (), spec.text, ticket.first_samples[i]))
        return found

    def _rollout_call(self) -> RolloutCall:
        request = self.request
        check_num_samples(1 if request.chat else len(request.prompts), request.params.n)
        specs = [
            PromptSpec(
                ids=None if given is None or isinstance(given, str) else given,
                text=given if isinstance(given, str) else None,
                messages=request.messages if request.chat else None,
                chat_template_kwargs=request.template,
                params=request.params,
                first_sample=None,  # equal prompts go on counting, so that their choices differ
                add_special_tokens=request.add_special_tokens,
            )
            for given in ([None] if request.chat else request.prompts)
        ]
        return RolloutCall(
            prompts=specs,
            naming=Naming(params=request.params_field),
            include=("prompt_logprobs",) if request.prompt_logprobs else (),
            request_id=request.request_id,
            group=request.group,
            session=request.session,
            cache_salt=request.cache_salt,
            priority=request.priority,
            stream="tokens" if request.stream else "",
            deadline_s=request.deadline_s,
            all_or_none=True,
            **request.versions,
        )

    async def _samples(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Deltas and finished samples. An error of one prompt is the call's: OpenAI has no place for it beside the others."""
        async for i, item in self.ticket.events():
            if isinstance(item, RollsyncError):
                raise _rename(item, i, self.request)
            yield i, item
        self.ticket.finish()

    async def whole(self) -> dict[str, Any]:
        samples = [found async for found in self._samples()]
        return await asyncio.to_thread(self.reply.whole, samples)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        async for i, item in self._samples():
            few = item["token_ids"]["shape"][0] <= INLINE_TOKENS
            made = self.reply.chunks(i, item)
            for chunk in made if few else await asyncio.to_thread(list, made):
                yield chunk
        if self.request.include_usage:
            yield self.reply.last_chunk()


class ChunkStream(Response):
    """Chunks as server-sent events, or as frames of msgpack. The status waits for the first, so a call that is refused has its own.

    `close` is called however it ends; `shape` makes the event of an error that comes later.
    """

    def __init__(
        self, chunks: AsyncIterator[dict[str, Any]], close: Callable[[], None], binary: bool, shape: ErrorShape = error_body
    ) -> None:
        super().__init__(media_type=MSGPACK if binary else SSE, headers={"Cache-Control": "no-store"})
        self._chunks, self._close, self._binary, self._shape = chunks, close, binary, shape
        self.raw_headers = [h for h in self.raw_headers if h[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def put(data: bytes, more: bool = True) -> None:
            nonlocal begun
            if not begun:
                begun = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async def run() -> None:
            try:
                async for chunk in self._chunks:
                    await put(await frame(chunk, self._binary))
            except Exception as error:
                if not begun:
                    raise
                # The status line is gone: the stream itself has to say it.
                await put(await frame(self._shape(error), self._binary), more=False)
            else:
                await put(b"" if self._binary else b"data: [DONE]\n\n", more=False)

        try:
            await until_disconnect(receive, run())
        except ClientGone:
            pass
        finally:
            self._close()


async def answer(
    request: Request,
    parse: Callable[[Any], OpenAIRequest],
    make_reply: Callable[..., Reply] = Reply,
    shape: ErrorShape = error_body,
) -> Response:
    """Serve one call: `parse` reads the body, `make_reply` builds what writes the reply."""
    state = request.app.state
    asked = await take(request, parse)
    call = Call(state.service, asked, check_model(request, asked.model), make_reply)
    await until_disconnect(request.receive, call.open())
    if asked.stream:
        return ChunkStream(call.chunks(), call.ticket.close, wants_msgpack(request), shape)
    try:
        whole = await until_disconnect(request.receive, call.whole())
    finally:
        call.ticket.close()
    return await give(request, whole)


@router.post(
    "/v1/completions",
    openapi_extra=route(
        "OpenAI", "traffic", takes="Completion", gives="CompletionReply", events="CompletionReply", errors=ERRORS, error="OpenAIError"
    ),
)
async def completions(request: Request) -> Response:
    """OpenAI's completions, from text or ids.

    One prompt that cannot be served fails the call, since OpenAI's reply has no place for its error; `POST /v1/rollouts` has. So
    does a choice that fails; in a stream that is an event with "error", and the end. Choices that were aborted have
    finish_reason "abort". Logprobs are those of the distribution drawn from, at temperature 0 those at temperature 1; a prompt's, with
    echo, are the model's own, without alternatives. A stream ends with `data: [DONE]`.
    """
    return await answer(request, parse_completion)


@router.post(
    "/v1/chat/completions",
    openapi_extra=route("OpenAI", "traffic", takes="Chat", gives="ChatReply", events="ChatChunk", errors=ERRORS, error="OpenAIError"),
)
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions. The model's template renders the messages; tool calls are not parsed out of the text.

    Tools are given to the template. Failures, aborts, logprobs and streams are as for completions.
    """
    return await answer(request, parse_chat)


def _model(request: Request) -> dict[str, Any]:
    state = request.app.state
    info = state.service.engine.snapshot.info
    name = served_names(state.service, state.served_model_name)[0]
    found = {"id": name, "object": "model", "created": state.started, "owned_by": "rollsync"}
    return {**found, "root": state.service.model, "max_model_len": info.get("max_model_len")}


@router.get("/v1/models", openapi_extra=route("OpenAI", "traffic", gives="Models", error="OpenAIError"))
async def models(request: Request) -> Response:
    """The one model that is served."""
    return reply(request, {"object": "list", "data": [_model(request)]})


@router.get("/v1/models/{model:path}", openapi_extra=route("OpenAI", "traffic", gives="Model", errors=(404,), error="OpenAIError"))
async def model(request: Request, model: str) -> Response:
    """The model of this name, if it is the one that is served."""
    check_model(request, model)
    return reply(request, _model(request))
