"""What an engine takes from the tokenizer's files: which rows are padding, and which ids end a sample."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from real_engine import finals, prompt
from rollsync import Engine, RolloutRequest, SamplingParams
from rollsync.rollout.engine.config import CacheConfig, EngineConfig
from rollsync.rollout.errors import BadRequest, ConfigError
from safetensors.torch import load_file, save_file

KNOWN, ROWS = 256, 320
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLING: tuple[dict[str, Any], ...] = (GREEDY, {}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 5.0, "top_p": 0.99})


def loud(cancelling: dict[str, str], tmp_path: Path, kind: str = "padded") -> str:
    """Every hidden state gives some padding row the largest logit: they come in pairs of opposite sign."""
    folder = shutil.copytree(cancelling[kind], tmp_path / "loud")
    tensors = load_file(folder / "model.safetensors")
    rows = tensors["model.embed_tokens.weight" if kind == "padded_tied" else "lm_head.weight"]
    rows[KNOWN:] = 30 * rows[:KNOWN].abs().amax() * torch.randn(ROWS - KNOWN, rows.shape[1], generator=torch.Generator().manual_seed(1))
    rows[KNOWN + 1 :: 2] = -rows[KNOWN::2]
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def ask(prompts: list[tuple[int, ...]], **fields: Any) -> list[RolloutRequest]:
    params = [SamplingParams(seed=1, max_tokens=4, ignore_eos=True, **sampling) for sampling in SAMPLING]
    return [
        RolloutRequest(request_id=f"{i} {j}", prompt_token_ids=ids, params=p, **fields)
        for i, ids in enumerate(prompts)
        for j, p in enumerate(params)
    ]


@pytest.mark.parametrize(("kind", "kernels"), [("padded", None), ("padded_tied", None), ("padded", "reference")])
def test_padding_is_fed_but_never_sampled(cancelling: dict[str, str], tmp_path: Path, kind: str, kernels: str | None) -> None:
    folder = loud(cancelling, tmp_path, kind)
    options: dict[str, Any] = {"threads": 1, "num_blocks": 32, "kernels": kernels}
    prompts = [(KNOWN, *prompt(2, 5), ROWS - 1), *([prompt(1, 9)] if kernels is None else [])]
    with Engine(folder, **options) as engine:
        assert (engine.info.vocab_size, engine.info.embed_size) == (KNOWN, ROWS)
        for output in finals(engine, ask(prompts)).values():
            assert output.finish_reason == "length"
            assert max(output.token_ids) < KNOWN
            assert all(math.isfinite(value) for value in output.logprobs)
        forced = ask(prompts[:1], forced_token_ids=(7, KNOWN + 3, 8), include=("model_logprobs",))
        for output in finals(engine, forced).values():
            assert output.token_ids[:3] == [7, KNOWN + 3, 8]
            assert output.logprobs[1] == -math.inf
            assert output.model_logprobs is not None and math.isfinite(output.model_logprobs[1])
        with pytest.raises(BadRequest, match=r"prompt_token_ids\[1\] is 320; ids the model can be fed are 0 to 319"):
            engine.add_request(RolloutRequest(request_id="x", prompt_token_ids=(1, ROWS)))
    with Engine(folder, sample_padding=True, **options) as engine:
        assert (engine.info.vocab_size, engine.info.embed_size) == (ROWS, ROWS)
        greedy = finals(engine, ask(prompts))["0 0", 0]
        assert min(greedy.token_ids) >= KNOWN  # the padding is indeed what the model would choose


def test_without_a_tokenizer_every_row_is_an_id(cancelling: dict[str, str], tmp_path: Path) -> None:
    folder = loud(cancelling, tmp_path)
    Path(folder, "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with Engine(folder, threads=1, num_blocks=4) as engine:
        assert engine.info.vocab_size == ROWS
    with Engine(EngineConfig(model=folder, tokenizer=str(tmp_path), cache=CacheConfig(num_blocks=4))) as engine:
        assert engine.info.vocab_size == KNOWN


@pytest.mark.parametrize(
    ("tokenizer", "said"), [("/nope", "tokenizer '/nope' was not found"), ("{empty}", "holds no tokenizer.json"), ("", "empty string")]
)
def test_a_tokenizer_that_is_asked_for_must_be_there(cancelling: dict[str, str], tmp_path: Path, tokenizer: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Engine(EngineConfig(model=cancelling["llama"], tokenizer=tokenizer.format(empty=tmp_path)))


@pytest.mark.parametrize("token", [5, 9, 11])
def test_every_eos_of_every_file_ends_a_sample(cancelling: dict[str, str], tmp_path: Path, token: int) -> None:
    """Ids 5 and 9 from generation_config, 5 from config, 11 from the tokenizer: drawn or given, they end it and stay in it."""
    folder = shutil.copytree(cancelling["llama"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    eos = next(text for text, i in json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].items() if i == 11)
    for name, data in (
        ("config.json", {**config, "eos_token_id": 5}),
        ("generation_config.json", {"eos_token_id": [5, 9]}),
        ("tokenizer_config.json", {"eos_token": {"content": eos}}),
    ):
        (folder / name).write_text(json.dumps(data))
    drawn = RolloutRequest(request_id="drawn", prompt_token_ids=prompt(1, 5), params=SamplingParams(logit_bias={token: 100.0}))
    given = RolloutRequest(request_id="given", prompt_token_ids=prompt(1, 5), forced_token_ids=(7, token, 8))
    with Engine(str(folder), threads=1, num_blocks=8) as engine:
        assert engine.info.eos_token_ids == (5, 9, 11)
        for output, ids in zip(finals(engine, [drawn, given]).values(), ([token], [7, token]), strict=True):
            assert (output.token_ids, output.finish_reason, output.stop_reason) == (ids, "stop", token)
            assert len(output.logprobs) == len(ids)
