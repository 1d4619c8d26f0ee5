"""TRL's AsyncGRPOTrainer with our rollout worker and weight transfer, and with its own worker; TRL 1.16."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollsync import RolloutClient
from rollsync.rollout.errors import BadRequest
from rollsync.trainer_adapters.errors import TargetError
from rollsync.trainer_adapters.trl_async import rollout_worker, weight_transfer
from rollsync.weight_sync.control import UpdateError
from servers import Server, serving
from trl_cases import chats, load, write_text_model
from trl_child import child

pytestmark = pytest.mark.adapters
FLAGS = ("--num-blocks", "128", "--max-model-len", "512", "--sample-padding")
ORDER = ["pause", "send_weights", "resume"]
"""of every sync"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_model(tmp_path_factory.mktemp("async") / "model")


@pytest.fixture(scope="module")
def found(folder: str) -> dict[str, Any]:
    with serving(folder, *FLAGS) as server:
        return child("async_worker.py", folder, server.url, "plain", "peft", "on_policy", "in_flight")


def test_the_order_of_calls(found: dict[str, Any]) -> None:
    """A1."""
    begin = ["init_weight_transfer", *ORDER, "v1", "start"]
    assert found["plain"]["notes"] == [*begin, *ORDER, "v2", *ORDER, "v3", *ORDER, "v4", "stop", "destroy"]
    assert not found["plain"]["threads"] and not found["peft"]["threads"]


def test_ratios_of_tokens_and_the_weights_that_drew_them(found: dict[str, Any]) -> None:
    """A2: exactly those of the version each sample names; rewards of both functions, with their advantages."""
    plain = found["plain"]
    assert abs(plain["ratio"][0] - 1) < 1e-6 and abs(plain["kl"][0]) < 1e-6 and plain["stale"][0] == 0
    assert all(abs(ratio - 1) > 1e-6 for ratio, stale in zip(plain["ratio"], plain["stale"], strict=True) if stale), "the ratio is alive"
    assert plain["rewards"] == ["rewards/reward", "rewards/slow_reward"]
    assert plain["versions_fit"] and plain["groups"] * 4 >= plain["queued"] >= 24 and plain["equal"]


def test_stale_samples_are_dropped(found: dict[str, Any]) -> None:
    """A3."""
    assert sum(found["on_policy"]["dropped"]) > 0 and max(found["on_policy"]["stale"]) == 0


def test_lora_arrives_merged(found: dict[str, Any]) -> None:
    """A4."""
    assert found["peft"]["equal"] and found["peft"]["versions_fit"] and abs(found["peft"]["ratio"][0] - 1) < 1e-6


def test_tokens_of_one_sample_come_from_several_versions_and_no_generation_waits(found: dict[str, Any]) -> None:
    flight = found["in_flight"]
    assert flight["most"] > 1 and flight["syncs"] > flight["most"] and max(flight["lags"]) <= flight["bound"]
    assert flight["running"] == 0, "stop() frees the servers"


def test_trls_own_worker(folder: str) -> None:
    """A5."""
    with serving(folder, *FLAGS) as server:
        found = child("async_worker.py", folder, server.url, "default_worker")["default_worker"]
    assert found["notes"] == ["init_weight_transfer", *ORDER, *ORDER, *ORDER, "destroy"] and found["budget"] == 512
    assert abs(found["ratio"][0] - 1) < 1e-5


# A6: what goes wrong is said where TRL looks


def reward(completion_ids: Any, **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def broken(**kwargs: Any) -> list[float]:
    raise KeyError("answer")


@pytest.fixture
def server(folder: str) -> Iterator[Server]:
    with serving(folder, *FLAGS) as found:
        yield found


@pytest.fixture
def make(folder: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A worker on a server that has the trainer's weights."""
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig

    made: list[Any] = []

    def worker(url: str, *, synced: bool = True, reward_funcs: Any = reward, dataset: Any = None, **options: Any) -> Any:
        own = {name: options.pop(name) for name in ("num_generations", "top_p", "log_completions") if name in options}
        settings = {"num_generations": 4, "max_completion_length": 8, **own}
        args = AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        given = {"train_dataset": dataset or chats(), "processing_class": tokenizer, "reward_funcs": reward_funcs}
        found = rollout_worker(url, args, **given, **options)
        made.append(found)
        if synced:
            transfer = weight_transfer(url, model=folder)
            transfer.init_weight_transfer()
            transfer.send_weights((n, p.detach()) for n, p in load(folder).named_parameters())
            transfer.destroy()
            found.update_model_version(1)
        return found

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    yield worker
    for found in made:
        found.stop()


def failure(worker: Any, deadline_s: float = 30.0) -> str:
    """What check_health raises in the end."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            worker.check_health(60.0)
        except RuntimeError as error:
            return str(error)
        time.sleep(0.05)
    raise AssertionError("the worker did not fail")


def test_a_reward_function_that_fails(server: Server, make: Any) -> None:
    worker = make(server.url, reward_funcs=[reward, broken])
    worker.start()
    assert "the reward function broken failed: KeyError: 'answer'" in failure(worker)


def test_a_server_that_dies(server: Server, make: Any) -> None:
    worker = make(server.url, patience_s=2.0)
    worker.start()
    assert worker.rollout_buffer.get(timeout=20).model_version == 1
    server.kill()
    words = failure(worker)
    assert "no server takes prompts" in words and server.url in words


def test_prompts_that_no_server_takes(server: Server, make: Any) -> None:
    from datasets import Dataset

    long = Dataset.from_list([{"prompt": "x" * 600}])
    worker = make(server.url, dataset=long)
    worker.start()
    words = failure(worker)
    assert "4 groups in a row came to nothing" in words and "row 0 of the dataset" in words and "512" in words


def test_a_stop_waits_for_no_reward_function_and_queues_are_bounded(server: Server, make: Any) -> None:
    release, finished = threading.Event(), threading.Event()

    def hangs(completion_ids: Any, **kwargs: Any) -> list[float]:
        release.wait(300)
        finished.set()
        return [0.0] * len(completion_ids)

    def running() -> int:
        with RolloutClient(server.url) as client:
            found: int = client.status()["stats"]["running"]
        return found

    quick, stuck = make(server.url, buffer=4), make(server.url, synced=False, reward_funcs=hangs)
    stuck.update_model_version(1)
    for worker in (quick, stuck):
        worker.start()
    assert quick.rollout_buffer.get(timeout=20).model_version == 1
    end = time.monotonic() + 60
    while (quick.rollout_buffer.qsize(), running()) != (3, 0) and time.monotonic() < end:  # no room for a group
        time.sleep(0.05)
    assert (quick.rollout_buffer.qsize(), running()) == (3, 0), "groups begin though nobody takes any"
    for worker in (quick, stuck):
        thread = worker._thread
        worker.stop()
        assert not thread.is_alive()
    assert not finished.is_set() and running() == 0
    release.set()
    quick.start()
    groups = {quick.rollout_buffer.get(timeout=20).group_id for _ in range(12)}
    assert len(groups) >= 3, "a worker that was stopped goes on"


def test_weights_that_others_sent_are_noticed_before_anything_is_sampled(server: Server, make: Any) -> None:
    worker = make(server.url, synced=False)
    worker.update_model_version(3)
    with pytest.raises(TargetError, match="serves version 0 of the weights and the trainer is at 3"):
        worker.start()


def test_settings_are_refused_by_name(
    server: Server, make: Any, folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BadRequest, match="top_p"):
        make(server.url, synced=False, top_p=1.5)
    with pytest.raises(ValueError, match="num_generations"):
        make(server.url, synced=False, num_generations=1)
    with pytest.raises(ValueError, match="reward_weights has 2 for 1"):
        make(server.url, synced=False, reward_weights=[1.0, 2.0])
    with pytest.raises(TypeError, match="reward_funcs must be functions"):
        make(server.url, synced=False, reward_funcs=["some/model"])
    with pytest.raises(ValueError, match="reward_weights must be finite, got nan"):
        make(server.url, synced=False, reward_weights=[float("nan")])
    with caplog.at_level(logging.WARNING):
        make(server.url, synced=False)
        assert "log_completions" not in caplog.text
        make(server.url, synced=False, log_completions=True)
        assert "log_completions prints nothing" in caplog.text
    other = write_text_model(tmp_path / "other", rms_norm_eps=1e-3)
    with pytest.raises(TargetError, match="rms_norm_eps"):
        weight_transfer(server.url, model=other).init_weight_transfer()


def test_frozen_parameters_stay_and_a_stream_that_changes_is_refused(server: Server, folder: str) -> None:
    model = load(folder)
    transfer = weight_transfer(server.url)
    with pytest.raises(UpdateError, match="init_weight_transfer"):
        transfer.send_weights(iter([]))
    transfer.init_weight_transfer()
    trained = [(n, torch.nn.Parameter(p.detach() * 1.5)) for n, p in model.named_parameters() if "layers.1" in n]
    transfer.send_weights(iter(trained))
    with RolloutClient(server.url) as client:
        before = client.digests()["digests"]
        left = iter([*trained[:2], ("model.norm.weight", torch.zeros(32))])
        with pytest.raises(UpdateError, match=r"gave model\.norm\.weight"):
            transfer.send_weights(left)
        assert next(left, None) is None, "other ranks take part in the stream to its end"
        assert client.digests()["digests"] == before and transfer.version == 1
        transfer.send_weights(iter(trained))
        assert client.weights()["weights"]["version"] == 2
    transfer.destroy()
