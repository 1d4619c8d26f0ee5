"""Clients submit without a pause while a trainer pauses, updates and resumes: nobody is lost, and no sample mixes weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollsync import Engine, RolloutClient, RolloutRequest, SamplingParams
from rollsync.rollout.selftest.model import write_model
from rollsync.weight_sync.sender import WeightSender
from rollsync.weight_sync.sources import TensorSource
from safetensors.torch import load_file, save_file

OPTIONS = {"block_tokens": 4, "num_blocks": 2048, "max_model_len": 128, "threads": 1}
FLAGS = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
CLIENTS, PROMPTS = 64, 8
PARAMS = {"seed": 1, "max_tokens": 64, "ignore_eos": True}
PAUSES = (("/v1/engine/pause", {"mode": "abort", "owner": "trainer"}), ("/pause", {}), ("/pause_generation", {"mode": "abort"}))
RESUMES = (("/v1/engine/resume", {"owner": "trainer"}), ("/resume", {}), ("/continue_generation", {}))


def prompt(i: int) -> list[int]:
    return [3 + i % PROMPTS, *range(20, 30)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One model, two sets of weights."""
    root = tmp_path_factory.mktemp("race")
    found = [Path(write_model(root / f"m{i}", "llama")) for i in range(2)]
    generator = torch.Generator().manual_seed(3)
    new = {k: v + 0.05 * torch.randn(v.shape, generator=generator) for k, v in load_file(found[0] / "model.safetensors").items()}
    save_file(new, found[1] / "model.safetensors")
    return found


@pytest.fixture(scope="module")
def wanted(folders: list[Path]) -> list[list[tuple[list[int], list[float]]]]:
    """By weights and prompt: what a fresh engine samples."""
    found = []
    for folder in folders:
        with Engine(str(folder), **OPTIONS) as engine:
            for i in range(PROMPTS):
                params = SamplingParams(**PARAMS)
                engine.add_request(RolloutRequest(request_id=str(i), prompt_token_ids=tuple(prompt(i)), params=params))
            outputs = []
            while engine.has_work:
                outputs += [o for o in engine.step() if o.finished]
        found.append([(o.token_ids, o.logprobs) for o in sorted(outputs, key=lambda o: int(o.request_id))])
    return found


@pytest.fixture
def server(serving: Any, folders: list[Path]) -> Iterator[Any]:
    with serving(*FLAGS, model=str(folders[0]), factory=None) as found:
        yield found


@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_requests_on_their_way_end_once_and_on_one_set_of_weights(
    server: Any, folders: list[Path], wanted: Any, rounds: int, until: Any
) -> None:
    before = server.holds()
    over, samples, faults = threading.Event(), [], []

    def submit(client: RolloutClient, i: int) -> None:
        try:
            while not over.is_set():
                (result,) = client.rollouts([prompt(i)], sampling_params=PARAMS).results
                samples.append((i % PROMPTS, *result.samples))
        except Exception as error:
            faults.append(error)

    def come(count: int) -> None:
        until(lambda: len(samples) >= count or faults, 60)

    with RolloutClient(server.url, timeout_s=60) as client, RolloutClient(server.url, timeout_s=60) as trainer:
        threads = [threading.Thread(target=submit, args=(client, i)) for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        weights = [TensorSource(load_file(folder / "model.safetensors")) for folder in folders]
        senders = [WeightSender(server.url, source, timeout_s=20) for source in weights]
        for number in range(1, rounds + 1):
            come(len(samples) + CLIENTS // 2)
            path, body = PAUSES[number % 3]
            trainer._call("POST", path, json=body)
            assert senders[number % 2].sync(version=number).version == number
            path, body = RESUMES[number % 3]
            trainer._call("POST", path, json=body)
        over.set()
        for thread in threads:
            thread.join(60)
        for sender in senders:
            sender.close()
    assert not faults and not any(thread.is_alive() for thread in threads)
    ends = set()
    for i, sample in samples:  # exactly one each
        ends.add(sample.finish_reason)
        assert len(sample.weight_versions) <= 1, "what a pause did not end began after it"
        version = sample.weight_versions[0]["version"] if sample.weight_versions else 0
        ids, logprobs = wanted[version % 2][i]
        length = len(sample.token_ids)
        assert (list(sample.token_ids), list(sample.logprobs)) == (ids[:length], logprobs[:length])
    assert ends == {"length", "abort"}
    until(lambda: {k: v for k, v in server.holds().items() if "files" not in k} == {k: v for k, v in before.items() if "files" not in k})
