"""What crosses a line: requests and outputs, and the plan and result of one step.

Everything here is plain Python (no tensors) and survives msgpack, so a runner or a front can live in another process.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ...kernels.sampling_mask import SamplingMask
from ..errors import BadRequest, show
from .params import MAX_SAMPLES, SamplingParams, check_ids, check_integer, check_text

ON_UNAVAILABLE = ("queue", "refuse")
VERSION_LIMIT = (1 << 63) - 1
INCLUDES = ("text", "model_logprobs", "temperature_logprobs", "entropy", "prompt_logprobs", "sampling_mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """One prompt and its n samples. Ids only: text belongs to the caller.

    Sample i (counted from `first_sample`) is a pure function of (weights, prompt, params, seed, i), so a partial that is
    sent again with `continue_from` goes on bit for bit, on any like replica.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    first_sample: int = 0
    """index of the first of the n samples in the seed's stream"""
    continue_from: tuple[int, ...] = ()
    """tokens already sampled (n must be 1); counted in max_tokens, returned in front of the new ones"""
    forced_token_ids: tuple[int, ...] = ()
    """output tokens given instead of sampled, one after another; scored like sampled ones, then sampling goes on. They end a sample as
    sampled ones would: EOS, stop ids, stop strings and max_tokens cut what follows, and finish_reason says so"""
    score_only: bool = False
    """score forced_token_ids to their end, whatever they hold, and sample nothing: no rule that ends a sample counts"""
    include: tuple[str, ...] = ()
    """what to return besides ids and logprobs; of INCLUDES ("text" is the front's business)"""
    prompt_logprobs_start: int = 0
    """first prompt token that `prompt_logprobs` covers, 0 to the prompt's length; those before it need no row and may be cached"""
    group: str | None = None
    session: str | None = None
    cache_salt: str | None = None
    """cached prefixes are shared only with requests of the same salt"""
    priority: int = 0
    """lower is admitted earlier and preempted later"""
    stream: bool = False
    """emit token deltas as they come, not only the final output"""
    min_version: int | None = None
    """oldest weights that may make its tokens: it waits until such a version is committed"""
    max_version_lag: int | None = None
    """a sample ends with abort_reason "max_version_lag" once the version served exceeds that of its first token by more than this"""
    on_unavailable: str = "queue"
    """queue: wait while the engine is paused or asleep, or for `min_version`; refuse: IllegalState or VersionUnavailable at once"""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "prompt_token_ids", check_ids("prompt_token_ids", self.prompt_token_ids))
        put(self, "continue_from", check_ids("continue_from", self.continue_from))
        put(self, "forced_token_ids", check_ids("forced_token_ids", self.forced_token_ids))
        put(self, "include", tuple(self.include))
        if not isinstance(self.request_id, str) or not self.request_id:
            raise BadRequest(f"request_id must be a non-empty string, got {show(self.request_id)}", field="request_id")
        check_text("request_id", self.request_id)
        if not self.prompt_token_ids:
            raise BadRequest("prompt_token_ids must hold at least one id, got none", field="prompt_token_ids")
        for name in self.include:
            if name not in INCLUDES:
                raise BadRequest(f"include must name only {', '.join(INCLUDES)}; got {show(name)}", field="include")
        check_integer("first_sample", self.first_sample, 0, (1 << 32) - MAX_SAMPLES, "an int in [0, 2**32 - 4096]")
        check_integer("priority", self.priority, -(1 << 31), 1 << 31, "an int")
        if self.continue_from and self.params.n != 1:
            raise BadRequest(f"continue_from needs n = 1, got n = {self.params.n}", field="continue_from")
        end = len(self.prompt_token_ids)
        check_integer("prompt_logprobs_start", self.prompt_logprobs_start, 0, end, f"an int in [0, {end}], the prompt's length")
        if self.prompt_logprobs_start and "prompt_logprobs" not in self.include:
            raise BadRequest("prompt_logprobs_start needs prompt_logprobs in include", field="prompt_logprobs_start")
        for name in ("stream", "score_only"):
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(f"{name} must be true or false, got {getattr(self, name)!r}", field=name)
        if self.score_only and self.continue_from:
            raise BadRequest("score_only takes forced_token_ids, not continue_from", field="continue_from")
        if self.continue_from and self.forced_token_ids:
            raise BadRequest("give continue_from or forced_token_ids, not both", field="continue_from")
        for name in ("min_version", "max_version_lag"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, VERSION_LIMIT, "an int in [0, 2**63) or null")
        if self.on_unavailable not in ON_UNAVAILABLE:
            allowed = " or ".join(ON_UNAVAILABLE)
            raise BadRequest(f"on_unavailable must be {allowed}, got {show(self.on_unavailable)}", field="on_unavailable")
        for name in ("group", "session", "cache_salt"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise BadRequest(f"{name} must be a string or null, got {show(value)}", field=name)
            check_text(name, value or "")

    def to_wire(self, params: Any = None) -> dict[str, Any]:
        """Msgpack-able dict; `from_wire` is its inverse. `params` stands for the params if the other side has them."""
        wire = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "params"}
        wire["params"] = self.params.to_wire() if params is None else params
        return wire

    @classmethod
    def from_wire(cls, wire: dict[str, Any], params: SamplingParams | None = None) -> RolloutRequest:
        return cls(**{**wire, "params": SamplingParams.from_wire(wire["params"]) if params is None else params})


FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(kw_only=True, slots=True)
class SampleOutput:
    """One sample: a delta while it runs (only if the request streams), and exactly one final output.

    `token_ids`, `logprobs` and the optional columns have equal length; the final EOS or stop id is in them. A final
    output always holds the whole sample.
    """

    request_id: str
    sample_index: int
    """first_sample + i"""
    token_ids: list[int]
    logprobs: list[float]
    """log-probability of each token in the distribution it was drawn from (after temperature and truncation)"""
    temperature_logprobs: list[float] | None = None
    """the same before truncation: log_softmax(logits / temperature)"""
    model_logprobs: list[float] | None = None
    """log_softmax(logits), temperature 1"""
    entropy: list[float] | None = None
    """of softmax(logits / temperature), in nats"""
    top_token_ids: list[list[int]] | None = None
    """with `top_logprobs`, per token: the `SamplingParams.top_logprobs` likeliest ids at its place, likeliest first, ties to the lower id.
    The token itself need not be among them; where fewer ids can be drawn, -1 and -inf fill up"""
    top_logprobs: list[list[float]] | None = None
    """their log-probabilities, as `logprobs` counts them"""
    sampling_mask: SamplingMask | None = None
    """per token the ids that it could be drawn from: those that truncation, allowed_token_ids and min_tokens left (at temperature 0 the
    likeliest). `logprobs` are those of the distribution renormalised over them"""
    prompt_logprobs: list[float | None] | None = None
    """model log-probability of each prompt token, from `prompt_logprobs_start` on, given those before it; None for the prompt's first"""
    finish_reason: str | None = None
    """None on a delta; else one of FINISH_REASONS"""
    stop_reason: int | str | None = None
    """which id or string ended it, when finish_reason is "stop" """
    abort_reason: str | None = None
    error: str | None = None
    weight_versions: list[dict[str, int]] = field(default_factory=list)
    """spans {"version", "start", "end"} over token_ids, in order, without gaps"""
    seed: int = 0
    """the seed in effect"""
    cached_tokens: int = 0
    """prompt tokens whose KV came from the prefix cache at first admission"""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def to_wire(self) -> dict[str, Any]:
        """Msgpack-able dict without the empty fields; `SampleOutput(**wire)` is its inverse, a mask apart (`SamplingMask.to_wire`)."""
        wire = {name: v for name in _OUTPUT_NAMES if (v := getattr(self, name)) is not None}
        if self.sampling_mask is not None:
            wire["sampling_mask"] = self.sampling_mask.to_wire()
        return wire


_OUTPUT_NAMES = tuple(f.name for f in fields(SampleOutput))


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotInit:
    """What the runner keeps per slot for as long as a sequence runs: how to sample its rows."""

    slot: int
    seed: int
    sample_index: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    want_model_logprobs: bool = False
    want_entropy: bool = False
    want_mask: bool = False
    """of the rows of output tokens"""
    banned_ids: tuple[int, ...] = ()
    """ids not to sample while a row's position is below `banned_until` (EOS and stop ids under min_tokens)"""
    banned_until: int = 0
    prompt_tokens: int = 0
    """length of the prompt: from this position on rows are output, which alone the fields below concern"""
    top_logprobs: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    history: tuple[int, ...] = ()
    """the tokens so far, prompt included, if a penalty is on; those fed beyond them are taken from the plans"""


@dataclass(kw_only=True, slots=True)
class StepPlan:
    """One forward pass, decided by the scheduler. Columnar: entry i feeds `counts[i]` tokens of one sequence.

    Slots name the runner's persistent rows (block table, sampling columns). A logits row r reads the hidden state of token
    `row_offset[r]` of entry `row_entry[r]` and draws with slot `row_slot[r]`; n samples of one prompt are n rows on one
    hidden state. The token drawn by a row has position `starts[entry] + row_offset + 1`.
    """

    step: int
    new_slots: list[SlotInit] = field(default_factory=list)
    block_updates: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(slot, index of the first block in the slot's table, block ids); applied before `copies` and the forward pass"""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, destination block), copied in every layer before the forward pass"""
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """position of the entry's first fed token"""
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """fed tokens of all entries, one after another"""
    row_entry: list[int] = field(default_factory=list)
    row_offset: list[int] = field(default_factory=list)
    row_slot: list[int] = field(default_factory=list)
    row_forced: list[int] = field(default_factory=list)
    """-1 draws; an id >= 0 is taken as the token instead and scored"""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(kw_only=True, slots=True)
class StepResult:
    """One value per logits row of the plan, in its order."""

    step: int
    version: int
    """the weight version this forward pass ran on"""
    token_ids: list[int]
    logprobs: list[float]
    temperature_logprobs: list[float]
    model_logprobs: list[float]
    """NaN for a row whose slot did not ask for it; so is `entropy`"""
    entropy: list[float]
    top_token_ids: list[list[int]] = field(default_factory=list)
    """per row as many ids as its slot asked for (see SampleOutput); empty if no row asks"""
    top_logprobs: list[list[float]] = field(default_factory=list)
    sampling_mask: list[bytes] = field(default_factory=list)
    """per row the words of its mask (kernels/sampling_mask.py), or none if its slot did not ask; empty if no row asks"""
    nonfinite: list[int] = field(default_factory=list)
    """indices of rows whose logits held NaN or +inf; their other values mean nothing"""
    faults: list[tuple[int, str]] = field(default_factory=list)
    """(row, words) of rows that could not be sampled for a reason of their own; their other values mean nothing"""
