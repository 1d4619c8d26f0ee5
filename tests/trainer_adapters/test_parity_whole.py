"""A model under parity stays so in every module, or says that it does not; so do copies of it, and what comes after failures."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from rollsync.kernels.trainer_ops import trainer_ops
from rollsync.trainer_adapters.parity import ParityError, make_parity, parity_of, rollsync_parity
from test_parity_refusals import IDS, Lora, _everything, tiny
from torch import nn
from torch.nn.utils import parametrize


def _at(path: str, value: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Puts something in the place of a module or an attribute."""

    def change(model: Any) -> None:
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, name, value(getattr(owner, name, None)))

    return change


def _linear_like(old: nn.Linear) -> nn.Linear:
    return Lora(old.in_features, old.out_features, bias=False)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "head": (_at("lm_head", _linear_like), r"lm_head \(Lora\) was put there under parity"),
    "adapter": (_at("model.layers.1.self_attn.q_proj", _linear_like), r"model\.layers\.1\.self_attn\.q_proj \(Lora\) was put there"),
    "resized": (lambda m: m.resize_token_embeddings(300, mean_resizing=False), r"\(\w+\) was put there under parity"),
    "layer": (_at("model.layers.0", copy.deepcopy), r"model\.layers\.0 \(LlamaDecoderLayer\) was put there"),
    "layers swapped": (lambda m: m.model.layers.insert(0, m.model.layers.pop(1)), r"model\.layers\.0 \(LlamaDecoderLayer\) was put there"),
    "layer lost": (lambda m: m.model.layers.pop(1), r"model\.layers \(ModuleList\) lost a LlamaDecoderLayer"),
    "new module": (_at("model.layers.0.extra", lambda _: nn.Dropout(0.1)), r"model\.layers\.0\.extra \(Dropout\) was put there"),
    "backbone": (_at("model", lambda old: type(old)(old.config)), "model was replaced after the model came under parity"),
    "parametrized": (
        lambda m: parametrize.register_parametrization(m.model.layers[0].mlp.up_proj, "weight", nn.Identity()),
        r"up_proj\.parametrizations \(ModuleDict\) was put there",
    ),
    "forward of ours": (_at("model.norm.forward", lambda old: lambda x: old(x)), r"model\.norm \(LlamaRMSNorm\) was given another forward"),
    "forward of the stock": (
        lambda m: setattr(m.model.layers[0], "forward", MethodType(type(m.model.layers[0]).forward, m.model.layers[0])),
        r"model\.layers\.0 \(LlamaDecoderLayer\) was given another forward",
    ),
    "no forward": (lambda m: vars(m.lm_head).pop("forward"), r"lm_head \(Linear\) was given another forward"),
    "class": (
        lambda m: setattr(m.model.layers[0], "__class__", type("Other", (type(m.model.layers[0]),), {})),
        r"model\.layers\.0 \(Other\) was a LlamaDecoderLayer",
    ),
    "attention": (_at("model.layers.1.self_attn.config", copy.copy), "the config of a LlamaAttention was replaced"),
    "compiled": (lambda m: m.model.layers[1].compile(backend="eager"), r"model\.layers\.1 \(LlamaDecoderLayer\) was compiled under parity"),
    "cast": (lambda m: m.bfloat16(), r"rotary_emb\.\w*inv_freq is torch\.bfloat16"),
    "cap": (lambda m: setattr(m.config, "final_logit_softcapping", 5.0), r"final_logit_softcapping was 0\.0 .* and is 5\.0"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_is_changed_under_parity_is_refused_by_name(name: str) -> None:
    change, words = CHANGES[name]
    model = tiny()
    parity = make_parity(model)
    model(IDS)
    change(model)
    with pytest.raises(ParityError, match=words):
        model(IDS)
    with pytest.raises(ParityError, match=words), rollsync_parity(model):
        raise AssertionError("the older parity was found whole")
    parity.remove()
    assert parity_of(model) is None


def test_what_changes_no_bit_may_come_later() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = tiny().train()
    with rollsync_parity(model):
        want = model(IDS, use_cache=False).logits
        model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
        model.forward = (lambda old: lambda *args, **kwargs: old(*args, **kwargs))(model.forward)
        got = model(IDS, use_cache=False).logits
    got.sum().backward()
    assert torch.equal(got, want)


def test_a_capped_model_outlives_calls_that_fail() -> None:
    """Whatever pre-hook raises, before ours or after it."""
    model = tiny("gemma2", final_logit_softcapping=4.0)
    config, fail = model.config, [True]

    def boom(*_: Any) -> None:
        if fail[0]:
            raise RuntimeError("boom")

    boom.__module__ = "accelerate.hooks"  # those of others are refused on layers
    before = model.register_forward_pre_hook(boom)
    with rollsync_parity(model):
        want = None
        for hook in (before, model.register_forward_pre_hook(boom, prepend=True), model.model.layers[1].register_forward_hook(boom)):
            fail[0] = True
            with pytest.raises(RuntimeError, match="boom"):
                model(IDS)
            assert model.config is config and config.final_logit_softcapping == 4.0
            fail[0] = False
            logits = model(IDS).logits
            want = logits if want is None else want
            assert torch.equal(logits, want) and logits.abs().max() <= 4.0
            hook.remove()
    assert model.config is config


def test_one_build_is_one_setting(tmp_path: Path) -> None:
    build = trainer_ops().build
    assert trainer_ops(None) is trainer_ops() is trainer_ops(build)
    model = tiny()
    parity = make_parity(model, kernels="reference")
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (model, loaded, copy.deepcopy(model)):
        for kernels in ("reference", None):
            with rollsync_parity(other, kernels=kernels) as found:
                assert found is parity_of(other)
    if build != "reference":
        words = f"kernels=reference already; .*kernels={build} was asked for"
        with pytest.raises(ParityError, match=words), rollsync_parity(model, kernels=build):
            raise AssertionError("it was accepted")
    parity.remove()
    with rollsync_parity(model), rollsync_parity(model, kernels=build):
        model(IDS)


FRESH = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
ids, want = torch.load(sys.argv[2])
torch.set_num_threads(1)
assert torch.equal(model(ids).logits, want)
"""


def test_a_saved_model_computes_in_a_fresh_process(tmp_path: Path) -> None:
    model = tiny()
    make_parity(model)
    torch.save(model, tmp_path / "model.pt")
    torch.save((IDS, model(IDS).logits.detach()), tmp_path / "want.pt")
    argv = [sys.executable, "-c", FRESH, str(tmp_path / "model.pt"), str(tmp_path / "want.pt")]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


def test_a_copy_taken_inside_can_be_undone() -> None:
    model = tiny("gemma2", final_logit_softcapping=4.0)
    stock = model(IDS).logits
    with rollsync_parity(model), rollsync_parity(model):
        ours, copied = model(IDS).logits, copy.deepcopy(model)
    assert parity_of(model) is None and torch.equal(model(IDS).logits, stock)
    parity = parity_of(copied)
    assert parity is not None and torch.equal(copied(IDS).logits, ours)
    parity.remove()
    assert torch.equal(copied(IDS).logits, stock) and not torch.equal(stock, ours)
    assert _everything(copied).keys() == _everything(model).keys()
    assert not copied._forward_pre_hooks and not copied.model._forward_pre_hooks and not copied._forward_hooks
