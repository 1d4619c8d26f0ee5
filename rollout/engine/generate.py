"""`Engine.generate`: a list of prompts in, a list of results out."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import BadRequest, IllegalState, RollsyncError, describe
from ..models.detokenizer import end_at_stop
from .outputs import bare_output
from .types import RolloutRequest, SampleOutput, SamplingParams

if TYPE_CHECKING:
    from ..models.tokenizer import Tokenizer
    from .engine import Engine

log = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | dict[str, Any]
"""text, token ids, chat messages, or a prompt object as in `POST /v1/rollouts`: {"token_ids" | "text" | "messages": …} with
forced_token_ids, continue_from or first_sample"""

_OWN_FIELDS = ("forced_token_ids", "continue_from", "first_sample")


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
    unknown = sorted(prompt.keys() - {*kinds, *_OWN_FIELDS})
    if len(kinds) != 1 or unknown:
        raise BadRequest(
            f"must hold one of token_ids, text and messages, and of others only {', '.join(_OWN_FIELDS)}; got {', '.join(prompt)}"
        )
    return prompt[kinds[0]], {name: prompt[name] for name in _OWN_FIELDS if name in prompt}


def _params(value: SamplingParams | dict[str, Any]) -> SamplingParams:
    return SamplingParams.from_wire(value) if isinstance(value, dict) else value


def _requests(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | dict[str, Any] | Sequence[SamplingParams] | None,
    include: tuple[str, ...],
    prefix: str,
) -> list[RolloutRequest]:
    """One checked request per prompt. All of them before any starts, so a bad one costs nothing."""
    if isinstance(prompts, str | bytes) or not hasattr(prompts, "__iter__"):
        raise BadRequest(f"prompts must be a list of prompts, got {type(prompts).__name__}: put a single one into a list", field="prompts")
    prompts = list(prompts)
    if isinstance(include, str):
        raise BadRequest(f"include must be a list of names, got {include!r}", field="include")
    one = params is None or isinstance(params, SamplingParams | dict)
    each = [_params(params or SamplingParams())] * len(prompts) if one else [_params(p) for p in params]  # type: ignore[arg-type, union-attr]
    if len(each) != len(prompts):
        raise BadRequest(f"params must be one SamplingParams or one per prompt: got {len(each)} for {len(prompts)} prompts", field="params")
    counted: dict[tuple[tuple[int, ...], int | None], int] = {}
    requests = []
    for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        try:
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
        except BadRequest as error:
            raise type(error)(f"prompts[{i}]: {error}", field=f"prompts[{i}]") from error
        requests.append(request)
    return requests


def _add(engine: Engine, request: RolloutRequest, samples: dict[str, list[SampleOutput]]) -> int:
    """Start a request. One that meets an unforeseen exception has only errors for samples; returns how many of them."""
    try:
        engine.add_request(request)
        return 0
    except RollsyncError:
        raise
    except Exception as error:
        log.error("request %r could not be added", request.request_id, exc_info=error)
        indices = range(request.first_sample, request.first_sample + request.params.n)
        samples[request.request_id] += [bare_output(request.request_id, i, request.params.seed or 0, describe(error)) for i in indices]
        return request.params.n


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | dict[str, Any] | Sequence[SamplingParams] | None,
    *,
    progress: bool,
    include: tuple[str, ...],
    id_prefix: str,
) -> list[RolloutOutput]:
    """See `Engine.generate`. Outputs of other requests in flight are not taken: with such, use `step`."""
    if engine.has_work:
        raise IllegalState("generate needs an engine without other requests in flight: use add_request and step, or abort(all=True)")
    requests = _requests(engine, prompts, params, include, id_prefix)
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
    return [
        RolloutOutput(
            prompt_token_ids=list(r.prompt_token_ids), samples=samples[r.request_id], tokenizer_source=engine,
            include_stop_str=r.params.include_stop_str_in_output,
        )
        for r in requests
    ]
