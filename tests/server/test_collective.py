"""Weights over gloo into a real server: whatever becomes of the trainer, the old weights serve on and the next sync works."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from rollsync import RolloutClient
from rollsync.rollout.selftest.model import write_model
from rollsync.weight_sync.control import HttpControl, UpdateError
from rollsync.weight_sync.sender import WeightSender
from rollsync.weight_sync.sources import TensorSource
from rollsync.weight_sync.transports.broadcast import Broadcast
from safetensors.torch import load_file

FLAGS = ("--block-tokens", "16", "--num-blocks", "256", "--max-model-len", "256", "--threads", "1")
PROMPT = list(range(3, 23))
ANSWERS_WITHIN_S = 0.5

TRAINER = """
import sys, time
from rollsync.weight_sync.sender import WeightSender
from rollsync.weight_sync.sources import TensorSource
from rollsync.weight_sync.transports.broadcast import Broadcast
from safetensors.torch import load_file

class Slow(TensorSource):
    def __iter__(self):
        for number, item in enumerate(super().__iter__()):
            if number == 4:
                print("half way", flush=True)
                time.sleep(120)
            yield item

tensors = {name: tensor + 1 for name, tensor in load_file(sys.argv[2]).items()}
sender = WeightSender(sys.argv[1], Slow(tensors), transport=Broadcast(timeout_s=2), bucket_bytes=3000, deadline_s=float(sys.argv[3]))
sender.sync()
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_model(tmp_path_factory.mktemp("collective") / "m", "llama")) / "model.safetensors"


@pytest.fixture(scope="module")
def server(serving: Any, checkpoint: Path) -> Iterator[Any]:
    with serving(*FLAGS, model=str(checkpoint.parent), factory=None) as found:
        yield found


def sample(url: str) -> tuple[list[int], list[float]]:
    with RolloutClient(url) as client:
        found = client.rollouts([PROMPT], sampling_params={"seed": 1, "max_tokens": 8}).results[0].samples[0]
    return list(found.token_ids), list(found.logprobs)


def sender_of(url: str, checkpoint: Path, add: float = 0.0, **options: Any) -> WeightSender:
    tensors = {name: tensor + add for name, tensor in load_file(checkpoint).items()}
    return WeightSender(url, TensorSource(tensors), transport=Broadcast(timeout_s=20), bucket_bytes=3000, **options)


def answers(url: str) -> float:
    """The longest of what an operator would ask, each at the best of three: what is held up is held up every time."""

    def took(client: httpx.Client, path: str) -> float:
        began = time.monotonic()
        assert client.get(path).status_code == 200
        return time.monotonic() - began

    with httpx.Client(base_url=url, timeout=5) as client:
        paths = ("/health", "/v1/engine/status", "/v1/weights", "/v1/weights/groups")
        return max(min(took(client, path) for _ in range(3)) for path in paths)


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_that_dies_or_freezes_half_way_changes_nothing(server: Any, checkpoint: Path, fate: signal.Signals) -> None:
    before = sample(server.url)
    deadline_s = "60" if fate == signal.SIGKILL else "3"
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, server.url, str(checkpoint), deadline_s], stdout=subprocess.PIPE)
    try:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"half way\n"
        trainer.send_signal(fate)
        assert answers(server.url) < ANSWERS_WITHIN_S
        assert sample(server.url) == before
        if fate == signal.SIGSTOP:
            end = time.monotonic() + 10
            while httpx.get(f"{server.url}/v1/weights").json()["weights"]["update"] and time.monotonic() < end:
                time.sleep(0.1)
        with sender_of(server.url, checkpoint, 0.01) as sender:
            sender.sync()
            assert sample(server.url) != before
        with sender_of(server.url, checkpoint) as sender:
            sender.sync()
            assert sample(server.url) == before
    finally:
        trainer.kill()
        trainer.wait()


def test_the_servers_own_words_win_over_a_transfer_that_fails(server: Any, checkpoint: Path) -> None:
    """The update is ended over there while buckets are on their way; the trainer hears why, at once."""
    before = sample(server.url)

    class Ended(TensorSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(super().__iter__()):
                if number == 4:
                    control = HttpControl(server.url)
                    update = control.call("GET", "/v1/weights")["weights"]["update"]
                    control.abort(update if isinstance(update, str) else update["id"], "an operator says no")
                yield item

    began = time.monotonic()
    transport = Broadcast(timeout_s=30)
    with (
        WeightSender(server.url, Ended(load_file(checkpoint)), transport=transport, bucket_bytes=3000) as sender,
        pytest.raises(UpdateError, match=r"an operator says no|is not open"),
    ):
        sender.sync()
    assert time.monotonic() - began < 15
    with sender_of(server.url, checkpoint) as sender:
        sender.sync()
        sender.sync()
    assert sample(server.url) == before


def test_senders_that_come_and_go_leave_the_server_as_it_was(server: Any, checkpoint: Path, until: Any) -> None:
    engine = httpx.get(f"{server.url}/v1/engine/status").json()["engine_pid"]

    def held() -> tuple[int, int]:
        return len(os.listdir(f"/proc/{engine}/fd")), len(os.listdir(f"/proc/{engine}/task"))

    def after(senders: int) -> tuple[int, int]:
        for _ in range(senders):
            with sender_of(server.url, checkpoint) as sender:
                sender.sync()
                sender.sync()
        return held()

    files, threads = after(2)
    after(5)
    until(lambda: held()[0] <= files and held()[1] <= threads, 20)  # threads of calls that are over end after some seconds


def test_a_server_that_dies_is_an_error_in_time_and_the_next_one_gets_a_group(serving: Any, server: Any, checkpoint: Path) -> None:
    with serving(*FLAGS, model=str(checkpoint.parent), factory=None) as doomed:

        class Killing(TensorSource):
            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                for number, item in enumerate(super().__iter__()):
                    if number == 4:
                        doomed.process.kill()
                    yield item

        transport = Broadcast(timeout_s=10)
        began = time.monotonic()
        with WeightSender(doomed.url, Killing(load_file(checkpoint)), transport=transport, bucket_bytes=3000) as sender:
            with pytest.raises(UpdateError, match=re.escape(doomed.url)):
                sender.sync()
            assert time.monotonic() - began < 20
    with sender_of(server.url, checkpoint) as sender:
        sender.sync()


def test_groups_over_http_are_checked_by_field_and_told_where(server: Any) -> None:
    call = lambda method, path, **body: httpx.request(method, server.url + path, json=body, timeout=20)  # noqa: E731
    place = call("POST", "/v1/weights/groups", name="t").json()
    assert (place["host"], place["rank"], place["world_size"], place["backend"]) == ("127.0.0.1", 1, 2, "gloo")
    assert call("POST", "/v1/weights/groups", name="u", port=place["port"]).status_code == 409
    assert call("POST", "/v1/weights/groups", name="a/b").json()["error"]["field"] == "name"
    assert call("POST", "/v1/weights/groups/t/join", backend="mpi").json()["error"]["field"] == "backend"
    assert call("POST", "/v1/weights/groups/t/join", world_size=1).json()["error"]["field"] == "world_size"
    assert call("POST", "/v1/weights/groups/t/join", host="x").json()["error"]["field"] == "port"
    alone = call("POST", "/v1/weights/groups/t/join", timeout_s=0.3)
    assert alone.status_code == 409 and f"127.0.0.1:{place['port']}" in alone.json()["error"]["message"]
    assert call("POST", "/v1/weights/groups/t/join").status_code == 409, "it is not bound any more"
    assert not httpx.delete(f"{server.url}/v1/weights/groups/t").json()["changed"]
    waits = threading.Thread(target=lambda: call("POST", "/v1/weights/groups/v/join", timeout_s=15))
    call("POST", "/v1/weights/groups", name="v")
    waits.start()
    assert answers(server.url) < ANSWERS_WITHIN_S
    assert httpx.delete(f"{server.url}/v1/weights/groups/v").json()["changed"]
    waits.join(10)
    assert not waits.is_alive()
    refused = call("POST", "/v1/weights/updates", manifest={"tensors": []}, transport={"name": "collective", "group": "none"})
    assert refused.status_code in (400, 422)
