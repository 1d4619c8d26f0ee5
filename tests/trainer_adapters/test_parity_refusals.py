"""What parity refuses, by name, and that a model is afterwards as it was."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from parity_cases import Case, lay_out
from rollsync.trainer_adapters.parity import ParityError, make_parity, rollsync_parity
from test_parity_training import CONFIGS, SMALL
from torch import Tensor, nn

IDS = torch.arange(3, 13).repeat(2, 1)


def tiny(family: str = "llama", **changes: Any) -> Any:
    config = copy.deepcopy(CONFIGS[family])
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


class Lora(nn.Linear):
    """A Linear that adds something of its own."""


def _set(path: str, make: Callable[[nn.Module], Any]) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, name, make(getattr(owner, name)))
        return model

    return change


def _own_forward(model: Any) -> Any:
    norm = model.model.norm
    norm.forward = MethodType(lambda self, x: x, norm)
    return model


def _compiled_layer(model: Any) -> Any:
    model.model.layers[1].compile(backend="eager")
    return model


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "lora": (
        lambda: _set("model.layers.0.self_attn.q_proj", lambda m: Lora(64, 128, bias=False))(tiny()),
        r"layers\.0\.self_attn\.q_proj is a .*Lora",
    ),
    "norm": (lambda: _set("model.norm", lambda m: nn.RMSNorm(64))(tiny()), r"model\.norm is a torch\.nn\.modules\.normalization\.RMSNorm"),
    "activation": (lambda: tiny(hidden_act="gelu"), r"mlp\.act_fn is a .*GELUActivation"),
    "another model's norm": (lambda: _set("model.norm", lambda m: tiny("gemma2").model.norm)(tiny()), r"model\.norm is a .*Gemma2RMSNorm"),
    "extra layer": (lambda: _set("model.dropout", lambda m: nn.Dropout(0.1))(_with_slot(tiny())), r"model\.dropout is a .*Dropout"),
    "own forward": (lambda: _own_forward(tiny()), r"model\.norm \(LlamaRMSNorm\) has a forward of its own, put there by .*refusals"),
    "compiled layer": (lambda: _compiled_layer(tiny()), r"model\.layers\.1 .*is compiled: torch\.compile changes bits"),
    "compiled": (lambda: torch.compile(tiny(), backend="eager"), r"OptimizedModule"),
    "architecture": (
        lambda: transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64)),
        r"no parity for transformers\.models\.gpt2\.modeling_gpt2\.GPT2LMHeadModel",
    ),
    "cast": (lambda: tiny().to(torch.bfloat16), r"rotary_emb\.inv_freq is torch\.bfloat16"),
    "meta": (lambda: tiny().to("meta"), r"the model lies on meta: there are no kernels for it"),
    "not a model": (lambda: 3, r"parity needs a model, got int"),
    "max_norm": (lambda: _max_norm(tiny()), r"model\.embed_tokens\.max_norm is 1\.0"),
    "bidirectional": (lambda: _bidirectional(tiny()), r"self_attn attends to later tokens"),
}


def _with_slot(model: Any) -> Any:
    model.model.dropout = None
    return model


def _max_norm(model: Any) -> Any:
    model.model.embed_tokens.max_norm = 1.0
    return model


def _bidirectional(model: Any) -> Any:
    model.model.layers[0].self_attn.is_causal = False
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_no_stock_model_is_refused_by_name(name: str) -> None:
    make, words = MODELS[name]
    with pytest.raises(ParityError, match=words), rollsync_parity(make()):
        raise AssertionError("it was accepted")


def _mask(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


TEN = torch.arange(10)
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "hole": ({"attention_mask": _mask([1] * 10, [1] * 4 + [0] + [1] * 5)}, "attention_mask has a hole in row 1"),
    "document numbers": ({"attention_mask": _mask([1] * 5 + [2] * 5, [1] * 10)}, "numbers other than 0 and 1: .* position_ids"),
    "4d": ({"attention_mask": torch.zeros(2, 1, 10, 10)}, r"attention_mask must be \[2, 10\] .* got \[2, 1, 10, 10\]"),
    "longer mask": ({"attention_mask": torch.ones(2, 12)}, r"attention_mask must be \[2, 10\] as the tokens are, got \[2, 12\]"),
    "positions": ({"position_ids": TEN[None] + 1}, "row 0, place 0 says 1, but it is token 0 of its sequence"),
    "positions of left padding": (
        {"attention_mask": _mask([0, 0] + [1] * 8, [1] * 10), "position_ids": TEN.repeat(2, 1)},
        "row 0, place 2 says 2, but it is token 0",
    ),
    "positions' shape": ({"position_ids": TEN[None, :5]}, r"position_ids must be \[2, 10\]"),
    "lengths of rows": ({"cu_seq_lens_q": torch.tensor([0, 4, 10])}, "cu_seq_lens_q needs one packed row, got 2 rows"),
    "attentions": ({"output_attentions": True}, "output_attentions"),
    "past": ({"past_key_values": "a cache"}, "holds tokens of an earlier call"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_have_the_engines_bits_is_refused(name: str) -> None:
    inputs, words = CALLS[name]
    with pytest.raises(ParityError, match=words), rollsync_parity(tiny("qwen3")) as parity:
        parity.model(IDS, **inputs)


def test_lengths_must_fit_the_row() -> None:
    row, two = IDS[:1], torch.tensor([0, 4, 10])
    with rollsync_parity(tiny()) as parity:
        for lengths, words in (([0, 4, 9], "rise from 0 to the 10 tokens"), ([0, 6, 4, 10], "rise from 0")):
            with pytest.raises(ParityError, match=words):
                parity.model(row, cu_seq_lens_q=torch.tensor(lengths))
        with pytest.raises(ParityError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
            parity.model(row, cu_seq_lens_q=two, cu_seq_lens_k=torch.tensor([0, 5, 10]))
        with pytest.raises(ParityError, match="row 0, place 4 says 4, but it is token 0"):
            parity.model(row, cu_seq_lens_q=two, position_ids=TEN[None])


def test_settings_that_change_bits_as_it_runs_are_refused() -> None:
    with rollsync_parity(tiny(attention_dropout=0.1).train()) as parity:
        with pytest.raises(ParityError, match=r"LlamaAttention: attention_dropout is 0\.1 in training mode"):
            parity.model(IDS)
        parity.model.eval()(IDS)
    with rollsync_parity(tiny()) as parity:
        with pytest.raises(ParityError, match=r"would compute in torch\.float16"), torch.autocast("cpu", torch.float16):
            parity.model(IDS)
        with pytest.raises(ParityError, match="holds tokens of an earlier call"):
            parity.model(IDS, past_key_values=parity.model(IDS, use_cache=True).past_key_values)
        parity.model.model.norm.weight.data = parity.model.model.norm.weight.data.bfloat16()
        with pytest.raises(ParityError, match=r"model\.norm has torch\.bfloat16 weights and got torch\.float32"):
            parity.model(IDS)
    capped = tiny("gemma2", final_logit_softcapping=4.0)
    with rollsync_parity(capped) as parity, pytest.raises(ParityError, match="cap the logits a second time"):
        parity.model.lm_head(torch.zeros(1, 64))
    long = {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    with rollsync_parity(tiny(**long)) as parity, pytest.raises(ParityError, match=r"17 tokens .* max_position_embeddings is 16"):
        parity.model(torch.arange(17)[None])


def test_a_model_compiled_afterwards_is_refused_when_it_runs() -> None:
    model = tiny()
    compiled = torch.compile(model, backend="eager")
    with rollsync_parity(model), pytest.raises(ParityError, match="runs in compiled code"):
        compiled(IDS)


def test_one_model_has_one_parity_at_a_time() -> None:
    model = tiny()
    with rollsync_parity(model) as outer, rollsync_parity(model) as inner:
        assert inner is outer
        words = r"under parity with k_shards=4, .* k_shards=2, .* was asked for"
        with pytest.raises(ParityError, match=words), rollsync_parity(model, k_shards=2):
            pass
    for options, words in (({"k_shards": 3}, "k_shards must be"), ({"head_dtype": "float16"}, "head_dtype must be float32")):
        with pytest.raises(ParityError, match=words), rollsync_parity(model, **options):
            pass


def _everything(model: Any) -> dict[str, Any]:
    """All that hangs on a model's modules, by name, objects by identity."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            plain = dict(value) if isinstance(value, dict) else value
            found[f"{name}.{key}"] = sorted(f"{k}:{id(v)}" for k, v in plain.items()) if isinstance(plain, dict) else id(plain)
    return found


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_a_model_is_as_it_was(family: str, fails: bool) -> None:
    model = tiny(family).train()
    model.activation_checkpointing_enable()
    config, weights = copy.deepcopy(model.config.to_dict()), {k: v.clone() for k, v in model.state_dict().items()}
    before, stock = _everything(model), model(IDS).logits
    with pytest.raises(RuntimeError) if fails else nullcontext(), rollsync_parity(model):
        assert not torch.equal(model(IDS).logits, stock)
        assert model.config.to_dict() == config  # what would be saved meanwhile
        if fails:
            raise RuntimeError
    assert _everything(model) == before and model.config.to_dict() == config
    assert torch.equal(model(IDS).logits, stock)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


def test_for_good_and_undone(make_case: Callable[..., Case]) -> None:
    """A copy made meanwhile computes with its own weights; a saved one too."""
    case = make_case("llama", "bfloat16")
    model, inputs = case.model(), lay_out(case, "right").inputs
    before = _everything(model)
    parity = make_parity(model)
    logits = model(**inputs).logits
    copied = copy.deepcopy(model)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copied, loaded):
        assert torch.equal(other(**inputs).logits, logits)
        with torch.no_grad():
            other.model.layers[0].mlp.up_proj.weight.mul_(2)
        assert not torch.equal(other(**inputs).logits, logits)
    assert torch.equal(model(**inputs).logits, logits)
    parity.remove()
    assert _everything(model) == before and not torch.equal(model(**inputs).logits, logits)
    with pytest.raises(ParityError, match="is not under parity"):
        parity.remove()


def test_a_second_model_with_the_same_config_stays_stock() -> None:
    model = tiny()
    other = type(model)(model.config)
    stock = other(IDS).logits
    with rollsync_parity(model):
        assert torch.equal(other(IDS).logits, stock)


def test_small_heads_and_rows_without_a_token() -> None:
    config = transformers.LlamaConfig(**{**SMALL, "head_dim": 6})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with rollsync_parity(model):
        logits = model(IDS, attention_mask=_mask([0] * 10, [1] * 10)).logits
        assert logits.isfinite().all() and torch.equal(logits[1], model(IDS[1:]).logits[0])
