"""`Engine.generate`: a list of prompts in, a list of results out."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import BadRequest, IllegalState, RollsyncError, describe
from ..fields import did_you_mean
from ..models.detokenizer import end_at_stop
from .columns import columns_for, empty_output
from .params import SamplingParams
from .score import score_request
from .types import RolloutRequest, SampleOutput

if TYPE_CHECKING:
    from ..models.tokenizer import Tokenizer
    from .engine import Engine

log = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | dict[str, Any]
"""text, token ids, chat messages, or a prompt object as in `POST /v1/rollouts`: {"token_ids" | "text" | "messages": …} with
forced_token_ids, continue_from, first_sample or prompt_logprobs_start"""

_OWN_FIELDS = ("forced_token_ids", "continue_from", "first_sample", "prompt_logprobs_start")


@dataclass(kw_only=True, slots=True)
class RolloutOutput:
    """The samples of one prompt."""

    prompt_token_ids: list[int]
    samples: list[SampleOutput]
    """in sample order"""
    tokenizer_source: Engine | Tokenizer | None = field(default=None, repr=False, compare=False)
    """the engine (or tokenizer) that `texts` decodes with"""
    include_stop_str: bool = field(default=False, repr=False)
    """whether `texts` keep the stop string that ended a sample"""

    @property
    def texts(self) -> list[str]:
        """The samples as text, decoded now."""
        tokenizer: Any = getattr(self.tokenizer_source, "tokenizer", self.tokenizer_source)
        return [self._text(tokenizer, sample.token_ids, sample.stop_reason) for sample in self.samples]

    def _text(self, tokenizer: Any, ids: list[int], stop: int | str | None) -> str:
        text: str = tokenizer.decode(ids)
        return end_at_stop(text, tokenizer.decode(ids[:-1]), stop, include=self.include_stop_str) if isinstance(stop, str) else text


class _Progress:
    """One line on stderr, at most ten times a second."""

    def __init__(self, num_samples: int, stream: TextIO) -> None:
        self._num_samples, self._stream = num_samples, stream
        self._start = self._shown = time.perf_counter()

    def show(self, num_done: int, num_tokens: int, *, last: bool = False) -> None:
        now = time.perf_counter()
        if last or now - self._shown > 0.1:
            self._shown = now
            rate = num_tokens / max(now - self._start, 1e-9)
            line = f"\r{num_done}/{self._num_samples} samples, {num_tokens} tokens, {rate:.0f} tok/s"
            with contextlib.suppress(OSError, ValueError):  # a closed stream is no reason to lose the samples
                self._stream.write(line + ("\n" if last else ""))
                self._stream.flush()


class _Interrupt:
    """Within it Ctrl-C waits for the step in progress, so the engine stays whole; a second one does not wait."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> _Interrupt:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        if self.asked:
            raise KeyboardInterrupt

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


def _prompt_ids(engine: Engine, prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(engine.tokenizer.encode(prompt))
    if isinstance(prompt, bytes) or not hasattr(prompt, "__iter__"):
        raise BadRequest(f"must be a text, a list of token ids or a list of chat messages, got {type(prompt).__name__}")
    items: list[Any] = list(prompt)
    if items and all(isinstance(item, dict) for item in items):
        return tuple(engine.tokenizer.apply_chat_template(items))
    return tuple(items)


def _split(prompt: Prompt) -> tuple[Prompt, dict[str, Any]]:
    """A prompt object as what to sample from and its own request fields."""
    if not isinstance(prompt, dict):
        return prompt, {}
    kinds = [kind for kind in ("token_ids", "text", "messages") if kind in prompt]
    unknown = [name for name in prompt if name not in kinds and name not in _OWN_FIELDS]
    if len(kinds) != 1 or unknown:
        hint = did_you_mean(str(unknown[0]), ("token_ids", "text", "messages", *_OWN_FIELDS)) if unknown else ""
        raise BadRequest(
            f"must hold one of token_ids, text and messages, and of others only {', '.join(_OWN_FIELDS)}; "
            f"got {', '.join(map(str, prompt))}{hint}"
        )
    return prompt[kinds[0]], {name: prompt[name] for name in _OWN_FIELDS if name in prompt}


def _params(value: Any) -> SamplingParams:
    if isinstance(value, dict):
        return SamplingParams.from_wire(value)
    if not isinstance(value, SamplingParams):
        raise BadRequest(f"params must be SamplingParams or dicts of its fields, got {type(value).__name__}", field="params")
    return value


def _list(name: str, values: Any, of: str) -> list[Any]:
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__iter__"):
        raise BadRequest(f"{name} must be a list of {of}, got {type(values).__name__}: put a single one into a list", field=name)
    return list(values)


def _each(
    params: SamplingParams | dict[str, Any] | Sequence[SamplingParams | dict[str, Any]] | None, num: int, include: Any
) -> list[SamplingParams]:
    """Parameters per prompt, and a check of `include`, which is common."""
    if isinstance(include, str):
        raise BadRequest(f"include must be a list of names, got {include!r}", field="include")
    if params is None or isinstance(params, SamplingParams | dict):
        return [_params(params or SamplingParams())] * num
    each = [_params(p) for p in params]
    if len(each) != num:
        raise BadRequest(f"params must be one SamplingParams or one per prompt: got {len(each)} for {num} prompts", field="params")
    return each


def _make(
    name: str, n: int, columns: tuple[str, ...], on_error: str, make: Callable[[], RolloutRequest]
) -> RolloutRequest | list[SampleOutput]:
    """A checked request; or what it cannot be, as an error that names the item or (`on_error` "return") as n samples of it."""
    if on_error not in ("raise", "return"):
        raise BadRequest(f'on_error must be "raise" or "return", got {on_error!r}', field="on_error")
    try:
        return make()
    except Exception as error:
        if on_error == "return":
            words = str(error) if isinstance(error, RollsyncError) else describe(error)
            return [empty_output(name, i, columns, finish_reason="error", error=words) for i in range(n)]
        if isinstance(error, BadRequest):
            raise type(error)(f"{name}: {error}", field=name) from error
        raise


def _requests(
    engine: Engine, prompts: Any, params: Any, include: tuple[str, ...], prefix: str, on_error: str
) -> list[RolloutRequest | list[SampleOutput]]:
    """One checked request per prompt. All of them before any starts, so a bad one costs nothing."""
    prompts = _list("prompts", prompts, "prompts")
    counted: dict[tuple[tuple[int, ...], int | None], int] = {}

    def make(i: int, prompt: Prompt, own: SamplingParams) -> RolloutRequest:
        content, fields = _split(prompt)
        ids = _prompt_ids(engine, content)
        first = fields.pop("first_sample", None)
        if first is None and own.seed is None:
            first = 0
        elif first is None:
            first = counted.get((ids, own.seed), 0)
            counted[ids, own.seed] = first + own.n
        request = RolloutRequest(
            request_id=f"{prefix}-{i}", prompt_token_ids=ids, params=own, first_sample=first, include=tuple(include), **fields
        )
        engine.check_request(request)
        return request

    each = enumerate(zip(prompts, _each(params, len(prompts), include), strict=True))
    return [
        _make(f"prompts[{i}]", own.n, columns_for(include, own), on_error, partial(make, i, prompt, own)) for i, (prompt, own) in each
    ]


def _add(engine: Engine, request: RolloutRequest, samples: dict[str, list[SampleOutput]]) -> int:
    """Start a request. One that meets an unforeseen exception has only errors for samples; returns how many of them."""
    try:
        engine.add_request(request)
        return 0
    except RollsyncError:
        raise
    except Exception as error:
        log.error("request %r could not be added", request.request_id, exc_info=error)
        columns = columns_for(request.include, request.params)
        ends = {"seed": request.params.seed or 0, "finish_reason": "error", "error": describe(error)}
        indices = range(request.first_sample, request.first_sample + request.params.n)
        samples[request.request_id] += [empty_output(request.request_id, i, columns, **ends) for i in indices]
        return request.params.n


def _run(engine: Engine, requests: Sequence[RolloutRequest], progress: bool) -> dict[str, list[SampleOutput]]:
    """The final outputs of requests by id, in sample order. Outputs of other requests in flight are not taken: with such, use `step`."""
    if engine.has_work:
        raise IllegalState("generate needs an engine without other requests in flight: use add_request and step, or abort(all=True)")
    samples: dict[str, list[SampleOutput]] = {request.request_id: [] for request in requests}
    line = _Progress(sum(request.params.n for request in requests), sys.stderr) if progress else None
    queue = deque(requests)
    num_done = num_tokens = 0
    with _Interrupt() as interrupt:
        try:
            while queue or engine.has_work:
                while queue and engine.has_room(queue[0].params.n):
                    num_done += _add(engine, queue.popleft(), samples)
                interrupt.check()
                before = engine.scheduler.counters["generated_tokens"]
                for output in engine.step():
                    samples[output.request_id].append(output)
                    num_done += 1
                num_tokens += engine.scheduler.counters["generated_tokens"] - before
                if line is not None:
                    line.show(num_done, num_tokens, last=not queue and not engine.has_work)
            interrupt.check()  # a Ctrl-C during the last step
        except BaseException:
            engine.abort(all=True, reason="generate was interrupted")
            raise
    for found in samples.values():
        found.sort(key=lambda output: output.sample_index)
    return samples


def generate(
    engine: Engine, prompts: Any, params: Any, *, progress: bool, include: tuple[str, ...], id_prefix: str, on_error: str
) -> list[RolloutOutput]:
    """See `Engine.generate`."""
    items = _requests(engine, prompts, params, include, id_prefix, on_error)
    samples = _run(engine, [item for item in items if isinstance(item, RolloutRequest)], progress)
    return [
        RolloutOutput(
            prompt_token_ids=list(item.prompt_token_ids), samples=samples[item.request_id], tokenizer_source=engine,
            include_stop_str=item.params.include_stop_str_in_output,
        )
        if isinstance(item, RolloutRequest)
        else RolloutOutput(prompt_token_ids=[], samples=item, tokenizer_source=engine)
        for item in items
    ]


def score(
    engine: Engine,
    prompts: Any,
    continuations: Any,
    params: Any,
    *,
    progress: bool,
    include: tuple[str, ...],
    id_prefix: str,
    on_error: str,
) -> list[SampleOutput]:
    """See `Engine.score`."""
    prompts, continuations = _list("prompts", prompts, "prompts"), _list("continuations", continuations, "lists of token ids")
    if len(prompts) != len(continuations):
        raise BadRequest(
            f"continuations must be one per prompt: got {len(continuations)} for {len(prompts)} prompts", field="continuations"
        )

    def make(i: int, prompt: Prompt, continuation: Any, own: SamplingParams) -> RolloutRequest:
        content, fields = _split(prompt)
        if given := fields.keys() & {"forced_token_ids", "continue_from"}:
            raise BadRequest(f"a prompt to score under takes no {given.pop()}: the continuation says what is scored")
        if isinstance(continuation, str | bytes | dict) or not hasattr(continuation, "__iter__"):
            raise BadRequest(f"its continuation must be a list of token ids, got {type(continuation).__name__}")
        request = score_request(f"{id_prefix}-{i}", _prompt_ids(engine, content), continuation, own, include=include, **fields)
        engine.check_request(request)
        return request

    each = enumerate(zip(prompts, continuations, _each(params, len(prompts), include), strict=True))
    items = [_make(f"prompts[{i}]", 1, columns_for(include, pair[2]), on_error, partial(make, i, *pair)) for i, pair in each]
    samples = _run(engine, [item for item in items if isinstance(item, RolloutRequest)], progress)
    return [samples[item.request_id][0] if isinstance(item, RolloutRequest) else item[0] for item in items]
