"""One call of `POST /v1/rollouts` in flight, from its prompts to the items of its reply.

Each prompt is an engine request of its own, so one that is refused takes nobody with it. Whatever ends a call early (hang-up,
abort, deadline) ends its engine requests too; a call with `detach_s` outlives its reader for that long.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import traceback
from collections import Counter
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ..engine.columns import columns_for, empty_output
from ..engine.outputs import output_to_wire
from ..engine.params import SAMPLING_NAMES
from ..engine.types import RolloutRequest
from ..errors import BadRequest, EngineDead, IllegalState, RollsyncError, UnknownRequest
from ..wire import COLUMNS, unpack_array
from .checks import check_made, check_vocabulary
from .engine_client import Output
from .mailbox import Mailbox, output_from
from .protocol import Naming, PromptSpec, RolloutCall
from .sample_text import SampleText
from .turns import Turns

if TYPE_CHECKING:
    from .rollouts import RolloutService

Item = dict[str, Any] | RollsyncError
"""a sample or a delta of one as the reply shows it, or the error of a prompt"""
SENT_KEPT_S = 30.0
"""how long a reply with detach_s is kept once it was sent: what a dropped connection has not delivered cannot be known"""
LEAVING_S = 1.0
"""how long a reader that has all may take to leave, before another is refused"""
SUBMIT_PIECE_TOKENS = 1 << 14
"""after submitting prompts of so many tokens in all, others get a turn"""
PROMPT_TOKENS = 256
"""what a prompt counts besides its own"""
OPTIONAL_COLUMNS = tuple(name for name in COLUMNS if name not in ("token_ids", "logprobs"))


SHARED_NAMES = SAMPLING_NAMES - {"max_tokens", "seed"}
"""params that no prompt has of its own"""


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


def _aborted_output(request: RolloutRequest, reason: str) -> Output:
    """What the first sample of a request says that was aborted before the engine saw it; the others differ in their index."""
    columns, seed = columns_for(request.include, request.params), request.params.seed or 0
    ends: dict[str, Any] = {"seed": seed, "finish_reason": "abort", "abort_reason": reason}
    return output_to_wire(empty_output(request.request_id, request.first_sample, columns, **ends))


def name_prompt(error: RollsyncError, i: int, naming: Naming) -> RollsyncError:
    """The same error with the engine's field names as the caller wrote them."""
    if not isinstance(error, BadRequest) or (error.field or "").startswith(f"{naming.items}["):
        return error
    field, message = error.field, str(error)
    shared = (field or "").split("[")[0]
    if shared in SHARED_NAMES and message.startswith(shared):
        where = "" if shared == "n" else naming.params
        return type(error)(where + message, field=f"{where}{field}")
    if field is None:
        return type(error)(f"{naming.path(i)}: {message}", field=naming.path(i))
    return type(error)(
        naming.path(i, message) if message.startswith(field) else f"{naming.path(i, field)}: {message}", field=naming.path(i, field)
    )


class Ticket:
    """One call in flight: it submits the prompts, hands what comes back to its reader, and cleans up."""

    def __init__(self, service: RolloutService, call: RolloutCall, call_id: str) -> None:
        self.call, self.id = call, call_id
        self.key = f"{call_id}#{service.next_number()}"
        """names this call to the engine: what still comes for an earlier call of the same id must not be taken for this one's"""
        self.prompt_ids: list[tuple[int, ...] | None] = [None] * len(call.prompts)
        self.first_samples = [0] * len(call.prompts)
        """index of each prompt's first sample, once it is submitted"""
        self.refused: tuple[int, RollsyncError] | None = None
        """the first prompt that never came to the engine, and why"""
        self.aborted: str | None = None
        self.stream = call.stream
        """what the reader wants: "samples", "tokens", or empty"""
        self.is_read = self._has_all = False
        self._left = asyncio.Event()
        self._service, self._engine = service, service.engine
        self._mailbox = Mailbox(keep=call.detach_s > 0)
        self._mailbox.rewind(deltas=call.stream == "tokens")
        self._open: dict[str, tuple[int, int]] = {}
        """(prompt index, samples to come) of the requests in the engine"""
        self._shared: int | None = None
        """key of the params that the engine was told of once for all prompts"""
        self._counts: Counter[tuple[tuple[int, ...], int | None]] = Counter()
        loop = asyncio.get_running_loop()
        self._timer = None if call.deadline_s is None else loop.call_later(call.deadline_s, self.abort, "deadline")
        self._expiry: asyncio.TimerHandle | None = None
        self._starting = loop.create_task(self._start())

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

    async def until_left(self) -> None:
        """Give a reader that has all a moment to leave: who has read a reply to its end may ask for it again at once."""
        if self._has_all:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVING_S):
                    await self._left.wait()

    def attach(self, stream: str) -> None:
        """A reader begins, with everything from the beginning. IllegalState if there is one already."""
        if self.is_read:
            raise IllegalState(f"call {self.id!r} is being read by another connection: wait for that one, or close it")
        if self._expiry is not None:
            self._expiry.cancel()
        self.is_read, self.stream, self._has_all = True, stream, False
        self._left.clear()
        self._mailbox.rewind(deltas=stream == "tokens")

    def finish(self) -> None:
        """All has come: the name is free for others before the caller has the last byte."""
        self._has_all = True
        if self.call.detach_s:
            self._service.set_aside(self)
        else:
            self.close()

    def leave(self, sent: bool) -> None:
        """The reader is gone. With `detach_s` the call is kept: for that long, or, its reply sent, in case the last bytes were lost."""
        self.is_read = False
        self._left.set()
        if not self.call.detach_s or not self._service.keeps(self):
            self.close()
            return
        if not sent:
            self._service.take_back(self)
        kept_s = min(self.call.detach_s, SENT_KEPT_S) if sent else self.call.detach_s
        self._expiry = asyncio.get_running_loop().call_later(kept_s, self.close)

    def close(self) -> None:
        """Free whatever is still in the engine, and what was kept. Idempotent."""
        for timer in (self._timer, self._expiry):
            if timer is not None:
                timer.cancel()
        self._starting.cancel()
        self._service.closed(self)
        left = [i for i in self._open if self._engine.forget(i)]
        self._open.clear()
        read, self._mailbox = self._mailbox, Mailbox()
        for mailbox in (read, self._mailbox):
            mailbox.fail(UnknownRequest(f"call {self.id!r} is no longer kept"))
        self._engine.abort_quietly(left, "client disconnected")

    async def start(self) -> None:
        """Wait until every prompt is tokenised and submitted, or refused: then `prompt_ids` are known."""
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        key = None
        try:
            if len(self.call.prompts) > 1:
                key = self._shared = self._engine.share(self.call.shared_params)
            await self._submit_all()
        except EngineDead as error:
            self._mailbox.put(0, error)
        finally:
            if key is not None:
                self._engine.unshare(key)

    async def _submit_all(self) -> None:
        turns = Turns(SUBMIT_PIECE_TOKENS)
        for i, prompt in enumerate(self.call.prompts):
            try:
                await self._submit(i, prompt)
            except EngineDead:
                raise
            except RollsyncError as error:
                self._refuse(i, error)
            except Exception as error:  # one prompt's fault must not end the others
                traceback.print_exc(file=sys.stderr)
                self._refuse(i, RollsyncError(f"{type(error).__name__}: {error}"))
            if self.refused is not None and self.call.all_or_none:
                return
            await turns.after(PROMPT_TOKENS + len(self.prompt_ids[i] or ()))

    def _refuse(self, i: int, error: RollsyncError) -> None:
        self.refused = self.refused or (i, error)
        self._engine.counters.rejected(error.code)
        self._mailbox.put(i, error)

    async def _submit(self, i: int, prompt: PromptSpec) -> None:
        ids = await self._ids(i, prompt)
        vocabulary = self._engine.snapshot.info.get("embed_size")
        forced = prompt.forced_token_ids if prompt.continuation is None else await self._service.text.encode(prompt.continuation)
        for name, given, text in (
            ("prompt_token_ids", ids, prompt.text_field),
            ("continue_from", prompt.continue_from, ""),
            ("forced_token_ids", forced, "" if prompt.continuation is None else "continuation"),
        ):
            (check_made if text else check_vocabulary)(self.call.naming.path(i, text or name), given, vocabulary)
        key = (ids, prompt.params.seed)
        request_id = f"{self.key}/{i}"
        request = RolloutRequest(
            request_id=request_id,
            prompt_token_ids=ids,
            params=prompt.params,
            first_sample=self._counts[key] if prompt.first_sample is None else prompt.first_sample,
            continue_from=prompt.continue_from,
            forced_token_ids=forced,
            score_only=prompt.score_only,
            prompt_logprobs_start=prompt.prompt_logprobs_start,
            include=tuple(name for name in self.call.include if name != "text"),
            group=self.call.group,
            session=self.call.session,
            cache_salt=self.call.cache_salt,
            priority=self.call.priority,
            stream=self.call.stream == "tokens",
            on_unavailable=self.call.on_unavailable,
            min_version=self.call.min_version,
            max_version_lag=self.call.max_version_lag,
        )
        self.prompt_ids[i] = ids  # only now known to fit the reply's int32
        self.first_samples[i] = request.first_sample
        if prompt.first_sample is None:
            self._counts[key] += prompt.params.n
        if self.aborted is not None:
            turns, output = Turns(), _aborted_output(request, self.aborted)
            for k in range(prompt.params.n):
                self._mailbox.put(i, {**output, "sample_index": request.first_sample + k})
                await turns.after()
            return
        self._engine.submit(request, self._deliver, None if self._shared is None else (self._shared, prompt.own))
        self._open[request_id] = (i, prompt.params.n)

    async def _ids(self, i: int, prompt: PromptSpec) -> tuple[int, ...]:
        if prompt.text is not None:
            ids = await self._service.text.encode(prompt.text, prompt.add_special_tokens)
        elif prompt.messages is not None:
            ids = await self._service.text.render(prompt.messages, prompt.chat_template_kwargs)
        else:
            ids = prompt.ids or ()
        if not ids:
            path = self.call.naming.path(i)
            raise BadRequest(f"{path} must hold at least one token, got none", field=path)
        return ids

    def _deliver(self, request_id: str, item: Output | RollsyncError) -> None:
        if request_id not in self._open:
            return
        i, left = self._open[request_id]
        left -= left if isinstance(item, RollsyncError) else "finish_reason" in item
        if left:
            self._open[request_id] = (i, left)
        else:
            del self._open[request_id]
        self._mailbox.put(i, item)

    async def events(self) -> AsyncIterator[tuple[int, Item]]:
        """(prompt index, item): each finished sample once, or the prompt's error. Raises EngineDead.

        A reader that streams tokens also gets deltas, samples with finish_reason None. Those of a sample add up to it exactly,
        and it follows whole. What came while the reader was away is one delta.
        """
        left = [p.params.n for p in self.call.prompts]
        total = sum(left)
        texts: dict[tuple[int, int], SampleText] = {}
        wants_text = "text" in self.call.include
        turns, mailbox = Turns(), self._mailbox
        while total:
            i, item, sent = await mailbox.get()
            await turns.after()
            if isinstance(item, RollsyncError):
                total -= left[i]
                yield i, name_prompt(item, i, self.call.naming)
                continue
            key = (i, item["sample_index"])
            if wants_text and key not in texts:
                texts[key] = await self._service.text.sample_text(self.call, self.call.prompts[i].params)
            text = texts.get(key)
            if self.stream == "tokens":
                delta = await self._delta(item, sent, text)
                if delta["token_ids"]["shape"][0] or delta.get("text"):
                    yield i, delta
            if "finish_reason" not in item:
                continue
            left[i] -= 1
            total -= 1
            sample = sample_to_reply(item)
            if "prompt_logprobs" in sample:
                sample["prompt_logprobs_start"] = self.call.prompts[i].prompt_logprobs_start
            if text is not None:
                if self.stream != "tokens":
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
