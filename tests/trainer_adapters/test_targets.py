"""Targets: which requests rows become, what is refused of what comes back, and an engine in this process. No trainer is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollsync import BadRequest, Engine, SamplingParams
from rollsync.rollout.errors import IllegalState
from rollsync.rollout.models.config import computation, load_decoder_config
from rollsync.rollout.selftest.model import write_model
from rollsync.trainer_adapters.errors import TargetError
from rollsync.trainer_adapters.rows import asks_of
from rollsync.trainer_adapters.targets import EngineTarget, Facts, agreed, check_model, check_rows, target_of
from rollsync.trainer_adapters.trl_params import is_plain, sampling_params
from rollsync.weight_sync.control import UpdateError
from rollsync.weight_sync.ranks import Alone
from rollsync.weight_sync.sources import weights_from
from trl_cases import load, write_text_model

PROMPTS = [[1, 2, 3], [4, 5], [1, 2, 3], [1, 2, 3], [6]]
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_model(tmp_path_factory.mktemp("targets") / "model")


@pytest.fixture
def engine(folder: str) -> Iterator[Engine]:
    with Engine(folder, threads=1, num_blocks=64, max_model_len=128) as engine:
        yield engine


def test_equal_rows_are_one_request() -> None:
    asks = asks_of(PROMPTS, 7)
    assert [ask.rows for ask in asks] == [[0, 2, 3], [1], [4]] and [ask.prompt["token_ids"] for ask in asks] == [[1, 2, 3], [4, 5], [6]]
    seeds = [ask.prompt["seed"] for ask in asks]
    assert len({*seeds, *(ask.prompt["seed"] for ask in asks_of(PROMPTS, 8))}) == 6, "a prompt or call shares another one's seed"
    many = asks_of([[1]] * 5000, 7)
    assert [len(ask.rows) for ask in many] == [4096, 904] and many[1].prompt["first_sample"] == 4096


def test_every_row_gets_a_sample_of_its_own(engine: Engine, folder: str) -> None:
    target = target_of(engine)
    with pytest.raises(IllegalState, match="nothing was synced"):
        target.generate(PROMPTS, PARAMS, seed=1)
    model = load(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    report = target.sync(weights_from(model), 5, Alone())
    assert report.nbytes == 4 * sum(p.numel() for p in model.parameters()) and target.version == 5
    rows = target.generate(PROMPTS, PARAMS, seed=1, include=["temperature_logprobs"])
    check_rows(rows, 5, target.facts().vocab_size, column="temperature_logprobs", version=5)
    assert len({tuple(row.token_ids) for row in rows}) == 5
    for prompt, row in zip(PROMPTS, rows, strict=True):
        logits = model(torch.tensor([prompt + row.token_ids])).logits[0, len(prompt) - 1 : -1]
        want = torch.log_softmax(logits, -1).gather(1, torch.tensor(row.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(row.temperature_logprobs), want, atol=1e-5)
    again, other = (target.generate(PROMPTS, PARAMS, seed=seed) for seed in (1, 2))
    assert [r.token_ids for r in again] == [r.token_ids for r in rows] != [r.token_ids for r in other]


def test_an_update_that_fails_leaves_what_was(engine: Engine, folder: str) -> None:
    """A source that ends early or sends other shapes, and a version that goes back after the first sync."""
    model, target = load(folder), EngineTarget(engine)
    target.sync(weights_from(model), 3, Alone())
    digests = engine.control.digests()

    class Broken:
        def __init__(self, change: Any) -> None:
            self.weights, self.change = weights_from(model), change

        def metadata(self) -> Any:
            return self.weights.metadata()

        def __iter__(self) -> Any:
            for i, (name, tensor) in enumerate(self.weights):
                if i == 9 and self.change is None:
                    return
                yield name, self.change(tensor) if i == 9 else tensor * 2

    for change, words in ((None, "nothing came"), (lambda t: t[:-1], "came from the source"), (lambda t: t * torch.nan, "not finite")):
        with pytest.raises(UpdateError, match=words):
            target.sync(Broken(change), 4, Alone())
    with pytest.raises(UpdateError, match="must not go back from 3 to 2"):
        target.sync(weights_from(model), 2, Alone())
    assert engine.control.digests() == digests and target.version == 3
    target.sync(weights_from(model), 4, Alone())
    assert EngineTarget(engine).sync(weights_from(model), 1, Alone()).version == 1  # a new run on an engine that has served another


@pytest.mark.parametrize("kernels", [None, "reference"])
def test_an_engine_that_is_closed_says_so(folder: str, kernels: str | None) -> None:
    """Also in the middle of an update: nothing is written where its weights were."""
    model = load(folder)
    engine = Engine(folder, threads=1, num_blocks=64, max_model_len=128, kernels=kernels)
    target, control = target_of(engine), engine.control
    weights, update = engine.runner.weights, control.open_update(mode="full")  # type: ignore[attr-defined]
    engine.close()
    engine.close()
    with pytest.raises(UpdateError, match="the engine is closed; make a new one"):
        target.sync(weights_from(model), 1, Alone())
    verbs: dict[str, Any] = {
        "open_update": lambda: control.open_update(mode="full"), "extend_update": lambda: control.extend_update(update.id, [], {}),
        "take_chunk": lambda: control.take_chunk(update.id, 0, 0, {}), "commit_update": lambda: control.commit_update(update.id),
        "abort_update": lambda: control.abort_update(update.id), "load_folder": lambda: control.load_folder(folder),
        "digests": control.digests, "versioned_digests": control.versioned_digests, "shards": control.shards,
        "weight_values": lambda: control.weight_values("lm_head.weight", 1), "sleep": control.sleep, "wake": control.wake,
        "pause": control.pause, "resume": control.resume,
    }  # fmt: skip
    for name, verb in verbs.items():
        with pytest.raises(IllegalState, match="the engine is closed; make a new one"):
            verb()
            pytest.fail(name)
    with pytest.raises((ValueError, KeyError)):
        weights.write("embed", 0, 0, torch.zeros(1, model.config.hidden_size))


def test_weights_of_another_model_are_refused_by_name(engine: Engine, tmp_path: Path) -> None:
    model = load(write_text_model(tmp_path, vocab_size=300, intermediate_size=48))
    with pytest.raises(UpdateError) as caught:
        EngineTarget(engine).sync(weights_from(model), 1, Alone())
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight", "[32, 48]", "[32, 64]"):
        assert name in str(caught.value)


def test_a_model_that_computes_something_else_is_refused(engine: Engine, folder: str) -> None:
    """Shapes fit, so no update would notice."""
    facts, model = target_of(engine).facts(), load(folder)
    check_model(facts, model)
    model.config.rms_norm_eps = 1e-5
    model.config.num_attention_heads, model.config.head_dim = 2, 16
    with pytest.raises(TargetError) as caught:
        check_model(facts, model)
    for words in ("rms_norm_eps is 1e-06 in the engine and 1e-05 in the trainer", "num_heads is 4", "head_dim is 8 in the engine and 16"):
        assert words in str(caught.value)


def test_a_server_that_tells_nothing_of_its_model_is_not_passed_over(engine: Engine, folder: str, caplog: pytest.LogCaptureFixture) -> None:
    facts, model = target_of(engine).facts(), load(folder)
    check_model(facts, model)
    assert not caplog.records
    check_model(dataclasses.replace(facts, computation={}), model)
    assert "not compared" in caplog.text and "rms_norm_eps" in caplog.text


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
def test_a_model_as_transformers_loads_it_is_the_engines(family: str, tmp_path: Path) -> None:
    """Its config in memory says other words than the file: rotary parameters, layer types."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    folder = write_model(tmp_path, family, **({} if family.startswith("gemma") else {"rope_scaling": scaling}))
    known = {"dtype": "float32", "fingerprint": "", "vocab_size": 256, "max_model_len": 512}
    facts = Facts(**known, computation=computation(load_decoder_config(folder)))
    model = load(folder)
    check_model(facts, model)
    model.config.hidden_size *= 2
    with pytest.raises(TargetError, match="hidden_size is 64 in the engine and 128 in the trainer"):
        check_model(facts, model)


def row(**changes: Any) -> Any:
    spans = [{"version": 2, "start": 0, "end": 2}]
    good = {"token_ids": [1, 2], "logprobs": [-1.0, -2.0], "finish_reason": "stop", "weight_versions": spans}
    return SimpleNamespace(**{**good, **changes})


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row()], "1 rows came for 2 prompts"),
        ([row(), row(), row()], "3 rows came for 2 prompts"),
        ([row(), row(logprobs=[-1.0])], "row 1 has 1 logprobs for 2 tokens"),
        ([row(token_ids=[], logprobs=[]), row()], "row 0 has no token"),
        ([row(), row(token_ids=[1, 9])], "row 1 has the token id 9, outside the vocabulary of 9"),
        ([row(token_ids=[1, -1]), row()], "row 0 has the token id -1"),
        ([row(logprobs=[-1.0, float("nan")]), row()], "row 0 has nan among its logprobs"),
        ([row(logprobs=[-1.0, None]), row()], "row 0 has None among its logprobs"),
        ([row(), row(logprobs=[float("-inf"), -1.0])], "row 1 has -inf among its logprobs"),
        ([row(), row(finish_reason="abort", abort_reason="by request")], "row 1 ended by abort: by request"),
        ([row(), row(finish_reason="error", error="out of range")], "row 1 ended by error: out of range"),
        ([row(), row(weight_versions=[{"version": 1}, {"version": 2}])], "row 1 was drawn by weights of version 1, 2, not 2"),
    ],
)
def test_rows_that_nobody_can_train_on(rows: list[Any], words: str) -> None:
    with pytest.raises(TargetError) as caught:
        check_rows(rows, 2, 9, version=2)
    assert words in str(caught.value) and len(caught.value.problems) == 1


def test_a_server_that_is_not_there_is_waited_for_aloud(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("rollsync.trainer_adapters.facts.TELL_S", 0.2)
    with pytest.raises(TargetError, match="is `rollsync serve` running there"):
        target_of("http://127.0.0.1:9", timeout_s=0.7).facts()
    assert [r.getMessage() for r in caplog.records if "waiting" in r.getMessage()] == ["waiting for http://127.0.0.1:9 (up to 0.7 s)"]


def test_prompts_over_the_limit_are_named_with_their_rows(engine: Engine, folder: str) -> None:
    target = target_of(engine)
    target.sync(weights_from(load(folder)), 1, Alone())
    rows = target.generate([[1, 2], [5] * 200, [5] * 200], PARAMS, seed=1)
    with pytest.raises(TargetError, match=r"row 1 .*200.*128.*row 2 "):
        check_rows(rows, 3, 264)


def test_what_fails_on_one_rank_fails_on_all() -> None:
    ranks: Any = SimpleNamespace(rank=0, size=2, gather=lambda value: [value, "BadRequest: no"])
    with pytest.raises(TargetError, match="the rollout failed on trainer rank 1: BadRequest: no"):
        agreed(ranks, "the rollout", lambda: 1)


def test_targets_are_urls_engines_or_bring_their_own(engine: Engine) -> None:
    own = SimpleNamespace(as_target=lambda: "its own")
    assert target_of(own) == "its own"
    for bad in (None, [], [engine, engine], 5):
        with pytest.raises(TypeError, match="target must be a URL"):
            target_of(bad)
    facts = Facts.of({"dtype": "float32", "fingerprint": "f", "vocab_size": 5, "max_model_len": 9, "model_digest": "d", "more": 1})
    assert facts.vocab_size == 5 and facts.computation == {}


def trainer_with(**settings: Any) -> Any:
    """As much of a TRL trainer as its settings take."""
    own = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "max_completion_length": 8}
    given = {**own, "eos_token_ids": [256], **settings}
    return SimpleNamespace(args=SimpleNamespace(generation_kwargs=given.pop("generation_kwargs", None)), **given)


def test_every_setting_of_a_trainer_arrives() -> None:
    """Each at another value than its default, as read at the time of the call; no field of SamplingParams is left out of this test."""
    given = {
        "stop_token_ids": [7, 8], "eos_token_id": 9, "min_tokens": 2, "presence_penalty": 0.3, "frequency_penalty": 0.4, "top_logprobs": 2,
        "logit_bias": {3: 1.5}, "allowed_token_ids": [3, 7, 256], "stop": ["end"], "include_stop_str_in_output": True,
    }  # fmt: skip
    trainer = trainer_with(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, generation_kwargs=given)
    params = sampling_params(trainer)
    assert params.to_wire() == {
        "max_tokens": 8, "min_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.4, "logit_bias": {"3": 1.5}, "allowed_token_ids": (3, 7, 256), "top_logprobs": 2,
        "stop": ("end",), "include_stop_str_in_output": True, "stop_token_ids": (7, 8, 9, 256), "ignore_eos": True,
    }  # fmt: skip
    assert {f.name for f in dataclasses.fields(params)} - params.to_wire().keys() == {"n", "seed"}
    trainer.temperature = 0.5
    assert sampling_params(trainer).temperature == 0.5
    trainer.args.generation_kwargs = {"max_new_tokens": 3, "ignore_eos": True}
    assert (sampling_params(trainer).max_tokens, sampling_params(trainer).stop_token_ids) == (3, ())


def test_plain_is_what_trls_scorer_computes_again() -> None:
    assert is_plain(sampling_params(trainer_with(temperature=0.7)))
    for changed in ({"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"generation_kwargs": {"min_tokens": 1}}):
        assert not is_plain(sampling_params(trainer_with(**changed)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"generation_kwargs": {"best_of": 3}}, "generation_kwargs.best_of is not a known field"),
        ({"generation_kwargs": {"cache_implementation": "static"}}, "generation_kwargs.cache_implementation"),
        ({"generation_kwargs": {"seed": 3}}, "generation_kwargs.seed has no meaning here: args.seed says it"),
        ({"generation_kwargs": {"n": 3}}, "num_generations says it"),
        ({"generation_kwargs": {"structured_outputs": {}}}, "output is not constrained"),
        ({"generation_kwargs": {"stop_token_ids": "x"}}, "stop_token_ids"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"max_completion_length": 0}, "max_completion_length must be at least 1"),
    ],
)
def test_settings_that_mean_nothing_here_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        sampling_params(trainer_with(**settings))
    assert words in str(caught.value)
