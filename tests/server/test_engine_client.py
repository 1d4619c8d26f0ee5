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


@pytest.mark.parametrize("what", ["published", "reply"])
def test_a_cancellation_that_comes_with_the_news_is_not_lost(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    async def run() -> None:
        engine = EngineProcess(EngineConfig(model="fake"))
        monkeypatch.setattr(engine, "_send", lambda *message: None)

        async def work() -> None:
            while True:
                await (engine.published(5.0) if what == "published" else engine.command("status"))

        task = asyncio.create_task(work())
        await asyncio.sleep(0.01)
        engine._wake_watchers() if what == "published" else engine._got_reply(1, True, {})
        await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=1)
        assert done

    asyncio.run(asyncio.wait_for(run(), 10))


@pytest.mark.parametrize("lane", [None, "open"])
def test_an_open_that_comes_about_after_it_was_told_to_have_failed_is_aborted(monkeypatch: pytest.MonkeyPatch, lane: str | None) -> None:
    async def run() -> None:
        engine = EngineProcess(EngineConfig(model="fake"))
        engine._ready.set()
        sent: list[tuple[Any, ...]] = []
        monkeypatch.setattr(engine, "_send", lambda *message: sent.append(message))
        for late in (True, False):
            opening = asyncio.create_task(engine.open("open_update", {}, 0.05 if late else 5.0, lane))
            await asyncio.sleep(0.01)
            number = sent[-1][1]
            if late:
                with pytest.raises(EngineDead, match=r"did not answer 'open_update' within 0\.05 s"):
                    await opening
            engine._got_reply(number, True, {"id": "u"})
            if not late:
                assert await opening == {"id": "u"}
        aborts = [message for message in sent if message[2] == "abort_update"]
        assert len(aborts) == 1 and aborts[0][3]["update_id"] == "u" and not engine._late

    asyncio.run(asyncio.wait_for(run(), 10))
