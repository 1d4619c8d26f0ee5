"""Under parity TRL's own metric of the difference between rollout and trainer is exactly 0, at every step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rollsync import Engine
from rollsync.trainer_adapters.errors import ParityError
from rollsync.trainer_adapters.parity import parity_of
from rollsync.trainer_adapters.trl import attach
from trl_cases import chats, grpo, length_reward, load, logged, write_text_model

pytestmark = pytest.mark.adapters
HERE = Path(__file__).parent
LONG = {"max_completion_length": 24, "max_steps": 3, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_model(tmp_path_factory.mktemp("trl") / "model", "llama")


def uneven(count: int = 8) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": [{"role": "user", "content": "q" * (1 + 5 * i)}]} for i in range(count)])


def exactly_zero(trainer: Any, steps: int = 3) -> None:
    for name in ("mean", "max"):
        assert logged(trainer, f"sampling/sampling_logp_difference/{name}") == [0.0] * steps
    for name in ("min", "mean", "max"):
        assert logged(trainer, f"sampling/importance_sampling_ratio/{name}") == [1.0] * steps


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
def test_every_difference_is_zero(folder: str, tmp_path: Path, kind: str, temperature: float) -> None:
    model = load(folder, torch.bfloat16 if kind == "bfloat16" else torch.float32)
    trainer = grpo(folder, tmp_path, model, temperature=temperature, bf16=kind == "autocast", gradient_checkpointing=True, **LONG)
    trainer.train_dataset = uneven()
    with Engine(folder, dtype="float32" if kind == "float32" else "bfloat16", threads=1, num_blocks=64) as engine:
        attach(trainer, engine, parity=True)
        trainer.train()
    exactly_zero(trainer)
    assert all(0 < norm < 1e4 for norm in logged(trainer, "grad_norm"))
    assert all(4 < entropy < 6 for entropy in logged(trainer, "entropy"))


def test_a_stock_model_is_not_zero(folder: str, tmp_path: Path) -> None:
    trainer = grpo(folder, tmp_path, load(folder, torch.bfloat16), **LONG)
    with Engine(folder, dtype="bfloat16", threads=1, num_blocks=64) as engine:
        attach(trainer, engine)
        trainer.train()
    assert min(logged(trainer, "sampling/sampling_logp_difference/max")) > 0


def test_the_reference_model_has_the_same_bits(folder: str, tmp_path: Path) -> None:
    trainer = grpo(folder, tmp_path, load(folder), beta=0.1, **LONG)
    with Engine(folder, dtype="float32", threads=1, num_blocks=64) as engine:
        attach(trainer, engine, parity=True)
        trainer.train()
    exactly_zero(trainer)
    first, *later = logged(trainer, "kl")
    assert first == 0.0 and all(kl > 0 for kl in later)


def test_rloo_scores_the_sampled_logprobs(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RLOO logs no difference: what its scorer gives is compared with what was sampled."""
    from transformers import AutoTokenizer
    from trl import RLOOConfig, RLOOTrainer
    from trl_cases import COMMON

    args = RLOOConfig(output_dir=str(tmp_path), **{**COMMON, **LONG, "num_generations": 4, "temperature": 0.7, "beta": 0.05})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = RLOOTrainer(model=load(folder), reward_funcs=length_reward, args=args, train_dataset=chats(), processing_class=tokenizer)
    with Engine(folder, dtype="float32", threads=1, num_blocks=64) as engine:
        generation = attach(trainer, engine, parity=True)
        sampled: list[list[float]] = []
        scored: list[list[float]] = []
        generate, score = generation.generate, trainer._get_per_token_logps_and_entropies

        def kept_generate(*args: Any, **kwargs: Any) -> Any:
            found = generate(*args, **kwargs)
            sampled.extend([value for (value,) in row] for row in found[2])
            return found

        def kept_score(model: Any, *args: Any, **kwargs: Any) -> Any:
            found = score(model, *args, **kwargs)
            if model is trainer.model and not torch.is_grad_enabled():
                scored.extend(found[0].tolist())
            return found

        monkeypatch.setattr(generation, "generate", kept_generate)
        monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", kept_score)
        trainer.train()
    assert len(sampled) == len(scored) == 24
    assert [row[: len(own)] for row, own in zip(scored, sampled, strict=True)] == sampled


def test_two_ranks_under_ddp(folder: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(HERE / "parity_ranks.py"), folder, str(tmp_path)]
    subprocess.run(command, check=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)})
    for rank in range(2):
        assert (tmp_path / f"rank{rank}.txt").read_text() == "[0.0, 0.0] 2"


@pytest.mark.parametrize(
    ("engine_has", "words"),
    [
        ({"dtype": "bfloat16"}, "the engine computes in bfloat16 and the trainer in float32: start the engine with dtype float32"),
        ({"dtype": "float32", "k_shards": 2}, r"the trainer's are \S+ \(numerics.k_shards 4, numerics.head_dtype None\)"),
    ],
)
def test_an_engine_of_other_numerics_is_refused(folder: str, tmp_path: Path, engine_has: dict[str, Any], words: str) -> None:
    trainer = grpo(folder, tmp_path, load(folder), **LONG)
    forward = trainer.model.forward
    with Engine(folder, threads=1, num_blocks=64, **engine_has) as engine:
        with pytest.raises(ParityError, match=words):
            attach(trainer, engine, parity=True)
        assert parity_of(trainer.model) is None and trainer.model.forward == forward and not trainer.use_vllm
        attach(trainer, engine)  # as it was, so without parity it is taken


def test_a_head_that_is_trained_apart_is_refused(folder: str, tmp_path: Path) -> None:
    trainer = grpo(folder, tmp_path, load(folder), cast_lm_head_to_fp32=True, **LONG)
    with Engine(folder, dtype="float32", threads=1, num_blocks=64) as engine, pytest.raises(ParityError, match="cast_lm_head_to_fp32"):
        attach(trainer, engine, parity=True)


@pytest.mark.parametrize("numerics", [{"k_shards": 2}, {"head_dtype": "float32"}])
def test_an_engines_own_numerics_can_be_named(folder: str, tmp_path: Path, numerics: dict[str, Any]) -> None:
    trainer = grpo(folder, tmp_path, load(folder, torch.bfloat16), **LONG)
    with Engine(folder, dtype="bfloat16", threads=1, num_blocks=64, **numerics) as engine:
        attach(trainer, engine, parity=numerics)
        trainer.train()
    exactly_zero(trainer)


def test_lora_is_refused_by_name(folder: str, tmp_path: Path) -> None:
    from peft import LoraConfig

    trainer = grpo(folder, tmp_path, load(folder), peft_config=LoraConfig(r=4, target_modules=["q_proj"]), **LONG)
    with Engine(folder, dtype="float32", threads=1, num_blocks=64) as engine, pytest.raises(ParityError, match="adapters"):
        attach(trainer, engine, parity=True)
