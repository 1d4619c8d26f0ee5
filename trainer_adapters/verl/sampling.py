"""verl's sampling parameters in, its TokenOutput's fields out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...rollout.engine.params import SAMPLING_NAMES, SamplingParams
from ...rollout.engine.types import SampleOutput
from ...rollout.errors import BadRequest, EngineDead, PromptTooLong, RollsyncError, show
from .settings import ReplicaSettings

LIMITS = ("max_tokens", "max_new_tokens")
OURS = ("n",)
"""names of SamplingParams that a call for one sample does not take"""
KNOWN = sorted({*SAMPLING_NAMES, *LIMITS, "logprobs"} - set(OURS))


def read_params(
    given: Mapping[str, Any], prompt_tokens: int, max_model_len: int, settings: ReplicaSettings
) -> tuple[SamplingParams, bool]:
    """How to sample one response, and whether its log-probabilities are wanted.

    Without a limit of its own a response gets what prompt_length + response_length leaves, at most response_length; every limit is
    clamped to 1 at least and to the room in the context at most, as verl's other rollouts do.

    Args:
        given: temperature, top_p, top_k, repetition_penalty, logprobs (a bool), max_tokens or max_new_tokens, seed, and any other field
            of SamplingParams but n.
        max_model_len: the engine's.

    Raises:
        BadRequest: an unknown field, by its name, or a value that cannot be. PromptTooLong: no room for one token.
    """
    if unknown := [name for name in given if name not in KNOWN]:
        raise BadRequest(f"sampling_params.{unknown[0]} is not a known field (known: {', '.join(KNOWN)})", field=unknown[0])
    room = max_model_len - prompt_tokens
    if room < 1:
        raise PromptTooLong(f"the prompt has {prompt_tokens} tokens, which leaves no room in a context of {max_model_len}")
    fields = dict(given)
    wanted = fields.pop("logprobs", False)
    if not isinstance(wanted, bool):
        raise BadRequest(f"sampling_params.logprobs must be true or false, got {show(wanted)}", field="logprobs")
    limits = [name for name in LIMITS if fields.get(name) is not None]
    if len(limits) > 1:
        raise BadRequest("sampling_params.max_new_tokens says the same as max_tokens: give one of them", field="max_new_tokens")
    asked = {name: fields.pop(name, None) for name in LIMITS}
    left = settings.prompt_length + settings.response_length - prompt_tokens
    limit = asked[limits[0]] if limits else min(settings.response_length, left)
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise BadRequest(f"sampling_params.{limits[0]} must be an int, got {show(limit)}", field=limits[0])
    fields.setdefault("repetition_penalty", settings.repetition_penalty)
    fields.setdefault("ignore_eos", settings.ignore_eos)
    return SamplingParams(max_tokens=max(1, min(limit, room)), **fields), wanted


def seeded(params: SamplingParams, settings: ReplicaSettings, request_id: str, version: int) -> SamplingParams:
    """Under full_determinism a request without a seed gets one that follows from its id (which verl then keeps from run to run, and uses
    again at every step) and the weights' version."""
    if settings.seed is None or params.seed is not None:
        return params
    key = hashlib.blake2b(f"{settings.seed}/{version}/{request_id}".encode(), digest_size=8).digest()
    return replace(params, seed=int.from_bytes(key, "little"))


def token_output(sample: SampleOutput, version: int, wanted: bool, column: str) -> dict[str, Any]:
    """Fields of verl's TokenOutput.

    Args:
        sample: a final output.
        version: of the weights served now, for a sample without a token.
        wanted: whether log_probs are.

    Raises:
        RollsyncError: the sample failed; in the engine's words.
    """
    if sample.finish_reason == "error":
        raise RollsyncError(f"a sample failed: {sample.error}")
    values = getattr(sample, column)
    if len(values) != len(sample.token_ids):
        raise EngineDead(f"{len(values)} log_probs came for {len(sample.token_ids)} tokens")
    versions = [span["version"] for span in sample.weight_versions] or [version]
    return {
        "token_ids": list(sample.token_ids),
        "log_probs": list(values) if wanted else None,
        "stop_reason": {"stop": "completed", "length": "completed", "abort": "aborted"}.get(sample.finish_reason or ""),
        "extra_fields": {
            "global_steps": versions[-1],
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "weight_versions": [dict(span) for span in sample.weight_versions],
            "num_cached_tokens": sample.cached_tokens,
            "seed": sample.seed,
        },
    }


def rejected(version: int) -> dict[str, Any]:
    """Fields of the TokenOutput of a request that was turned away: nothing sampled, to be sent elsewhere or again."""
    steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), version)
    return {"token_ids": [], "log_probs": None, "stop_reason": "aborted", "extra_fields": steps}
