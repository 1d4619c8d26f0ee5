"""What an engine samples after it was given a LoRA trainer's weights: the merged model's, and the trainer's base is as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rollsync import Engine, SamplingParams
from rollsync.rollout.selftest.model import write_model
from rollsync.trainer_adapters.targets import target_of
from rollsync.weight_sync.checkpoint_writer import write_folder
from rollsync.weight_sync.control import UpdateError
from rollsync.weight_sync.ranks import Alone
from rollsync.weight_sync.sources import weights_from
from torch import nn

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"threads": 1, "num_blocks": 64}


def greedy(engine: Any) -> tuple[list[int], list[float]]:
    sample = engine.generate([list(range(3, 23))], PARAMS)[0].samples[0]
    return list(sample.token_ids), list(sample.logprobs)


def test_an_engine_gets_the_merged_weights_and_nothing_else(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "base", "llama", dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    torch.manual_seed(0)
    trained = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]))
    for name, parameter in trained.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter.data += torch.randn_like(parameter) * parameter.std().clamp(0.02)
    before = {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
    with Engine(folder, **OPTIONS) as engine:
        base = greedy(engine)
        target = target_of(engine)
        target.sync(weights_from(trained), version=1, ranks=Alone())
        merged = greedy(engine)

        trained.base_model.model.value_head = nn.Linear(2, 1)
        with pytest.raises(UpdateError, match=r"value_head\.weight \[1, 2\] is not part of this model"):
            target.sync(weights_from(trained), version=2, ranks=Alone())
        del trained.base_model.model.value_head
        assert greedy(engine) == merged
    assert all(torch.equal(parameter, before[name]) for name, parameter in trained.named_parameters())
    other = write_folder(tmp_path / "merged", weights_from(trained.merge_and_unload()), files_from=folder)
    with Engine(other, **OPTIONS) as engine:
        assert greedy(engine) == merged != base
