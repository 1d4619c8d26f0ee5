"""The documents say what is so: their tables come from committed results, their claims stay within them, their commands run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CHANGELOG.md", "docs/api.md", "docs/architecture.md", "docs/numerics.md", "benchmarks/README.md")
MODEL, URL = "HuggingFaceTB/SmolLM2-135M-Instruct", "http://127.0.0.1:8000"
CLAIMS = {
    "cuda": r"\bGPUs?\b|\bCUDA\b|\bTriton\b|\bNVIDIA\b|\bH[12]00\b|\bA100\b|\bNCCL\b",
    "ranks": r"\btensor[- ]parallel|\btensor parallelism\b|\bseveral ranks\b",
    "arm": r"\bArm\b|\baarch64\b|\bApple\b",
    "avx2": r"\bAVX2\b",
    "avx512": r"\bAVX-512\b",
    "amx": r"\bAMX\b",
}
"""by device of docs/tables.py: words that speak of it"""
HEDGES = r"\b(no|not|never|without|later|would|must)\b"
"""a sentence with one of these denies or defers"""
RUN = ("rollsync version", "rollsync generate", "curl")
"""what is run of the shell blocks; the others set up, serve, or take minutes"""


def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rollsync_docs_tables", ROOT / "docs" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sentences(document: str) -> list[str]:
    """Prose and bullets, without code blocks, tables and what stands between generated markers."""
    text = re.sub(r"<!-- (\w+): .*? -->.*?<!-- /\1 -->", "", document, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    paragraphs = re.split(r"\n\s*\n|\n(?=[-*#]|\d+\. )", "\n".join(lines))
    return [" ".join(s.split()) for p in paragraphs for s in re.split(r"(?<=[.!?])\s", p) if s.strip()]


def overclaims(document: str, reached: dict[str, str]) -> list[str]:
    """Sentences that speak of a device nothing was run on, and neither deny nor defer."""
    return [
        f"{device} is {reached[device]}: {sentence}"
        for device, words in CLAIMS.items()
        if reached[device] != "run"
        for sentence in sentences(document)
        if re.search(words, sentence) and not re.search(HEDGES, sentence, re.IGNORECASE)
    ]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)


def test_the_tables_are_those_of_the_results() -> None:
    text = (ROOT / "README.md").read_text()
    assert tables().fill(text) == text, "run `make readme`"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_claim_goes_beyond_the_table(name: str) -> None:
    assert not overclaims((ROOT / name).read_text(), tables().levels())


def test_claims_are_found_and_denials_left_alone() -> None:
    nowhere = dict.fromkeys(tables().DEVICES, "never run")
    assert overclaims("It is fast on an H100 with\nTriton. It does not run on GPUs.", nowhere) == [
        "cuda is never run: It is fast on an H100 with Triton."
    ]
    assert not overclaims("It is fast on an H100.", {**nowhere, "cuda": "run"})
    assert overclaims("It is fast on an H100.", {**nowhere, "cuda": "compiled"})


def test_a_result_needs_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = tables()
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    assert set(module.levels().values()) == {"never run"}
    machine = {"cpu": "a chip", "cores": 1}
    result = {"date": "2030-01-01", "machine": machine, "results": [{"device": "cuda", "level": "compiled", "what": "all variants"}]}
    (tmp_path / "x.json").write_text(json.dumps(result))
    assert module.levels()["cuda"] == "compiled"
    assert "| compiled | a chip, 1 cores, 2030-01-01 | all variants" in module.device_table()


def test_the_commands_named_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for name in DOCUMENTS:
        assert set(re.findall(r"`make ([a-z-]+)", (ROOT / name).read_text())) <= targets
    assert set(re.findall(r"^make ([a-z-]+)", "\n".join(blocks("bash")), flags=re.MULTILINE)) <= targets


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_files_named_are_there(name: str) -> None:
    text = (ROOT / name).read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (ROOT / name).parent.joinpath(link).exists(), link
    for path in re.findall(r"`((?:kernels|rollout|tests|docs|benchmarks)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path


# The blocks of code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template."""
    from rollsync.rollout.selftest.model import write_model
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = Path(write_model(tmp_path_factory.mktemp("tiny") / "model"))
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    config = {"chat_template": template, "eos_token": "~", "pad_token": "~", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "rollsync.rollout.cli", "serve", str(folder), "--port", "0", "--num-blocks", "64"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None, "the server did not start"
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        process.kill()
        process.wait()


@pytest.mark.parametrize("index", range(len(blocks("python"))))
def test_python_blocks_run(
    index: int, folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # trainers write beside them
    code = blocks("python")[index].replace(MODEL, str(folder)).replace(URL, url)
    exec(compile(code, f"README.md, python block {index}", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 4


def shell_commands() -> list[str]:
    """Each command of the shell blocks, continuation lines of a quoted body included."""
    found: list[str] = []
    for line in "".join(blocks("bash")).splitlines():
        if found and found[-1].count("'") % 2:
            found[-1] += "\n" + line
        else:
            found.append(line)
    return found


@pytest.mark.parametrize("command", [c for c in shell_commands() if c.startswith(RUN)], ids=lambda c: c.split()[0] + " " + c.split()[1])
def test_shell_commands_run(command: str, folder: Path, url: str) -> None:
    if command.startswith("curl"):
        body = json.loads(command.split("'")[-2])
        answer = pytest.importorskip("httpx").post(f"{url}/v1/rollouts", json=body)
        results = answer.json()["results"]
        assert answer.status_code == 200 and [len(r["samples"]) for r in results] == [body["n"]] * len(body["prompts"])
        assert all(len(s["model_logprobs"]) == len(s["token_ids"]) for r in results for s in r["samples"])
        return
    module = command.replace("rollsync", f"{sys.executable} -m rollsync.rollout.cli", 1).replace(MODEL, str(folder))
    done = subprocess.run(["bash", "-c", module], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout, done.stderr


# The examples


def example(*argv: str) -> str:
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quickstart_samples_in_process(folder: Path) -> None:
    lines = example("examples/quickstart.py", str(folder)).splitlines()
    assert sum("mean logprob" in line for line in lines) == 4


def test_http_client_goes_the_whole_road(url: str) -> None:
    said = example("examples/http_client.py", "--url", url)
    assert "as drawn: True" in said and "whole: " in said and "'samples': 6" in said
    assert "abort (new weights)" in said
