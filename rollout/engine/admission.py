"""What a model's size allows a request to hold, checked before anything of it is made."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import BadRequest, PromptTooLong
from .params import SamplingParams
from .runner_info import RunnerInfo
from .types import RolloutRequest

MAX_BANNED_IDS = 64
"""ids that a row may not draw (EOS and stop ids under min_tokens)"""


def check_ids(field: str, ids: Sequence[int], limit: int, what: str) -> None:
    """BadRequest naming the first of `ids` that is not below `limit`."""
    if ids and max(ids) >= limit:
        i = next(i for i, v in enumerate(ids) if v >= limit)
        raise BadRequest(f"{field}[{i}] is {ids[i]}; {what} are 0 to {limit - 1}", field=field)


class Rules:
    """What follows from params for every sample, whatever the prompt: checked and made once for requests that share their lists.

    Raises:
        BadRequest: an id that the model cannot sample, too many that end a sample under min_tokens, or nothing left to sample.
    """

    __slots__ = ("banned_ids", "logit_bias", "params", "stop_ids")

    def __init__(self, params: SamplingParams, info: RunnerInfo) -> None:
        self.params = params
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(info.eos_token_ids))
        _check_params(params, self.stop_ids, info)
        self.banned_ids = tuple(sorted(self.stop_ids)) if params.min_tokens else ()
        self.logit_bias = tuple(params.logit_bias.items())

    def hold_for(self, params: SamplingParams) -> bool:
        """Whether they are those of `params` too. False may also mean that nobody looked closely."""
        mine = self.params
        return params is mine or (
            params.stop_token_ids is mine.stop_token_ids
            and params.allowed_token_ids is mine.allowed_token_ids
            and params.logit_bias is mine.logit_bias
            and (params.min_tokens, params.ignore_eos) == (mine.min_tokens, mine.ignore_eos)
        )


def check_request(spec: RolloutRequest, info: RunnerInfo, last: Rules | None = None) -> Rules:
    """What a model's size forbids: ids outside its vocabulary, a prompt that can never fit. Returns `last` if it holds for this one too.

    Raises:
        BadRequest: an id is out of range; names the field and the allowed range.
        PromptTooLong: the prompt and one token exceed the context or the KV pool; says how much room there is.
    """
    check_ids("prompt_token_ids", spec.prompt_token_ids, info.embed_size, "ids the model can be fed")
    check_ids("continue_from", spec.continue_from, info.embed_size, "ids the model can be fed")
    check_ids("forced_token_ids", spec.forced_token_ids, info.embed_size, "ids the model can be fed")
    rules = last if last is not None and last.hold_for(spec.params) else Rules(spec.params, info)
    _check_length(spec, info)
    return rules


def _check_params(params: SamplingParams, banned: frozenset[int], info: RunnerInfo) -> None:
    check_ids("stop_token_ids", params.stop_token_ids, info.vocab_size, "ids the model can sample")
    check_ids("allowed_token_ids", params.allowed_token_ids or (), info.vocab_size, "ids the model can sample")
    beyond = next((token for token in params.logit_bias if token >= info.vocab_size), None)
    if beyond is not None:
        raise BadRequest(f"logit_bias[{beyond}]: ids the model can sample are 0 to {info.vocab_size - 1}", field="logit_bias")
    if params.min_tokens and len(banned) > MAX_BANNED_IDS:
        raise BadRequest(
            f"stop_token_ids with min_tokens may name at most {MAX_BANNED_IDS} ids, the model's EOS ids included; got {len(banned)}",
            field="stop_token_ids",
        )
    if params.min_tokens and params.allowed_token_ids is not None and banned.issuperset(params.allowed_token_ids):
        raise BadRequest(
            "allowed_token_ids must hold an id that does not end the sample (an EOS id or one of stop_token_ids): min_tokens = "
            f"{params.min_tokens} leaves nothing to sample",
            field="allowed_token_ids",
        )


def _check_length(spec: RolloutRequest, info: RunnerInfo) -> None:
    prompt_tokens = len(spec.prompt_token_ids)
    if spec.score_only:
        new, asked = len(spec.forced_token_ids), f"the continuation's {len(spec.forced_token_ids)}"
    else:
        new, asked = (0, "max_tokens 0") if spec.params.max_tokens == 0 else (1, "one new token")
    pool_tokens = info.num_blocks * info.block_tokens
    for limit, what in ((info.max_model_len, "the context"), (pool_tokens, "the KV pool")):
        if prompt_tokens + new > limit:
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens; {what} of {limit} tokens allows at most {max(0, limit - new)} (with {asked})",
                field="prompt_token_ids" if prompt_tokens >= limit or not spec.score_only else "forced_token_ids",
            )
