"""Clients of the rollout server, sync and async. No torch; ids, floats and errors come back as the server meant them.

    with RolloutClient("http://127.0.0.1:8000") as client:
        result = client.rollouts([[1, 2, 3]], n=4, sampling_params={"temperature": 0.7, "max_tokens": 64})
        print(result.results[0].samples[0].token_ids)
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, TypeVar

import httpx

from .engine.params import SamplingParams
from .errors import ProtocolMismatch, ServerUnreachable
from .results import (
    Call,
    Delta,
    Frames,
    Prompt,
    PromptResult,
    Rendered,
    RolloutResult,
    Sample,
    Score,
    StreamItem,
    detokenize_call,
    get,
    reattach_call,
    render_call,
    rollouts_call,
    score_call,
    stream_call,
    tokenize_call,
)
from .transport import CALLS_PER_POOL, Settings, check_protocol, checked, sent, silence
from .verbs import AsyncControlVerbs, ControlVerbs, needs_of

__all__ = [
    "AsyncRolloutClient",
    "Delta",
    "Prompt",
    "PromptResult",
    "ProtocolMismatch",
    "Rendered",
    "RolloutClient",
    "RolloutResult",
    "Sample",
    "Score",
    "ServerUnreachable",
    "StreamItem",
]

T = TypeVar("T")


class RolloutClient(ControlVerbs):
    """Blocking client of one server. Threads may share it.

    Args:
        base_url: e.g. "http://127.0.0.1:8000".
        api_key: sent as a bearer token; the control token, if control routes are used.
        timeout_s: longest silence of the server within a call, in seconds.
    """

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 3600.0) -> None:
        self._settings = Settings(base_url.rstrip("/"), api_key, timeout_s)
        self._http = httpx.Client(**self._settings.options())
        self._server: dict[str, Any] | None = None

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, method: str, path: str, accept: tuple[int, ...] = (), **kw: Any) -> Any:
        try:
            return checked(self._http.request(method, path, **kw), accept)
        except httpx.HTTPError as error:
            raise self._settings.lost(error) from error

    def _handshake(self, needs: str = "rollouts") -> None:
        """ProtocolMismatch if the server speaks another protocol, or lacks what is needed. It is asked once."""
        server = self._server or self.version()
        check_protocol(server, needs)
        self._server = server

    def _verb(self, call: Call[T]) -> T:
        self._handshake(needs_of(call))
        return self._do(call)

    def _do(self, call: Call[T], accept: tuple[int, ...] = (), **kw: Any) -> T:
        return call.parse(self._call(call.method, call.path, accept, **sent(call), **kw))

    def rollouts(
        self,
        prompts: Sequence[Prompt],
        n: int | None = None,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        include: Sequence[str] = (),
        **options: Any,
    ) -> RolloutResult:
        """Sample `n` times from each prompt and wait for all. A refused prompt has `error` set; a refused call raises.

        Args:
            options: further fields of `POST /v1/rollouts`, e.g. request_id, group, session, priority, deadline_s, detach_s.
        """
        self._handshake()
        return self._do(rollouts_call(prompts, n, sampling_params, include, options))

    def stream(
        self,
        prompts: Sequence[Prompt],
        n: int | None = None,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        include: Sequence[str] = (),
        *,
        tokens: bool = False,
        **options: Any,
    ) -> Iterator[StreamItem]:
        """The same, each sample as soon as it is finished, and with `tokens` its tokens as they come.

        The deltas of a sample add up to it exactly; a slow reader gets fewer, larger ones. Leaving the loop early frees the rest
        on the server (unless detach_s is given).
        """
        self._handshake()
        yield from self._stream(stream_call(prompts, n, sampling_params, include, tokens, options))

    def reattach(self, request_id: str) -> RolloutResult:
        """The reply to a call with `detach_s` whose connection was lost; waits for it. UnknownRequest if it is not kept."""
        self._handshake()
        return self._do(reattach_call(request_id))

    def reattach_stream(self, request_id: str, *, tokens: bool = False) -> Iterator[StreamItem]:
        """The same as a stream, from the beginning. Tokens come as they are made only if the call streamed tokens."""
        self._handshake()
        yield from self._stream(reattach_call(request_id, "tokens" if tokens else "samples"))

    def _stream(self, call: Call[Any]) -> Iterator[StreamItem]:
        frames = Frames()
        try:
            with self._http.stream(call.method, call.path, **sent(call)) as response:
                if response.status_code >= 400:
                    response.read()
                    checked(response)
                for chunk in response.iter_bytes():
                    yield from frames.feed(chunk)
        except httpx.HTTPError as error:
            raise self._settings.lost(error) from error
        frames.finish()

    def score(self, items: Sequence[tuple[Prompt, Prompt]], temperature: float | None = None, **options: Any) -> list[Score]:
        """Log-probabilities of given (prompt, continuation) pairs, each text, ids or an object of `POST /v1/logprobs`.

        Args:
            temperature: asks for `temperature_logprobs` too.
            options: request_id, group, session, priority, deadline_s.
        """
        self._handshake()
        return self._do(score_call(items, temperature, options))

    def tokenize(self, inputs: Sequence[str | list[dict[str, Any]]], add_special_tokens: bool = False) -> list[list[int]]:
        """Ids of texts or chats, as a rollout's prompt would have them."""
        return self._do(tokenize_call(inputs, add_special_tokens))

    def detokenize(self, inputs: Sequence[Sequence[int]], **options: bool) -> list[str]:
        """Texts of lists of ids. Options: skip_special_tokens, spaces_between_special_tokens."""
        return self._do(detokenize_call(inputs, options))

    def render(self, chats: Sequence[list[dict[str, Any]]], variables: dict[str, Any] | None = None) -> list[Rendered]:
        """What the model's chat template makes of lists of messages."""
        return self._do(render_call(chats, variables))

    def version(self) -> dict[str, Any]:
        return self._do(get("/version"))

    def health(self) -> dict[str, Any]:
        """{"live", "ready", "reason"?}; raises only if the server cannot be reached."""
        live, ready = self._do(get("/health/live"), (503,)), self._do(get("/health/ready"), (503,))
        return {**live, **ready}

    def wait_until_ready(self, deadline_s: float = 600.0) -> None:
        """Return once the server serves. ServerUnreachable with the last reason after `deadline_s`."""
        end = time.monotonic() + deadline_s
        while (reason := self._not_ready(end - time.monotonic())) is not None:
            if time.monotonic() >= end:
                raise ServerUnreachable(f"{self._settings.base_url} was not ready within {deadline_s:g} s: {reason}")
            time.sleep(max(0.0, min(0.1, end - time.monotonic())))

    def _not_ready(self, timeout_s: float) -> str | None:
        """Why the server does not serve, or None; each silence is waited for `timeout_s` at most."""
        try:
            health = self._do(get("/health/ready"), (503,), timeout=silence(timeout_s))
        except ServerUnreachable as error:
            return str(error)
        return None if health["ready"] else str(health.get("reason"))


class AsyncRolloutClient(AsyncControlVerbs):
    """`RolloutClient` for asyncio: the same methods, awaited. Any number of calls at once."""

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 3600.0) -> None:
        self._settings = Settings(base_url.rstrip("/"), api_key, timeout_s)
        self._pools: list[httpx.AsyncClient] = []
        self._num_calls = 0
        self._server: dict[str, Any] | None = None
        self._checking = asyncio.Lock()

    async def close(self) -> None:
        for pool in self._pools:
            await pool.aclose()

    @contextlib.contextmanager
    def _pool(self) -> Iterator[httpx.AsyncClient]:
        """A connection pool with few calls on it: httpx's work per call grows with the calls on its pool."""
        index = self._num_calls // CALLS_PER_POOL
        if index == len(self._pools):
            self._pools.append(httpx.AsyncClient(**self._settings.options()))
        self._num_calls += 1
        try:
            yield self._pools[index]
        finally:
            self._num_calls -= 1

    async def __aenter__(self) -> AsyncRolloutClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _call(self, method: str, path: str, accept: tuple[int, ...] = (), **kw: Any) -> Any:
        try:
            with self._pool() as http:
                return checked(await http.request(method, path, **kw), accept)
        except httpx.HTTPError as error:
            raise self._settings.lost(error) from error

    async def _handshake(self, needs: str = "rollouts") -> None:
        async with self._checking:
            server = self._server or await self.version()
            check_protocol(server, needs)
            self._server = server

    async def _verb(self, call: Call[T]) -> T:
        await self._handshake(needs_of(call))
        return await self._do(call)

    async def _do(self, call: Call[T], accept: tuple[int, ...] = (), **kw: Any) -> T:
        return call.parse(await self._call(call.method, call.path, accept, **sent(call), **kw))

    async def rollouts(
        self,
        prompts: Sequence[Prompt],
        n: int | None = None,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        include: Sequence[str] = (),
        **options: Any,
    ) -> RolloutResult:
        """See `RolloutClient.rollouts`. Cancelling it frees the work on the server (unless detach_s is given)."""
        await self._handshake()
        return await self._do(rollouts_call(prompts, n, sampling_params, include, options))

    async def stream(
        self,
        prompts: Sequence[Prompt],
        n: int | None = None,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        include: Sequence[str] = (),
        *,
        tokens: bool = False,
        **options: Any,
    ) -> AsyncIterator[StreamItem]:
        """See `RolloutClient.stream`."""
        await self._handshake()
        async for item in self._stream(stream_call(prompts, n, sampling_params, include, tokens, options)):
            yield item

    async def reattach(self, request_id: str) -> RolloutResult:
        await self._handshake()
        return await self._do(reattach_call(request_id))

    async def reattach_stream(self, request_id: str, *, tokens: bool = False) -> AsyncIterator[StreamItem]:
        await self._handshake()
        async for item in self._stream(reattach_call(request_id, "tokens" if tokens else "samples")):
            yield item

    async def _stream(self, call: Call[Any], frames: Frames | None = None) -> AsyncIterator[StreamItem]:
        frames = frames or Frames()
        try:
            with self._pool() as http:
                async with http.stream(call.method, call.path, **sent(call)) as response:
                    if response.status_code >= 400:
                        await response.aread()
                        checked(response)
                    async for chunk in response.aiter_bytes():
                        for item in frames.feed(chunk):
                            yield item
        except httpx.HTTPError as error:
            raise self._settings.lost(error) from error
        frames.finish()

    async def score(self, items: Sequence[tuple[Prompt, Prompt]], temperature: float | None = None, **options: Any) -> list[Score]:
        await self._handshake()
        return await self._do(score_call(items, temperature, options))

    async def tokenize(self, inputs: Sequence[str | list[dict[str, Any]]], add_special_tokens: bool = False) -> list[list[int]]:
        return await self._do(tokenize_call(inputs, add_special_tokens))

    async def detokenize(self, inputs: Sequence[Sequence[int]], **options: bool) -> list[str]:
        return await self._do(detokenize_call(inputs, options))

    async def render(self, chats: Sequence[list[dict[str, Any]]], variables: dict[str, Any] | None = None) -> list[Rendered]:
        return await self._do(render_call(chats, variables))

    async def version(self) -> dict[str, Any]:
        return await self._do(get("/version"))

    async def health(self) -> dict[str, Any]:
        live, ready = await self._do(get("/health/live"), (503,)), await self._do(get("/health/ready"), (503,))
        return {**live, **ready}

    async def wait_until_ready(self, deadline_s: float = 600.0) -> None:
        end = time.monotonic() + deadline_s
        while (reason := await self._not_ready(end - time.monotonic())) is not None:
            if time.monotonic() >= end:
                raise ServerUnreachable(f"{self._settings.base_url} was not ready within {deadline_s:g} s: {reason}")
            await asyncio.sleep(max(0.0, min(0.1, end - time.monotonic())))

    async def _not_ready(self, timeout_s: float) -> str | None:
        """Why the server does not serve, or None; each silence is waited for `timeout_s` at most."""
        try:
            health = await self._do(get("/health/ready"), (503,), timeout=silence(timeout_s))
        except ServerUnreachable as error:
            return str(error)
        return None if health["ready"] else str(health.get("reason"))
