"""Who may call: API key, control token, and the Host and Origin check that keeps web pages away from a loopback server."""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections import Counter
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ConfigError

OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready", "/version"})
"""answered without a key: probes and the version handshake"""
CONTROL_PATHS = frozenset({"/v1/engine/abort"})
"""change the engine: need the control token, unless the listener is loopback and none was set"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """What the listener asks of its callers."""

    host: str
    api_key: str | None = None
    control_token: str | None = None

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    def validate(self) -> None:
        """ConfigError if control would be open to other machines."""
        if not self.loopback and self.control_token is None:
            raise ConfigError(
                f"--host {self.host} is reachable from other machines, so control routes need --control-token (or use --host 127.0.0.1)"
            )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _hostname(netloc: str) -> str:
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""


def refusal(access: Access, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
    """(status, message) if the call must not pass, else None."""
    if access.loopback:
        host = _hostname(headers.get("host", ""))
        if not is_loopback(host):
            return 403, f"Host must name this machine (localhost or a loopback address), got {host!r}"
        origin = headers.get("origin")
        if origin is not None and not is_loopback(_hostname(origin.partition("://")[2])):
            return 403, f"Origin must be this machine, got {origin!r}"
    given = headers.get("authorization", "").removeprefix("Bearer ").strip()
    is_control = access.control_token is not None and _equal(given, access.control_token)
    if path in CONTROL_PATHS and access.control_token is not None:
        return None if is_control else (401, "this route needs Authorization: Bearer <control token>")
    if access.api_key is None or path in OPEN_PATHS or is_control or _equal(given, access.api_key):
        return None
    return 401, "this route needs Authorization: Bearer <api key>"


def _equal(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())


class Guard:
    """Pure ASGI middleware: refuses first, counts responses by route."""

    def __init__(self, app: ASGIApp, access: Access, responses: Counter[tuple[str, int]], routes: frozenset[str]) -> None:
        self._app, self._access, self._responses, self._routes = app, access, responses, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        route = path if path in self._routes else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._responses[route, message["status"]] += 1
            await send(message)

        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        refused = refusal(self._access, path, headers)
        if refused is None:
            await self._app(scope, receive, counted)
            return
        status, text = refused
        body = json.dumps({"error": {"code": "forbidden", "message": text}}).encode()
        start = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 401:
            start.append((b"www-authenticate", b"Bearer"))
        await counted({"type": "http.response.start", "status": status, "headers": start})
        await send({"type": "http.response.body", "body": body})
