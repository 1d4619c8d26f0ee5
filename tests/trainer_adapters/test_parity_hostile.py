"""What others do to a model under parity: hooks, autocast on embeddings, interrupts and threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from rollsync.trainer_adapters.parity import Parity, ParityError, make_parity, parity_of, rollsync_parity
from test_parity_refusals import IDS, tiny


def _double(module: Any, args: Any, output: Any) -> Any:
    return output * 2


def test_hooks_that_may_change_bits_are_refused() -> None:
    from transformers.integrations.neftune import activate_neftune

    model = tiny().train()
    model.enable_input_require_grads()  # a library's, which changes no value
    with rollsync_parity(model):
        model(IDS)
        hook = model.model.layers[0].mlp.up_proj.register_forward_hook(_double)
        with pytest.raises(ParityError, match=r"up_proj \(Linear\) has a forward hook, .*_double"):
            model(IDS)
        hook.remove()
        handle: Any = activate_neftune(model, 5.0)
        with pytest.raises(ParityError, match=r"embed_tokens \(\w+\) adds NEFTune noise"):
            model(IDS)
        model.eval()(IDS)  # it adds none there
    handle.remove() if hasattr(handle, "remove") else None


def test_float32_embeddings_under_autocast_are_the_bfloat16_residual_stream() -> None:
    model = tiny().float()
    embeds = model.get_input_embeddings()(IDS).detach()
    with rollsync_parity(model), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(model(inputs_embeds=embeds).logits, model(IDS).logits)


def test_an_interrupted_forward_leaves_the_config_whole() -> None:
    model = tiny("gemma2")
    cap = model.config.final_logit_softcapping
    assert cap

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    parity = make_parity(model)
    for undo in (lambda: model(IDS), parity.remove):
        hook = model.register_forward_pre_hook(interrupt)  # runs after ours
        with pytest.raises(KeyboardInterrupt):
            model(IDS)
        hook.remove()
        undo()
        assert model.config.final_logit_softcapping == cap


def test_threads_that_enter_at_once_find_one_parity_and_leave_a_stock_model() -> None:
    model = tiny("gemma2")
    cap, found, gate = model.config.final_logit_softcapping, [], threading.Barrier(4)

    def enter() -> None:
        gate.wait()
        with rollsync_parity(model) as parity:
            found.append(parity)
            gate.wait()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and isinstance(found[0], Parity) and all(p is found[0] for p in found)
    assert parity_of(model) is None and model.config.final_logit_softcapping == cap


def test_an_empty_batch_is_named() -> None:
    model = tiny()
    with rollsync_parity(model), pytest.raises(ParityError, match="at least one place, got 1 rows of 0"):
        model(torch.zeros(1, 0, dtype=torch.long))
