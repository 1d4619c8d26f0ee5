"""TRL's hook `rollout_func` on an engine in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rollsync import Engine
from rollsync.trainer_adapters.colocated import ColocatedEngine
from rollsync.trainer_adapters.errors import TargetError
from rollsync.trainer_adapters.trl_rollout_func import rollout_func
from trl_cases import COMMON, chats, load, logged, write_text_model

pytestmark = pytest.mark.adapters
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
ANSWER = [50, 51, 52]
"""what the environment says"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_model(tmp_path_factory.mktemp("func") / "model")


def run(folder: str, out: Path, func: Any, **changes: Any) -> tuple[Any, list[dict[str, Any]], list[Any]]:
    """Two steps; what the function gave, and the versions that the reward function was told."""
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    gave: list[dict[str, Any]] = []
    told: list[Any] = []

    def noting(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        found = func(prompts, trainer)
        gave.append({"count": len(prompts), **{name: [list(r) if isinstance(r, list) else r for r in v] for name, v in found.items()}})
        return found

    def reward(completion_ids: Any, weight_version: Any, **kwargs: Any) -> list[float]:
        told.append(list(weight_version))
        return [float(sum(ids) % 17) for ids in completion_ids]

    args = GRPOConfig(output_dir=str(out), **{**COMMON, "num_generations": 4, **changes})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = {"reward_funcs": reward, "train_dataset": chats(), "processing_class": tokenizer, "rollout_func": noting}
    trainer = GRPOTrainer(model=load(folder), args=args, **given)
    trainer.train()
    return trainer, gave, told


def test_a_row_for_every_prompt_and_weights_for_every_step(folder: str, tmp_path: Path) -> None:
    """R1, R3, R4: with the mask that leaves samples out whose logprobs have moved too far."""
    with Engine(folder, threads=1, num_blocks=64) as engine:
        trainer, gave, told = run(folder, tmp_path, rollout_func(engine), off_policy_mask_threshold=0.5)
        assert engine.weight_version == 2
    assert [g["count"] for g in gave] == [8, 8] and all(len(g["completion_ids"]) == 8 for g in gave)
    assert all(len(lp) == len(ids) >= 1 for g in gave for lp, ids in zip(g["logprobs"], g["completion_ids"], strict=True))
    assert len({tuple(ids) for ids in gave[0]["completion_ids"]}) > 4
    assert told == [[1] * 8, [2] * 8] and len(logged(trainer, "loss")) == 2


@pytest.mark.parametrize("colocated", [False, True])
def test_what_an_environment_says_is_not_trained_on(colocated: bool, folder: str, tmp_path: Path) -> None:
    """R2."""
    turns: list[int] = []

    def reply(prompt: Any, completion: Any) -> list[int] | None:
        turns.append(len(completion))
        return ANSWER if len(completion) < 8 else None

    trained = load(folder)
    made = ColocatedEngine(trained, threads=1, num_blocks=64) if colocated else Engine(folder, threads=1, num_blocks=64)
    with made as engine:
        syncs = []
        if colocated:
            sync_from = engine.sync_from
            engine.sync_from = lambda *args, **kwargs: syncs.append(args[1]) or sync_from(*args, **kwargs)
        func = rollout_func(engine, reply=reply, max_turns=3)
        _, gave, told = run(folder, tmp_path, func, max_completion_length=24)
        assert not colocated or (syncs == [1, 2] and not engine.awake)
    assert turns and told == [[1] * 8, [2] * 8]
    for found in gave:
        for ids, logprobs, mask in zip(found["completion_ids"], found["logprobs"], found["env_mask"], strict=True):
            assert len(ids) == len(logprobs) == len(mask) <= 24 and mask[0] == 1
            said = [i for i, own in enumerate(mask) if own == 0]
            assert [ids[i] for i in said] == (ANSWER * 3)[: len(said)] and all(logprobs[i] == 0.0 for i in said)


def test_one_function_serves_one_trainer_of_the_engines_model(folder: str, tmp_path: Path) -> None:
    other = write_text_model(tmp_path / "other", rms_norm_eps=1e-3)
    with Engine(other, threads=1, num_blocks=64) as engine, pytest.raises(TargetError, match="rms_norm_eps"):
        run(folder, tmp_path, rollout_func(engine))
    with Engine(folder, threads=1, num_blocks=64) as engine:
        func = rollout_func(engine)
        run(folder, tmp_path, func, max_steps=1)
        with pytest.raises(ValueError, match="another trainer"):
            run(folder, tmp_path, func, max_steps=1)
        with pytest.raises(ValueError, match="max_turns"):
            rollout_func(engine, max_turns=0)
