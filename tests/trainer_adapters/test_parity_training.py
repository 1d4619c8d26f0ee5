"""Training under parity: gradients, recomputed layers, autocast, accelerate; bits stay the engine's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from parity_cases import Batch, Case, equal_tokens, lay_out
from rollsync.kernels.native_lib import available_builds
from rollsync.trainer_adapters.parity import make_parity, rollsync_parity
from torch import Tensor

SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL),
    "gemma2": transformers.Gemma2Config(**SMALL, sliding_window=20, query_pre_attn_scalar=16),
    "gemma3": transformers.Gemma3TextConfig(**SMALL, sliding_window=20, layer_types=["sliding_attention", "full_attention"]),
}


def ordinary(family: str) -> Any:
    """A model without cancelling sums, so that gradients are no matter of rounding."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def padded_batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 256, (3, 50), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 30:], mask[2, :13] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[2, 13] = -100  # what would predict a row's first token is padding
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def gradients(model: Any, inputs: dict[str, Tensor], under: bool, backward_inside: bool = True) -> tuple[Tensor, Tensor]:
    """Logits and all gradients."""
    model.zero_grad()
    with rollsync_parity(model) if under else nullcontext():
        out = model(**inputs)
        if backward_inside:
            out.loss.backward()
    if not backward_inside:
        out.loss.backward()
    return out.logits.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_are_those_of_the_stock_model(family: str) -> None:
    model, inputs = ordinary(family), padded_batch()
    _, want = gradients(model, inputs, under=False)
    _, got = gradients(model, inputs, under=True)
    assert (got - want).norm() < 5e-6 * want.norm()
    half = copy.deepcopy(model)
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16()
    error = [(gradients(half, inputs, under=under)[1] - want).norm() / want.norm() for under in (True, False)]
    assert error[0] < 1.2 * error[1] + 1e-3, "further from the true gradients than the stock model in bfloat16 is"


def _reenable(model: Any, **options: Any) -> None:
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)


def _wrap(model: Any, impl: str) -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as cw

    kind = cw.CheckpointImpl[impl]
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = cw.checkpoint_wrapper(layer, checkpoint_impl=kind)


CHECKPOINTS: dict[str, Callable[[Any], None]] = {
    "transformers": partial(_reenable, use_reentrant=False),
    "transformers_reentrant": partial(_reenable, use_reentrant=True),
    "torch_wrapper": partial(_wrap, impl="NO_REENTRANT"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_recomputed_layers_have_the_same_bits_wherever_backward_runs(how: str, dtype: str, make_case: Callable[..., Case]) -> None:
    case = make_case("gemma2" if how == "transformers" else "llama", dtype)
    batch = lay_out(case, "left")
    inputs: dict[str, Any] = {**batch.inputs, "labels": batch.inputs["input_ids"], "use_cache": False}
    logits, want = gradients(case.model().train(), inputs, under=True)
    equal, total = equal_tokens(case, batch, logits)
    assert equal == total
    model = case.model().train()
    CHECKPOINTS[how](model)
    if how == "transformers_reentrant":  # some input must want a gradient
        model.enable_input_require_grads()
    for backward_inside in (True, False):
        again, got = gradients(model, inputs, under=True, backward_inside=backward_inside)
        assert torch.equal(again, logits) and torch.equal(got, want)
    assert not torch.equal(gradients(model, inputs, under=False)[1], want)


def test_checkpointing_may_begin_inside_the_context(make_case: Callable[..., Case]) -> None:
    case = make_case("llama", "float32")
    inputs = {**lay_out(case, "right").inputs, "labels": lay_out(case, "right").inputs["input_ids"]}
    _, want = gradients(case.model().train(), inputs, under=True)
    model = case.model().train()
    with rollsync_parity(model):
        model.activation_checkpointing_enable()
        loss = model(**inputs).loss
    second = padded_batch()
    with rollsync_parity(model):
        other = model(**second).loss  # another batch in between: each recomputes with its own sequences
    loss.backward()
    assert torch.equal(torch.cat([p.grad.flatten() for p in model.parameters()]), want)
    other.backward()
    assert not any(type(layer._gradient_checkpointing_func).__module__.startswith("rollsync") for layer in model.model.layers)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_float32_masters_under_autocast_have_the_bfloat16_engines_bits(family: str, make_case: Callable[..., Case]) -> None:
    case = make_case(family, "bfloat16")
    model, batch = case.model(dtype=torch.float32).train(), lay_out(case, "left")
    model.activation_checkpointing_enable()
    with rollsync_parity(model), torch.autocast("cpu", torch.bfloat16):
        logits = model(**batch.inputs).logits
    equal, total = equal_tokens(case, batch, logits)
    assert equal == total and logits.dtype == torch.bfloat16
    logits.float().logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_accelerate_prepares_a_model_before_or_after(make_case: Callable[..., Case]) -> None:
    from accelerate import Accelerator

    case = make_case("gemma2", "bfloat16")
    batch, accelerator = lay_out(case, "right"), Accelerator(cpu=True, mixed_precision="bf16")

    def check(model: Any) -> None:
        logits = model(**batch.inputs).logits
        equal, total = equal_tokens(case, batch, logits)
        assert equal == total and logits.dtype == torch.float32

    prepared = accelerator.prepare(case.model(dtype=torch.float32))
    with rollsync_parity(prepared):
        check(prepared)
    assert equal_tokens(case, batch, prepared(**batch.inputs).logits)[0] < sum(map(len, case.samples))
    model = case.model(dtype=torch.float32)
    make_parity(model)
    check(accelerator.prepare(model))


def test_frozen_weights_and_given_embeddings(make_case: Callable[..., Case]) -> None:
    case = make_case("llama", "float32")
    model, batch = case.model(), lay_out(case, "right")
    model.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    embeds = model.get_input_embeddings()(batch.inputs["input_ids"]).requires_grad_()
    with rollsync_parity(model):
        logits = model(inputs_embeds=embeds, attention_mask=batch.inputs["attention_mask"]).logits
    equal, total = equal_tokens(case, batch, logits)
    assert equal == total
    logits.square().sum().backward()
    assert embeds.grad is not None and embeds.grad.any() and model.model.norm.weight.grad.any()
    assert model.lm_head.weight.grad is None


@pytest.mark.parametrize("kernels", [*available_builds(), "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_build_has_the_same_bits(kernels: str, dtype: str, make_case: Callable[..., Case]) -> None:
    case = make_case("gemma2", dtype)
    model, batch = case.model(), lay_out(case, "packed")
    with torch.no_grad(), rollsync_parity(model, kernels=kernels):
        equal, total = equal_tokens(case, batch, model(**batch.inputs).logits)
    assert equal == total


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {"k_shards": 1}), ("gemma2", {"k_shards": 2}), ("llama", {"head_dtype": "float32"}), ("gemma2", {"head_dtype": "float32"}),
     ("llama", {"tp": 2})],
    ids=str,
)  # fmt: skip
def test_the_engines_settings_are_the_trainers(family: str, options: dict[str, Any], make_case: Callable[..., Case]) -> None:
    case = make_case(family, "bfloat16", **options)
    model, batch = case.model(), lay_out(case, "right")
    own = {name: value for name, value in options.items() if name != "tp"}
    torch.set_num_threads(2)
    with torch.no_grad(), rollsync_parity(model, **own):
        logits = model(**batch.inputs).logits
    equal, total = equal_tokens(case, batch, logits)
    assert equal == total and logits.dtype == (torch.float32 if "head_dtype" in options else torch.bfloat16)


def test_packed_by_lengths(make_case: Callable[..., Case]) -> None:
    """As transformers' own collator for packed rows gives them."""
    case = make_case("llama", "float32")
    batch: Batch = lay_out(case, "packed")
    ends = torch.tensor([0, *map(len, case.sequences)]).cumsum(0).to(torch.int32)
    inputs = {"input_ids": batch.inputs["input_ids"], "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    model = case.model()
    with torch.no_grad(), rollsync_parity(model):
        for extra in ({}, {"position_ids": batch.inputs["position_ids"]}):
            equal, total = equal_tokens(case, batch, model(**inputs, **extra).logits)
            assert equal == total
