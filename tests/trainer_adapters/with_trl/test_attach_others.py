"""TRL's experimental trainers that sample in the same place: two steps each, on the TRL of this environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollsync import Engine
from rollsync.trainer_adapters.colocated import ColocatedEngine
from rollsync.trainer_adapters.trl import attach
from trl_cases import COMMON, asked_by, chats, grpo, length_reward, load, logged, write_text_model

pytestmark = pytest.mark.adapters
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_model(tmp_path_factory.mktemp("others") / "model")


@pytest.fixture
def engine(folder: str) -> Iterator[Engine]:
    with Engine(folder, threads=1, num_blocks=64) as engine:
        yield engine


def lessons() -> Any:
    from datasets import Dataset

    user = [{"role": "user", "content": f"q{i}"} for i in range(8)]
    answer = {"role": "assistant", "content": "abc"}
    return Dataset.from_list([{"messages": [message, answer]} for message in user])


def hints() -> Any:
    return chats().map(lambda row: {"privileged_context": "abc"})


def gmpo(config: dict[str, Any], student: dict[str, Any], teacher: Any) -> Any:
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    args = GMPOConfig(**config, num_generations=4)
    return GMPOTrainer(**student, args=args, reward_funcs=length_reward, train_dataset=chats())


def gold(config: dict[str, Any], student: dict[str, Any], teacher: Any) -> Any:
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    args = GOLDConfig(**config, max_length=64, lmbda=1.0, num_generations=1)
    return GOLDTrainer(**student, args=args, teacher_model=teacher, train_dataset=lessons())


def iw_opd(config: dict[str, Any], student: dict[str, Any], teacher: Any) -> Any:
    from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

    return IWOPDTrainer(**student, args=IWOPDConfig(**config, max_length=64, lmbda=1.0), teacher_model=teacher, train_dataset=lessons())


def sdft(config: dict[str, Any], student: dict[str, Any], teacher: Any) -> Any:
    from trl.experimental.sdft import SDFTConfig, SDFTTrainer

    return SDFTTrainer(**student, args=SDFTConfig(**config), train_dataset=hints())


def sdpo(config: dict[str, Any], student: dict[str, Any], teacher: Any) -> Any:
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    args = SDPOConfig(**config, num_generations=4)
    return SDPOTrainer(**student, args=args, reward_funcs=length_reward, train_dataset=hints())


@pytest.mark.parametrize("make", [gmpo, gold, iw_opd, sdft, sdpo])
def test_two_steps(make: Any, folder: str, engine: Engine, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    student = {"model": load(folder), "processing_class": AutoTokenizer.from_pretrained(folder)}
    trainer = make({**COMMON, "output_dir": str(tmp_path)}, student, load(folder))
    generation = attach(trainer, engine)
    calls = asked_by(generation)
    trainer.train()
    assert generation.num_syncs == engine.weight_version == 2 and len(logged(trainer, "loss")) == 2
    rows = [tuple(row) for call in calls for row in call["rows"]]
    assert len(set(rows)) == len(rows) >= 16 and len({call["seed"] for call in calls}) == len(calls)


@pytest.mark.parametrize("between", ["discard", "keep"])
def test_grpo_on_a_colocated_engine(between: str, folder: str, tmp_path: Path) -> None:
    """Whatever it does with its memory while the trainer trains, each rollout is of the weights of its step."""
    trainer = grpo(folder, tmp_path, eval_dataset=chats(4), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    with ColocatedEngine(lambda: trainer.model_wrapped, between=between, threads=1, num_blocks=64) as engine:
        attach(trainer, engine)
        trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5
    assert max(logged(trainer, "eval_sampling/sampling_logp_difference/max")) < 1e-5
