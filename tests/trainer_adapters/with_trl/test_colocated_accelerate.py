"""An engine in the trainer: TRL in one process, and two ranks with a model that accelerate's FSDP2 has prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import colocated_runs
import pytest
from rollsync.trainer_adapters.colocated import ColocatedEngine
from rollsync.trainer_adapters.trl import attach
from trl_cases import chats, grpo, logged, write_text_model

pytestmark = pytest.mark.adapters


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return colocated_runs.run(tmp_path_factory.mktemp("colocated"), "accelerate")


@pytest.mark.parametrize(("mixed", "dtype"), [("no", "float32"), ("bf16", "bfloat16")])
def test_every_rank_samples_the_trainers_bits(mixed: str, dtype: str, ranks: list[dict[str, Any]]) -> None:
    colocated_runs.check_phases([found[mixed] for found in ranks], dtype)


def test_a_rank_that_does_not_come_is_waited_for_so_long(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["late"].startswith("TargetError: at generate: trainer rank 0 waited for the others (at most 5 s)")


def test_trl_trains_with_an_engine_that_sleeps_meanwhile(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_text_model(tmp_path / "model")
    trainer = grpo(folder, tmp_path / "out", eval_strategy="steps", eval_steps=1, eval_dataset=chats(2))
    asleep = []
    reward = trainer.reward_funcs[0]
    with ColocatedEngine(trainer, tokenizer=AutoTokenizer.from_pretrained(folder), threads=1, memory_bytes=16 << 20) as engine:
        generation = attach(trainer, engine, parity=True)
        trainer.reward_funcs[0] = lambda *args, **kwargs: asleep.append(not engine.awake) or reward(*args, **kwargs)
        trainer.train()
        assert engine.last_phase is not None and engine.last_phase.freed_bytes["weights"] > 0
    assert generation.num_syncs > 2, "an evaluation finds no weights, and has them sent again"
    assert asleep and all(asleep)
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) == 0.0
