"""The front's end of the engine process, without a process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from rollsync import EngineConfig, RolloutRequest
from rollsync.rollout.errors import EngineDead
from rollsync.rollout.server import engine_client
from rollsync.rollout.server.engine_client import EngineProcess


def test_work_nobody_waits_for_is_aborted_after_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        engine = EngineProcess(EngineConfig(model="fake"))
        sent: list[tuple[Any, ...]] = []
        got: list[Any] = []
        monkeypatch.setattr(engine, "_send", lambda *message: sent.append(message))
        monkeypatch.setattr(engine_client, "BEAT_LOST_S", -1.0)
        engine.submit(RolloutRequest(request_id="a", prompt_token_ids=(1,)), lambda _, item: got.append(item))
        watch = asyncio.create_task(engine._watch_beats())
        while not got:
            await asyncio.sleep(0.05)
        watch.cancel()
        assert isinstance(got[0], EngineDead)
        assert sent[-1][0] == "command" and sent[-1][2:] == ("abort", {"request_ids": ["a"], "reason": "no heartbeat"})

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_front_that_was_held_up_does_not_take_the_engine_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        engine = EngineProcess(EngineConfig(model="fake"))
        got: list[Any] = []
        monkeypatch.setattr(engine, "_send", lambda *message: None)
        clock, looks, sleep = [engine.snapshot.beat_at], 0, asyncio.sleep

        async def passes(seconds: float) -> None:
            nonlocal looks
            looks += 1
            clock[0] += 1000.0 if looks in (1, 20) else seconds
            await sleep(0)

        monkeypatch.setattr(engine_client, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        monkeypatch.setattr(engine_client, "asyncio", SimpleNamespace(sleep=passes))
        engine.submit(RolloutRequest(request_id="a", prompt_token_ids=(1,)), lambda _, item: got.append(item))
        watch = asyncio.create_task(engine._watch_beats())
        while not got:
            await sleep(0)
        watch.cancel()
        assert isinstance(got[0], EngineDead) and 30 < looks < 35, "only what passed while the loop moved counts"

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_reader_that_raises_is_told_to_every_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        engine = EngineProcess(EngineConfig(model="fake"))
        got: list[Any] = []
        monkeypatch.setattr(engine, "_send", lambda *message: None)
        engine.submit(RolloutRequest(request_id="a", prompt_token_ids=(1,)), lambda _, item: got.append(item))

        async def broken() -> None:
            raise KeyError("bogus message")

        task = asyncio.create_task(broken())
        task.add_done_callback(engine._watch_ended)
        while not got:
            await asyncio.sleep(0.01)
        assert isinstance(got[0], EngineDead) and "bogus message" in str(got[0])
        assert engine.why_not_live() is not None

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_very_long_line_of_stderr_does_not_end_its_reader(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        engine = EngineProcess(EngineConfig(model="fake"))
        reader = asyncio.StreamReader(limit=64)
        reader.feed_data(b"x" * 1000 + b"\n" + b"last words\n")
        reader.feed_eof()
        engine._process = type("Process", (), {"stderr": reader})()  # type: ignore[assignment]
        await engine._read_stderr()

    asyncio.run(asyncio.wait_for(run(), 10))
    assert "last words" in capsys.readouterr().err
