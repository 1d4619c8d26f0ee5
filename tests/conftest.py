"""Tiny random models on disk, for every test that runs a real engine."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from rollsync.rollout.selftest.model import write_model

KINDS = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen2": ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "padded": ("llama", {"vocab_size": 320}),
    "padded_tied": ("llama", {"vocab_size": 320, "tie_word_embeddings": True}),
}
NAN_TOKEN = 255


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that would be skipped fails: its environment is said to be complete")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    return _not_skipped(item.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    return _not_skipped(collector.config, (yield))


def _not_skipped(config: pytest.Config, report: Any) -> Any:
    if config.getoption("--no-skips") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and with --no-skips nothing may be: {report.longrepr[-1] if report.longrepr else ''}"
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Engines take a GPU where there is one; only the tests that are about one shall see it. Before torch looks, and for children."""
    if config.getoption("markexpr", "") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _write_tokenizer(folder: str) -> None:
    """Token id i is byte-level symbol i of 256: every sequence of ids is a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(Path(folder, "tokenizer.json")))
    Path(folder, "tokenizer_config.json").write_text(json.dumps({}))


@pytest.fixture(scope="session")
def cancelling(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of models that show every change of summation order, by kind; "nan" has an embedding of NaN at NAN_TOKEN."""
    root = tmp_path_factory.mktemp("cancelling")
    folders = {name: write_model(root / name, family, **changes) for name, (family, changes) in KINDS.items()}
    folders["nan"] = write_model(root / "nan", nan_token=NAN_TOKEN)
    for folder in folders.values():
        _write_tokenizer(folder)
    return folders
