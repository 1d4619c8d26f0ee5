"""`POST /v1/rollouts` and `GET /v1/rollouts/{id}`: calls in flight, and their replies, whole or streamed by sample or token."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

from ...kernels.sampling_mask import bit_words
from ..engine.params import SamplingParams
from ..errors import BadRequest, DetachLimit, DuplicateRequest, IllegalState, NotReady, RollsyncError, UnknownRequest, show
from ..wire import error_to_wire, pack_array
from .checks import check_vocabulary
from .engine_client import EngineProcess
from .protocol import RolloutCall
from .text import TextService
from .ticket import OPTIONAL_COLUMNS, PROMPT_TOKENS, SUBMIT_PIECE_TOKENS, Ticket
from .turns import Turns

__all__ = ["RolloutService", "Ticket"]

MAX_DETACHED_CALLS = 1024
MAX_DETACHED_BYTES = 1 << 30
"""of replies that may have to be kept at the same time, by the longest they can get"""


def mask_words(params: SamplingParams, vocab_size: int) -> int:
    """int32 words that the mask of one token can take at most: those of its ids, and never more than a bit for each id there is."""
    ids = [vocab_size, *([params.top_k] if params.top_k else []), *([1] if params.temperature == 0 else [])]
    if params.allowed_token_ids is not None:
        ids.append(len(params.allowed_token_ids))
    truncates = params.top_p < 1 or params.min_p > 0 or params.min_tokens or len(ids) > 1
    return 1 + (min(*ids, bit_words(vocab_size)) if truncates else 0)


def reply_bytes(call: RolloutCall, max_model_len: int, vocab_size: int) -> int:
    """What the reply to `call` can take at most."""
    columns = 2 + sum(name in OPTIONAL_COLUMNS for name in call.include)
    total = 0
    for prompt in call.prompts:
        prompt_tokens = len(prompt.ids) if prompt.ids is not None else max_model_len
        room = max(0, max_model_len - (prompt_tokens if prompt.ids is not None else 0))
        new = room if prompt.params.max_tokens is None else min(room, prompt.params.max_tokens)
        likeliest = 2 * (prompt.params.top_logprobs or 0)
        if "sampling_mask" in call.include:
            likeliest += mask_words(prompt.params, vocab_size)
        scored = prompt_tokens if "prompt_logprobs" in call.include else 0
        total += 40 * prompt_tokens + prompt.params.n * (1024 + 4 * (columns + likeliest) * new + 4 * scored)
    return total


def check_params(call: RolloutCall, vocab_size: int | None) -> None:
    """BadRequest if an id in what all prompts of `call` share is none that the model can sample."""
    params, where = call.shared_params, call.naming.params
    check_vocabulary(f"{where}stop_token_ids", params.stop_token_ids, vocab_size)
    check_vocabulary(f"{where}allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    beyond = next((token for token in params.logit_bias if vocab_size is not None and token >= vocab_size), None)
    if beyond is not None:
        path = f"{where}logit_bias"
        raise BadRequest(f"{path} must name token ids in [0, {vocab_size}), got {beyond}", field=path)


class Usage:
    """Token counts of one call."""

    def __init__(self) -> None:
        self.samples = self.completion_tokens = self.cached_tokens = 0

    def add(self, sample: dict[str, Any]) -> None:
        self.samples += 1
        self.completion_tokens += sample["token_ids"]["shape"][0]
        self.cached_tokens += sample["cached_tokens"] or 0

    def to_reply(self, ticket: Ticket, failed: set[int]) -> dict[str, int]:
        prompt_tokens = sum(len(ids) for i, ids in enumerate(ticket.prompt_ids) if ids and i not in failed)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "samples": self.samples,
        }


class RolloutService:
    """All calls in flight."""

    def __init__(self, engine: EngineProcess, text: TextService) -> None:
        self.engine, self.text = engine, text
        self.in_flight: dict[str, Ticket] = {}
        """by id; also those kept for a reader to come back"""
        self._sent: dict[str, Ticket] = {}
        """those whose reply was sent and is kept a little longer; oldest first, their names free for others"""
        self._reserved: dict[str, int] = {}
        """bytes that calls with detach_s may need"""
        self.going_on: set[asyncio.Task[Any]] = set()
        """commands whose callers were answered before they were carried out"""
        self.next_number = itertools.count().__next__

    @property
    def model(self) -> str:
        return str(self.engine.snapshot.info.get("model", self.engine.config.model))

    @property
    def fingerprint(self) -> str:
        """Of the numerics: which specification, settings and build-independent bits these logprobs come from."""
        return str(self.engine.snapshot.info.get("fingerprint", ""))

    @property
    def facts(self) -> dict[str, str]:
        """What a reply says of its engine."""
        return {"model": self.model, "dtype": str(self.engine.snapshot.info.get("dtype", "")), "fingerprint": self.fingerprint}

    def open(self, call: RolloutCall) -> Ticket:
        """Register a call and begin it, read by its caller. Raises EngineDead, NotReady, IllegalState, DuplicateRequest, DetachLimit."""
        if self.engine.dead is not None:
            raise self.engine.lost()
        if not self.engine.is_ready:
            why = f"the engine is still starting ({self.engine.snapshot.progress[0]})"
            raise IllegalState(why) if call.on_unavailable == "refuse" else NotReady(f"{why}: ask /health/ready")
        call_id = call.request_id or uuid.uuid4().hex
        if call_id in self.in_flight:
            state = "still in flight: choose another, or abort it first"
            if self.in_flight[call_id].call.detach_s:
                state = f"in flight or kept: GET /v1/rollouts/{quote(call_id, safe='')} re-attaches"
            raise DuplicateRequest(f"request_id {show(call_id)} is {state}")
        check_params(call, self.engine.snapshot.info.get("vocab_size"))
        if call_id in self._sent:
            self._sent[call_id].close()
        if call.detach_s:
            self._reserve(call, call_id)
        ticket = self.in_flight[call_id] = Ticket(self, call, call_id)
        ticket.attach(call.stream)
        return ticket

    def find(self, call_id: str) -> Ticket:
        """UnknownRequest if no such call is in flight or kept."""
        ticket = self.in_flight.get(call_id) or self._sent.get(call_id)
        if ticket is None:
            raise UnknownRequest(f"no call {show(call_id)} is in flight or kept: it never was, its reply was sent, or its detach_s is over")
        return ticket

    def _reserve(self, call: RolloutCall, call_id: str) -> None:
        """Keep room for the longest reply `call` can get. DetachLimit if there is none."""
        info = self.engine.snapshot.info
        size = reply_bytes(call, int(info.get("max_model_len", 0)), int(info.get("vocab_size", 0)))
        held = sum(self._reserved.values())
        while self._sent and (len(self._reserved) >= MAX_DETACHED_CALLS or held + size > MAX_DETACHED_BYTES):
            next(iter(self._sent.values())).close()
            held = sum(self._reserved.values())
        if len(self._reserved) >= MAX_DETACHED_CALLS or held + size > MAX_DETACHED_BYTES:
            raise DetachLimit(
                f"at most {MAX_DETACHED_CALLS} calls with detach_s, with replies of {MAX_DETACHED_BYTES} bytes in all: "
                f"{len(self._reserved)} hold {held}, and this one may need {size}; send fewer samples, a lower max_tokens, or no detach_s"
            )
        self._reserved[call_id] = size

    def keeps(self, ticket: Ticket) -> bool:
        """Whether it is not closed."""
        return ticket in (self.in_flight.get(ticket.id), self._sent.get(ticket.id))

    def set_aside(self, ticket: Ticket) -> None:
        """Its reply is all there and being sent: no longer in flight, but kept for now."""
        if self.in_flight.get(ticket.id) is ticket:
            del self.in_flight[ticket.id]
            self._sent[ticket.id] = ticket

    def take_back(self, ticket: Ticket) -> None:
        """Its reply was not received, so its name is taken again, unless another call has it."""
        if self._sent.get(ticket.id) is ticket and ticket.id not in self.in_flight:
            self.in_flight[ticket.id] = self._sent.pop(ticket.id)

    def closed(self, ticket: Ticket) -> None:
        """The call is over and nothing of it is kept."""
        for group in (self.in_flight, self._sent):
            if group.get(ticket.id) is ticket:
                del group[ticket.id]
                self._reserved.pop(ticket.id, None)

    async def whole(self, ticket: Ticket) -> tuple[dict[str, Any], int]:
        """The reply to a call that does not stream, and its HTTP status: that of the first error if every prompt failed."""
        samples: list[list[dict[str, Any]]] = [[] for _ in ticket.call.prompts]
        errors: dict[int, RollsyncError] = {}
        usage = Usage()
        async for i, item in ticket.events():
            if isinstance(item, RollsyncError):
                errors[i] = item
            else:
                samples[i].append(item)
                usage.add(item)
        await ticket.start()
        ticket.finish()
        results: list[dict[str, Any]] = []
        turns = Turns(SUBMIT_PIECE_TOKENS)
        for i, ids in enumerate(ticket.prompt_ids):
            await turns.after(PROMPT_TOKENS + len(ids or ()) + PROMPT_TOKENS * len(samples[i]) // 64)
            if i in errors:
                results.append({"prompt_index": i, "error": error_to_wire(errors[i])})
                continue
            done = sorted(samples[i], key=lambda s: int(s["index"]))
            results.append({"prompt_index": i, "prompt_token_ids": pack_array("<i4", ids or ()), "samples": done})
        body: dict[str, Any] = {"id": ticket.id, **self.facts, "results": results}
        body["usage"] = usage.to_reply(ticket, set(errors))
        if len(errors) < len(results):
            return body, 200
        return {**body, "error": results[0]["error"]}, errors[0].status

    async def streamed(self, ticket: Ticket) -> AsyncIterator[dict[str, Any]]:
        """Events: start; delta (if asked), sample and error as they come; done. An error without prompt_index ends the stream."""
        usage, failed = Usage(), set()
        try:
            await ticket.start()
            prompts: list[dict[str, Any]] = []
            turns = Turns(SUBMIT_PIECE_TOKENS)
            for i, ids in enumerate(ticket.prompt_ids):
                if ids:
                    prompts.append({"prompt_index": i, "prompt_token_ids": pack_array("<i4", ids)})
                    await turns.after(PROMPT_TOKENS + len(ids))
            yield {"event": "start", "id": ticket.id, **self.facts, "prompts": prompts}
            async for i, item in ticket.events():
                if isinstance(item, RollsyncError):
                    failed.add(i)
                    yield {"event": "error", "prompt_index": i, "error": error_to_wire(item)}
                elif item["finish_reason"] is None:
                    yield {"event": "delta", "prompt_index": i, "sample": item}
                else:
                    usage.add(item)
                    yield {"event": "sample", "prompt_index": i, "sample": item}
        except Exception as error:  # the status line is gone: the stream itself has to say it
            yield {"event": "error", "error": error_to_wire(error)}
            return
        ticket.finish()
        yield {"event": "done", "id": ticket.id, "usage": usage.to_reply(ticket, failed)}
