"""The engine's thread, and asyncio on top of it, in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from rollsync import RolloutRequest, SamplingParams
from rollsync.rollout.engine.async_engine import AsyncEngine
from rollsync.rollout.engine.commands import VERBS
from rollsync.rollout.errors import BadRequest, DuplicateRequest, EngineDead, PromptTooLong, RollsyncError

Maker = Callable[[], Any]


def request(name: str, *ids: int, n: int = 1, max_tokens: int = 4) -> RolloutRequest:
    return RolloutRequest(request_id=name, prompt_token_ids=ids or (1, 2), params=SamplingParams(n=n, max_tokens=max_tokens))


async def started(make: Maker) -> AsyncEngine:
    engine = AsyncEngine(make)
    await engine.wait_ready()
    return engine


def test_requests_run_side_by_side(fake_engine: Maker) -> None:
    async def run() -> None:
        engine = await started(fake_engine)
        many = await asyncio.gather(*(engine.generate(request(f"r{i}", i + 1, n=3)) for i in range(8)))
        assert [[o.sample_index for o in outputs] for outputs in many] == [[0, 1, 2]] * 8
        assert all(o.finish_reason == "length" for outputs in many for o in outputs)
        await engine.close()
        assert engine.heartbeat.phase == "closed"
        with pytest.raises(EngineDead, match="closed"):
            await engine.generate(request("late"))

    asyncio.run(run())


def test_cancelling_aborts_and_aborting_returns_partials(fake_engine: Maker) -> None:
    async def run() -> None:
        engine = await started(fake_engine)
        gone, kept = (asyncio.create_task(engine.generate(request(name, max_tokens=4000))) for name in ("gone", "kept"))
        await asyncio.sleep(0.1)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert (await engine.command("status"))["running"] == 1
        assert await engine.abort(request_id="kept", reason="enough") == {"samples": 1, "request_ids": ["kept"]}
        (output,) = await kept
        assert (output.finish_reason, output.abort_reason) == ("abort", "enough") and output.token_ids
        await engine.close()

    asyncio.run(run())


def test_an_id_is_free_at_once_and_what_still_comes_for_a_cancelled_request_reaches_nobody(fake_engine: Maker) -> None:
    async def run() -> None:
        engine = await started(fake_engine)
        wanted = (await engine.generate(request("alone", 7, max_tokens=50)))[0].token_ids
        for wait in range(6):
            task = asyncio.create_task(engine.generate(request("same", 3, max_tokens=60)))
            for _ in range(3 * wait):
                await asyncio.sleep(0.001)
            if wait % 2:
                engine._loop.command("abort", {"request_ids": list(engine._waiters), "reason": "sent just before"}, lambda _: None)
            task.cancel()
            await asyncio.sleep(0)  # the cancelled task ends, and its id is used in the same turn of the loop
            (output,) = await asyncio.wait_for(engine.generate(request("same", 7, max_tokens=50)), 10)
            assert (output.request_id, output.finish_reason, output.token_ids) == ("same", "length", wanted)
        assert (await engine.command("status"))["running"] == 0
        assert await engine.abort(request_id="same") == {"samples": 0, "request_ids": []}
        await engine.close()

    asyncio.run(run())


def test_start_cancelled_while_it_loads_leaves_no_engine(fake_engine: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    loading, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def build(*args: Any, **options: Any) -> Any:
        loading.set()
        assert go_on.wait(20)
        engine = fake_engine()
        engine.close = closed.set
        return engine

    async def run() -> None:
        monkeypatch.setattr("rollsync.rollout.engine.engine.Engine", build)
        task = asyncio.create_task(AsyncEngine.start("any"))
        await asyncio.to_thread(loading.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert await asyncio.to_thread(closed.wait, 20), "the engine that nobody got is closed"

    asyncio.run(run())


def test_a_refusal_reaches_its_own_caller(fake_engine: Maker) -> None:
    async def run() -> None:
        engine = await started(fake_engine)
        good, bad = await asyncio.gather(
            engine.generate(request("good")), engine.generate(request("bad", *[1] * 5000)), return_exceptions=True
        )
        assert isinstance(bad, PromptTooLong) and not isinstance(good, BaseException)
        with pytest.raises(BadRequest, match="command must be one of"):
            await engine.command("explode")
        await engine.close()

    asyncio.run(run())


def test_a_misspelt_argument_is_the_callers_error_alone(fake_engine: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        engine = await started(fake_engine)
        with pytest.raises(BadRequest, match="reqest_id"):
            await asyncio.wait_for(engine.abort(reqest_id="a"), 5)
        with pytest.raises(BadRequest, match="quickly is not an argument"):
            await asyncio.wait_for(engine.command("status", quickly=True), 5)
        monkeypatch.setitem(VERBS, "status", lambda engine, sink: len(3))  # type: ignore[arg-type]
        with pytest.raises(RollsyncError, match="TypeError") as caught:
            await asyncio.wait_for(engine.command("status"), 5)
        assert not isinstance(caught.value, BadRequest), "a fault of ours is not the caller's"
        assert (await engine.generate(request("after")))[0].finish_reason == "length"
        await engine.close()

    asyncio.run(run())


def test_a_command_that_waits_is_told_when_the_engine_ends(fake_engine: Maker) -> None:
    async def run() -> None:
        engine = await started(fake_engine)
        crash = asyncio.create_task(engine.generate(request("crash", 99)))
        commands = [asyncio.create_task(engine.command("status")) for _ in range(50)]
        results = await asyncio.wait_for(asyncio.gather(crash, *commands, return_exceptions=True), 5)
        assert isinstance(results[0], EngineDead) and all(isinstance(r, dict | EngineDead) for r in results[1:])

    asyncio.run(run())


def test_a_name_in_flight_is_a_duplicate(fake_engine: Maker) -> None:
    async def run() -> None:
        engine = await started(fake_engine)
        first = asyncio.create_task(engine.generate(request("same", max_tokens=4000)))
        await asyncio.sleep(0)
        with pytest.raises(DuplicateRequest, match="still in flight"):
            await engine.generate(request("same"))
        await engine.abort(request_id="same")
        await first
        await engine.close()

    asyncio.run(run())


def test_a_step_that_raises_fails_every_waiter(fake_engine: Maker) -> None:
    async def run() -> None:
        engine = await started(fake_engine)
        calls = [engine.generate(request("long", max_tokens=4000)), engine.generate(request("crash", 99))]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(r, EngineDead) and "the fake step broke" in str(r) for r in results)
        assert engine.heartbeat.phase == "dead"

    asyncio.run(run())


def test_a_failed_build_is_raised() -> None:
    def build() -> Any:
        raise BadRequest("no")

    async def run() -> None:
        engine = AsyncEngine(build)
        with pytest.raises(BadRequest, match="no"):
            await engine.wait_ready()
        with pytest.raises(EngineDead, match="could not start"):
            await asyncio.wait_for(engine.generate(request("late")), 5)
        with pytest.raises(EngineDead, match="could not start"):
            await asyncio.wait_for(engine.command("status"), 5)

    asyncio.run(run())
