"""A tiny model with a tokenizer, and TRL trainers on it; nothing is downloaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_length": 6, "max_steps": 2,
    "report_to": [], "use_cpu": True, "bf16": False, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-2,
    "gradient_checkpointing": False, "disable_tqdm": True,
}  # fmt: skip


def write_text_model(folder: str | Path, kind: str = "qwen2", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> str:
    """A model folder with weights, and a tokenizer of bytes with <|im_end|> as EOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, **special)
    tokenizer.chat_template = CHAT
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)
    options = {
        "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    torch.manual_seed(seed)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**options)) if kind == "qwen2" else LlamaForCausalLM(LlamaConfig(**options))
    model.to(dtype).save_pretrained(folder)
    return str(folder)


def load(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def length_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(c[0]["content"])) for c in completions]


def chats(count: int = 8) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"q{i}"}]} for i in range(count)])


def grpo(folder: str, out: str | Path, model: Any = None, **changes: Any) -> Any:
    """A stock GRPOTrainer: groups of 4, two prompts a step."""
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    apart = {name: changes.pop(name) for name in ("peft_config", "eval_dataset", "environment_factory", "reward_funcs") if name in changes}
    given = {"reward_funcs": length_reward, **apart}
    tokenizer = changes.pop("tokenizer", None) or AutoTokenizer.from_pretrained(folder)
    args = GRPOConfig(output_dir=str(out), **{**COMMON, "num_generations": 4, **changes})
    return GRPOTrainer(model=model or load(folder), args=args, train_dataset=chats(), processing_class=tokenizer, **given)


def logged(trainer: Any, name: str) -> list[float]:
    """A metric at every step that logged it."""
    return [line[name] for line in trainer.state.log_history if name in line]


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Copies of a model's parameters, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def asked_by(generation: Any) -> list[dict[str, Any]]:
    """What an attached trainer asks of its target from now on, and what it gets."""
    calls: list[dict[str, Any]] = []
    generate = generation.target.generate

    def noting(prompts: Any, params: Any, **kw: Any) -> Any:
        rows = generate(prompts, params, **kw)
        calls.append({"prompts": [list(p) for p in prompts], "rows": [list(r.token_ids) for r in rows], "seed": kw["seed"]})
        return rows

    generation.target.generate = noting
    return calls


class Bumper:
    """An environment with one tool."""

    def reset(self, **kwargs: Any) -> None:
        self.total = 0

    def bump(self, k: int) -> str:
        """Adds k.

        Args:
            k: how much to add

        Returns:
            The new total.
        """
        self.total += k
        return f"total={self.total}"


def tool_user(
    folder: str, out: str | Path, target: Any, *, calls_tools: bool = True, rewards: list[float] | None = None, **changes: Any
) -> tuple[Any, Any, list[dict[str, Any]]]:
    """A GRPOTrainer with an environment, attached: its first turns call the tool, its second ones end.

    The model says neither: its rows are replaced, after they were drawn. The third value is what is asked of the target.
    """
    import trl
    from rollsync.trainer_adapters.trl import attach
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    ask = '<tool_call>\n{"name": "bump", "arguments": {"k": 2}}\n</tool_call>'
    turns = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in (ask if calls_tools else "no", "done")]
    model = load(folder)
    model.config.max_position_embeddings = 2048

    def reward(completions: Any, **kwargs: Any) -> list[float]:
        found = [float(sum("total=2" in str(m) for m in c)) + i / 10 for i, c in enumerate(completions)]
        if rewards is not None:
            rewards.extend(found)
        return found

    trainer = grpo(
        folder, out, model, tokenizer=tokenizer, environment_factory=Bumper, reward_funcs=reward, max_completion_length=300, max_steps=1,
        max_tool_calling_iterations=3, gradient_accumulation_steps=1, vllm_importance_sampling_correction=False, **changes,
    )  # fmt: skip
    generation = attach(trainer, target)
    calls = asked_by(generation)
    generate = generation.target.generate

    def scripted(prompts: Any, params: Any, **kw: Any) -> Any:
        rows = generate(prompts, dataclasses.replace(params, max_tokens=4), **kw)
        turn = turns[0] if len(calls) % 2 else turns[1]
        for i, row in enumerate(rows):
            logprobs = [-1.0] * len(turn)
            same = {"token_ids": list(turn), "logprobs": logprobs, "temperature_logprobs": logprobs, "finish_reason": "stop"}
            rows[i] = dataclasses.replace(row, **same)
        return rows

    generation.target.generate = scripted
    return trainer, generation, calls
