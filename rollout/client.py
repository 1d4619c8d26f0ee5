"""Clients of the rollout server, sync and async. No torch; ids, floats and errors come back as the server meant them.

    with RolloutClient("http://127.0.0.1:8000") as client:
        result = client.rollouts([[1, 2, 3]], n=4, sampling_params={"temperature": 0.7, "max_tokens": 64})
        print(result.results[0].samples[0].token_ids)
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import httpx
import msgpack  # type: ignore[import-untyped]

from .engine.types import SamplingParams
from .errors import RollsyncError
from .wire import MSGPACK, PROTOCOL_VERSION, error_from_wire, is_array, pack_array, unpack_array

Prompt = str | Sequence[int] | dict[str, Any]
"""text, token ids, or a whole prompt object of `POST /v1/rollouts` ({"messages": …}, {"token_ids": …, "seed": …})"""
CONNECT_TIMEOUT_S = 10.0


class ServerUnreachable(RollsyncError):
    """No answer from the server, or the connection broke; the message says from which address and how."""

    status = 503
    code = "unreachable"


class ProtocolMismatch(RollsyncError):
    """Server and client are of versions that do not understand each other."""

    code = "protocol_mismatch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One finished sample. The columns have equal length; those not asked for are None."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_reason: int | str | None = None
    abort_reason: str | None = None
    error: str | None = None
    weight_versions: list[dict[str, int]] = field(default_factory=list)
    seed: int = 0
    cached_tokens: int = 0
    text: str | None = None
    temperature_logprobs: list[float] | None = None
    model_logprobs: list[float] | None = None
    entropy: list[float] | None = None
    prompt_logprobs: list[float | None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptResult:
    """The samples of one prompt, by index, or the error that refused it."""

    prompt_index: int
    prompt_token_ids: list[int]
    samples: list[Sample]
    error: RollsyncError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResult:
    """The answer to one call."""

    id: str
    model: str
    results: list[PromptResult]
    usage: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamItem:
    """One event of a stream: a finished sample of a prompt, or the error that refused that prompt."""

    prompt_index: int
    sample: Sample | None = None
    error: RollsyncError | None = None


_SAMPLE_FIELDS = {f.name for f in fields(Sample)}


def _sample(wire: dict[str, Any]) -> Sample:
    """Fields a newer server adds are passed over."""
    values: dict[str, Any] = {k: unpack_array(v) if is_array(v) else v for k, v in wire.items() if k in _SAMPLE_FIELDS}
    return Sample(**values)


def _result(wire: dict[str, Any]) -> RolloutResult:
    results = []
    for item in wire["results"]:
        error = error_from_wire(item["error"]) if "error" in item else None
        ids = unpack_array(item["prompt_token_ids"]) if error is None else []
        samples = [_sample(s) for s in item.get("samples", ())]
        results.append(PromptResult(prompt_index=item["prompt_index"], prompt_token_ids=ids, samples=samples, error=error))
    return RolloutResult(id=wire["id"], model=wire["model"], results=results, usage=wire["usage"])


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, dict):
        return prompt
    ids = list(prompt)
    fits = all(type(i) is int and -(1 << 31) <= i < 1 << 31 for i in ids)
    return {"token_ids": pack_array("<i4", ids) if fits else ids}


def rollouts_body(
    prompts: Sequence[Prompt], n: int | None, sampling_params: SamplingParams | dict[str, Any] | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The body of `POST /v1/rollouts`. `n` wins over `sampling_params.n`."""
    params = sampling_params.to_wire() if isinstance(sampling_params, SamplingParams) else dict(sampling_params or {})
    own_n = params.pop("n", 1)
    body = {"prompts": [_prompt(p) for p in prompts], "n": own_n if n is None else n, "sampling_params": params}
    return {**body, **{k: list(v) if isinstance(v, tuple) else v for k, v in options.items() if v is not None}}


def _decode(response: httpx.Response) -> Any:
    return msgpack.unpackb(response.content) if "msgpack" in response.headers.get("content-type", "") else response.json()


def _checked(response: httpx.Response, accept: tuple[int, ...] = ()) -> Any:
    """The decoded body; raises the named error a refusal carries."""
    try:
        body = _decode(response)
    except ValueError:
        raise RollsyncError(f"{response.request.url} answered {response.status_code} with something that is not ours") from None
    if response.status_code >= 400 and response.status_code not in accept:
        wire = body.get("error") if isinstance(body, dict) else None
        raise error_from_wire(wire if isinstance(wire, dict) else {"code": "http", "message": f"{response.status_code}: {body}"})
    return body


class _Frames:
    """Length-prefixed msgpack frames out of chunks of bytes, as stream items."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.done = False

    def feed(self, chunk: bytes) -> Iterator[StreamItem]:
        self._buffer += chunk
        while len(self._buffer) >= 4:
            (length,) = struct.unpack_from("<I", self._buffer)
            if len(self._buffer) < 4 + length:
                return
            event = msgpack.unpackb(bytes(self._buffer[4 : 4 + length]))
            del self._buffer[: 4 + length]
            yield from self._item(event)

    def _item(self, event: dict[str, Any]) -> Iterator[StreamItem]:
        if event["event"] == "done":
            self.done = True
        elif event["event"] == "sample":
            yield StreamItem(prompt_index=event["prompt_index"], sample=_sample(event["sample"]))
        elif event["event"] == "error":
            error = error_from_wire(event["error"])
            if "prompt_index" not in event:
                raise error
            yield StreamItem(prompt_index=event["prompt_index"], error=error)

    def finish(self) -> None:
        if not self.done:
            raise ServerUnreachable("the stream ended before its last event: the connection or the server was lost")


@dataclass(frozen=True, slots=True)
class _Settings:
    """What both clients need to make httpx clients: no cap on connections, one timeout."""

    base_url: str
    api_key: str | None
    timeout_s: float

    def options(self) -> dict[str, Any]:
        headers = {"Accept": MSGPACK}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return {
            "base_url": self.base_url,
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=64),
            "trust_env": False,
            "verify": self.base_url.startswith("https:"),  # loading certificates takes longer than a call
        }

    def lost(self, error: httpx.HTTPError) -> ServerUnreachable:
        return ServerUnreachable(f"{self.base_url}: {type(error).__name__}: {error}".rstrip(": "))


def _check_protocol(version: dict[str, Any]) -> None:
    spoken = version.get("protocol_version")
    if spoken != PROTOCOL_VERSION:
        raise ProtocolMismatch(f"server speaks protocol {spoken}, this client {PROTOCOL_VERSION}: install the same rollsync on both sides")


def _post(body: dict[str, Any]) -> dict[str, Any]:
    return {"content": msgpack.packb(body), "headers": {"Content-Type": MSGPACK}}


class RolloutClient:
    """Blocking client of one server. Threads may share it.

    Args:
        base_url: e.g. "http://127.0.0.1:8000".
        api_key: sent as a bearer token; the control token, if control routes are used.
        timeout_s: longest silence of the server within a call, in seconds.
    """

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 3600.0) -> None:
        self._settings = _Settings(base_url.rstrip("/"), api_key, timeout_s)
        self._http = httpx.Client(**self._settings.options())
        self._checked_version = False

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, method: str, path: str, accept: tuple[int, ...] = (), **kw: Any) -> Any:
        try:
            return _checked(self._http.request(method, path, **kw), accept)
        except httpx.HTTPError as error:
            raise self._settings.lost(error) from error

    def _handshake(self) -> None:
        if not self._checked_version:
            _check_protocol(self.version())
            self._checked_version = True

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
            options: further fields of `POST /v1/rollouts`, e.g. request_id, group, session, priority, deadline_s.
        """
        self._handshake()
        body = rollouts_body(prompts, n, sampling_params, {"include": list(include), **options})
        return _result(self._call("POST", "/v1/rollouts", **_post(body)))

    def stream(
        self,
        prompts: Sequence[Prompt],
        n: int | None = None,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        include: Sequence[str] = (),
        **options: Any,
    ) -> Iterator[StreamItem]:
        """The same, each sample as soon as it is finished. Leaving the loop early frees the rest on the server."""
        self._handshake()
        body = rollouts_body(prompts, n, sampling_params, {"include": list(include), **options, "stream": True})
        frames = _Frames()
        try:
            with self._http.stream("POST", "/v1/rollouts", **_post(body)) as response:
                if response.status_code >= 400:
                    response.read()
                    _checked(response)
                for chunk in response.iter_bytes():
                    yield from frames.feed(chunk)
        except httpx.HTTPError as error:
            raise self._settings.lost(error) from error
        frames.finish()

    def abort(self, **which: Any) -> dict[str, Any]:
        """End calls by `request_id=`, `group=`, `session=` or `all=True`; their own replies carry the partial outputs."""
        answer: dict[str, Any] = self._call("POST", "/v1/engine/abort", **_post(which))
        return answer

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._call("GET", "/v1/engine/status")
        return answer

    def version(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._call("GET", "/version")
        return answer

    def health(self) -> dict[str, Any]:
        """{"live", "ready", "reason"?}; raises only if the server cannot be reached."""
        return {**self._call("GET", "/health/live", (503,)), **self._call("GET", "/health/ready", (503,))}

    def wait_until_ready(self, deadline_s: float = 600.0) -> None:
        """Return once the server serves. ServerUnreachable with the last reason after `deadline_s`."""
        end = time.monotonic() + deadline_s
        while (reason := self._not_ready()) is not None:
            if time.monotonic() >= end:
                raise ServerUnreachable(f"{self._settings.base_url} was not ready within {deadline_s:g} s: {reason}")
            time.sleep(0.1)

    def _not_ready(self) -> str | None:
        try:
            health = self.health()
        except ServerUnreachable as error:
            return str(error)
        return None if health["ready"] else str(health.get("reason"))


class AsyncRolloutClient:
    """`RolloutClient` for asyncio: the same methods, awaited. Any number of calls at once."""

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 3600.0) -> None:
        self._settings = _Settings(base_url.rstrip("/"), api_key, timeout_s)
        self._http = httpx.AsyncClient(**self._settings.options())
        self._checked_version = False

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncRolloutClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _call(self, method: str, path: str, accept: tuple[int, ...] = (), **kw: Any) -> Any:
        try:
            return _checked(await self._http.request(method, path, **kw), accept)
        except httpx.HTTPError as error:
            raise self._settings.lost(error) from error

    async def _handshake(self) -> None:
        if not self._checked_version:
            _check_protocol(await self.version())
            self._checked_version = True

    async def rollouts(
        self,
        prompts: Sequence[Prompt],
        n: int | None = None,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        include: Sequence[str] = (),
        **options: Any,
    ) -> RolloutResult:
        """See `RolloutClient.rollouts`. Cancelling it frees the work on the server."""
        await self._handshake()
        body = rollouts_body(prompts, n, sampling_params, {"include": list(include), **options})
        return _result(await self._call("POST", "/v1/rollouts", **_post(body)))

    async def stream(
        self,
        prompts: Sequence[Prompt],
        n: int | None = None,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        include: Sequence[str] = (),
        **options: Any,
    ) -> AsyncIterator[StreamItem]:
        """See `RolloutClient.stream`."""
        await self._handshake()
        body = rollouts_body(prompts, n, sampling_params, {"include": list(include), **options, "stream": True})
        frames = _Frames()
        try:
            async with self._http.stream("POST", "/v1/rollouts", **_post(body)) as response:
                if response.status_code >= 400:
                    await response.aread()
                    _checked(response)
                async for chunk in response.aiter_bytes():
                    for item in frames.feed(chunk):
                        yield item
        except httpx.HTTPError as error:
            raise self._settings.lost(error) from error
        frames.finish()

    async def abort(self, **which: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call("POST", "/v1/engine/abort", **_post(which))
        return answer

    async def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call("GET", "/v1/engine/status")
        return answer

    async def version(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call("GET", "/version")
        return answer

    async def health(self) -> dict[str, Any]:
        return {**await self._call("GET", "/health/live", (503,)), **await self._call("GET", "/health/ready", (503,))}

    async def wait_until_ready(self, deadline_s: float = 600.0) -> None:
        end = time.monotonic() + deadline_s
        while (reason := await self._not_ready()) is not None:
            if time.monotonic() >= end:
                raise ServerUnreachable(f"{self._settings.base_url} was not ready within {deadline_s:g} s: {reason}")
            await asyncio.sleep(0.1)

    async def _not_ready(self) -> str | None:
        try:
            health = await self.health()
        except ServerUnreachable as error:
            return str(error)
        return None if health["ready"] else str(health.get("reason"))
