"""An engine in the trainer: TRL in one process, and two ranks with a model that accelerate's FSDP2 has prepared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import colocated_runs
import pytest
import torch
from rollsync import SamplingParams
from rollsync.trainer_adapters import parity
from rollsync.trainer_adapters.colocated import ColocatedEngine
from rollsync.trainer_adapters.trl import attach
from trl_cases import chats, grpo, load, logged, write_text_model

pytestmark = pytest.mark.adapters


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return colocated_runs.run(tmp_path_factory.mktemp("colocated"), "accelerate")


@pytest.mark.parametrize(("mixed", "dtype"), [("no", "float32"), ("bf16", "bfloat16")])
def test_every_rank_samples_the_trainers_bits(mixed: str, dtype: str, ranks: list[dict[str, Any]]) -> None:
    colocated_runs.check_phases([found[mixed] for found in ranks], dtype)


def test_a_rank_that_does_not_come_is_waited_for_so_long(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["late"].startswith("TargetError: at generate: trainer rank 0 waited for the others (at most 10 s)")


def test_an_accelerators_autocast_is_the_engines_dtype(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = accelerator.prepare(load(write_text_model(tmp_path / "model")))
    parity.make_parity(model)
    with ColocatedEngine(accelerator, threads=1, memory_bytes=16 << 20) as engine:
        assert engine.info.dtype == "bfloat16"
        for _ in range(2):
            with engine.generating():
                outputs = engine.generate([[1, 2, 3]], SamplingParams(n=2, max_tokens=5))
            assert parity.check(model, outputs).equal
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)


def test_adapters_are_merged_on_the_way_and_left_alone(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(load(write_text_model(tmp_path / "model"), torch.bfloat16), LoraConfig(target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with ColocatedEngine(model, threads=1, memory_bytes=16 << 20) as engine:
        with engine.generating():
            outputs = engine.generate([[1, 2, 3]], SamplingParams(n=2, max_tokens=5))
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    merged = model.merge_and_unload()
    assert parity.check(merged, outputs).equal
    with pytest.raises(ValueError, match="belongs to an adapter"):
        ColocatedEngine(get_peft_model(merged, LoraConfig(target_modules=["q_proj"])), share=True, threads=1, memory_bytes=16 << 20)


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


def test_trl_on_two_ranks_each_with_an_engine(tmp_path: Path) -> None:
    folder, out = write_text_model(tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    script = str(Path(__file__).with_name("colocated_ranks.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script, folder, str(out)]
    run = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [f["syncs"] for f in found] == [2, 2] and [f["version"] for f in found] == [2, 2]
    assert found[0]["difference"] == [0.0, 0.0] and found[0]["model"] == "DistributedDataParallel"
    assert all(f["freed"]["kv_cache"] > 0 for f in found)
