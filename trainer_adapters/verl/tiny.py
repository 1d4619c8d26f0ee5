"""A random model of some kilobytes, with a tokenizer that transformers loads: what `rollsync verl-check` and the tests run on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ...rollout.selftest.model import write_model

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
"""chat template"""


def write_tiny(folder: str | os.PathLike[str], family: str = "llama", **changes: Any) -> str:
    """Write it and return its folder. Id i is byte-level symbol i of 256, so every sequence of ids is a text.

    Args:
        changes: of config.json.
    """
    path = Path(write_model(Path(folder), family, **changes))
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    symbols = list(vocabulary)
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": symbols[2],
        "pad_token": symbols[1],
        "chat_template": TEMPLATE,
        "model_max_length": 512,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    return str(path)
