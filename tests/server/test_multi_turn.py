"""examples/multi_turn.py against a real server: ids are kept, the prefix is reused, and one pass over the row gives the same bits."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_text_model
from rollsync import RolloutClient

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "multi_turn.py"


@pytest.fixture(scope="module")
def url(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tiny_text_model.write_folder(tmp_path_factory.mktemp("multi_turn"))
    (folder / "config.json").write_text(json.dumps({**tiny_text_model.CONFIG, "max_position_embeddings": 512}))
    flags = ("--load-format", "random", "--num-blocks", "64", "--block-tokens", "16", "--threads", "1")
    with serving(*flags, model=str(folder), factory=None) as found:
        yield found.url


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("multi_turn", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["multi_turn"] = module
    spec.loader.exec_module(module)
    return module


def test_two_turns_are_one_row_of_ids(url: str, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    row = script.run(url, 3)
    said = capsys.readouterr().out
    size = len(row.ids)
    assert len(row.logprobs) == len(row.mask) == len(row.versions) == size
    changes = [i for i in range(1, size) if row.mask[i] != row.mask[i - 1]]
    assert row.mask[0] == 0 and len(changes) == 3, "prompt, model, tool, model"
    first, end, second = changes
    asked: Any = {"sampling_params": {"max_tokens": script.TURN_TOKENS, "seed": 3}, "include": ["model_logprobs"]}
    with RolloutClient(url) as client:
        (prompt,) = client.render([[{"role": "user", "content": script.QUESTION}]], {"add_generation_prompt": True})
        assert row.ids[:first] == prompt.token_ids
        (alone,) = client.rollouts([row.ids[:second]], **asked).results
        assert alone.samples[0].token_ids == row.ids[second:] and alone.samples[0].model_logprobs == row.logprobs[second:]
    assert all(v == 0 for v in row.versions[first:end]) and set(row.versions[end:second]) == {-1}
    assert f"turn 2: {second} ids" in said and f"{(end - 1) // 16 * 16} cached" in said
    drawn = sum(row.mask)
    assert f"{drawn} of {drawn} logprobs" in said


def test_an_end_of_turn_that_the_model_wrote_is_not_given_again(script: Any) -> None:
    assert script.joined([5, 2], [2, 7, 8]) == [7, 8]
    assert script.joined([5, 6], [2, 7, 8]) == [2, 7, 8]
