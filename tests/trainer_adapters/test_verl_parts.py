"""What of the verl adapter needs no verl: settings, sampling parameters, the gate. The rest: with_verl/."""

from __future__ import annotations

import asyncio
import importlib.metadata
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rollsync import BadRequest, ConfigError, IllegalState, PromptTooLong, SampleOutput
from rollsync.rollout.cli import main
from rollsync.rollout.errors import EngineDead
from rollsync.trainer_adapters.verl import check
from rollsync.trainer_adapters.verl.gate import Gate
from rollsync.trainer_adapters.verl.sampling import read_params, seeded, token_output
from rollsync.trainer_adapters.verl.settings import engine_config, replica_settings
from rollsync.trainer_adapters.verl.updates import ReplicaUpdates

MODEL = SimpleNamespace(path="/model", lora_rank=0)
USUAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def settings(**rollout: Any) -> Any:
    return replica_settings({"prompt_length": 32, "response_length": 16, "dtype": "bfloat16", "load_format": "dummy", **rollout}, MODEL)


def test_verls_settings_become_an_engines() -> None:
    config = engine_config(
        settings(tensor_model_parallel_size=2, max_num_seqs=1024, enable_prefix_caching=False, engine_kwargs={"rollsync": {"threads": 1}}),
        "/model",
    )
    assert (config.model, config.tp, config.dtype, config.load_format, config.apply) == ("/model", 2, "bfloat16", "dummy", "staged")
    assert (config.scheduler.max_num_seqs, config.numerics.threads, config.cache.prefix_cache) == (1024, 1, False)
    shared = replica_settings({"seed": 42}, MODEL, on_gpu=True, alone=False).engine
    assert (shared["apply"], shared["memory_fraction"]) == ("in_place", 0.5)
    assert "seed" not in shared  # a restart does not repeat what was sampled before


def test_all_that_an_engine_cannot_do_is_refused_at_once_and_by_name() -> None:
    rollout = {
        "data_parallel_size": 2,
        "quantization": "fp8",
        "dtype": "float16",
        "prometheus": {"enable": True},
        "engine_kwargs": {"rollsync": {"block_token": 16, "sync_timeout_s": 0}},
    }
    with pytest.raises(ConfigError) as refused:
        replica_settings(rollout, SimpleNamespace(path="/model", lora_rank=8, lora={"merge": False}))
    for name in ("data_parallel_size", "quantization", "dtype", "prometheus.enable", "lora_rank", "did you mean", "sync_timeout_s"):
        assert name in str(refused.value)
    assert settings(quantization=None, mtp=None).engine["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("prompt", "given", "limit"),
    [(10, {}, 16), (40, {}, 8), (60, {}, 1), (10, {"max_tokens": 1000}, 54), (10, {"max_new_tokens": 3}, 3), (10, {"max_tokens": 0}, 1)],
)
def test_limits_are_clamped_as_verls_other_rollouts_do(prompt: int, given: dict[str, Any], limit: int) -> None:
    params, wanted = read_params({**USUAL, **given}, prompt, 64, settings(repetition_penalty=1.2, ignore_eos=True))
    assert (params.max_tokens, params.top_k, params.ignore_eos, params.repetition_penalty, wanted) == (limit, 0, True, 1.0, True)


def test_what_cannot_be_asked_for_is_named() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"best_of": 2}, "best_of"),
        ({"n": 2}, "sampling_params.n "),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_tokens": 3, "max_new_tokens": 3}, "max_new_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
    ]
    for given, name in cases:
        with pytest.raises(BadRequest, match=name):
            read_params(given, 4, 64, settings())
    with pytest.raises(PromptTooLong, match="64"):
        read_params({}, 64, 64, settings())


def test_determinism_seeds_by_id_and_version_and_only_without_a_seed() -> None:
    fixed = settings(full_determinism=True, seed=42)
    params, _ = read_params({}, 4, 64, fixed)
    first = seeded(params, fixed, "det-1", 3).seed
    assert first == seeded(params, fixed, "det-1", 3).seed
    assert len({first, seeded(params, fixed, "det-2", 3).seed, seeded(params, fixed, "det-1", 4).seed}) == 3
    assert seeded(params, settings(), "det-1", 3).seed is None
    own, _ = read_params({"seed": 9}, 4, 64, fixed)
    assert seeded(own, fixed, "det-1", 3).seed == 9


def test_an_outputs_versions_are_those_of_its_tokens() -> None:
    spans = [{"version": 3, "start": 0, "end": 2}, {"version": 5, "start": 2, "end": 3}]
    sample = SampleOutput(
        request_id="r", sample_index=0, token_ids=[7, 8, 9], logprobs=[-1.0, -2.0, -3.0], finish_reason="abort", weight_versions=spans
    )
    fields = token_output(sample, 6, wanted=False, column="logprobs")
    assert (fields["token_ids"], fields["log_probs"], fields["stop_reason"]) == ([7, 8, 9], None, "aborted")
    steps = [fields["extra_fields"][name] for name in ("min_global_steps", "max_global_steps", "global_steps")]
    assert steps == [3, 5, 5]
    sample.token_ids, sample.logprobs, sample.weight_versions = [], [], []
    assert token_output(sample, 6, wanted=True, column="logprobs")["extra_fields"]["min_global_steps"] == 6


def test_a_closed_gate_parks_or_turns_away_and_parking_ends() -> None:
    async def run() -> None:
        gate = Gate(timeout_s=0.2)
        assert await gate.admits()
        gate.close(reject=False)
        parked = asyncio.create_task(gate.admits())
        await asyncio.sleep(0.01)
        assert not parked.done()
        gate.open()
        assert await parked
        gate.close(reject=False)
        parked = asyncio.create_task(gate.admits())
        await asyncio.sleep(0.01)
        gate.close(reject=True)
        assert not await parked and not await gate.admits()
        gate.close(reject=False)
        with pytest.raises(IllegalState, match=r"0\.2 s"):
            await gate.admits()

    asyncio.run(run())


@pytest.mark.parametrize("fault", [EngineDead("the engine ended"), ValueError("a fault of ours")])
def test_all_ranks_learn_at_once_that_the_engine_died_at_the_commit(fault: Exception) -> None:
    class Dying:
        async def command(self, verb: str, **_: Any) -> Any:
            if verb == "open_update":
                return {"id": "u", "version": 1}
            raise fault

    async def run() -> None:
        updates = ReplicaUpdates(Dying(), ranks=3, timeout_s=30.0)  # type: ignore[arg-type]
        await updates.begin(1)
        calls = (updates.end(1, rank, None, None if rank else "u", {}) for rank in range(3))
        async with asyncio.timeout(5):
            first, *others = await asyncio.gather(*calls)
        assert not first["ok"] and str(fault) in first["error"] and others == [first, first]

    asyncio.run(run())


def test_verl_check_names_what_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"verl": "0.9.1", "ray": "2.60.0", "transformers": "5.24.0", "torch": "2.13.0", "uvicorn": "0.54.0", "fastapi": "0.165.0"}

    def version(name: str) -> str:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["verl-check"]) == 1
    told = capsys.readouterr().out
    assert "transformers 5.24.0 does not fit" in told and "below 5.11" in told and "cachetools is not installed" in told


def test_verl_check_has_a_verdict_where_no_cluster_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{place.getsockname()[1]}"
        (problem,) = check.reached(address).problems
        assert "nobody answers there" in problem
        place.listen()  # somebody who never says a word
        monkeypatch.setattr(check, "REACH_S", 0.3)
        slow = tmp_path / "python"
        slow.write_text("#!/bin/sh\nexec sleep 30\n")
        slow.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(slow))
        assert check.reached(address).problems == ("it let no process in within 0.3 s",)
