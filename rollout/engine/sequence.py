"""Mutable state of requests in flight: one `Request` per RolloutRequest, one `Sequence` per sample of it."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Protocol

from ..errors import RollsyncError, describe
from .admission import Rules
from .columns import Columns, columns_for
from .runner_info import RunnerInfo
from .types import RolloutRequest, SlotInit


class StopMatcher(Protocol):
    """Watches the text of one sample for stop strings."""

    def push(self, token_id: int) -> str | None:
        """The stop string that this token completes, if any."""


StopMatcherFactory = Callable[[tuple[str, ...]], StopMatcher]
PromptVersions = tuple[tuple[int, bool], ...]
"""weight versions that gave the prompt's logprobs, each with whether that was behind KV of older weights"""


class Ending:
    """How a sample ended."""

    __slots__ = ("abort_reason", "error", "reason", "stop_reason")

    def __init__(
        self, reason: str, *, stop_reason: int | str | None = None, abort_reason: str | None = None, error: str | None = None
    ) -> None:
        self.reason = reason
        self.stop_reason = stop_reason
        self.abort_reason = abort_reason
        self.error = error


LENGTH = Ending("length")


class Request:
    """One accepted RolloutRequest: what its n samples have in common.

    `given` are the output tokens that are not sampled (continue_from, forced_token_ids), cut where they end the sample; then
    `given_end` says how. Prompt and given tokens are the common prefix: prefilled and scored once, by the first sample.
    """

    __slots__ = (
        "arrival",
        "banned_ids",
        "banned_until",
        "columns",
        "given",
        "given_end",
        "id",
        "live",
        "logit_bias",
        "make_matcher",
        "max_len",
        "more_columns",
        "next_index",
        "pending",
        "prompt",
        "prompt_logprobs",
        "prompt_versions",
        "salt",
        "seed",
        "sequences",
        "shared_columns",
        "spec",
        "stop_ids",
        "vocab_size",
    )

    def __init__(
        self, spec: RolloutRequest, info: RunnerInfo, seed: int, make_matcher: StopMatcherFactory | None, rules: Rules
    ) -> None:
        params = spec.params
        self.spec = spec
        self.id = spec.request_id
        self.seed = seed
        self.arrival = 0
        self.salt = blake2b(spec.cache_salt.encode(), digest_size=16).digest() if spec.cache_salt else b""
        """of the keys of its cached blocks"""
        self.prompt = spec.prompt_token_ids
        self.make_matcher = make_matcher if params.stop and not spec.score_only else None
        self.stop_ids = rules.stop_ids
        limit = min(info.max_model_len, info.num_blocks * info.block_tokens)
        self.max_len = limit if params.max_tokens is None else min(limit, len(self.prompt) + params.max_tokens)
        self.banned_ids, self.logit_bias = rules.banned_ids, rules.logit_bias
        self.banned_until = len(self.prompt) + params.min_tokens if params.min_tokens else 0
        self.columns = columns_for(spec.include, params)
        """names of the value columns of its samples"""
        self.vocab_size = info.vocab_size
        self.more_columns = frozenset(self.columns[1:])
        self.prompt_logprobs: list[float | None] | None = None
        if "prompt_logprobs" in spec.include:
            self.prompt_logprobs = [] if spec.prompt_logprobs_start else [None]
        self.prompt_versions: PromptVersions = ()
        self.live = params.n
        self.pending = params.n
        self.next_index = 0
        self.sequences: dict[int, Sequence] = {}
        """samples begun and not ended, by index"""
        self.shared_columns: Columns | None = None
        """values of the given tokens, once the first sample has them"""
        self.given: tuple[int, ...]
        self.given_end: Ending | None
        try:
            self.given, self.given_end = self._cut_given(spec.continue_from or spec.forced_token_ids)
        except RollsyncError:
            raise
        except Exception as error:  # a stop matcher's fault: the request is over before it begins
            self.given, self.given_end, self.prompt_logprobs = (), Ending("error", error=describe(error)), None

    def _cut_given(self, given: tuple[int, ...]) -> tuple[tuple[int, ...], Ending | None]:
        """Given tokens end a sample just as sampled ones would: where, and how."""
        if self.spec.score_only:
            return given, LENGTH
        if self.max_len == len(self.prompt):
            return (), LENGTH
        matcher = self.new_matcher(())
        for i, token in enumerate(given):
            end = self.ending(i + 1, token, matcher)
            if end is not None:
                return given[: i + 1], end
        return given, None

    def new_matcher(self, given: tuple[int, ...]) -> StopMatcher | None:
        """A stop-string matcher that has seen `given`; None if the request has no stop strings."""
        if self.make_matcher is None:
            return None
        matcher = self.make_matcher(self.spec.params.stop)
        for token in given:
            matcher.push(token)
        return matcher

    def ending(self, num_output: int, token: int, matcher: StopMatcher | None) -> Ending | None:
        """How output token number `num_output` (from 1) ends the sample, if it does: stop id, then stop string, then length."""
        text = matcher.push(token) if matcher is not None else None
        min_tokens = self.spec.params.min_tokens
        if token in self.stop_ids and num_output > min_tokens:
            return Ending("stop", stop_reason=token)
        if text is not None and num_output >= min_tokens:
            return Ending("stop", stop_reason=text)
        return LENGTH if len(self.prompt) + num_output >= self.max_len else None

    @property
    def needs_no_step(self) -> bool:
        """Whether it is over before it begins: no token to sample, none to score."""
        return self.given_end is not None and not self.given and self.num_prompt_scored >= len(self.prompt)

    @property
    def num_prompt_scored(self) -> int:
        """Prompt tokens, from the first on, that have their logprob or need none."""
        values = self.prompt_logprobs
        return len(self.prompt) if values is None else self.spec.prompt_logprobs_start + len(values)

    def restart_prompt(self) -> None:
        """Forget the prompt's logprobs if no KV and no token stands behind them: other weights give all of them, not some."""
        if self.prompt_logprobs and not any(seq.slot >= 0 or seq.columns.logprobs for seq in self.sequences.values()):
            del self.prompt_logprobs[0 if self.spec.prompt_logprobs_start else 1 :]
            self.prompt_versions = ()

    def scored_prompt(self, version: int, mixed_kv: bool) -> None:
        """Weights of this version gave some of the prompt's logprobs."""
        if (version, mixed_kv) not in self.prompt_versions:
            self.prompt_versions += ((version, mixed_kv),)

    def next_sequence(self) -> Sequence:
        """The next of the n samples that has none yet."""
        seq = self.sequences[self.next_index] = Sequence(self, self.next_index)
        self.next_index += 1
        self.pending -= 1
        return seq


class Sequence:
    """One sample. `tokens` are prompt, given and sampled ids; the KV of the first `num_computed` of them is in `blocks`."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "columns",
        "decoding",
        "digests",
        "emitted",
        "end",
        "epoch",
        "index",
        "key",
        "matcher",
        "num_computed",
        "num_registered",
        "request",
        "slot",
        "started",
        "stop_ids",
        "stream",
        "tokens",
        "was_admitted",
        "writable_end",
    )

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.key = (request.spec.priority, request.arrival, index)
        """order of admission, and backwards of preemption"""
        self.tokens: list[int] = []
        self.columns = Columns()
        self.stop_ids = request.stop_ids
        self.stream = request.spec.stream
        self.matcher: StopMatcher | None = None
        self.end: Ending | None = None
        self.started = False
        self.was_admitted = False
        self.decoding = False
        """exactly one token to feed, and a draw from its row"""
        self.slot = -1
        self.blocks: list[int] = []
        self.num_computed = 0
        self.writable_end = 0
        """positions below this have a block nobody shares"""
        self.epoch = -1
        """commit epoch of its KV"""
        self.digests: list[bytes] = []
        self.num_registered = 0
        self.cached_tokens = 0
        self.emitted = 0

    def start(self) -> None:
        """Lay out the tokens; done late, so a long queue costs no copies of its prompts."""
        if not self.started:
            self.started = True
            self.tokens = [*self.request.prompt, *self.request.given]
            self.matcher = self.request.new_matcher(self.request.given)
            if self.request.shared_columns is not None:
                self.columns = self.request.shared_columns.copy()

    @property
    def first_version(self) -> int | None:
        """Weight version of its first token; None before it has one."""
        shared = self.request.shared_columns if not self.started else None
        found = (shared or self.columns).spans
        return found[0][0] if found else None

    def trim(self) -> None:
        """Cut the columns to the tokens that have all their values: what a fault amid a token's leaves.

        Given tokens stay only if a token of its own stands behind them: broken numbers may reach the rows before them in a chunk,
        so how many were scored would tell how they were cut into chunks.
        """
        lists: list[list[Any]] = [getattr(self.columns, name) for name in self.request.columns]
        whole = min(max(0, len(self.tokens) - len(self.request.prompt)), *map(len, lists))
        if whole <= len(self.request.given):
            whole, self.columns.spans = 0, []
        for column in lists:
            del column[whole:]

    @property
    def next_row(self) -> int:
        """Index of the first token still without the values it needs; what comes before may come from the prefix cache."""
        request = self.request
        scored = request.num_prompt_scored
        return scored if scored < len(request.prompt) else len(request.prompt) + len(self.columns.logprobs)

    @property
    def num_to_feed(self) -> int:
        """Tokens of the sequence a row must be read behind: all, or all but the last if nothing is to be sampled after it."""
        return len(self.tokens) - (self.request.given_end is not None)

    def slot_init(self, slot: int) -> SlotInit:
        request, params = self.request, self.request.spec.params
        return SlotInit(
            slot=slot,
            seed=request.seed,
            sample_index=request.spec.first_sample + self.index,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            want_model_logprobs="model_logprobs" in request.columns or request.prompt_logprobs is not None,
            want_entropy="entropy" in request.columns,
            want_mask="sampling_mask" in request.columns,
            banned_ids=request.banned_ids,
            banned_until=request.banned_until,
            prompt_tokens=len(request.prompt),
            top_logprobs=params.top_logprobs,
            logit_bias=request.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            history=tuple(self.tokens) if params.penalised else (),
        )
