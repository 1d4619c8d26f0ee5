"""The synchronous core: ids in, ids and logprobs out. No threads, no text unless asked."""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ... import __version__
from ..errors import BadRequest, ConfigError, DuplicateRequest, EngineDead, IllegalState, Overloaded, show
from .admission import Rules, check_request
from .config import EngineConfig, make_config
from .control import Control
from .generate import RolloutOutput, generate, score
from .params import SamplingParams
from .prompts import Prompt
from .runner_info import Runner, RunnerInfo
from .scheduler import Scheduler
from .score import SCORED
from .sequence import Request, StopMatcher, StopMatcherFactory
from .trace_file import check_trace_path
from .trace_writer import TraceWriter
from .types import RolloutRequest, SampleOutput

if TYPE_CHECKING:
    from ..models.tokenizer import Tokenizer

RANK_WATCH_S = 0.5
"""between two looks at whether the ranks live, with nothing to do"""
TRACE_WATCH_S = 0.1
"""between two looks at how far the trace is, with nothing to do"""


class Engine:
    """One model, one KV pool, any number of requests. Call `add_request`, then `step` until `has_work` is false; or `generate`.

    Args:
        model: a local folder, a .gguf file or a cached hub id; or a whole EngineConfig.
        runner: what executes steps, with its own configuration (`model` and options do not count then); default: that of `make_runner`.
        tokenizer: default: the model's, loaded when first needed (text prompts, stop strings, `RolloutOutput.texts`).
        stop_matcher: makes what watches a sample for stop strings; default: a StopStringMatcher over the tokenizer.
        options: fields of EngineConfig and its parts by name, e.g. `block_tokens=16`, `max_num_seqs=64`.
    """

    def __init__(
        self,
        model: str | EngineConfig,
        *,
        runner: Runner | None = None,
        tokenizer: Tokenizer | None = None,
        stop_matcher: StopMatcherFactory | None = None,
        **options: Any,
    ) -> None:
        if runner is None:
            from .parallel_runner import make_runner

            config = make_config(model, options)
            if config.trace is not None:
                check_trace_path(config.trace)  # before a model is loaded in vain
            runner = make_runner(config)
        elif options:
            raise ConfigError(f"a runner brings its own configuration: drop the option(s) {', '.join(sorted(options))}")
        self.runner: Runner = runner
        self.info: RunnerInfo = runner.info
        self.config: EngineConfig = runner.info.config
        self.scheduler = Scheduler(self.info)
        self.weight_version = 0
        """version of the last step"""
        self._tokenizer = tokenizer
        self._stop_matcher: StopMatcherFactory = stop_matcher or self._default_matcher
        self._entropy: Callable[[int], int] = (
            secrets.randbits if self.config.seed is None else random.Random(self.config.seed).getrandbits
        )
        self._broken: str | None = None
        self._closed = False
        self._pid = os.getpid()
        self._stepping = threading.Lock()
        self._seconds = {"plan": 0.0, "execute": 0.0, "update": 0.0}
        self._num_generate_calls = 0
        self.control = Control(self)
        """pause, sleep, weight updates"""
        self._last_rules: Rules | None = None
        self._trace: TraceWriter | None = None
        if self.config.trace is not None:
            self._trace = self.scheduler.observer = TraceWriter(
                self.config.trace, self.info, __version__, self.control.versioned_digests
            )

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            from ..models.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.from_model(self.config.tokenizer or self.config.model)
        return self._tokenizer

    def _default_matcher(self, stops: tuple[str, ...]) -> StopMatcher:
        from ..models.detokenizer import StopStringMatcher

        return StopStringMatcher(self.tokenizer, stops)

    def check_alive(self) -> None:
        """Raises IllegalState once the engine is closed, and in a process that was forked from its own."""
        if self._closed:
            raise IllegalState("the engine is closed; make a new one")
        if os.getpid() != self._pid:  # its threads did not come along
            raise IllegalState(f"the engine belongs to process {self._pid}; a forked process needs one of its own")

    def _check_usable(self) -> None:
        self.check_alive()
        if self._broken is not None:
            raise IllegalState(f"the engine is broken and can only be closed; a step failed with: {self._broken}")

    # Requests

    def check_request(self, request: RolloutRequest) -> None:
        """Everything about a request that could make `add_request` refuse it, but for what else is in flight.

        Raises:
            BadRequest, PromptTooLong: the model cannot serve it. ConfigError: stop strings, and no tokenizer to match them with.
        """
        self._check(request)

    def _check(self, request: RolloutRequest) -> Rules:
        rules = self._last_rules = check_request(request, self.info, self._last_rules)
        if request.params.stop and self._stop_matcher == self._default_matcher and self._tokenizer is None:
            self._default_matcher(request.params.stop)
        limit = self.config.scheduler.max_waiting
        if request.params.n > limit:
            raise BadRequest(f"n must be at most scheduler.max_waiting = {limit}, got {request.params.n}", field="n")
        return rules

    def has_room(self, n: int) -> bool:
        """Whether `n` more samples may wait."""
        return self.scheduler.num_waiting + n <= self.config.scheduler.max_waiting

    def add_request(self, request: RolloutRequest) -> None:
        """Accept a request, or raise and change nothing. Each of its n samples will end in exactly one final output.

        Raises:
            BadRequest: an id outside the vocabulary, and so on; PromptTooLong: it can never fit.
            DuplicateRequest: its id is in flight. Overloaded: too many samples wait.
            IllegalState: the weights are invalid; or the engine is paused or asleep, and the request does not wait.
            VersionUnavailable: its `min_version` is not there, and it does not wait.
        """
        self._check_usable()
        rules = self._check(request)
        if request.request_id in self.scheduler.requests:
            raise DuplicateRequest(f"request_id {request.request_id!r} is still in flight; abort it or choose another id")
        begins = self.control.admit(request)
        if not self.has_room(request.params.n):
            raise Overloaded(
                f"{self.scheduler.num_waiting} samples wait and {request.params.n} more would exceed scheduler.max_waiting = "
                f"{self.config.scheduler.max_waiting}; try again later"
            )
        seed = request.params.seed if request.params.seed is not None else self._entropy(64)
        self.scheduler.add(Request(request, self.info, seed, self._stop_matcher, rules), hold=not begins)

    def abort(
        self,
        request_id: str | None = None,
        group: str | None = None,
        session: str | None = None,
        all: bool = False,
        reason: str = "aborted",
    ) -> list[SampleOutput]:
        """End requests by exact id, group, session, or all, in whatever state. Returns their final outputs, with the tokens so far.

        Their ids may be used again at once. An unknown id, group or session ends nothing.
        """
        for name, value in (("request_id", request_id), ("group", group), ("session", session), ("reason", reason)):
            if value is not None and not isinstance(value, str):
                raise BadRequest(f"{name} must be a string, got {show(value)}", field=name)
        requests = self.scheduler.requests
        doomed: Iterable[Request]
        if all:
            doomed = list(requests.values())
        elif group is not None or session is not None:
            doomed = [
                r
                for r in requests.values()
                if (group is None or r.spec.group == group) and (session is None or r.spec.session == session)
                and (request_id is None or r.id == request_id)
            ]
        elif request_id is not None:
            doomed = [requests[request_id]] if request_id in requests else []
        else:
            raise BadRequest("abort needs request_id, group, session or all=True", field="request_id")
        return self.scheduler.abort(doomed, reason)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something now; false while paused, however much waits."""
        return self.scheduler.has_work and self.control.may_step

    def step(self) -> list[SampleOutput]:
        """One forward pass. Returns final outputs, and deltas of requests that stream.

        An exception within comes through as it is; after it the engine is broken and can only be closed.
        """
        self._check_usable()
        if not self.control.may_step:
            raise IllegalState(f"no step runs now: {self.control.lifecycle.why_not_running()}")
        if not self._stepping.acquire(blocking=False):
            raise IllegalState("another thread is in step(): an engine is driven by one thread")
        try:
            return self._step()
        finally:
            self._stepping.release()

    def _step(self) -> list[SampleOutput]:
        seconds = self._seconds
        try:
            t0 = time.perf_counter()
            plan = self.scheduler.plan()
            if plan is None:
                return self.scheduler.take_instant()
            t1 = time.perf_counter()
            result = self.runner.execute(plan)
            t2 = time.perf_counter()
            outputs = self.scheduler.update(plan, result)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        self.weight_version = result.version
        seconds["plan"] += t1 - t0
        seconds["execute"] += t2 - t1
        seconds["update"] += time.perf_counter() - t2
        return outputs

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | dict[str, Any] | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        include: tuple[str, ...] = (),
        on_error: str = "raise",
    ) -> list[RolloutOutput]:
        """Sample for a list of prompts and wait; results in the order of `prompts`.

        Args:
            prompts: each a text, a list of token ids, a list of chat messages, or a prompt object (see `prompts.Prompt`).
            params: one for all, or one per prompt. The same prompt twice under the same seed goes on counting samples.
            progress: a line on stderr.
            include: columns wanted besides ids and logprobs; see RolloutRequest.
            on_error: what becomes of a prompt that cannot be served (too long, empty, an unknown id): "raise", or "return" samples of it
                with finish_reason "error" and go on with the others. A fault while it runs gives such samples in any case.

        Raises:
            BadRequest: naming `prompts[i]`; then nothing was started.
        """
        return generate(self, prompts, params, progress=progress, include=include, id_prefix=self._next_prefix(), on_error=on_error)

    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Iterable[int]],
        params: SamplingParams | dict[str, Any] | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        include: tuple[str, ...] = SCORED,
        on_error: str = "raise",
    ) -> list[SampleOutput]:
        """Log-probabilities of given continuations (token ids), each under its prompt: one output per pair, in order.

        A continuation is scored to its end, EOS ids within it too; under the params it was sampled with it gets the bits it had then.
        Arguments and errors are those of `generate`; see `score.score_request` for what counts of `params`. A prompt and continuation
        that together exceed the context or the KV pool are a PromptTooLong.
        """
        return score(
            self, prompts, continuations, params, progress=progress, include=include, id_prefix=self._next_prefix(), on_error=on_error
        )

    def _next_prefix(self) -> str:
        self._check_usable()
        self._num_generate_calls += 1
        return f"generate-{self._num_generate_calls}"

    def poll(self) -> list[SampleOutput]:
        """Between two steps: end pauses, drains and updates whose time is over. Final outputs that verbs of `control` caused."""
        try:
            self.runner.check()
        except EngineDead as error:
            self._broken = self._broken or str(error)
            raise
        self.control.poll()
        return self.control.take_outputs()

    def next_deadline(self) -> float | None:
        """time.monotonic() at which `poll` has something to do."""
        times = [self.control.next_deadline(), time.monotonic() + RANK_WATCH_S if self.config.tp > 1 else None]
        if self._trace is not None and not self._trace.is_settled:
            times.append(time.monotonic() + TRACE_WATCH_S)
        return min((t for t in times if t is not None), default=None)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; cheap."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        return {
            "running": len(scheduler.running),
            "waiting": scheduler.num_waiting,
            "free_blocks": blocks.num_free,
            "total_blocks": blocks.num_blocks,
            "cached_blocks": blocks.num_cached,
            "weight_version": self.weight_version,
            "state": self.control.status(),
            "updates": self.control.update_stats.to_stats(),
            **scheduler.counters,
            **(self._trace.stats() if self._trace is not None else {}),
            **{f"{name}_s": seconds for name, seconds in self._seconds.items()},
        }

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; running requests go on. Returns the blocks forgotten."""
        return self.scheduler.blocks.reset_cache()

    def close(self) -> None:
        """Free the model and the KV pool. Requests in flight get no output any more: abort them first. Twice is fine."""
        if not self._closed:
            try:
                if self._trace is not None:
                    self._trace.close()  # reads digests of the weights
            finally:
                self._closed = True
                self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
