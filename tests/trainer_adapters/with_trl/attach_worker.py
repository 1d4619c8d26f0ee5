"""All of `attach` against the TRL that is first on this process's path: cases by name, what they found as one line of JSON.

    python attach_worker.py FOLDER
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.path.append(str(Path(__file__).parent.parent))

import torch
import trl
from rollsync import Engine
from rollsync.trainer_adapters.trl import attach
from trl_cases import COMMON, asked_by, chats, grpo, length_reward, load, logged, tool_user, weights_of

FOLDER = sys.argv[1]
OUT = tempfile.mkdtemp()
DIFFERENCE, RATIO = "sampling/sampling_logp_difference/max", "sampling/importance_sampling_ratio"


def case_grpo(engine: Engine) -> dict[str, Any]:
    trainer = grpo(FOLDER, OUT)
    before = weights_of(trainer.model)
    generation = attach(trainer, engine)
    calls = asked_by(generation)
    trainer.train()
    after = weights_of(trainer.model)
    return {
        "syncs": generation.num_syncs, "version": engine.weight_version, "moved": all(not torch.equal(after[n], before[n]) for n in before),
        "difference": logged(trainer, DIFFERENCE), "mean": logged(trainer, f"{RATIO}/mean"), "seeds": [c["seed"] for c in calls],
        "rows": calls[0]["rows"], "asked": [len(c["prompts"]) for c in calls],
    }  # fmt: skip


def case_noise(engine: Engine) -> dict[str, Any]:
    trainer = grpo(FOLDER, OUT, vllm_importance_sampling_mode="token_truncate")
    generation = attach(trainer, engine)
    generate = generation.target.generate

    def off(*args: Any, **kw: Any) -> Any:
        rows = generate(*args, **kw)
        for row in rows:
            row.temperature_logprobs = [p + 0.1 for p in row.temperature_logprobs]
        return rows

    generation.target.generate = off
    trainer.train()
    return {"difference": logged(trainer, DIFFERENCE), "mean": logged(trainer, f"{RATIO}/mean")}


def case_rloo(engine: Engine) -> dict[str, Any]:
    from transformers import AutoTokenizer
    from trl import RLOOConfig, RLOOTrainer

    args = RLOOConfig(output_dir=OUT, **{**COMMON, "num_generations": 4})
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    trainer = RLOOTrainer(model=load(FOLDER), reward_funcs=length_reward, args=args, train_dataset=chats(), processing_class=tokenizer)
    generation = attach(trainer, engine)
    trainer.train()
    return {"syncs": generation.num_syncs, "loss": logged(trainer, "loss")}


def case_distillation(engine: Engine) -> dict[str, Any]:
    from transformers import AutoTokenizer
    from trl import DistillationConfig, DistillationTrainer

    args = DistillationConfig(output_dir=OUT, **COMMON)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    torch.manual_seed(5)
    teacher = type(load(FOLDER))(load(FOLDER).config)
    trainer = DistillationTrainer(
        model=load(FOLDER), teacher_model=teacher, args=args, train_dataset=chats(), processing_class=tokenizer
    )
    generation = attach(trainer, engine)
    trainer.train()
    return {"syncs": generation.num_syncs, "loss": logged(trainer, "loss")}


def case_peft(engine: Engine) -> dict[str, Any]:
    from peft import LoraConfig

    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    trainer = grpo(FOLDER, OUT, peft_config=config)
    base = {n: p for n, p in weights_of(trainer.model).items() if "lora_" not in n}
    generation = attach(trainer, engine)
    trainer.train()
    generation.sync_weights()
    now = weights_of(trainer.model)
    trained = trainer.accelerator.unwrap_model(trainer.model)
    merged = weights_of(trained.merge_and_unload())
    held = {name: engine.control.weight_values(name, p.shape[0])["values"] for name, p in merged.items()}
    apart = max(float((torch.tensor(held[name]) - p.reshape(torch.tensor(held[name]).shape)).abs().max()) for name, p in merged.items())
    return {
        "base_is_as_it_was": all(torch.equal(now[n], p) for n, p in base.items()), "apart": apart,
        "difference": logged(trainer, DIFFERENCE),
    }  # fmt: skip


def case_eval(engine: Engine) -> dict[str, Any]:
    trainer = grpo(FOLDER, OUT, eval_dataset=chats(4), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    generation = attach(trainer, engine)
    calls = asked_by(generation)
    trainer.train()
    return {
        "syncs": generation.num_syncs, "seeds": [c["seed"] for c in calls], "evals": len(logged(trainer, "eval_reward")),
        "difference": logged(trainer, f"eval_{DIFFERENCE}"),
    }  # fmt: skip


def case_tools(engine: Engine) -> dict[str, Any]:
    rewards: list[float] = []
    trainer, generation, calls = tool_user(FOLDER, OUT, engine, rewards=rewards)
    trainer.train()
    return {"asked": [[len(p) for p in c["prompts"]] for c in calls], "rewards": rewards, "syncs": generation.num_syncs}


def case_full(engine: Engine) -> dict[str, Any]:
    """Tool results that the engine's context has no room for, though the model's would have."""
    with Engine(FOLDER, threads=1, num_blocks=128, max_model_len=750) as small:
        trainer, _generation, calls = tool_user(FOLDER, OUT, small)
        trainer.train()
    return {"asked": [[len(p) for p in c["prompts"]] for c in calls], "steps": trainer.state.global_step}


def case_resumed(engine: Engine) -> dict[str, Any]:
    """Stopped after a step and resumed: the engine, back at the base model, has the trained weights before the first rollout."""
    whole = grpo(FOLDER, OUT, max_steps=3)
    calls = asked_by(attach(whole, engine))
    whole.train()
    with tempfile.TemporaryDirectory() as out:
        first = grpo(FOLDER, out, max_steps=3, save_strategy="steps", save_steps=2)
        attach(first, engine)
        first.train()
        with Engine(FOLDER, threads=1, num_blocks=64) as fresh:
            again = grpo(FOLDER, out, max_steps=3, save_strategy="steps", save_steps=2)
            generation = attach(again, fresh)
            resumed = asked_by(generation)
            again.train(resume_from_checkpoint=os.path.join(out, "checkpoint-2"))
            return {
                "syncs": generation.num_syncs, "version": fresh.weight_version, "calls": len(resumed),
                "difference": logged(again, DIFFERENCE)[-1], "same": resumed[-1] == calls[-1],
            }  # fmt: skip


def main() -> None:
    found: dict[str, Any] = {"trl": trl.__version__}
    for case in (case_grpo, case_noise, case_rloo, case_distillation, case_peft, case_eval, case_tools, case_full, case_resumed):
        name = case.__name__.removeprefix("case_")
        if name == "distillation" and not hasattr(trl, "DistillationTrainer"):
            continue  # before 1.6 or so it stood elsewhere
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        with Engine(FOLDER, threads=1, num_blocks=128, max_model_len=1024) as engine:
            found[name] = case(engine)
    found["vllm"] = importlib.util.find_spec("vllm") is not None
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
