"""A TRL trainer's settings as SamplingParams: each one that TRL knows is passed on, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..rollout.engine.params import SamplingParams
from ..rollout.errors import BadRequest

DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""what a setting that is absent or None means"""
OURS = {
    "n": "num_generations says it",
    "seed": "args.seed says it; each call derives its own, or all groups would repeat",
    "logprobs": "those of the sampled tokens always come",
}
"""of SamplingParams or vLLM's, but not to be given by generation_kwargs"""
SPELLINGS = {"max_new_tokens": "max_tokens", "eos_token_id": "stop_token_ids"}
"""of transformers' generation_config, in our words"""


def sampling_params(trainer: Any) -> SamplingParams:
    """What rollouts are drawn by, read from the trainer now.

    A sample ends by the trainer's own EOS ids and by `generation_kwargs["stop_token_ids"]`, whatever the engine's model folder says.

    Raises:
        BadRequest: a setting is out of range, or generation_kwargs names what is not known here.
    """
    fields: dict[str, Any] = {}
    for name, default in DEFAULTS.items():
        value = setting(trainer, name)
        fields[name] = default if value is None else value
    fields["max_tokens"] = setting(trainer, "max_completion_length")
    if fields["max_tokens"] is not None and fields["max_tokens"] < 1:
        raise BadRequest(f"max_completion_length must be at least 1, got {fields['max_tokens']}", field="max_completion_length")
    given = _given(trainer)
    if given.get("temperature", fields["temperature"]) != fields["temperature"]:
        words = f"is {given['temperature']} and the trainer's temperature {fields['temperature']}, by which it scores: say it there alone"
        raise BadRequest(f"generation_kwargs.temperature {words}", field="temperature")
    if fields["temperature"] == 0:
        raise BadRequest("temperature must be above 0: the trainer divides logits by it", field="temperature")
    stops, own = _ids(given.pop("stop_token_ids", ())), given.get("ignore_eos", False)
    stops += () if own is True else stop_ids(trainer)
    given["ignore_eos"] = True if isinstance(own, bool) else own  # the engine's own EOS ids; what is no bool is refused below
    try:
        return SamplingParams.from_wire({**fields, **given, "stop_token_ids": tuple(dict.fromkeys(stops))})
    except BadRequest as error:
        words = str(error).replace("sampling_params.", "generation_kwargs.")
        raise BadRequest(f"the trainer's sampling settings cannot be served: {words}", field=error.field) from None


def is_plain(params: SamplingParams) -> bool:
    """Whether tokens are drawn from softmax(logits / temperature), as TRL's scorer has it: nothing cut off, no logit changed."""
    whole = params.top_p == 1.0 and params.top_k == 0 and params.min_p == 0.0 and params.min_tokens == 0
    return whole and not params.penalised and not params.logit_bias and params.allowed_token_ids is None and params.temperature > 0


def _given(trainer: Any) -> dict[str, Any]:
    """generation_kwargs in our words."""
    given: dict[str, Any] = {}
    for name, value in (getattr(trainer.args, "generation_kwargs", None) or {}).items():
        if name in OURS:
            raise BadRequest(f"generation_kwargs.{name} has no meaning here: {OURS[name]}", field=name)
        known = SPELLINGS.get(name, name)
        if known == "stop_token_ids":
            value = [*given.get(known, ()), *_ids(value)]
        given[known] = value
    return given


def setting(trainer: Any, name: str) -> Any:
    """A setting as the trainer has it, else its args; None if neither does."""
    own = getattr(trainer, name, None)
    return own if own is not None else getattr(trainer.args, name, None)


def stop_ids(trainer: Any) -> tuple[int, ...]:
    """The ids that end a completion for this trainer: TRL counts a row that ends by any other as cut off."""
    own = getattr(trainer, "eos_token_ids", None)
    if own is not None:
        return _ids(own)
    config = getattr(trainer.accelerator.unwrap_model(trainer.model), "generation_config", None)
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    return (*_ids(tokenizer.eos_token_id), *_ids(getattr(config, "eos_token_id", None)))


def _ids(value: Any) -> tuple[int, ...]:
    """None stands for the EOS of a tokenizer that has none."""
    if value is None:
        return ()
    return tuple(i for i in value if i is not None) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
