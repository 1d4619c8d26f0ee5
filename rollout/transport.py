"""How both clients talk to the server over httpx: settings, bodies, and refusals as the errors they name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import msgpack  # type: ignore[import-untyped]

from .errors import Overloaded, ProtocolMismatch, RollsyncError, ServerUnreachable
from .results import Call
from .wire import MSGPACK, PROTOCOL_VERSION, error_from_wire

CONNECT_TIMEOUT_S = 10.0
CALLS_PER_POOL = 64


def _decode(response: httpx.Response) -> Any:
    return msgpack.unpackb(response.content) if "msgpack" in response.headers.get("content-type", "") else response.json()


def checked(response: httpx.Response, accept: tuple[int, ...] = ()) -> Any:
    """The decoded body; raises the named error a refusal carries."""
    try:
        body = _decode(response)
    except ValueError:
        if response.status_code == 503:
            raise Overloaded(f"{response.request.url} has as many connections as it can hold: try again later") from None
        raise RollsyncError(f"{response.request.url} answered {response.status_code} with something that is not ours") from None
    if response.status_code >= 400 and response.status_code not in accept:
        wire = body.get("error") if isinstance(body, dict) else None
        raise error_from_wire(wire if isinstance(wire, dict) else {"code": "http", "message": f"{response.status_code}: {body}"})
    return body


@dataclass(frozen=True, slots=True)
class Settings:
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
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=CALLS_PER_POOL, keepalive_expiry=30.0),
            "trust_env": False,
            "verify": self.base_url.startswith("https:"),  # loading certificates takes longer than a call
        }

    def lost(self, error: httpx.HTTPError) -> ServerUnreachable:
        return ServerUnreachable(f"{self.base_url}: {type(error).__name__}: {error}".rstrip(": "))


def check_protocol(version: dict[str, Any], needs: str | None = None) -> None:
    """ProtocolMismatch if the server of this `/version` speaks another one, or lacks a capability."""
    spoken = version.get("protocol_version")
    if spoken != PROTOCOL_VERSION:
        raise ProtocolMismatch(f"server speaks protocol {spoken}, this client {PROTOCOL_VERSION}: install the same rollsync on both sides")
    if needs is not None and needs not in version.get("capabilities", ()):
        raise ProtocolMismatch(f"server lacks {needs}: install the same rollsync on both sides")


def silence(timeout_s: float) -> httpx.Timeout:
    """At most `timeout_s` of silence, but enough for one try when none is left."""
    longest_s = max(timeout_s, 0.1)
    return httpx.Timeout(longest_s, connect=min(longest_s, CONNECT_TIMEOUT_S))


def sent(call: Call[Any]) -> dict[str, Any]:
    """The body of `call`, as httpx takes it."""
    return {} if call.body is None else {"content": msgpack.packb(call.body), "headers": {"Content-Type": MSGPACK}}
