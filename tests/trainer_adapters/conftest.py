"""Fixtures of the parity tests; lets them import `parity_cases` (there are no packages under tests/)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollsync import Engine, SamplingParams
from rollsync.rollout.selftest.model import write_model

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

from frameworks import LEFT_OUT
from parity_cases import FAMILIES, LENGTHS, NEW_TOKENS, Case

pytest.importorskip("transformers")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A run without a trainer says which tests it left out, and why."""
    for folder, reason in sorted(config.stash.get(LEFT_OUT, {}).items()):
        name = folder.removeprefix("with_")
        terminalreporter.write_line(f"not run: tests/trainer_adapters/{folder}: {reason} (make test-adapters FRAMEWORKS={name})")


@pytest.fixture(scope="session")
def make_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """A family's model and what an engine sampled on it; once for every set of arguments."""
    made: dict[Any, Case] = {}

    def make(family: str, dtype: str, **options: Any) -> Case:
        key = (family, dtype, tuple(sorted(options.items())))
        if key not in made:
            base, changes = FAMILIES[family]
            folder = write_model(tmp_path_factory.mktemp(family) / dtype, base, dtype=dtype, **changes)
            generator = torch.Generator().manual_seed(7)
            prompts = [torch.randint(3, 256, (n,), generator=generator).tolist() for n in LENGTHS]
            params = SamplingParams(max_tokens=NEW_TOKENS, seed=3, ignore_eos=True)
            with Engine(folder, sample_padding=True, threads=1, num_blocks=64, **options) as engine:
                outputs = engine.generate(prompts, params, include=["model_logprobs"])
            samples = [o.samples[0] for o in outputs]
            logprobs = [list(s.model_logprobs or ()) for s in samples]
            made[key] = Case(
                folder=folder, dtype=getattr(torch, dtype), prompts=prompts, samples=[list(s.token_ids) for s in samples],
                model_logprobs=logprobs, outputs=outputs,
            )  # fmt: skip
        return made[key]

    return make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
