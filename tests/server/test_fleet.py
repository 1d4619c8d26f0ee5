"""Two servers and a trainer: one may die, freeze, sleep or come back with old weights, and the other goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from rollsync import RolloutClient, RolloutFleet, ServerUnreachable
from rollsync.rollout.errors import BadRequest, VersionUnavailable
from rollsync.rollout.selftest.model import write_model
from rollsync.weight_sync.control import HttpControl, UpdateError
from rollsync.weight_sync.sender import WeightSender
from rollsync.weight_sync.sources import TensorSource
from safetensors.torch import load_file

FLAGS = ["--block-tokens", "16", "--num-blocks", "256", "--max-model-len", "1000", "--threads", "1"]
PROMPTS = [[3 + i, 4, 5, 6 + i] for i in range(6)]
PARAMS = {"seed": 1, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_model(tmp_path_factory.mktemp("fleet") / "m", "llama", max_position_embeddings=1024))


@pytest.fixture(scope="module")
def pair(serving: Any, model: Path) -> Iterator[list[Any]]:
    """Two servers, for tests that leave them running."""
    flags = [*FLAGS, "--weights-root", str(model.parent)]
    with serving(*flags, model=str(model), factory=None) as one, serving(*flags, model=str(model), factory=None) as two:
        yield [one, two]


class Source(TensorSource):
    """Weights that a "training step" changes; `during` is called when half of them are sent."""

    def __init__(self, model: Path) -> None:
        self.tensors = load_file(model / "model.safetensors")
        super().__init__(self.tensors)
        self.during: Any = lambda: None

    def train(self) -> None:
        for tensor in self.tensors.values():
            tensor.mul_(1.01)

    def __iter__(self) -> Any:
        for i, item in enumerate(super().__iter__()):
            if i == len(self.tensors) // 2:
                self.during()
            yield item


@pytest.fixture
def source(model: Path) -> Source:
    return Source(model)


def facts(server: Any) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/v1/weights").json()["weights"]
    return found


def bits(found: Any) -> list[tuple[list[int], list[float]]]:
    return [(list(s.token_ids), list(s.logprobs)) for r in found.results for s in r.samples]


def alone(server: Any, prompts: Any = PROMPTS, **options: Any) -> list[tuple[list[int], list[float]]]:
    with RolloutClient(server.url) as client:
        return bits(client.rollouts(prompts, sampling_params=PARAMS, **options))


def test_a_fleet_gives_what_one_server_gives_and_a_sync_reaches_all(pair: list[Any], source: Source) -> None:
    with WeightSender([s.url for s in pair], source) as sender, RolloutFleet([s.url for s in pair]) as fleet:
        for _ in range(2):
            source.train()
            report = sender.sync()
            assert set(report.engines) == {s.url for s in pair} and not report.failed
            assert {facts(s)["version"] for s in pair} == {report.version}
            for prompts in (PROMPTS[:1], PROMPTS[:3], [], [PROMPTS[0]] * 4):
                found = fleet.rollouts(prompts, n=2, sampling_params=PARAMS)
                assert bits(found) == (alone(pair[1], prompts, n=2) if prompts else [])
                assert [r.prompt_token_ids for r in found.results] == prompts
        assert fleet.min_version == report.version


def test_both_servers_get_work_and_errors_name_the_prompt(pair: list[Any]) -> None:
    with RolloutFleet([s.url for s in pair]) as fleet:
        found = fleet.rollouts([*PROMPTS, [10**6]], sampling_params=PARAMS, request_id="both")
        assert [r.error is None for r in found.results] == [True] * 6 + [False]
        assert found.results[6].error.field.startswith("prompts[6]")  # type: ignore[union-attr]
        with pytest.raises(BadRequest, match="temperature"):
            fleet.rollouts(PROMPTS, sampling_params={"temperature": -1})
        with pytest.raises(BadRequest, match="stream"):
            fleet.rollouts(PROMPTS, stream=True)
    tokens = [httpx.get(f"{s.url}/v1/engine/status").json()["stats"] for s in pair]
    assert all(any("token" in name and value for name, value in t.items()) for t in tokens)


def test_no_server_at_all_is_told_at_once_and_a_paused_one_is_routed_around(pair: list[Any]) -> None:
    with RolloutFleet(["http://127.0.0.1:9"]) as fleet, pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:9"):
        fleet.rollouts(PROMPTS)
    with RolloutClient(pair[0].url) as first, RolloutFleet([s.url for s in pair], patience_s=0.5) as fleet:
        first.pause(owner="test")
        assert len(bits(fleet.rollouts(PROMPTS, sampling_params=PARAMS))) == 6 and "paused by test" in str(fleet.servers()[pair[0].url])
        with RolloutClient(pair[1].url) as second:
            second.pause(owner="test")
            with pytest.raises(ServerUnreachable, match=r"paused by test.*paused by test"):
                fleet.rollouts(PROMPTS, sampling_params=PARAMS)
            second.resume(owner="test")
        first.resume(owner="test")


def trouble_of(server: Any, kind: str) -> None:
    with RolloutClient(server.url) as client:
        if kind == "asleep":
            client.sleep(tags=["weights"])
        elif kind == "busy":
            body = {"tensors": [{"name": "model.norm.weight", "dtype": "float32", "shape": [64]}]}
            HttpControl(server.url).call("POST", "/v1/weights/updates", msgpack.packb({"manifest": body, "mode": "partial"}))


def mend(server: Any) -> None:
    with RolloutClient(server.url) as client:
        client.wake()
        if (update := client.weights()["weights"]["update"]) is not None:
            client.abort_update(update)


@pytest.mark.parametrize("transport", ["ipc", "collective", "disk"])
@pytest.mark.parametrize("kind", ["asleep", "busy"])
def test_an_engine_that_refuses_keeps_no_other_from_the_update(
    pair: list[Any], source: Source, model: Path, transport: str, kind: str
) -> None:
    where = {"folder": model.parent / "synced"} if transport == "disk" else {}
    with WeightSender([s.url for s in pair], source, transport=transport, **where) as sender:
        first = sender.sync().version
        source.train()
        trouble_of(pair[1], kind)
        try:
            with pytest.raises(UpdateError, match=r"failed on 2 of 2 engines.*given up") as refused:
                sender.sync(required="all")
            assert not refused.value.report.engines and [facts(s)["version"] for s in pair] == [first, first]
            with pytest.raises(UpdateError, match=r"failed on 1 of 2 engines: in open: .*409") as refused:
                sender.sync()
            report = refused.value.report
            assert list(report.engines) == [pair[0].url] and report.failed[pair[1].url].phase == "open"
            assert [facts(s)["version"] for s in pair] == [first + 1, first]
        finally:
            mend(pair[1])
        assert list(sender.catch_up().engines) == [pair[1].url]
        assert [facts(s)["version"] for s in pair] == [first + 1] * 2 and alone(pair[0]) == alone(pair[1])
        assert not sender.catch_up().engines


def test_what_catches_up_is_what_was_committed(pair: list[Any], source: Source) -> None:
    with WeightSender(pair[0].url, source) as sender:
        with pytest.raises(UpdateError, match="nothing to catch up with"):
            sender.catch_up()
        version = sender.sync().version
        sender.add(pair[1].url)
        source.train()
        before = facts(pair[1])
        with pytest.raises(UpdateError, match="the source has changed"):
            sender.catch_up()
        assert facts(pair[1]) == before
        assert set(sender.sync().engines) == {s.url for s in pair}
        # Another trainer's commit under the same number is not this one's.
        with WeightSender(pair[1].url, source) as another:
            another.sync(version=version + 1, force=True)
        assert list(sender.catch_up().engines) == [pair[1].url]
        sender.remove(pair[1].url)
        assert list(sender.sync().engines) == [pair[0].url]


def test_a_trainer_that_dies_between_two_commits_is_made_good_by_the_next_sync(pair: list[Any], source: Source) -> None:
    with WeightSender([s.url for s in pair], source) as sender:
        version = sender.sync().version
    source.train()
    with WeightSender(pair[0].url, source) as sender:  # the other commit never came
        sender.sync(version=version + 1)
    with WeightSender([s.url for s in pair], source) as sender:
        with pytest.raises(UpdateError, match=rf"builds on version {version + 1}, but version {version} is served"):
            sender.sync(mode="partial")
        assert facts(pair[1])["version"] == version
        assert sender.sync().version == version + 3 and alone(pair[0]) == alone(pair[1])


def test_a_server_that_is_killed_and_restarted_gets_no_traffic_until_it_holds_the_weights(
    pair: list[Any], serving: Any, model: Path, source: Source, until: Any
) -> None:
    steady = pair[0]
    with serving(*FLAGS, model=str(model), factory=None) as doomed:
        port = doomed.address[1]
        urls = [steady.url, doomed.url]
        sender = WeightSender(urls, source)
        fleet = RolloutFleet(urls)
        source.train()
        version = sender.sync().version
        params = {"seed": 3, "max_tokens": 900, "ignore_eos": True}  # some seconds: what runs is published four times in one
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(fleet.rollouts(PROMPTS, sampling_params=params)))
        thread.start()
        until(lambda: doomed.running() > 0, 30)
        doomed.process.send_signal(signal.SIGKILL)
        doomed.process.wait(10)
        thread.join(60)
        with RolloutClient(steady.url) as client:
            assert bits(found[0]) == bits(client.rollouts(PROMPTS, sampling_params=params)), "nothing is lost, and the bits are the same"
    source.train()
    began = time.monotonic()
    with pytest.raises(UpdateError, match=rf"1 of 2 engines: in connect: {doomed.url}: Connection") as missed:
        sender.sync(version + 1)
    assert time.monotonic() - began < 20 and list(missed.value.report.engines) == [steady.url]
    with serving(*FLAGS, "--port", str(port), model=str(model), factory=None) as back:
        assert back.url == doomed.url and facts(back)["version"] == 0
        until(lambda: "serves version 0" in str(fleet.servers()[back.url]), 20)
        fleet.rollouts(PROMPTS, sampling_params=PARAMS)
        assert httpx.get(f"{back.url}/v1/engine/status").json()["steps"] == 0, "it made no token"
        with RolloutClient(back.url) as client, pytest.raises(VersionUnavailable):
            client.rollouts(PROMPTS[:1], sampling_params=PARAMS, min_version=version + 1, on_unavailable="refuse")
        assert list(sender.catch_up().engines) == [back.url] and facts(back)["version"] == version + 1
        assert alone(back) == alone(steady) and fleet.servers() == {steady.url: None, back.url: None}
        source.train()
        assert set(sender.sync().engines) == set(urls)
    sender.close()
    fleet.close()


@pytest.mark.slow
def test_a_frozen_server_costs_its_timeout_once(pair: list[Any], serving: Any, model: Path, source: Source, until: Any) -> None:
    with serving(*FLAGS, model=str(model), factory=None) as frozen:
        sender = WeightSender([pair[0].url, frozen.url], source, timeout_s=3.0)
        fleet = RolloutFleet([pair[0].url, frozen.url], lost_after_s=2.0)
        engine = frozen.engine_pid
        source.during = lambda: [os.kill(pid, signal.SIGSTOP) for pid in (engine, frozen.process.pid)]
        try:
            with pytest.raises(UpdateError, match=rf"1 of 2 engines: in (send|commit): {frozen.url}: TimeoutError"):
                sender.sync()
            source.during = lambda: None
            began = time.monotonic()
            with pytest.raises(UpdateError, match=rf"in connect: {frozen.url}: TimeoutError"):
                sender.sync()
            assert time.monotonic() - began < 3.0 + 7.0
            assert len(bits(fleet.rollouts(PROMPTS, sampling_params=PARAMS))) == 6
        finally:
            for pid in (frozen.process.pid, engine):
                os.kill(pid, signal.SIGCONT)
        until(lambda: facts(frozen)["update"] is None, 20)
        assert set(sender.sync().engines) == {pair[0].url, frozen.url}
        sender.close()
        fleet.close()
