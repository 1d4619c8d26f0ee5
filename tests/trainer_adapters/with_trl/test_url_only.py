"""TRL's server mode, unchanged, given the URL of a server of Rollsync: its clients of 1.12 to 1.16, with a stub of vLLM beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from servers import serving
from trl_cases import write_text_model
from trl_child import child

pytestmark = pytest.mark.adapters

VERSIONS = ("1.12.0", "1.13.0", "1.14.0", "1.15.0", "1.16.0")
UNTRAINABLE = ("1.15.0",)
"""on a CPU, whatever it samples from: its scorer is a kernel for GPUs"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_model(tmp_path_factory.mktemp("url") / "model")


@pytest.fixture(scope="module", params=VERSIONS)
def found(request: pytest.FixtureRequest, folder: str) -> Iterator[dict[str, Any]]:
    cases = ["generate", "chat", "scores", "pause", "weights"]
    cases += [] if request.param in UNTRAINABLE else ["train"]
    with serving(folder, "--num-blocks", "128", "--max-model-len", "512", "--sample-padding") as server:
        report = child("url_worker.py", folder, server.url, *cases, version=request.param)
    assert report["trl"] == request.param
    yield report


def test_samples_come_prompt_after_prompt_with_their_logprobs(found: dict[str, Any]) -> None:
    """H1."""
    generate = found["generate"]
    assert generate["prompts"] in ([[40, 41, 42, 43], [44, 45]], [[40, 41, 42, 43]] * 2 + [[44, 45]] * 2)
    assert generate["rows"] == [4, 4, 4] and generate["none"] is None and generate["distinct"] == 4
    assert generate["off"] < 1e-5 and set(generate["width"]) <= {2, 3} and generate["sampled_is_there"]


def test_chats_and_scores(found: dict[str, Any]) -> None:
    """H2, H3."""
    assert found["chat"]["rows"] == 4 and found["chat"]["off"] < 1e-5 and found["chat"]["as_rendered"]
    assert found["scores"]["off"] < 1e-5


def test_weights_arrive_bit_for_bit_and_what_can_never_work_is_asked_once(found: dict[str, Any]) -> None:
    """H4, H5: clients repeat what ends by 5xx, into a group whose bytes then mean something else."""
    weights = found["weights"]
    assert weights["config"] == {"backend": "nccl"} and weights["mode"] == "processed_logprobs"
    assert weights["whole"] and weights["one"] and weights["kept"] and weights["failed"]
    answers = [status for path, status in weights["asked"] if path == "update_weights"]
    assert len(answers) == 1 and 400 <= answers[0] < 500


def test_what_runs_survives_a_pause(found: dict[str, Any]) -> None:
    """H6."""
    pause = found["pause"]
    assert pause["waited"] and pause["lengths"] == [400] * 32 and pause["longest"] == 512


def test_a_run_of_grpo_in_server_mode(found: dict[str, Any]) -> None:
    if found["trl"] not in UNTRAINABLE:
        train = found["train"]
        assert len(train["loss"]) == 3 and max(train["difference"]) < 1e-5 and train["version"] > 2
