"""Several servers as one: prompts go where the current weights are served, and elsewhere if a server fails.

    with RolloutFleet(["http://127.0.0.1:8000", "http://127.0.0.1:8001"]) as fleet:
        result = fleet.rollouts(prompts, n=4, sampling_params={"max_tokens": 64, "seed": 1})

A sample is a function of weights, prompt, params, seed and its index, so it does not matter which server makes it, nor that another
begins it anew. Nothing is sent to a server that is down, paused, asleep, or whose weights are older than `min_version`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from .client import AsyncRolloutClient
from .engine.params import SamplingParams
from .errors import BadRequest, EngineDead, IllegalState, NotReady, Overloaded, RollsyncError, ServerUnreachable, VersionUnavailable
from .pieces import Work, renamed
from .results import Frames, Prompt, RolloutResult, Sample, get, rollouts_body

T = TypeVar("T")
ELSEWHERE = (ServerUnreachable, EngineDead, NotReady, Overloaded, VersionUnavailable, IllegalState)
"""errors of a server, not of what was asked: another may do it"""
NOT_HERE = ("stream", "detach_s", "on_unavailable")
"""fields of a call that say how one server is waited for"""
FRESH_S = 0.05
"""what a server said of itself holds for so long"""
REFUSED_S = 0.2
DOWN_S = 1.0
"""until a server that refused a call, or did not answer, is asked again"""
LOOK_S = 5.0
"""how long a server may take to answer"""
WATCH_S = 1.0


class _Server:
    """One server: what it said of itself last, and how much it has to do."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.client = AsyncRolloutClient(url, api_key, timeout_s)
        self.in_flight = 0
        """samples"""
        self.version = -1
        self.why: str | None = "it was not asked yet"
        """why it gets no prompts; None: it does"""
        self.was_there = False
        """it answered at least once"""
        self._ask_at = 0.0
        self._asking: asyncio.Task[None] | None = None

    def refused(self, words: str, for_s: float = REFUSED_S) -> None:
        self.why, self._ask_at = words, time.monotonic() + for_s

    def asked(self) -> asyncio.Task[None] | None:
        """Have it asked how it is, if the last answer is too old; None if it is not."""
        if (self._asking is None or self._asking.done()) and time.monotonic() >= self._ask_at:
            self._asking = asyncio.create_task(self._ask())
        return self._asking if self._asking is not None and not self._asking.done() else None

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self.client._handshake("rollouts.min_version")
                self.version = (await self.client.weights())["weights"]["version"]
                health = await self.client._do(get("/health/ready"), (503,))
            self.was_there = True
            self.refused("", FRESH_S)
            self.why = None if health["ready"] else f"{self.url}: {health.get('reason')}"
        except (RollsyncError, TimeoutError) as error:
            self.refused(str(error) or f"{self.url} did not answer within {LOOK_S:g} s", DOWN_S)

    async def until_lost(self, after_s: float) -> str:
        """Return, with its words, once it has not been live for `after_s`."""
        seen = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            words = f"{self.url} says nothing of itself"
            with contextlib.suppress(RollsyncError, TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    health = await self.client._do(get("/health/live"), (503,))
                if health["live"]:
                    seen = time.monotonic()
                words = f"{self.url}: {health.get('reason')}"
            if time.monotonic() - seen >= after_s:
                return words

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self.client.close()


class AsyncRolloutFleet:
    """`RolloutFleet` for asyncio. Any number of calls at once; cancelling one frees its work on the servers."""

    def __init__(
        self,
        urls: Iterable[str],
        api_key: str | None = None,
        timeout_s: float = 3600.0,
        *,
        min_version: int | None = None,
        patience_s: float = 600.0,
        lost_after_s: float = 15.0,
    ) -> None:
        self.min_version = min_version
        self._api_key, self._timeout_s, self._patience_s, self._lost_after_s = api_key, timeout_s, patience_s, lost_after_s
        self._servers: dict[str, _Server] = {}
        self._removed: list[_Server] = []
        for url in urls:
            self.add(url)

    def add(self, url: str) -> None:
        server = _Server(url, self._api_key, self._timeout_s)
        self._servers.setdefault(server.url, server)

    def remove(self, url: str) -> None:
        self._removed.append(self._servers.pop(url.rstrip("/")))

    async def close(self) -> None:
        for server in (*self._servers.values(), *self._removed):
            await server.close()

    async def __aenter__(self) -> AsyncRolloutFleet:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def servers(self) -> dict[str, str | None]:
        if asks := [task for server in self._servers.values() if (task := server.asked()) is not None]:
            await asyncio.wait(asks)
        self._follow()
        return {server.url: self._why_not(server, self.min_version) for server in self._servers.values()}

    def _follow(self) -> None:
        newest = max((server.version for server in self._servers.values()), default=-1)
        if newest > (self.min_version or 0):
            self.min_version = newest

    def _why_not(self, server: _Server, min_version: int | None) -> str | None:
        if server.why is None and server.version < (min_version or 0):
            return f"{server.url} serves version {server.version} of the weights, not {min_version}"
        return server.why

    async def _takers(self, wanted: int | None) -> list[_Server]:
        """Servers that take prompts now. One that was down is waited for only if there is no other."""
        asks = {server: task for server in self._servers.values() if (task := server.asked()) is not None}
        for some in ([task for server, task in asks.items() if server.why is None or not server.was_there], list(asks.values())):
            if some:
                await asyncio.wait(some)
            self._follow()
            least = self.min_version if wanted is None else wanted
            if takers := [server for server in self._servers.values() if self._why_not(server, least) is None]:
                return takers
        return []

    async def rollouts(
        self,
        prompts: Sequence[Prompt],
        n: int | None = None,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        include: Sequence[str] = (),
        **options: Any,
    ) -> RolloutResult:
        """See `RolloutFleet.rollouts`."""
        if wrong := [name for name in NOT_HERE if name in options]:
            raise BadRequest(f"{wrong[0]} is for a call to one server", field=wrong[0])
        work = Work(rollouts_body(prompts, n, sampling_params, {"include": include, **options}))
        wanted = options.get("min_version")
        going: set[asyncio.Task[None]] = set()
        last = time.monotonic()
        try:
            while work.todo or going:
                if work.todo and (takers := await self._takers(wanted)):
                    going |= {asyncio.create_task(self._serve(*share, work, wanted)) for share in self._deal(work, takers)}
                    last = time.monotonic()
                if going:
                    done, going = await asyncio.wait(going, timeout=FRESH_S if work.todo else None, return_when="FIRST_COMPLETED")
                    for task in done:
                        task.result()
                elif work.todo:
                    self._check_patience(last, wanted)
                    await asyncio.sleep(FRESH_S)
        finally:
            for task in going:
                task.cancel()
            await asyncio.gather(*going, return_exceptions=True)
        return work.result()

    def _check_patience(self, since: float, wanted: int | None) -> None:
        """ServerUnreachable, with all their words, if no server has taken prompts for too long, or none was ever there."""
        waited_s = time.monotonic() - since
        if waited_s < self._patience_s and any(server.was_there for server in self._servers.values()):
            return
        least = self.min_version if wanted is None else wanted
        words = "; ".join(str(self._why_not(server, least)) for server in self._servers.values())
        raise ServerUnreachable(f"no server takes prompts (waited {waited_s:.1f} s): {words or 'there is none'}")

    def _deal(self, work: Work, takers: list[_Server]) -> list[tuple[_Server, list[int]]]:
        """All prompts that no server has, each to the one with the fewest samples in flight."""
        shares: dict[_Server, list[int]] = {server: [] for server in takers}
        for i in work.todo:
            shares[min(takers, key=lambda s: s.in_flight + work.n * len(shares[s]))].append(i)
        work.todo = []
        return [(server, share) for server, share in shares.items() if share]

    async def _serve(self, server: _Server, prompts: list[int], work: Work, wanted: int | None) -> None:
        """Have one server do some prompts; what it does not finish is to do again."""
        server.in_flight += work.n * len(prompts)
        reading = asyncio.create_task(self._read(server, prompts, work, wanted))
        watching = asyncio.create_task(server.until_lost(self._lost_after_s))
        try:
            await asyncio.wait({reading, watching}, return_when="FIRST_COMPLETED")
            if not reading.done():
                server.refused(watching.result(), DOWN_S)
        finally:
            for task in (reading, watching):
                task.cancel()
            await asyncio.gather(reading, watching, return_exceptions=True)
            server.in_flight -= work.n * len(prompts)
            work.todo += [i for i in prompts if not work.has(i)]
        if not reading.cancelled():
            reading.result()

    async def _read(self, server: _Server, prompts: list[int], work: Work, wanted: int | None) -> None:
        frames = Frames()
        samples: dict[int, list[Sample]] = {i: [] for i in prompts}
        ids: dict[int, list[int]] = {}
        try:
            call = work.piece(prompts, self.min_version if wanted is None else wanted)
            async for item in server.client._stream(call, frames):
                ids = ids or work.started(frames, prompts)
                i = prompts[item.prompt_index]
                if isinstance(item.error, ELSEWHERE):
                    server.refused(str(item.error))
                elif item.error is not None:
                    work.finish(i, [], [], renamed(item.error, prompts))
                elif item.sample is not None:
                    samples[i].append(item.sample)
                    if len(samples[i]) == work.n:
                        work.finish(i, ids[i], samples[i])
        except ELSEWHERE as error:
            server.refused(str(error), DOWN_S if isinstance(error, ServerUnreachable | EngineDead) else REFUSED_S)
        except BadRequest as error:
            raise renamed(error, prompts) from None


class RolloutFleet:
    """Blocking client of several servers that serve one model. Threads may share it.

    Args:
        urls: e.g. ["http://127.0.0.1:8000", "http://127.0.0.1:8001"].
        api_key: sent to all of them as a bearer token.
        timeout_s: longest silence of a server within a call, in seconds.
        min_version: oldest weights that get prompts. It grows with the newest version that any server serves; set it after going back.
        patience_s: how long prompts wait while no server takes them.
        lost_after_s: a server that was not live for so long has its prompts taken away.
    """

    def __init__(self, urls: Iterable[str], api_key: str | None = None, timeout_s: float = 3600.0, **options: Any) -> None:
        self._fleet = AsyncRolloutFleet(urls, api_key, timeout_s, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollsync-fleet", daemon=True)
        self._thread.start()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # such as KeyboardInterrupt: the servers need not go on
            future.cancel()
            raise

    @property
    def min_version(self) -> int | None:
        return self._fleet.min_version

    @min_version.setter
    def min_version(self, version: int | None) -> None:
        self._fleet.min_version = version

    def rollouts(
        self,
        prompts: Sequence[Prompt],
        n: int | None = None,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        include: Sequence[str] = (),
        **options: Any,
    ) -> RolloutResult:
        """As `RolloutClient.rollouts`: results in the order of the prompts, each from one server. No prompts, no result, no call.

        A prompt that a server refuses has `error` set. One that a server lost, or could not take, goes to another; its samples come out
        the same, if the weights are and it has a seed.

        Raises:
            ServerUnreachable: with what each server said, if none took prompts for `patience_s`, or none was there at all.
        """
        return self._run(self._fleet.rollouts(prompts, n, sampling_params, include, **options))

    def servers(self) -> dict[str, str | None]:
        """By url: why it gets no prompts now, or None."""
        return self._run(self._fleet.servers())

    def add(self, url: str) -> None:
        """One more server; it gets prompts once it serves the weights."""
        self._loop.call_soon_threadsafe(self._fleet.add, url)

    def remove(self, url: str) -> None:
        """No more prompts to that server; it ends what it has."""
        self._loop.call_soon_threadsafe(self._fleet.remove, url)

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self._fleet.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> RolloutFleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
