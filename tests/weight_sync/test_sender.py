"""What a sender makes of engines that fail late, of ranks that fail early, and of replies that are lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from rollsync.weight_sync.control import EngineLost, UpdateError
from rollsync.weight_sync.sender import WeightSender
from rollsync.weight_sync.sources import TensorMeta, TensorSource

WEIGHTS = {"x": torch.zeros(4)}


class FakeEngine:
    """One that takes in whatever comes. `at_commit`: what becomes of a commit."""

    def __init__(self, address: str) -> None:
        self.address, self.version, self.epoch = address, 0, 0
        self.at_commit, self.state, self.opened, self.told = "", "open", 0, ""

    def look(self, timeout_s: float) -> dict[str, Any]:
        return {"version": self.version, "valid": True, "epoch": self.epoch, "instance": self.address}

    def require(self, capabilities: Any) -> None: ...

    def open(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.opened, self.state = body["version"], "open"
        return {"id": "u"}

    def release(self, update_id: str) -> None: ...

    def chunk(self, *args: Any, **where: Any) -> dict[str, Any]:
        return {}

    def commit(self, update_id: str, digests: Any) -> dict[str, Any]:
        if self.at_commit == "refused":
            raise UpdateError(f"{self.address} answered 422: a digest differs")
        if self.at_commit != "lost":
            self.state, self.version, self.epoch = "committed", self.opened, self.epoch + 1
        if self.at_commit:
            raise EngineLost(f"{self.address}: TimeoutError: timed out")
        return self.status(update_id)

    def status(self, update_id: str) -> dict[str, Any]:
        if self.at_commit == "lost":
            raise EngineLost(f"{self.address}: ConnectionRefusedError")
        return {"state": self.state, "version": self.version, "epoch": self.epoch, "bytes": 16}

    def abort(self, update_id: str, reason: str) -> dict[str, Any]:
        self.told = reason
        return {}


@pytest.fixture
def pair() -> list[FakeEngine]:
    return [FakeEngine("http://a"), FakeEngine("http://b")]


def sender(engines: list[FakeEngine], source: Any = None, **options: Any) -> WeightSender:
    return WeightSender(list(engines), source or TensorSource(WEIGHTS), transport="http", **options)


@pytest.mark.parametrize("required", [1, 2, "all"])
def test_a_refusal_at_the_commit_leaves_the_others_committed_and_known_to_be(pair: list[FakeEngine], required: Any) -> None:
    sending = sender(pair)
    sending.sync(version=1)
    pair[1].at_commit = "refused"
    with pytest.raises(UpdateError, match=r"failed on 1 of 2 engines: in commit: http://b answered 422") as failed:
        sending.sync(version=2, required=required)
    assert list(failed.value.report.engines) == ["http://a"] and list(failed.value.report.failed) == ["http://b"]
    pair[1].at_commit = ""
    assert list(sending.catch_up().engines) == ["http://b"]
    assert [engine.version for engine in pair] == [2, 2]


def test_a_commit_whose_reply_is_lost_is_asked_after(pair: list[FakeEngine]) -> None:
    pair[0].at_commit = "reply lost"
    assert sender(pair).sync(version=2).engines.keys() == {"http://a", "http://b"}
    pair[0].at_commit = "lost"
    with pytest.raises(UpdateError, match="in commit: http://a: TimeoutError"):
        sender(pair).sync(version=3)


def test_an_interrupt_lets_go_of_what_was_opened(pair: list[FakeEngine]) -> None:
    class Interrupted(TensorSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sender(pair, Interrupted(WEIGHTS)).sync()
    assert all("interrupted" in engine.told for engine in pair)


def test_a_plan_that_cannot_be_made_is_an_update_error(pair: list[FakeEngine]) -> None:
    class Twice(TensorSource):
        def metadata(self) -> list[TensorMeta]:
            return super().metadata() * 2

    with pytest.raises(UpdateError, match="x: listed more than once"):
        sender(pair, Twice(WEIGHTS)).sync()


class Meeting:
    """Two ranks as threads. A rank that stays away is an error of the others within seconds."""

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.size, self._barrier, self._table = rank, 2, barrier, table

    def gather(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._barrier.wait(10)
        found = list(self._table)
        self._barrier.wait(10)
        return found


@pytest.mark.parametrize("phase", ["metadata", "prepare"])
def test_a_rank_that_fails_early_fails_on_all_ranks(pair: list[FakeEngine], phase: str) -> None:
    barrier, table, errors = threading.Barrier(2), [None, None], [None, None]

    def run(rank: int) -> None:
        source = TensorSource(WEIGHTS)
        sending = sender(pair, source, ranks=Meeting(rank, barrier, table))
        if rank == 1:

            def fail(*args: Any) -> Any:
                raise MemoryError("no room")

            setattr(source if phase == "metadata" else sending._transport, phase, fail)
        try:
            sending.sync()
        except Exception as error:
            errors[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(isinstance(error, UpdateError) and "MemoryError: no room" in str(error) for error in errors), errors
