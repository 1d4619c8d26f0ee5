"""What crosses a line: requests and outputs, and the plan and result of one step.

Everything here is plain Python (no tensors) and survives msgpack, so a runner or a front can live in another process.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ..errors import BadRequest, show
from ..fields import did_you_mean

INCLUDES = ("text", "model_logprobs", "temperature_logprobs", "entropy", "prompt_logprobs")
MAX_SAMPLES = 4096
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024
U64 = 1 << 64


class Bound(NamedTuple):
    """The numbers a field takes: ints if `low` is an int. Finite bounds, so NaN and infinities fail."""

    low: float
    high: float
    allowed: str
    above: bool = False
    """without `low` itself"""

    def check(self, name: str, value: Any) -> Any:
        """`value`, as a float unless ints are asked for. BadRequest names `name`."""
        if isinstance(self.low, int):
            return _integer(name, value, self.low, int(self.high), self.allowed)
        found = _number(name, value, self.low, self.high, self.allowed)
        if self.above and found == self.low:
            raise BadRequest(f"{name} must be {self.allowed}, got {show(value)}", field=name)
        return found


def _number(name: str, value: Any, low: float, high: float, allowed: str) -> float:
    """A float in [low, high] (finite bounds, so NaN and infinities fail), or BadRequest naming `name`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(f"{name} must be {allowed}, got {show(value)}", field=name.partition("[")[0])
    return float(value)


def _integer(name: str, value: Any, low: int, high: int, allowed: str) -> int:
    """An int in [low, high], or BadRequest naming `name`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{name} must be {allowed}, got {show(value)}", field=name)
    return value


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """A tuple of ints in [0, 2**31), or BadRequest naming the first offender."""
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise BadRequest(f"{name} must be a list of token ids, got {type(value).__name__}", field=name)
    ids = tuple(value)
    if not all(type(v) is int for v in ids):  # numpy's integers and the like
        ids = tuple(operator.index(v) if hasattr(v, "__index__") and not isinstance(v, bool) else v for v in ids)
    for i, v in enumerate(ids):
        if isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < 1 << 31:
            raise BadRequest(f"{name}[{i}] must be a token id (an int in [0, 2**31)), got {show(v)}", field=name)
    return ids


def _key(value: Any) -> int:
    """A token id as JSON or Python writes a mapping's key; -1 if it is none."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) <= 10 else -1
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return -1
    return operator.index(value)


def _bias(value: Any) -> dict[int, float]:
    """Biases by id, ids ascending."""
    if not isinstance(value, Mapping):
        raise BadRequest(f"logit_bias must be an object of token ids and biases, got {type(value).__name__}", field="logit_bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise BadRequest(f"logit_bias must name at most {MAX_LOGIT_BIAS} ids, got {len(value)}", field="logit_bias")
    found: dict[int, float] = {}
    for key, bias in value.items():
        token = _key(key)
        if not 0 <= token < 1 << 31 or token in found:
            again = " (twice)" if token in found else ""
            raise BadRequest(f"logit_bias keys must be distinct token ids (ints in [0, 2**31)), got {show(key)}{again}", field="logit_bias")
        found[token] = SAMPLING_BOUNDS["logit_bias"].check(f"logit_bias[{token}]", bias)
    return dict(sorted(found.items()))


def is_utf8(text: str) -> bool:
    """False for a string with a lone surrogate, which no wire can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(name: str, value: str) -> None:
    if not is_utf8(value):
        raise BadRequest(f"{name} must be text that UTF-8 can encode (no lone surrogate), got {show(value)}", field=name)


SAMPLING_BOUNDS = {
    "n": Bound(1, MAX_SAMPLES, f"an int in [1, {MAX_SAMPLES}]"),
    "max_tokens": Bound(0, 1 << 31, "an int in [0, 2**31] or null"),
    "min_tokens": Bound(0, 1 << 31, "an int in [0, 2**31]"),
    "temperature": Bound(0.0, 1e6, "a finite number in [0, 1e6]"),
    "top_p": Bound(0.0, 1.0, "a number in (0, 1] (for greedy use temperature 0)", above=True),
    "top_k": Bound(-1, 1 << 62, "an int >= 0 (0 or -1 keeps all ids)"),
    "min_p": Bound(0.0, 1.0, "a number in [0, 1]"),
    "repetition_penalty": Bound(0.01, 100.0, "a number in [0.01, 100]"),
    "presence_penalty": Bound(-2.0, 2.0, "a number in [-2, 2]"),
    "frequency_penalty": Bound(-2.0, 2.0, "a number in [-2, 2]"),
    "logit_bias": Bound(-100.0, 100.0, "a number in [-100, 100]"),
    "top_logprobs": Bound(0, MAX_TOP_LOGPROBS, f"an int in [0, {MAX_TOP_LOGPROBS}]"),
    "seed": Bound(0, U64 - 1, "an int in [0, 2**64) or null"),
}
"""the numbers of SamplingParams (of logit_bias, its values), for its checks and for the schemas of the server"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose tokens. The defaults are plain sampling: temperature 1, nothing truncated.

    A row's logits are changed in this order: `logit_bias`; `repetition_penalty`; `frequency_penalty` and `presence_penalty`; ids that
    may not be drawn (`allowed_token_ids`, `min_tokens`) drop out; temperature. Then truncation keeps ids by rank (logit descending, id
    ascending on ties): top_k, then top_p of what top_k left, then min_p. `logprobs` are those of the renormalised rest.

    Penalties at a position look at the tokens before it. Output tokens that were given (continue_from, forced_token_ids) count as output.
    """

    n: int = 1
    """samples per prompt"""
    max_tokens: int | None = None
    """new tokens at most; None means the room left in the context"""
    min_tokens: int = 0
    """no EOS and no stop id is sampled, and no stop string ends, before this many new tokens"""
    temperature: float = 1.0
    """0 means greedy (exact argmax, ties to the lowest id)"""
    top_p: float = 1.0
    """keep the smallest set of likeliest ids whose mass reaches this; (0, 1]"""
    top_k: int = 0
    """keep this many likeliest ids; 0 keeps all"""
    min_p: float = 0.0
    """drop ids less likely than this fraction of the likeliest; [0, 1]"""
    repetition_penalty: float = 1.0
    """logits of ids in the prompt or the output so far are divided by this if positive, else multiplied; [0.01, 100]"""
    presence_penalty: float = 0.0
    """taken off the logits of ids in the output so far; [-2, 2]"""
    frequency_penalty: float = 0.0
    """taken off the logit of an id once for each time it is in the output so far; [-2, 2]"""
    logit_bias: dict[int, float] = field(default_factory=dict, hash=False)
    """added to the logits of ids; keys are ids (ints, or decimal strings as JSON has them), values numbers in [-100, 100]; at most 1024"""
    allowed_token_ids: tuple[int, ...] | None = None
    """the only ids that may be drawn, EOS ids too; None allows all. With min_tokens, one of them at least must not end a sample"""
    top_logprobs: int = 0
    """report this many of the likeliest ids at each output token, with their logprobs, from the distribution drawn from (temperature 0:
    from the one at temperature 1, nothing truncated); 0 to 20"""
    seed: int | None = None
    """key of the random stream, [0, 2**64); None draws one from the engine's entropy, and the output reports it"""
    stop: tuple[str, ...] = ()
    """strings that end a sample once its text contains one; at most 64, of at most 1024 characters"""
    include_stop_str_in_output: bool = False
    """whether the text goes on to the end of the stop string, or ends before it; token ids are never cut"""
    stop_token_ids: tuple[int, ...] = ()
    """ids that end a sample besides the model's EOS ids; kept as its last token"""
    ignore_eos: bool = False
    """go on past the model's EOS ids (stop_token_ids still count)"""

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name, bound in SAMPLING_BOUNDS.items():
            value = getattr(self, name)
            if name != "logit_bias" and (value is not None or name not in ("max_tokens", "seed")):
                put(self, name, bound.check(name, value))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", field="min_tokens")
        if 0.0 < self.temperature < 1e-8:
            raise BadRequest(f"temperature must be 0 (greedy) or at least 1e-8, got {self.temperature!r}", field="temperature")
        put(self, "top_k", max(0, self.top_k))
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(s, str) and s for s in stop):
            raise BadRequest(f"stop must be a non-empty string or a list of them, got {show(self.stop)}", field="stop")
        if len(stop) > MAX_STOPS:
            raise BadRequest(f"stop must hold at most {MAX_STOPS} strings, got {len(stop)}", field="stop")
        for s in stop:
            if len(s) > MAX_STOP_CHARS:
                raise BadRequest(f"stop must hold strings of at most {MAX_STOP_CHARS} characters, got one of {len(s)}", field="stop")
            _text("stop", s)
        put(self, "stop", stop)
        put(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(f"{name} must be true or false, got {show(getattr(self, name))}", field=name)
        self._check_logit_changes()

    def _check_logit_changes(self) -> None:
        put = object.__setattr__
        put(self, "logit_bias", _bias({} if self.logit_bias is None else self.logit_bias))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise BadRequest("allowed_token_ids must hold at least one id, or be null for all; got none", field="allowed_token_ids")

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def to_wire(self) -> dict[str, Any]:
        """The fields that differ from their defaults, fit for msgpack and JSON; `from_wire` is its inverse."""
        wire = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default and f.name != "logit_bias"}
        if self.logit_bias:
            wire["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return wire

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> SamplingParams:
        """Validate a dict of fields. An unknown key is a BadRequest that lists the known ones."""
        known = {f.name for f in fields(cls)}
        for key in wire:
            if key not in known:
                hint = did_you_mean(str(key), known)
                raise BadRequest(f"sampling_params.{key} is not a known field{hint} (known: {', '.join(sorted(known))})", field=str(key))
        return cls(**wire)


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
    priority: int = 0
    """lower is admitted earlier and preempted later"""
    stream: bool = False
    """emit token deltas as they come, not only the final output"""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "prompt_token_ids", _ids("prompt_token_ids", self.prompt_token_ids))
        put(self, "continue_from", _ids("continue_from", self.continue_from))
        put(self, "forced_token_ids", _ids("forced_token_ids", self.forced_token_ids))
        put(self, "include", tuple(self.include))
        if not isinstance(self.request_id, str) or not self.request_id:
            raise BadRequest(f"request_id must be a non-empty string, got {show(self.request_id)}", field="request_id")
        _text("request_id", self.request_id)
        if not self.prompt_token_ids:
            raise BadRequest("prompt_token_ids must hold at least one id, got none", field="prompt_token_ids")
        for name in self.include:
            if name not in INCLUDES:
                raise BadRequest(f"include must name only {', '.join(INCLUDES)}; got {show(name)}", field="include")
        _integer("first_sample", self.first_sample, 0, (1 << 32) - MAX_SAMPLES, "an int in [0, 2**32 - 4096]")
        _integer("priority", self.priority, -(1 << 31), 1 << 31, "an int")
        if self.continue_from and self.params.n != 1:
            raise BadRequest(f"continue_from needs n = 1, got n = {self.params.n}", field="continue_from")
        end = len(self.prompt_token_ids)
        _integer("prompt_logprobs_start", self.prompt_logprobs_start, 0, end, f"an int in [0, {end}], the prompt's length")
        if self.prompt_logprobs_start and "prompt_logprobs" not in self.include:
            raise BadRequest("prompt_logprobs_start needs prompt_logprobs in include", field="prompt_logprobs_start")
        for name in ("stream", "score_only"):
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(f"{name} must be true or false, got {getattr(self, name)!r}", field=name)
        if self.score_only and self.continue_from:
            raise BadRequest("score_only takes forced_token_ids, not continue_from", field="continue_from")
        if self.continue_from and self.forced_token_ids:
            raise BadRequest("give continue_from or forced_token_ids, not both", field="continue_from")
        for name in ("group", "session"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise BadRequest(f"{name} must be a string or null, got {show(value)}", field=name)
            _text(name, value or "")

    def to_wire(self) -> dict[str, Any]:
        """Msgpack-able dict; `from_wire` is its inverse."""
        wire = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "params"}
        wire["params"] = self.params.to_wire()
        return wire

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> RolloutRequest:
        return cls(**{**wire, "params": SamplingParams.from_wire(wire["params"])})


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
        """Msgpack-able dict without the empty fields; `SampleOutput(**wire)` is its inverse."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}


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
    nonfinite: list[int] = field(default_factory=list)
    """indices of rows whose logits held NaN or +inf; their other values mean nothing"""
    faults: list[tuple[int, str]] = field(default_factory=list)
    """(row, words) of rows that could not be sampled for a reason of their own; their other values mean nothing"""
