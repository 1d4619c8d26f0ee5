"""Makes a stock transformers model compute the engine's bits: forward passes are ours, gradients are ordinary.

Nothing of torch or transformers is replaced: the instances of one model's modules get forwards of their own, for as long as a context
lasts or for good. Residual additions, RoPE and the rotary tables stay the model's own code, whose steps the specification repeats.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ..kernels.fingerprint import failed_probes
from ..kernels.trainer_ops import TrainerOps, trainer_ops
from .errors import ParityError
from .parity_check import ParityReport, check_under
from .parity_model import LOCK, MARK, Parity
from .parity_modules import Settings

__all__ = ["Parity", "ParityError", "ParityReport", "check", "make_parity", "parity_of", "rollsync_parity"]


def unwrapped(model: Any) -> nn.Module:
    """The model inside DistributedDataParallel.

    Raises:
        ParityError: it is wrapped by something else.
    """
    from torch.nn.parallel import DistributedDataParallel

    while isinstance(model, DistributedDataParallel):
        model = model.module
    if hasattr(model, "_orig_mod"):
        raise ParityError("the model is compiled (OptimizedModule): torch.compile changes bits; pass the model it was made from")
    if not isinstance(model, nn.Module):
        raise ParityError(f"parity needs a model, got {type(model).__name__}")
    return model


def _ops(model: nn.Module, kernels: str | None) -> TrainerOps:
    """The ops for the device the model is on."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    if device == "cuda" and kernels in (None, "triton"):
        return _gpu_ops()
    if device != "cpu" or kernels == "triton":
        raise ParityError(f"the model lies on {device}: there are no {kernels or 'kernels'} for it")
    ops = trainer_ops(kernels)
    if wrong := failed_probes(getattr(ops, "library", None)):
        raise ParityError(f"the {ops.build} kernels give other bits than the specification in {', '.join(wrong)}: rebuild them")
    return ops


@lru_cache
def _gpu_ops() -> TrainerOps:
    from ..kernels.gpu.trainer import GpuTrainerOps

    return GpuTrainerOps()


def _parity(model: Any, k_shards: int, head_dtype: Any, kernels: str | None) -> Parity:
    model = unwrapped(model)
    if head_dtype not in (None, "float32", torch.float32):
        raise ParityError(f"head_dtype must be float32 or left out, as of the engine, got {head_dtype!r}")
    if k_shards not in (1, 2, 4, 8, 16):
        raise ParityError(f"k_shards must be 1, 2, 4, 8 or 16, as of the engine, got {k_shards!r}")
    found = parity_of(model)
    # No bit depends on the build: who asks for none takes the one that is there.
    ops = found.settings.ops if found is not None and kernels is None else _ops(model, kernels)
    settings = Settings(ops=ops, build=ops.build, k_shards=k_shards, head_dtype=None if head_dtype is None else "float32")
    if found is None:
        return Parity(model, settings)
    if found.settings != settings:
        raise ParityError(f"the model is under parity with {_words(found.settings)} already; {_words(settings)} was asked for")
    found.check_whole()
    return found


def _entered(model: Any, k_shards: int, head_dtype: Any, kernels: str | None) -> Parity:
    """Under parity once more."""
    with LOCK:  # two threads that come at once are to find the same one
        parity = _parity(model, k_shards, head_dtype, kernels)
        parity.install()
    return parity


def _words(settings: Settings) -> str:
    return f"k_shards={settings.k_shards}, head_dtype={settings.head_dtype}, kernels={settings.build}"


def parity_of(model: Any) -> Parity | None:
    """What `make_parity` gave for this model, or gives for a copy that was taken under parity; None if the model is stock."""
    found: Parity | None = vars(unwrapped(model)).get(MARK)
    return found


@contextmanager
def rollsync_parity(
    model: Any, *, k_shards: int = 4, head_dtype: str | torch.dtype | None = None, kernels: str | None = None
) -> Iterator[Parity]:
    """While it lasts, a stock transformers model computes the engine's bits: logits, and with `kernels.logprobs` logprobs, are those of
    an engine with the same weights and settings. Gradients are ordinary, and nothing of torch or transformers is replaced for others.

    Right- and left-padded batches and packed rows have the same bits: a sequence's places count from its own first token. Compute is
    float32 or bfloat16: that of the weights, of FSDP2's `param_dtype`, or of autocast, which then is that of the residual stream, norms and
    embedding too, as the engine's. Layers that the model recomputes (`gradient_checkpointing_enable`, torch's `checkpoint_wrapper`) are
    recomputed under parity, wherever the backward pass runs. Who calls `torch.utils.checkpoint` on the model or a part of it runs the
    backward pass inside as well, or uses `make_parity`: what it recomputes afterwards is a stock model, and nothing here sees that.

    A model's modules must stay those they were: adapters, new heads, casts and compiled layers come before or after. NEFTune and
    other hooks on its layers that come from neither torch nor a training library are refused: they may change outputs.
    One thread at a time calls a model. A copy that is taken or saved inside is under
    parity as well, and stays so; `parity_of(copy).remove()` undoes it.

    Args:
        model: an AutoModelForCausalLM (Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 text), before or after DistributedDataParallel,
            `fully_shard` or `accelerator.prepare`. Contexts on one model may lie inside each other.
        k_shards, head_dtype: the engine's `numerics.k_shards` and `numerics.head_dtype`.
        kernels: amx, avx512, avx2 or reference; by default the best here. No bit depends on it.

    Raises:
        ParityError: at once, for a module or setting that the engine's bits are not known for; when the model is called, for a batch
            or mode (a mask with holes, a cache, dropout, compiled code, ...), or a module that was replaced or changed meanwhile. It
            names what stands in the way.
        OSError: the kernels asked for do not run here.
    """
    parity = _entered(model, k_shards, head_dtype, kernels)
    try:
        yield parity
    finally:
        parity.remove()


def make_parity(model: Any, *, k_shards: int = 4, head_dtype: str | torch.dtype | None = None, kernels: str | None = None) -> Parity:
    """`rollsync_parity` for good; `.remove()` of what is returned undoes it. A copy of the model is under parity as well, and
    `parity_of(copy).remove()` undoes that."""
    return _entered(model, k_shards, head_dtype, kernels)


def check(
    model: Any,
    rollouts: Any,
    *,
    params: Any = None,
    padding: str = "right",
    batch_tokens: int = 2048,
    vocab_limit: int | None = None,
    fingerprint: str | None = None,
    dtype: str | None = None,
    library_version: str | None = None,
    weight_version: int | None = None,
    k_shards: int = 4,
    head_dtype: str | torch.dtype | None = None,
    kernels: str | None = None,
) -> ParityReport:
    """Compute rollouts again under parity, and compare every value in every bit.

    Compared are those of model_logprobs, temperature_logprobs, entropy and logprobs that the rollouts hold. `logprobs` of which the
    engine changed the logits (penalties, logit_bias), or of ids it was told to leave out without a sampling_mask that says which, are left
    out, and counted so.

    Args:
        model: as for `rollsync_parity`; may be under it already. It is run under no_grad, in the mode it is in.
        rollouts: a client's RolloutResult, or a list: of its prompts' results, of an engine's RolloutOutput, or of records of a trace.
        params: SamplingParams, or one for each prompt, where the rollouts do not hold theirs; without any, only model_logprobs are
            compared.
        padding: how sequences are laid out: "right", "left" or "packed".
        batch_tokens: of one forward pass, padding counted; a longer sequence has one to itself.
        vocab_limit: ids from here on are padding of the vocabulary, which the engine never draws (`Engine.info.vocab_size`).
        fingerprint, dtype, library_version: what the engine says of itself, where the rollouts do not.
        weight_version: of the trainer's weights. Records of a trace say which weights made them, and those of others are refused
            (unless the model is sharded over ranks);
            other rollouts hold no digest, and are found unequal.
        k_shards, head_dtype, kernels: as for `rollsync_parity`.

    Raises:
        ParityError: as `rollsync_parity`; or the two sides differ in what bits depend on, or there is nothing to compare.
    """
    return check_under(
        _parity(model, k_shards, head_dtype, kernels), rollouts, params=params, fingerprint=fingerprint, dtype=dtype,
        library_version=library_version, weight_version=weight_version, vocab_limit=vocab_limit, batch_tokens=batch_tokens, padding=padding,
    )  # fmt: skip
