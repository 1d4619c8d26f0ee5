"""SGLang's `/generate`: prompts as text or ids, alone or in a list. A translation: the work is RolloutService's, as for any other route."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...errors import BadRequest, RollsyncError
from ..openai import ChunkStream
from ..replies import give, take, until_disconnect, wants_msgpack
from ..rollouts import RolloutService, Ticket
from ..schemas import route
from ..text import INLINE_TOKENS
from ..ticket import name_prompt
from .sglang_protocol import GenerateRequest, parse_generate
from .sglang_replies import Samples
from .sglang_state import SglangState, state_of

router = APIRouter()
Found = tuple[int, dict[str, Any]]
"""(index of the prompt, a delta or a finished sample)"""


class Generation:
    """One call of `/generate` on its way: a ticket per prompt."""

    def __init__(self, service: RolloutService, state: SglangState, request: GenerateRequest) -> None:
        self._service, self._state, self.request = service, state, request
        self.tickets: list[Ticket] = []

    async def open(self) -> None:
        """Register every prompt and have it submitted. One that cannot be served fails the call: there is no place for its error."""
        request, service = self.request, self._service
        tokenizer = await self._tokenizer()
        try:
            for asked in request.asked:
                self.tickets.append(service.open(asked.call))
            for ticket, asked in zip(self.tickets, request.asked, strict=True):
                await ticket.start()
                if ticket.refused is not None:
                    raise asked.rename(name_prompt(ticket.refused[1], 0, asked.call.naming))
        except BaseException:
            self.close()
            raise
        eos_ids = service.engine.snapshot.info.get("eos_token_ids", ())
        self._samples = Samples(request, tokenizer, eos_ids, [ticket.id for ticket in self.tickets])

    async def _tokenizer(self) -> Any:
        """The tokenizer; None if the model has none and nobody asked for text."""
        try:
            return await self._service.text.tokenizer()
        except BadRequest:
            if self.request.needs_tokenizer:
                raise
            return None

    def close(self) -> None:
        for ticket in self.tickets:
            ticket.close()

    async def _found(self, i: int) -> AsyncGenerator[Found, None]:
        ticket = self.tickets[i]
        async for _, item in ticket.events():
            if isinstance(item, RollsyncError):
                raise self.request.asked[i].rename(item)
            yield i, item
        ticket.finish()

    async def _show(self, found: Found) -> tuple[int, dict[str, Any]]:
        """Where a sample stands in the reply, and all there is of it."""
        i, item = found

        def work() -> dict[str, Any]:
            prompt_ids = self.tickets[i].prompt_ids[0] or ()
            return self._samples.take(i, item, prompt_ids, self._state.version_text, self._state.version)

        few = item["token_ids"]["shape"][0] <= INLINE_TOKENS
        return self._samples.place(i, item), work() if few else await asyncio.to_thread(work)

    async def whole(self) -> Any:
        shown = [await self._show(found) for i in range(len(self.tickets)) async for found in self._found(i)]
        replies = [reply for _, reply in sorted(shown, key=lambda pair: pair[0])]
        return replies if self.request.listed else replies[0]

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Per sample all there is so far, each time there is more."""
        async with contextlib.aclosing(merged([self._found(i) for i in range(len(self.tickets))])) as stream:
            async for found in stream:
                place, reply = await self._show(found)
                yield {"index": place, **reply} if self.request.listed else reply


async def merged(streams: Sequence[AsyncIterator[Found]]) -> AsyncGenerator[Found, None]:
    """What several streams yield, as it comes. The first error ends all of them."""
    if len(streams) == 1:
        async for found in streams[0]:
            yield found
        return
    queue: asyncio.Queue[Found | BaseException | None] = asyncio.Queue(maxsize=1)

    async def pump(stream: AsyncIterator[Found]) -> None:
        try:
            async for found in stream:
                await queue.put(found)
            await queue.put(None)
        except Exception as error:  # handed on to the reader
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@router.post(
    "/generate",
    openapi_extra=route("SGLang", "traffic", takes="SglangGenerate", gives="SglangReply", events="SglangSample", errors=(404, 409)),
)
async def generate(request: Request) -> Response:
    """SGLang's generate: text or ids in, text, ids and logprobs out; a list if a list of prompts was sent, or n > 1.

    One prompt that cannot be served fails the call. While the engine is paused, calls wait. A sample that is aborted is replied with
    what it has and finish_reason {"type": "abort"}. A stream's events each hold all there is so far, and end with `data: [DONE]`.
    """
    service: RolloutService = request.app.state.service
    asked = await take(request, parse_generate)
    generation = Generation(service, state_of(request), asked)
    await until_disconnect(request.receive, generation.open())
    if asked.stream:
        return ChunkStream(generation.chunks(), generation.close, wants_msgpack(request))
    try:
        whole = await until_disconnect(request.receive, generation.whole())
    finally:
        generation.close()
    return await give(request, whole)
