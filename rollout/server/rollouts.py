"""`POST /v1/rollouts`: prompts to engine requests, outputs to a reply, whole or streamed by sample or by token.

Each prompt is an engine request of its own, so one that is refused takes nobody with it. Whatever ends a call early (hang-up,
abort, deadline) ends its engine requests too.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from ..engine.types import RolloutRequest
from ..errors import BadRequest, DuplicateRequest, EngineDead, NotReady, RollsyncError
from ..wire import error_to_wire, pack_array, unpack_array
from .checks import check_vocabulary
from .engine_client import EngineProcess, Output
from .mailbox import Mailbox, output_from
from .protocol import PromptSpec, RolloutCall
from .text import SampleText, TextService

Item = dict[str, Any] | RollsyncError
"""a sample or a delta of one as the reply shows it, or the error of a prompt"""
OPTIONAL_COLUMNS = ("temperature_logprobs", "model_logprobs", "entropy", "top_token_ids", "top_logprobs", "prompt_logprobs")


def sample_to_reply(output: Output) -> dict[str, Any]:
    """An engine output as the reply shows it."""
    sample = {"index": output["sample_index"]}
    for name in ("token_ids", "logprobs", "finish_reason", "stop_reason", "abort_reason", "weight_versions", "seed", "cached_tokens"):
        sample[name] = output.get(name)
    sample.update({name: output[name] for name in (*OPTIONAL_COLUMNS, "error") if name in output})
    return sample


def delta_to_reply(output: Output) -> dict[str, Any]:
    """New tokens of a running sample: `start` and the spans of `weight_versions` count from the sample's first token."""
    delta = {"index": output["sample_index"], "start": output["start"], "token_ids": output["token_ids"], "logprobs": output["logprobs"]}
    delta.update({name: output[name] for name in OPTIONAL_COLUMNS if name in output})
    return {**delta, "weight_versions": output["weight_versions"], "finish_reason": None}


def _aborted_output(request_id: str, index: int, seed: int | None, reason: str) -> Output:
    """What a sample says that was aborted before the engine saw it."""
    empty = {"token_ids": pack_array("<i4", []), "logprobs": pack_array("<f4", [])}
    ends = {"finish_reason": "abort", "abort_reason": reason, "weight_versions": [], "seed": seed or 0, "cached_tokens": 0}
    return {"request_id": request_id, "sample_index": index, **empty, **ends}


def name_prompt(error: RollsyncError, i: int) -> RollsyncError:
    """The same error with the engine's field names as the caller wrote them."""
    if not isinstance(error, BadRequest) or (error.field or "").startswith("prompts["):
        return error

    def path(name: str) -> str:
        return f"prompts[{i}]." + ("token_ids" + name.removeprefix("prompt_token_ids") if name.startswith("prompt_token_ids") else name)

    field, message = error.field, str(error)
    if field is None:
        return type(error)(f"prompts[{i}]: {message}", field=f"prompts[{i}]")
    return type(error)(path(message) if message.startswith(field) else f"{path(field)}: {message}", field=path(field))


class Ticket:
    """One call in flight: it submits the prompts, hands out what comes back, and cleans up."""

    def __init__(self, service: RolloutService, call: RolloutCall, call_id: str) -> None:
        self.call, self.id = call, call_id
        self.key = f"{call_id}#{service.next_number()}"
        """names this call to the engine: what still comes for an earlier call of the same id must not be taken for this one's"""
        self.prompt_ids: list[tuple[int, ...] | None] = [None] * len(call.prompts)
        self.aborted: str | None = None
        self._service, self._engine = service, service.engine
        self._mailbox = Mailbox()
        self._mailbox.rewind(deltas=call.stream == "tokens")
        self._open: dict[str, int] = {}
        self._counts: Counter[tuple[tuple[int, ...], int | None]] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        if call.deadline_s is not None:
            self._timer = asyncio.get_running_loop().call_later(call.deadline_s, self.abort, "deadline")

    @property
    def open_request_ids(self) -> list[str]:
        return list(self._open)

    def abort(self, reason: str) -> None:
        """End what has not ended; the call is answered with the partial outputs."""
        if self.mark_aborted(reason):
            self._engine.abort_quietly(list(self._open), reason)

    def mark_aborted(self, reason: str) -> bool:
        """Keep prompts not yet submitted from being submitted."""
        first, self.aborted = self.aborted is None, self.aborted or reason
        return first

    def close(self) -> None:
        """Free whatever is still in the engine. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._service.in_flight.pop(self.id, None)
        left = [i for i in self._open if self._engine.forget(i)]
        self._open.clear()
        self._engine.abort_quietly(left, "client disconnected")

    async def start(self) -> None:
        """Tokenise where needed and submit every prompt; a prompt that fails becomes an item error."""
        for i, prompt in enumerate(self.call.prompts):
            try:
                await self._submit(i, prompt)
            except EngineDead:
                raise
            except RollsyncError as error:
                self._engine.counters.rejected(error.code)
                self._mailbox.put(i, error)
            if i % 64 == 63:
                await asyncio.sleep(0)  # a long list must not hold up health

    async def _submit(self, i: int, prompt: PromptSpec) -> None:
        ids = await self._ids(i, prompt)
        vocabulary = self._engine.snapshot.info.get("embed_size")
        for name, given in (("token_ids", ids), ("continue_from", prompt.continue_from), ("forced_token_ids", prompt.forced_token_ids)):
            check_vocabulary(f"prompts[{i}].{name}", given, vocabulary)
        key = (ids, prompt.params.seed)
        request_id = f"{self.key}/{i}"
        request = RolloutRequest(
            request_id=request_id,
            prompt_token_ids=ids,
            params=prompt.params,
            first_sample=self._counts[key] if prompt.first_sample is None else prompt.first_sample,
            continue_from=prompt.continue_from,
            forced_token_ids=prompt.forced_token_ids,
            include=tuple(name for name in self.call.include if name != "text"),
            group=self.call.group,
            session=self.call.session,
            priority=self.call.priority,
            stream=self.call.stream == "tokens",
        )
        self.prompt_ids[i] = ids  # only now known to fit the reply's int32
        if prompt.first_sample is None:
            self._counts[key] += prompt.params.n
        if self.aborted is not None:
            for k in range(prompt.params.n):
                self._mailbox.put(i, _aborted_output(request_id, request.first_sample + k, prompt.params.seed, self.aborted))
            return
        self._engine.submit(request, self._deliver)
        self._open[request_id] = i

    async def _ids(self, i: int, prompt: PromptSpec) -> tuple[int, ...]:
        if prompt.text is not None:
            ids = await self._service.text.encode(prompt.text)
        elif prompt.messages is not None:
            ids = await self._service.text.render(prompt.messages, prompt.chat_template_kwargs)
        else:
            ids = prompt.ids or ()
        if not ids:
            raise BadRequest(f"prompts[{i}] must hold at least one token, got none", field=f"prompts[{i}]")
        return ids

    def _deliver(self, request_id: str, item: Output | RollsyncError) -> None:
        index = self._open.get(request_id)
        if index is not None:
            self._mailbox.put(index, item)

    async def events(self) -> AsyncIterator[tuple[int, Item]]:
        """(prompt index, item): each finished sample once, or the prompt's error. Raises EngineDead.

        A call that streams tokens also gets deltas, samples with finish_reason None. Those of a sample add up to it exactly,
        and it follows whole. What came while the reader was away is one delta.
        """
        left = [p.params.n for p in self.call.prompts]
        total = sum(left)
        texts: dict[tuple[int, int], SampleText] = {}
        wants_text = "text" in self.call.include
        while total:
            i, item, sent = await self._mailbox.get()
            if isinstance(item, RollsyncError):
                total -= left[i]
                self._open.pop(f"{self.key}/{i}", None)
                yield i, name_prompt(item, i)
                continue
            key = (i, item["sample_index"])
            if wants_text and key not in texts:
                texts[key] = await self._service.text.sample_text(self.call.prompts[i].params)
            text = texts.get(key)
            if self.call.stream == "tokens":
                delta = await self._delta(item, sent, text)
                if delta["token_ids"]["shape"][0] or delta.get("text"):
                    yield i, delta
            if "finish_reason" not in item:
                continue
            left[i] -= 1
            total -= 1
            if left[i] == 0:
                self._open.pop(item["request_id"], None)
            sample = sample_to_reply(item)
            if text is not None:
                if self.call.stream != "tokens":
                    await self._service.text.extend(text, unpack_array(item["token_ids"]), item)
                sample.update(text.to_reply())
                del texts[key]
            yield i, sample

    async def _delta(self, item: Output, sent: int, text: SampleText | None) -> dict[str, Any]:
        """What is new since `sent`: all of a joined delta, or the tail of a final output."""
        final = "finish_reason" in item
        delta = delta_to_reply(output_from(item, sent) if final else item)
        if text is not None:
            delta["text"] = await self._service.text.extend(text, unpack_array(delta["token_ids"]), item if final else None)
        return delta


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
        self.next_number = itertools.count().__next__

    @property
    def model(self) -> str:
        return str(self.engine.snapshot.info.get("model", self.engine.config.model))

    @property
    def fingerprint(self) -> str:
        """Of the numerics: which specification, settings and build-independent bits these logprobs come from."""
        return str(self.engine.snapshot.info.get("fingerprint", ""))

    def open(self, call: RolloutCall) -> Ticket:
        """Register a call. Raises EngineDead, NotReady or DuplicateRequest."""
        if self.engine.dead is not None:
            raise EngineDead(self.engine.dead)
        if not self.engine.is_ready:
            raise NotReady(f"the engine is still starting ({self.engine.snapshot.progress[0]}): ask /health/ready")
        call_id = call.request_id or uuid.uuid4().hex
        if call_id in self.in_flight:
            raise DuplicateRequest(f"request_id {call_id!r} is still in flight: choose another, or abort it first")
        ticket = self.in_flight[call_id] = Ticket(self, call, call_id)
        return ticket

    async def whole(self, ticket: Ticket) -> tuple[dict[str, Any], int]:
        """The reply to a call that does not stream, and its HTTP status: that of the first error if every prompt failed."""
        if "text" in ticket.call.include:
            await self.text.tokenizer()
        await ticket.start()
        samples: list[list[dict[str, Any]]] = [[] for _ in ticket.call.prompts]
        errors: dict[int, RollsyncError] = {}
        usage = Usage()
        async for i, item in ticket.events():
            if isinstance(item, RollsyncError):
                errors[i] = item
            else:
                samples[i].append(item)
                usage.add(item)
        results: list[dict[str, Any]] = []
        for i, ids in enumerate(ticket.prompt_ids):
            if i in errors:
                results.append({"prompt_index": i, "error": error_to_wire(errors[i])})
                continue
            done = sorted(samples[i], key=lambda s: int(s["index"]))
            results.append({"prompt_index": i, "prompt_token_ids": pack_array("<i4", ids or ()), "samples": done})
        body: dict[str, Any] = {"id": ticket.id, "model": self.model, "fingerprint": self.fingerprint, "results": results}
        body["usage"] = usage.to_reply(ticket, set(errors))
        if len(errors) < len(results):
            return body, 200
        return {**body, "error": results[0]["error"]}, errors[0].status

    async def streamed(self, ticket: Ticket) -> AsyncIterator[dict[str, Any]]:
        """Events: start; delta (if asked), sample and error as they come; done. An error without prompt_index ends the stream."""
        usage, failed = Usage(), set()
        try:
            await ticket.start()
            prompts = [{"prompt_index": i, "prompt_token_ids": pack_array("<i4", ids)} for i, ids in enumerate(ticket.prompt_ids) if ids]
            yield {"event": "start", "id": ticket.id, "model": self.model, "fingerprint": self.fingerprint, "prompts": prompts}
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
        yield {"event": "done", "id": ticket.id, "usage": usage.to_reply(ticket, failed)}
