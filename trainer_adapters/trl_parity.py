"""TRL's scorer with the engine's bits: its trainers ask the model for logprobs by `fused_lm_head=True`, and get the engine's.

B rows of T places, D hidden width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.fingerprint import numerics_fingerprint
from ..kernels.logprobs import hidden_token_logprobs_and_entropy
from .errors import ParityError
from .parity import make_parity, parity_of
from .parity_model import Parity


def score_by_engine(trainer: Any, *, k_shards: int = 4, head_dtype: str | None = None) -> Callable[[], None]:
    """Put a TRL trainer's model under parity for good, and have it score by the engine's logprobs: `sampling_logp_difference` is 0.

    The reference model, where there is one, comes under parity too. The temperature is read from the trainer at each call.

    Args:
        trainer: a GRPOTrainer or RLOOTrainer of TRL 1.15 or later.
        k_shards, head_dtype: the engine's `numerics.k_shards` and `numerics.head_dtype`.

    Returns:
        What undoes it.

    Raises:
        ParityError: the trainer, its model or a setting is none that the engine's bits are known for; it names what.
    """
    if getattr(trainer.args, "cast_lm_head_to_fp32", False):
        raise ParityError(
            "cast_lm_head_to_fp32 trains a float32 head on another trunk, which no engine has: leave it off; for logits that are not "
            "rounded, start the engine with numerics.head_dtype float32 and say so by parity={'head_dtype': 'float32'}"
        )
    models = [m for m in (trainer.model, getattr(trainer, "ref_model", None)) if m is not None]
    models = [trainer.accelerator.unwrap_model(model) for model in models]
    for model in models:
        _check_model(trainer, model)
    with contextlib.ExitStack() as undo:
        for model in models:
            undo.callback(make_parity(model, k_shards=k_shards, head_dtype=head_dtype).remove)
            before = vars(model)["forward"]
            if not getattr(before, "scores_by_engine", False):
                vars(model)["forward"] = types.MethodType(_scoring(before, lambda: float(trainer.temperature)), model)
                undo.callback(vars(model).__setitem__, "forward", before)
        return undo.pop_all().close


def _check_model(trainer: Any, model: Any) -> None:
    if hasattr(model, "peft_config"):
        raise ParityError("the model has adapters (PEFT): they are merged for the engine, and merged weights give other bits than adapters")
    if not _has_fused_head(model):
        raise ParityError(
            f"parity needs a trainer that scores by a fused head on the model (GRPOTrainer and RLOOTrainer of TRL 1.15 and later); "
            f"{type(trainer).__name__} of this TRL has put none on its {type(model).__name__}"
        )


def _has_fused_head(model: Any) -> bool:
    """Whether TRL has put its head on: an own forward that takes the keyword."""
    own = vars(model).get("forward")
    if own is None:
        return False
    while own is not None:  # accelerate wraps it again
        code = getattr(getattr(own, "__func__", own), "__code__", None)
        if code is not None and "fused_lm_head" in code.co_varnames:
            return True
        own = getattr(own, "__wrapped__", None)
    return False


def check_numerics(model: Any, fingerprint: str, dtype: str, trained_in: torch.dtype) -> None:
    """Whether an engine's bits can be those of a model under parity.

    Args:
        fingerprint, dtype: what the engine says of itself.
        trained_in: dtype the model computes in.

    Raises:
        ParityError: they cannot; it says what differs.
    """
    settings = _parity_of(model).settings
    ours = numerics_fingerprint(getattr(settings.ops, "library", None), settings.k_shards, settings.head_dtype)
    if fingerprint != ours:
        words = f"numerics.k_shards {settings.k_shards}, numerics.head_dtype {settings.head_dtype}"
        raise ParityError(f"the engine's numerics are {fingerprint} and the trainer's are {ours} ({words}): start the engine with these")
    name = str(trained_in).removeprefix("torch.")
    if dtype != name:
        raise ParityError(f"the engine computes in {dtype} and the trainer in {name}: start the engine with dtype {name}")


def _scoring(forward: Callable[..., Any], temperature: Callable[[], float]) -> Callable[..., Any]:
    """`forward` but for calls with `fused_lm_head=True`, which score by the engine's head."""

    @functools.wraps(forward)
    def scoring(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return forward(*args, **kwargs)
        return _score(self, temperature(), args, kwargs)

    scoring.scores_by_engine = True  # type: ignore[attr-defined]
    return scoring


def _score(model: Any, temperature: float, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What TRL's fused head returns: log_probs and entropy [B, T - 1] float32, 0 where a label is -100."""
    from trl.trainer.utils import FusedCausalLMOutput

    if kwargs.get("output_router_logits"):
        raise ParityError("output_router_logits: no model with experts is known")
    labels, shifted, count = (kwargs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch"))
    hidden = model.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
    if shifted is None:
        hidden, shifted = hidden[:, :-1], labels[:, 1:]
    mask = shifted != -100
    values = _logprobs(model, hidden[mask], shifted[mask], temperature)
    logprobs, entropies = (x.new_zeros(mask.shape).masked_scatter(mask, x) for x in values)
    loss = -logprobs.sum() / (mask.sum().clamp(min=1) if count is None else count)
    return FusedCausalLMOutput(loss=loss, log_probs=logprobs, entropy=entropies, label_mask=mask)


def _logprobs(model: Any, hidden_TD: Tensor, ids_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    parity = _parity_of(model)
    (head,) = parity.heads
    hidden_TD, weight_VD = head.operands(hidden_TD)
    settings = parity.settings
    return hidden_token_logprobs_and_entropy(
        hidden_TD, weight_VD, ids_T, temperature=temperature, softcap=head.cap, head_dtype=settings.head_dtype,
        build=settings.build,
    )  # fmt: skip


def _parity_of(model: Any) -> Parity:
    parity = parity_of(model)
    if parity is None:
        raise ParityError("the trainer scores by the engine's head, but parity was taken off its model: attach it again")
    return parity
