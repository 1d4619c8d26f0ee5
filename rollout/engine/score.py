"""Scoring: log-probabilities of a given continuation under a given prompt, by the rows and bits that sampling it has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .params import SamplingParams
from .types import RolloutRequest

SCORED = ("model_logprobs", "temperature_logprobs")


def score_request(
    request_id: str,
    prompt_token_ids: Iterable[int],
    continuation: Iterable[int],
    params: SamplingParams | None = None,
    *,
    include: Iterable[str] = SCORED,
    **fields: Any,
) -> RolloutRequest:
    """A request whose one sample is `continuation`, every token of it scored, EOS and stop ids too, and nothing sampled.

    Args:
        params: those of the distribution that `logprobs` are to be of: temperature, truncation, penalties, bans under min_tokens. `n`,
            `max_tokens` and the rules that end a sample do not count. Under the params (and `first_sample`) it was sampled with, a
            continuation gets the bits that it had then.
        include: columns besides `logprobs`; see RolloutRequest.
        fields: others of RolloutRequest, e.g. `group`, `priority`, `prompt_logprobs_start`.

    Raises:
        BadRequest: as RolloutRequest does. `Engine.check_request` refuses what is too long, by name.
    """
    own = params or SamplingParams()
    return RolloutRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        forced_token_ids=tuple(continuation),
        params=replace(own, n=1, stop=(), seed=own.seed or 0),  # nothing is drawn: a seed would be a number wasted
        include=tuple(include),
        score_only=True,
        **fields,
    )
