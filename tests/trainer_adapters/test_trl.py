"""A stock GRPOTrainer that samples from an engine in this process, and what `attach` refuses. More runs by `make test-adapters`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollsync import Engine

pytest.importorskip("trl", reason="TRL is not installed: these tests need `trl`, `datasets` and `peft`")

from rollsync.rollout.errors import IllegalState
from rollsync.trainer_adapters.errors import TargetError
from rollsync.trainer_adapters.trl import RollsyncGeneration, attach
from trl_cases import asked_by, chats, grpo, logged, weights_of, write_text_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_model(tmp_path_factory.mktemp("trl") / "model")


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[Engine]:
    with Engine(folder, threads=1, num_blocks=64) as engine:
        yield engine


@pytest.fixture(scope="module")
def attached(folder: str, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> RollsyncGeneration:
    return attach(grpo(folder, tmp_path_factory.mktemp("attached")), engine)


def test_two_steps_of_grpo_in_process(folder: str, engine: Engine, tmp_path: Path) -> None:
    trainer = grpo(folder, tmp_path)
    before = weights_of(trainer.model)
    generation = attach(trainer, engine)
    calls = asked_by(generation)
    trainer.train()
    assert generation.num_syncs == 2 and engine.weight_version == 2
    assert all(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5
    assert all(abs(r - 1) < 1e-5 for r in logged(trainer, "sampling/importance_sampling_ratio/mean"))
    for call in calls:
        assert len(call["prompts"]) == 8 and len({tuple(p) for p in call["prompts"]}) == 2
        assert len({tuple(row) for row in call["rows"]}) == 8, "two rows are the same sample"


def test_weights_that_change_while_the_step_does_not(folder: str, engine: Engine, tmp_path: Path) -> None:
    """A second run begins at the step that was synced last, and at a lower version; between two evaluations weights are changed by hand."""
    name = "sampling/sampling_logp_difference/max"
    settings = {"max_steps": 1, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 4, "eval_dataset": chats(1)}
    trainer = grpo(folder, tmp_path, **settings)
    generation = attach(trainer, engine)
    trainer.train()
    trainer.args.max_steps = 2
    trainer.train()  # samples at step 0 again, and at step 1
    assert generation.num_syncs == 3 and engine.weight_version == 2
    trainer.evaluate()
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(3.0)
    trainer.evaluate()
    assert generation.num_syncs == 5
    seen = logged(trainer, name) + logged(trainer, f"eval_{name}")
    assert len(seen) == 4 and max(seen) < 1e-5, seen
    trainer.args.max_steps = 1
    trainer.train()
    assert engine.weight_version == 1


def test_rows_that_are_not_right_end_the_step(attached: RollsyncGeneration, monkeypatch: pytest.MonkeyPatch) -> None:
    """T9, and what one EOS in place of an empty row weighs."""
    generate = attached.target.generate

    def but(change: Any) -> None:
        monkeypatch.setattr(attached.target, "generate", lambda *args, **kw: change(generate(*args, **kw)))

    but(lambda rows: [dataclasses.replace(rows[0], temperature_logprobs=rows[0].temperature_logprobs[:-1]), *rows[1:]])
    with pytest.raises(TargetError, match="row 0 has 5 temperature_logprobs for 6 tokens"):
        attached.generate(prompts=[[3, 4, 5]] * 2)
    for change, words in ((lambda rows: rows[:-1], "1 rows came for 2 prompts"), (lambda rows: [*rows, rows[0]], "3 rows came for 2")):
        but(change)
        with pytest.raises(TargetError, match=words):
            attached.generate(prompts=[[3, 4, 5]] * 2)
    but(lambda rows: [dataclasses.replace(rows[0], token_ids=[], logprobs=[], temperature_logprobs=[]), *rows[1:]])
    _, ids, logprobs, token_ids = attached.generate(prompts=[[3, 4, 5]] * 2)
    assert ids[0] == [256] and logprobs[0] == [[0.0]] and token_ids[0] == [[256]] and len(ids[1]) == len(logprobs[1]) == 6


def test_prompts_over_the_limit(attached: RollsyncGeneration) -> None:
    with pytest.raises(TargetError, match=r"row 1 .*2000"):
        attached.generate(prompts=[[3, 4, 5], [3] * 2000])


def test_images_are_refused(attached: RollsyncGeneration) -> None:
    attached.generate(prompts=[[3, 4, 5]] * 2, images=[None, None])
    with pytest.raises(ValueError, match="images cannot be served"):
        attached.generate(prompts=[[3, 4, 5]] * 2, images=[None, ["a picture"]])


def test_adapters_that_cannot_be_merged_are_refused_at_once(folder: str, engine: Engine, tmp_path: Path) -> None:
    from peft import LoraConfig

    trainer = grpo(folder, tmp_path, peft_config=LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ValueError, match="DoRA"):
        attach(trainer, engine)
    assert not trainer.use_vllm, "a trainer that was refused is as it was"


def test_ranks_with_tools_cannot_sync_by_themselves(monkeypatch: pytest.MonkeyPatch, attached: RollsyncGeneration) -> None:
    """A colocated engine that drops its weights between two turns of a row: no rank waits for others that never come."""
    attached.sync_weights()
    monkeypatch.setattr(attached, "_ranks", SimpleNamespace(rank=0, size=2, gather=lambda value: pytest.fail("a collective")))
    monkeypatch.setattr(attached._trainer, "tools", [print])
    monkeypatch.setattr(attached.target, "version", None)
    with pytest.raises(IllegalState, match='between="keep"'):
        attached.generate(prompts=[[3, 4, 5]] * 2)


class AsyncGRPOTrainer:
    use_vllm = False


class OnlineDPOTrainer:
    use_vllm = False


def test_trainers_that_sample_in_another_way_are_told_theirs() -> None:
    with pytest.raises(TypeError, match="does not take AsyncGRPOTrainer: it takes rollout_worker= and weight_transfer="):
        attach(AsyncGRPOTrainer(), "http://127.0.0.1:1")
    with pytest.raises(TypeError, match="does not take OnlineDPOTrainer"):
        attach(OnlineDPOTrainer(), "http://127.0.0.1:1")
    with pytest.raises(TypeError, match="got SimpleNamespace without use_vllm, accelerator"):
        attach(SimpleNamespace(), "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_vllm": True}, "make it with use_vllm=False"),
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex cannot be served"),
        ({"loss_type": "vespo"}, "loss_type vespo needs vllm_importance_sampling_mode to be token_truncate or token_mask"),
    ],
)
def test_settings_of_another_engine(settings: dict[str, Any], words: str) -> None:
    parts = {"accelerator": None, "state": None, "model": None, "vllm_importance_sampling_mode": "sequence_mask"}
    trainer = SimpleNamespace(**{"use_vllm": False, **parts, **settings}, args=SimpleNamespace(**settings))
    with pytest.raises(ValueError, match=words):
        attach(trainer, "http://127.0.0.1:1")
