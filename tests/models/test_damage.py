"""Files of a model folder with damage of every kind: a model that loads, or a ConfigError that names a file."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rollsync.rollout.errors import ConfigError
from rollsync.rollout.models.config import load_decoder_config
from rollsync.rollout.models.loader import load_weights
from rollsync.rollout.models.tokenizer import Tokenizer

ODD: list[Any] = [None, True, 0, -1, 2**70, 1.5, "", "x", [], [None], [1, 2], {}, {"a": 1}, {"content": None}]


class Nowhere:
    def write(self, param: str, dst_row: int, dst_col: int, tensor: torch.Tensor) -> None:
        """Weights are only read here."""


def mutated(value: Any, rng: random.Random) -> Any:
    """`value` with one thing in it, near the top rather than deep down, replaced."""
    if value and rng.random() < 0.7:
        if isinstance(value, dict):
            key = rng.choice(list(value))
            return {**value, key: mutated(value[key], rng)}
        if isinstance(value, list):
            i = rng.randrange(len(value))
            return [*value[:i], mutated(value[i], rng), *value[i + 1 :]]
    return rng.choice(ODD)


def damage(file: Path, rng: random.Random) -> None:
    if file.suffix == ".json":
        file.write_text(json.dumps(mutated(json.loads(file.read_text()), rng)))
        return
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 3])):
        data[rng.choice([rng.randrange(3000), rng.randrange(len(data))])] = rng.randrange(256)
    file.write_bytes(data[: rng.choice([len(data), len(data), rng.randrange(len(data))])])


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_damaged_file_loads_or_is_named(cancelling: dict[str, str], tmp_path: Path, name: str) -> None:
    whole = shutil.copytree(cancelling["llama"], tmp_path / "whole")
    (whole / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "bos_token_id": 1}))
    settings = {
        "eos_token": {"content": "!"},
        "added_tokens_decoder": {"3": {"content": "x"}},
        "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
    }
    (whole / "tokenizer_config.json").write_text(json.dumps(settings))
    rng, refused = random.Random(name), 0
    for i in range(25):
        folder = shutil.copytree(whole, tmp_path / str(i))
        damage(folder / name, rng)
        try:
            cfg = load_decoder_config(folder)
            load_weights(cfg, folder, "auto", Nowhere(), dtype=torch.float32)
            tokenizer = Tokenizer.from_model(folder)
        except ConfigError as error:
            assert str(tmp_path) in str(error)
            refused += 1
        else:
            assert tokenizer.encode("hi")
            if tokenizer.has_chat_template:
                assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) is not None
    assert 0 < refused < 25
