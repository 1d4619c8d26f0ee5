"""How to sample, and the checks of what a caller gives. Plain Python."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ..errors import BadRequest, show, show_name
from ..fields import did_you_mean

MAX_SAMPLES = 4096
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024
MAX_IDS = 1 << 20
"""of stop_token_ids and of allowed_token_ids"""
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
            return check_integer(name, value, self.low, int(self.high), self.allowed)
        found = check_number(name, value, self.low, self.high, self.allowed)
        if self.above and found == self.low:
            raise BadRequest(f"{name} must be {self.allowed}, got {show(value)}", field=name)
        return found


def check_number(name: str, value: Any, low: float, high: float, allowed: str) -> float:
    """A float in [low, high] (finite bounds, so NaN and infinities fail), or BadRequest naming `name`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(f"{name} must be {allowed}, got {show(value)}", field=name.partition("[")[0])
    return float(value)


def check_integer(name: str, value: Any, low: int, high: int, allowed: str) -> int:
    """An int in [low, high], or BadRequest naming `name`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{name} must be {allowed}, got {show(value)}", field=name)
    return value


def check_ids(name: str, value: Any) -> tuple[int, ...]:
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


def _few_ids(name: str, value: Any) -> tuple[int, ...]:
    """`check_ids` of at most MAX_IDS."""
    if hasattr(value, "__len__") and len(value) > MAX_IDS:
        raise BadRequest(f"{name} must hold at most {MAX_IDS} ids, got {len(value)}", field=name)
    return check_ids(name, value)


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


def check_text(name: str, value: str) -> None:
    """BadRequest naming `name` for text that no wire can carry."""
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
    """how many of the likeliest ids to report at each output token, as top_token_ids and top_logprobs: 0 (none) to 20. Their logprobs are
    those of the distribution the token is drawn from; for temperature 0, of that at temperature 1, nothing truncated"""
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
        self._check_lengths()
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
            check_text("stop", s)
        put(self, "stop", stop)
        put(self, "stop_token_ids", _few_ids("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(f"{name} must be true or false, got {show(getattr(self, name))}", field=name)
        self._check_logit_changes()

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", field="min_tokens")

    def _check_logit_changes(self) -> None:
        put = object.__setattr__
        put(self, "logit_bias", _bias({} if self.logit_bias is None else self.logit_bias))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _few_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise BadRequest("allowed_token_ids must hold at least one id, or be null for all; got none", field="allowed_token_ids")

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def varied(self, **own: int) -> SamplingParams:
        """The same but for a `max_tokens` or `seed` of its own. Lists are shared, and not looked at again."""
        new, put = object.__new__(type(self)), object.__setattr__
        for f in fields(self):
            value = getattr(self, f.name)
            put(new, f.name, SAMPLING_BOUNDS[f.name].check(f.name, own[f.name]) if f.name in own else value)
        new._check_lengths()
        return new

    def to_wire(self) -> dict[str, Any]:
        """The fields that differ from their defaults, fit for msgpack and JSON; `from_wire` is its inverse."""
        wire = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default and f.name != "logit_bias"}
        if self.logit_bias:
            wire["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return wire

    @classmethod
    def from_wire(cls, wire: dict[str, Any], unlisted: tuple[str, ...] = ()) -> SamplingParams:
        """Validate a dict of fields. An unknown key is a BadRequest that lists the known ones (but for those `unlisted`)."""
        known = SAMPLING_NAMES.difference(unlisted)
        for key in wire:
            if key not in SAMPLING_NAMES:
                name = show_name(key)
                hint = f": {ELSEWHERE[key]}" if key in ELSEWHERE else did_you_mean(name, known)
                raise BadRequest(f"sampling_params.{name} is not a known field{hint} (known: {', '.join(sorted(known))})", field=name)
        return cls(**wire)


SAMPLING_NAMES = frozenset(f.name for f in fields(SamplingParams))
ELSEWHERE = {
    "forced_token_ids": "it belongs to a prompt, beside its text or token_ids",
    "continue_from": "it belongs to a prompt, beside its text or token_ids",
    "logprobs": "logprobs always come; top_logprobs is for alternatives",
    "prompt_logprobs": 'name "prompt_logprobs" in include',
    "max_new_tokens": "here it is max_tokens",
    "max_completion_tokens": "here it is max_tokens",
    "num_return_sequences": "here it is n",
    "best_of": "sample n and choose among them",
    "do_sample": "temperature 0 is greedy",
    "eos_token_id": "here it is stop_token_ids",
    "bad_words": "words cannot be banned; logit_bias takes ids",
    "truncate_prompt_tokens": "a prompt is never cut, one that is too long is refused",
    "detokenize": 'text comes only if include names "text"',
    "skip_special_tokens": "it belongs beside sampling_params, in the call",
    "structured_outputs": "output is not constrained",
    "guided_decoding": "output is not constrained",
}
"""what to do instead of what other engines' parameters are called"""
