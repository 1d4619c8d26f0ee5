"""What may be a prompt in process: text, ids, a chat, or an object with fields of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import BadRequest, show
from ..fields import did_you_mean
from .params import SAMPLING_NAMES, SamplingParams

if TYPE_CHECKING:
    from .engine import Engine

Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | dict[str, Any]
"""text, token ids, chat messages, or a prompt object as in `POST /v1/rollouts`: {"token_ids" | "text" | "messages": …} with
seed, max_tokens (which override those of params), forced_token_ids, continue_from, first_sample, prompt_logprobs_start or, for messages,
chat_template_kwargs"""

_KINDS = {"token_ids": "a list of token ids", "text": "a string", "messages": "a list of messages"}
_OWN_PARAMS = ("seed", "max_tokens")
_OWN_FIELDS = ("forced_token_ids", "continue_from", "first_sample", "prompt_logprobs_start")
_OWN = (*_OWN_PARAMS, *_OWN_FIELDS, "chat_template_kwargs")


def _prompt_ids(engine: Engine, prompt: Prompt, variables: dict[str, Any]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        ids: list[Any] = engine.tokenizer.encode(prompt)
    elif isinstance(prompt, bytes | dict) or not hasattr(prompt, "__iter__"):
        raise BadRequest(f"must be a text, a list of token ids or a list of chat messages, got {type(prompt).__name__}")
    else:
        ids = list(prompt)
        if ids and all(isinstance(item, dict) for item in ids):
            ids = engine.tokenizer.apply_chat_template(ids, **variables)
    if not ids:
        raise BadRequest("must hold at least one token, got none")
    return tuple(ids)


def split_prompt(engine: Engine, prompt: Prompt, params: SamplingParams) -> tuple[tuple[int, ...], SamplingParams, dict[str, Any]]:
    """A prompt as ids, its parameters and its own request fields. In a prompt object null is as if left out."""
    if not isinstance(prompt, dict):
        return _prompt_ids(engine, prompt, {}), params, {}
    given = {name: value for name, value in prompt.items() if value is not None}
    kinds = [kind for kind in _KINDS if kind in given]
    unknown = [name for name in prompt if name not in _KINDS and name not in _OWN]
    if len(kinds) != 1 or unknown:
        hint = did_you_mean(str(unknown[0]), (*_KINDS, *_OWN)) if unknown else ""
        hint = f": give {unknown[0]} in params" if unknown and unknown[0] in SAMPLING_NAMES else hint
        raise BadRequest(
            f"must hold one of {', '.join(_KINDS)}, and of others only {', '.join(_OWN)}; got {', '.join(map(str, prompt))}{hint}"
        )
    variables = given.get("chat_template_kwargs", {})
    if variables and (kinds != ["messages"] or not isinstance(variables, dict)):
        raise BadRequest("chat_template_kwargs must be a dict of variables, and needs messages")
    content = given[kinds[0]]
    if (kinds[0] == "text") != isinstance(content, str):
        raise BadRequest(f"{kinds[0]} must be {_KINDS[kinds[0]]}, got {show(content)}")
    own = {name: given[name] for name in _OWN_PARAMS if name in given}
    fields = {name: given[name] for name in _OWN_FIELDS if name in given}
    return _prompt_ids(engine, content, variables), replace(params, **own) if own else params, fields
