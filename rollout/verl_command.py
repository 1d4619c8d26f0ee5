"""`rollsync verl-check`: whether verl finds Rollsync here, and in Ray's workers, and whether a replica works."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
"""chat template"""


def write_tiny(folder: str | os.PathLike[str], family: str = "llama", **changes: Any) -> str:
    """Write a random model of some kilobytes, with a tokenizer that transformers loads; returns its folder.

    Id i is byte-level symbol i of 256, so every sequence of ids is a text.

    Args:
        changes: of config.json.
    """
    from .selftest.model import write_model

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


def main(args: argparse.Namespace) -> int:
    """Print what is found, as it is found. 0 if all of it works, else 1."""
    from ..trainer_adapters.verl import NAME, check

    with tempfile.TemporaryDirectory(prefix="rs-verl-") as folder:
        good = True
        for found in check.run(write_tiny(folder), args.address):
            good = good and found.ok
            print(f"{'ok' if found.ok else 'NO'}  {found.what}{': ' * bool(found.words)}{found.words}", flush=True)
            for problem in found.problems:
                print(f"    {problem}", flush=True)
    print(f"verl can use it: actor_rollout_ref.rollout.name={NAME}" if good else f"verl cannot use rollout.name={NAME} here")
    return 0 if good else 1
