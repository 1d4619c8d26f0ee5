"""Who may call: API key, control token, and the Host and Origin check that keeps web pages away from a loopback server."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ConfigError, Forbidden, Overloaded, RollsyncError, Unauthorized
from .replies import error_reply
from .schemas import Needs

DOCUMENT = "/openapi.json"
"""FastAPI's own route, which cannot declare that it needs the API key"""
STRICTNESS: dict[Needs, int] = {"open": 0, "traffic": 1, "control": 2}
AUTHORITY = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
READ_AWAY_S = 1.0


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
    """Whether `host`, a name or an address, can only mean this machine. No name is looked up."""
    host = host.strip("[]").removesuffix(".")
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def host_of(authority: str) -> str:
    """The host in "host", "host:port" or "[v6]:port"; "" if it is none of these."""
    found = AUTHORITY.fullmatch(authority)
    return (found["v6"] or found["name"]).lower() if found else ""


def host_of_origin(origin: str) -> str:
    """The host in "http://host:port"; "" for anything else, "null" among it."""
    scheme, _, authority = origin.partition("://")
    return host_of(authority) if scheme.lower() in ("http", "https") else ""


def token_of(authorization: str) -> bytes:
    """What follows "Bearer"; empty if nothing does."""
    scheme, _, token = authorization.partition(" ")
    return token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


class RouteNeeds:
    """What each path needs, as its route declares (schemas.route). ValueError for a route that does not."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._declared: list[tuple[re.Pattern[str], Needs]] = [(re.compile(re.escape(DOCUMENT)), "traffic")]
        self._errors: list[tuple[re.Pattern[str], str]] = []
        self.paths = {DOCUMENT}
        for route in routes:
            declared = (isinstance(route, APIRoute) and route.openapi_extra) or {}
            needs = declared.get("x-needs")
            if not isinstance(route, APIRoute) or needs not in STRICTNESS:
                raise ValueError(f"{route} must declare what it needs, as openapi_extra=route(tag, needs)")
            self._declared.append((route.path_regex, needs))
            if "x-error" in declared:
                self._errors.append((route.path_regex, declared["x-error"]))
            self.paths.add(route.path)

    def of(self, path: str) -> Needs:
        """The strictest of the routes that could take it, by the router's own patterns; of no route: "traffic"."""
        found = [needs for pattern, needs in self._declared if pattern.match(path)]
        return max(found, key=STRICTNESS.__getitem__, default="traffic")

    def error_of(self, path: str) -> str | None:
        """The component that errors on it look like, if its route declares one of its own."""
        return next((error for pattern, error in self._errors if pattern.match(path)), None)


def check(access: Access, needs: Needs, headers: dict[str, str]) -> None:
    """Raise Forbidden or Unauthorized if a call of a path that needs `needs` must not pass.

    Control needs the control token, or what traffic needs if none was set, which only a loopback listener may do.
    """
    if access.loopback:
        host = headers.get("host", "")
        if not is_loopback(host_of(host)):
            raise Forbidden(f"Host must name this machine (localhost or a loopback address), got {host!r}")
        origin = headers.get("origin")
        if origin is not None and not is_loopback(host_of_origin(origin)):
            raise Forbidden(f"Origin must be this machine, got {origin!r}")
    token = token_of(headers.get("authorization", ""))
    controls = access.control_token is not None and _equal(token, access.control_token)
    if needs == "control" and access.control_token is not None:
        if not controls:
            raise Unauthorized("this route needs Authorization: Bearer <control token>")
    elif not (access.api_key is None or needs == "open" or controls or _equal(token, access.api_key)):
        raise Unauthorized("this route needs Authorization: Bearer <api key>")


def _equal(token: bytes, secret: str) -> bool:
    return hmac.compare_digest(token, secret.encode(errors="surrogateescape"))


async def read_away(receive: Receive) -> None:
    """Take a body nobody wants, so that closing does not reset the connection before the answer is read."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READ_AWAY_S):
            while (await receive()).get("more_body", False):
                pass


class Guard:
    """Pure ASGI middleware: refuses first, counts responses by route."""

    def __init__(self, app: ASGIApp, access: Access, responses: Counter[tuple[str, int]], routes: RouteNeeds) -> None:
        self._app, self._access, self._responses, self._routes = app, access, responses, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        scope["error_shape"] = self._routes.error_of(path)
        state = scope.get("state", {})
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                found = getattr(scope.get("route"), "path", path)  # of "/v1/rollouts/abc" the pattern
                route = found if found in self._routes.paths else "other"
                self._responses[route, message["status"]] += 1
                if state.get("crowded") or state.get("over_limit"):  # the next try may find a place
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        try:
            needs = self._routes.of(path)
            if state.get("over_limit") and needs != "open":
                raise Overloaded("all connections that the file limit (ulimit -n) allows are taken: try again, or raise it")
            check(self._access, needs, headers)
        except RollsyncError as error:
            await read_away(receive)
            await error_reply(Request(scope), error)(scope, receive, counted)
        else:
            try:
                await self._app(scope, receive, counted)
            except Exception as error:  # the edge of a call: answered here, its connection stays usable
                if begun:
                    raise
                traceback.print_exc(file=sys.stderr)
                await error_reply(Request(scope, receive), error)(scope, receive, counted)
