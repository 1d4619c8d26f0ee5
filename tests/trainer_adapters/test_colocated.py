"""An engine in the trainer's process: the trainer's bits, its own memory given back, and the trainer's state left alone."""

from __future__ import annotations

import gc
import glob
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rollsync import Engine, SamplingParams
from rollsync.kernels.native_lib import available_builds
from rollsync.rollout.errors import BadRequest, ConfigError, IllegalState
from rollsync.rollout.selftest.model import tiny_config
from rollsync.trainer_adapters import parity
from rollsync.trainer_adapters.colocated import ColocatedEngine
from rollsync.trainer_adapters.targets import target_of
from rollsync.weight_sync.control import UpdateError
from rollsync.weight_sync.ranks import Alone
from rollsync.weight_sync.sources import weights_from
from trl_cases import load, write_text_model

PROMPTS = [[1, 2, 3], [4] * 20]
PARAMS = SamplingParams(n=2, max_tokens=6, seed=1)
OPTIONS = {"threads": 1, "memory_bytes": 16 << 20}


def fresh(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model made by its class alone: there is no checkpoint."""
    transformers.set_seed(3)
    config = tiny_config("llama", **changes)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    for parameter in model.parameters():  # not .to(), which rounds rope's frequencies too
        parameter.data = parameter.data.to(dtype)
    return model


def train(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_phase_samples_from_the_models_weights_bit_for_bit(dtype: torch.dtype) -> None:
    model = fresh(dtype)
    left = set(glob.glob(f"{tempfile.gettempdir()}/rollsync-model-*"))
    with ColocatedEngine(model, **OPTIONS) as engine:
        assert set(glob.glob(f"{tempfile.gettempdir()}/rollsync-model-*")) == left
        assert engine.info.dtype == str(dtype).removeprefix("torch.")
        seen = []
        for step in (4, 5, 9):
            with engine.generating(version=step):
                outputs = engine.generate(PROMPTS, PARAMS)
            assert parity.check(model, outputs).equal
            assert {span["version"] for o in outputs for s in o.samples for span in s.weight_versions} == {step}
            seen.append([s.logprobs for o in outputs for s in o.samples])
            train(model)
        assert seen[0] != seen[1] != seen[2]
        with pytest.raises(UpdateError, match="must not go back from 9 to 8"), engine.generating(version=8):
            pass
        with engine.generating():
            pass
        assert engine.last_phase is not None and engine.last_phase.version == 10


@pytest.mark.skipif(not available_builds(), reason="no compiled kernels here")
def test_memory_is_the_systems_while_the_trainer_trains() -> None:
    model = fresh(torch.bfloat16, hidden_size=512, intermediate_size=1024, vocab_size=8192, tie_word_embeddings=False)
    weights = sum(p.numel() for p in model.parameters()) * 2
    pool = 32 << 20
    with ColocatedEngine(model, threads=1, memory_bytes=pool) as engine:
        for _ in range(2):
            with engine.generating():
                engine.generate(PROMPTS, PARAMS)
                engine.engine.runner._kv._thread.join(30)  # type: ignore[attr-defined] # which has the pool in the background
            report = engine.last_phase
            assert report is not None and report.synced_bytes == weights
            assert report.freed_bytes["kv_cache"] >= 0.9 * pool and report.freed_bytes["weights"] >= 0.9 * weights
        rss = report.rss_bytes
        # No second copy of the weights on the way: what came is one, the largest tensor at most beside it.
        assert rss["synced"] - rss["before"] < 1.5 * weights
        assert rss["after"] - rss["before"] < 0.8 * weights


def test_plain_torch_gives_its_weights_back_too() -> None:
    model = fresh(torch.float32, hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    with ColocatedEngine(model, kernels="reference", **OPTIONS) as engine:
        for _ in range(2):
            with engine.generating():
                kept = [torch.ones(1000) for _ in range(100)]  # so that malloc's heap has no free end
        report = engine.last_phase
    assert report is not None and report.freed_bytes["weights"] > 0.8 * report.synced_bytes and kept


def test_the_trainers_state_is_as_it_was() -> None:
    model = fresh().train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    engine = ColocatedEngine(model, **OPTIONS)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)

    def state() -> tuple[Any, ...]:
        draws = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
        flags = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_num_threads())
        return *draws, *flags, torch.get_default_dtype(), [m.training for m in model.modules()], [p.grad for p in model.parameters()]

    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            before = state()
            with engine.generating():
                assert state() == before
                outputs = engine.generate(PROMPTS, PARAMS)
            assert state() == before
    finally:
        torch.set_default_dtype(torch.float32)
    assert modes == before[-2]
    model.eval()
    assert parity.check(model, outputs).equal
    engine.close()


def test_nothing_is_sampled_outside_a_phase_or_from_weights_that_are_not_there() -> None:
    model = fresh()
    with ColocatedEngine(model, between="keep", **OPTIONS) as engine:
        with pytest.raises(IllegalState, match="no phase of generation"):
            engine.generate(PROMPTS, PARAMS)
        with pytest.raises(IllegalState, match="holds no weights"), engine.generating(sync=False):
            pass
        with engine.generating(version=3):
            first = engine.generate(PROMPTS, PARAMS)
            with pytest.raises(BadRequest, match=r"prompts\[1\]"):
                engine.generate([[1], [10**6]], PARAMS)
        train(model)
        with engine.generating(sync=False):
            again = engine.generate(PROMPTS, PARAMS)
        assert [s.logprobs for o in again for s in o.samples] == [s.logprobs for o in first for s in o.samples]
        with torch.no_grad():
            model.model.norm.weight[0] = torch.nan
        with pytest.raises(UpdateError, match=r"model.norm.weight.*finite"), engine.generating(version=4):
            pass
        with pytest.raises(IllegalState, match="holds no weights"), engine.generating(sync=False):
            pass  # what came over the weights of version 3 is in them
        with torch.no_grad():
            model.model.norm.weight[0] = 1.0
        with engine.generating(version=4):
            outputs = engine.generate(PROMPTS, PARAMS)
        assert parity.check(model, outputs).equal
    with pytest.raises(IllegalState, match="closed"), engine.generating():
        pass


def test_as_a_target_memory_goes_after_each_generation() -> None:
    model = fresh()
    with ColocatedEngine(model, **OPTIONS) as engine:
        target = target_of(engine)
        assert target.version is None and target.facts().vocab_size == engine.info.vocab_size
        params = SamplingParams(max_tokens=5)
        for version in (1, 2):
            target.sync(weights_from(model), version, Alone())
            assert target.version == version
            rows = target.generate([[1, 2, 3]] * 3, params, seed=version)
            assert len({tuple(row.token_ids) for row in rows}) > 1
            assert target.version is None and not engine.awake
            assert engine.last_phase is not None and engine.last_phase.num_samples == 3
            train(model)


def test_texts_need_a_tokenizer_by_name_or_as_an_object(tmp_path: Path) -> None:
    model, folder = fresh(), write_text_model(tmp_path / "model")
    with ColocatedEngine(model, **OPTIONS) as engine, engine.generating():
        for prompt, params in (("a text", PARAMS), ([{"role": "user", "content": "hi"}], PARAMS), ([1, 2], SamplingParams(stop="a"))):
            with pytest.raises(ConfigError, match=r"this engine has no tokenizer: ColocatedEngine\(model, tokenizer="):
                engine.generate([prompt], params)
    with ColocatedEngine(load(folder), tokenizer=folder, **OPTIONS) as engine, engine.generating():
        (output,) = engine.generate(["a text"], PARAMS)
        assert output.prompt_token_ids == engine.engine.tokenizer.encode("a text") and isinstance(output.texts[0], str)


def test_a_sleep_that_fails_ends_the_phase_and_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh()
    with ColocatedEngine(model, **OPTIONS) as engine:

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise OSError("no sleep")

        def phase() -> None:
            with engine.generating():
                assert 1 / len(noted)

        noted = [1]
        with monkeypatch.context() as patch:
            patch.setattr(engine.engine.control, "sleep", fail)
            with pytest.raises(OSError, match="no sleep"):
                phase()
            assert not engine.awake and engine.version is None
            noted = []
            with pytest.raises(ZeroDivisionError) as caught:
                phase()
            assert "no sleep" in caught.value.__notes__[0]
            with pytest.raises(UpdateError, match="must not go back") as refused, engine.generating(version=0):
                pass
            assert "no sleep" in refused.value.__notes__[0]
        with engine.generating():
            outputs = engine.generate(PROMPTS, PARAMS)
    assert parity.check(model, outputs).equal


def test_an_engine_that_cannot_be_had_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    close = Engine.close
    monkeypatch.setattr(Engine, "close", lambda engine: (closed.append(engine), close(engine)))
    with pytest.raises(ValueError, match="computes in"):
        ColocatedEngine(fresh(), share=True, dtype="bfloat16", **OPTIONS)
    assert len(closed) == 1


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="between must be discard or keep"):
        ColocatedEngine(fresh(), between="offload")
    with pytest.raises(ValueError, match="float16"):
        ColocatedEngine(fresh(torch.float16))
    with pytest.raises(ValueError, match="apply cannot be chosen"):
        ColocatedEngine(fresh(), apply="staged")
    with pytest.raises(TypeError, match="Linear, which has no config"):
        ColocatedEngine(torch.nn.Linear(2, 2))
    mixed = fresh()
    mixed.lm_head.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16, torch.float32: give dtype"):
        ColocatedEngine(mixed)


@pytest.mark.parametrize(("kernels", "tied"), [("reference", True), (None, False)])
def test_shared_weights_are_held_once(kernels: str | None, tied: bool) -> None:
    model = fresh(torch.float32, hidden_size=512, intermediate_size=1024, vocab_size=8192, tie_word_embeddings=tied)
    whole = sum(p.nbytes for p in model.parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    objects = [id(p) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ColocatedEngine(model, share=True, kernels=kernels, **OPTIONS) as engine:
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert objects == [id(p) for p in model.parameters()]
        for step in range(2):
            with engine.generating():
                outputs = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, seed=step))
            report = engine.last_phase
            assert report is not None and parity.check(model, outputs).equal
            model(torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
            optimizer.step()
        if kernels == "reference":
            assert engine.shared_bytes == whole and report.synced_bytes == 0
            assert report.rss_bytes["synced"] - report.rss_bytes["before"] < 0.9 * whole
            held = engine.engine.runner.weights.tensors["embed"]  # type: ignore[attr-defined]
            assert held.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        else:  # the embedding, and norms
            assert model.model.embed_tokens.weight.nbytes < engine.shared_bytes < whole - report.synced_bytes + 1
            assert report.freed_bytes["weights"] < report.synced_bytes + whole // 10
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    del engine
    gc.collect()
    assert all(torch.equal(p, after[name]) and not torch.equal(p, before[name]) for name, p in model.named_parameters())
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    with pytest.raises(ValueError, match=r"embed_tokens.weight is torch.float32, the engine computes in torch.bfloat16"):
        ColocatedEngine(model, share=True, dtype="bfloat16", **OPTIONS)
