"""The examples that learn: the demo's last act at work for two steps, and what the TRL example pays for."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"rollsync_example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_ratio_is_one_in_the_demos_last_act(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("demo_grpo").main(["--steps", "2", "--warm-up-steps", "3", "--prompts", "4", "--samples", "4"]) == 0
    counts = re.findall(r"(\d+) of (\d+)$", capsys.readouterr().out, re.MULTILINE)
    assert len(counts) == 2 and all(int(exact) == int(tokens) > 50 for exact, tokens in counts)


def test_the_demos_reward_is_the_share_of_digits_in_place() -> None:
    act = example("demo_grpo")
    prompt = [3, 1, 9, 0, 7, 5, act.ANSWER]
    assert act.reward(prompt, [0, 1, 3, 5, 7, 9, act.END]) == 1
    assert act.reward(prompt, [1, 0, 3, 5, 7, 9, act.END]) == pytest.approx(4 / 6)
    assert act.reward(prompt, [0, 1, 3, 5, 7, act.END]) == 0 == act.reward(prompt, [0, 1, 3, 5, 7, 9, 9])


def test_what_an_answer_is_worth_to_the_trl_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    found = example("grpo_trl")
    texts = [" 12.", " 12. So", " 13", " twelve", " 1"]
    worth = [found.worth(text, 12, ended) for text, ended in zip(texts, (True, False, True, True, False), strict=True)]
    assert worth == pytest.approx([1.0, 0.6, 0.65, 0.2, 0.2])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for option, package in (("--plot=x.png", "matplotlib"), ("--report-to=wandb", "wandb")):
        with pytest.raises(SystemExit):
            found.parse([str(tmp_path), option])
        assert f"pip install {package}" in capsys.readouterr().err
    (tmp_path / "config.json").touch()
    with pytest.raises(SystemExit):
        found.parse([str(tmp_path), f"--json={tmp_path}/none/out.json"])
    assert "--json goes to a folder that is not there" in capsys.readouterr().err
