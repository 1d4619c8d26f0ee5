"""`attach` on stock trainers of several TRLs, each in a child process: GRPO, RLOO, Distillation, LoRA, tools, evaluation, resumed runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from trl_cases import write_text_model
from trl_child import child

pytestmark = pytest.mark.adapters

VERSIONS = ("1.0.0", "1.5.0", "1.10.0", "1.12.0", "1.14.0", "1.16.0")
WITHOUT_TOOLS = ("1.0.0", "1.5.0")
"""they want a package more for tools"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_model(tmp_path_factory.mktemp("attach") / "model")


@pytest.fixture(scope="module", params=VERSIONS)
def found(request: pytest.FixtureRequest, folder: str) -> dict[str, Any]:
    cases = ["grpo", "noise", "rloo", "distillation", "peft", "eval", "resumed"]
    cases += [] if request.param in WITHOUT_TOOLS else ["tools", "full"]
    report = child("attach_worker.py", folder, *cases, version=request.param)
    assert report["trl"] == request.param
    return report


def test_a_run_of_grpo(found: dict[str, Any]) -> None:
    """T1, T2, T8: weights move and are sent once a step; the trainer computes the rollout's logprobs again."""
    grpo = found["grpo"]
    assert grpo["syncs"] == 2 and grpo["version"] == 2 and grpo["moved"]
    assert max(grpo["difference"]) < 1e-5 and all(abs(mean - 1) < 1e-5 for mean in grpo["mean"])
    assert not found["vllm"]


def test_every_row_and_every_step_is_a_sample_of_its_own(found: dict[str, Any]) -> None:
    grpo = found["grpo"]
    assert grpo["asked"] == [8, 8] and len({tuple(row) for row in grpo["rows"]}) == 8
    assert len(set(grpo["seeds"])) == 2 and len(set(found["eval"]["seeds"])) == len(found["eval"]["seeds"]) > 4


def test_trls_ratios_see_what_is_off_by_a_tenth(found: dict[str, Any]) -> None:
    """T2: the metric that is 0 otherwise is alive."""
    noise = found["noise"]
    assert all(abs(d - 0.1) < 1e-5 for d in noise["difference"]) and all(abs(m - math.exp(-0.1)) < 1e-5 for m in noise["mean"])


def test_rloo_and_distillation(found: dict[str, Any]) -> None:
    """T3."""
    assert found["rloo"]["syncs"] == 2 and len(found["rloo"]["loss"]) == 2
    if found["trl"] not in ("1.0.0", "1.5.0"):
        assert found["distillation"]["syncs"] == 2 and all(loss > 1e-4 for loss in found["distillation"]["loss"])


def test_lora_is_merged_on_the_way(found: dict[str, Any]) -> None:
    """T4: the engine holds what merge_and_unload makes; the base weights were not touched."""
    assert found["peft"]["base_is_as_it_was"] and found["peft"]["apart"] < 1e-6 and max(found["peft"]["difference"]) < 1e-5


def test_tools(found: dict[str, Any]) -> None:
    """T6: the second turn has longer prompts, the first turn's ids in them."""
    if found["trl"] not in WITHOUT_TOOLS:
        first, second = found["tools"]["asked"]
        assert found["tools"]["syncs"] == 1 and len(first) == len(second) == 4 and min(second) > max(first)
        assert found["tools"]["rewards"] == [1.0, 1.1, 1.2, 1.3]
        assert len(found["full"]["asked"]) == found["full"]["steps"] == 1, "a tool's result that does not fit ends its row, not the run"


def test_evaluation_in_between(found: dict[str, Any]) -> None:
    """T7: an evaluation after the last step sees its weights, so there is one sync more than steps."""
    assert found["eval"]["syncs"] == 3 and found["eval"]["evals"] == 2 and max(found["eval"]["difference"]) < 1e-5


def test_a_resumed_run(found: dict[str, Any]) -> None:
    """Its first rollout is of the trained weights, and what an unbroken run had drawn in that step."""
    resumed = found["resumed"]
    assert resumed["syncs"] == 1 and resumed["version"] == 3 and resumed["same"] and resumed["difference"] < 1e-5
