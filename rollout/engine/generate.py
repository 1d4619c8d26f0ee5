"""`Engine.generate`: a list of prompts in, a list of results out."""

from __future__ import annotations

import contextlib
import copy
import logging
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import BadRequest, IllegalState, RollsyncError, describe
from ..fields import is_message
from ..models.detokenizer import end_at_stop
from .columns import columns_for, empty_output
from .params import SamplingParams
from .prompts import Prompt, split_prompt
from .score import score_request
from .types import RolloutRequest, SampleOutput

if TYPE_CHECKING:
    from ..models.tokenizer import Tokenizer
    from .engine import Engine

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RolloutOutput:
    """The samples of one prompt. Plain data, fit for pickle, copies and `dataclasses.asdict`."""

    prompt_token_ids: list[int]
    samples: list[SampleOutput]
    """in sample order"""
    tokenizer_source: InitVar[Engine | Tokenizer | None] = None
    """the engine (or tokenizer) that `texts` decodes with; it stays in this process"""
    include_stop_str: bool = field(default=False, repr=False)
    """whether `texts` keep the stop string that ended a sample"""
    params: SamplingParams | None = field(default=None, repr=False)
    """what the samples were drawn by; None for a prompt that was refused"""
    dtype: str = field(default="", repr=False)
    """the engine's"""
    fingerprint: str = field(default="", repr=False)
    """of the engine's numerics; equal ones mean equal bits for equal weights and dtype"""

    def __post_init__(self, tokenizer_source: Any) -> None:
        self._source = tokenizer_source
        self._texts: list[str] | None = None

    @property
    def texts(self) -> list[str]:
        """The samples as text, decoded now; in a pickled copy, those that were read before it was made.

        Raises:
            IllegalState: a pickled copy of an output whose texts were not read.
        """
        if self._source is not None:
            tokenizer: Any = getattr(self._source, "tokenizer", self._source)
            self._texts = [self._text(tokenizer, sample.token_ids, sample.stop_reason) for sample in self.samples]
        if self._texts is None:
            raise IllegalState("this output has no tokenizer: read `texts` before it is pickled, or decode the token ids")
        return self._texts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> RolloutOutput:
        copied = object.__new__(type(self))
        copied.__dict__ = {**copy.deepcopy(self.__getstate__(), memo), "_source": self._source}
        return copied

    def __copy__(self) -> RolloutOutput:
        copied = object.__new__(type(self))
        copied.__dict__ = dict(self.__dict__)
        return copied

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


def _params(value: Any) -> SamplingParams:
    if isinstance(value, dict):
        return SamplingParams.from_wire(value)
    if not isinstance(value, SamplingParams):
        raise BadRequest(f"params must be SamplingParams or dicts of its fields, got {type(value).__name__}", field="params")
    return value


def _list(name: str, values: Any, of: str) -> list[Any]:
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__iter__"):
        raise BadRequest(f"{name} must be a list of {of}, got {type(values).__name__}: put a single one into a list", field=name)
    items = list(values)
    if any(map(is_message, items)):
        raise BadRequest(f"{name} must be a list of {of}, got the messages of one chat: put the chat into a list", field=name)
    return items


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


def _as_sent(words: str) -> str:
    """An error's words with the names that a caller gives, not those of RolloutRequest."""
    return words.removeprefix("prompt_") if words.startswith("prompt_token_ids") else words


def _of_continuation(error: BadRequest) -> BadRequest:
    """An error of `score_request` or `check_request` with the name that a caller of `score` gives."""
    words = str(error)
    return type(error)("its continuation" + words.removeprefix("forced_token_ids")) if words.startswith("forced_token_ids") else error


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
            words = _as_sent(str(error)) if isinstance(error, RollsyncError) else describe(error)
            return [empty_output(name, i, columns, finish_reason="error", error=words) for i in range(n)]
        if isinstance(error, BadRequest):
            raise type(error)(f"{name}: {_as_sent(str(error))}", field=name) from error
        raise


def _requests(
    engine: Engine, prompts: Any, params: Any, include: tuple[str, ...], prefix: str, on_error: str
) -> list[RolloutRequest | list[SampleOutput]]:
    """One checked request per prompt. All of them before any starts, so a bad one costs nothing."""
    prompts = _list("prompts", prompts, "prompts")
    counted: dict[tuple[tuple[int, ...], int | None], int] = {}

    def make(i: int, prompt: Prompt, own: SamplingParams) -> RolloutRequest:
        ids, own, fields = split_prompt(engine, prompt, own)
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
    return [_output(engine, item, samples) for item in items]


def _output(engine: Engine, item: RolloutRequest | list[SampleOutput], samples: dict[str, list[SampleOutput]]) -> RolloutOutput:
    if not isinstance(item, RolloutRequest):
        return RolloutOutput(prompt_token_ids=[], samples=item, tokenizer_source=engine)
    return RolloutOutput(
        prompt_token_ids=list(item.prompt_token_ids),
        samples=samples[item.request_id],
        tokenizer_source=engine,
        include_stop_str=item.params.include_stop_str_in_output,
        params=item.params,
        dtype=engine.info.dtype,
        fingerprint=engine.info.fingerprint,
    )


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
        ids, own, fields = split_prompt(engine, prompt, own)
        if given := fields.keys() & {"forced_token_ids", "continue_from"}:
            raise BadRequest(f"a prompt to score under takes no {given.pop()}: the continuation says what is scored")
        if isinstance(continuation, str | bytes | dict) or not hasattr(continuation, "__iter__"):
            raise BadRequest(f"its continuation must be a list of token ids, got {type(continuation).__name__}")
        try:
            request = score_request(f"{id_prefix}-{i}", ids, continuation, own, include=include, **fields)
            engine.check_request(request)
        except BadRequest as error:
            raise _of_continuation(error) from error
        return request

    each = enumerate(zip(prompts, continuations, _each(params, len(prompts), include), strict=True))
    items = [_make(f"prompts[{i}]", 1, columns_for(include, pair[2]), on_error, partial(make, i, *pair)) for i, pair in each]
    samples = _run(engine, [item for item in items if isinstance(item, RolloutRequest)], progress)
    return [samples[item.request_id][0] if isinstance(item, RolloutRequest) else item[0] for item in items]
