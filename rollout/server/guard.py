"""Stands before every route: refuses first, counts responses, and writes down who called a control route."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import Overloaded, RollsyncError
from .access import Access, check
from .audit import AuditLog
from .replies import error_reply
from .schemas import Needs

DOCUMENT = "/openapi.json"
"""FastAPI's own route, which cannot declare that it needs the API key"""
STRICTNESS: dict[Needs, int] = {"open": 0, "traffic": 1, "control": 2}
READ_AWAY_S = 1.0
GONE = 499
"""status, in the audit log, of a call whose caller left before the answer"""


class RouteNeeds:
    """What each path needs, as its route declares (schemas.route). ValueError for a route that does not."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        document = re.compile(re.escape(DOCUMENT))
        self._declared: list[tuple[re.Pattern[str], set[str], Needs, str]] = [(document, {"GET"}, "traffic", DOCUMENT)]
        self._errors: list[tuple[re.Pattern[str], str]] = []
        self.paths = {DOCUMENT}
        for route in routes:
            declared = (isinstance(route, APIRoute) and route.openapi_extra) or {}
            needs = declared.get("x-needs")
            if not isinstance(route, APIRoute) or needs not in STRICTNESS:
                raise ValueError(f"{route} must declare what it needs, as openapi_extra=route(tag, needs)")
            self._declared.append((route.path_regex, set(route.methods or ()), needs, route.path))
            if "x-error" in declared:
                self._errors.append((route.path_regex, declared["x-error"]))
            self.paths.add(route.path)

    def of(self, method: str, path: str) -> Needs:
        """The strictest of the routes that could take it, by the router's own patterns; of no route: "traffic"."""
        return self.find(method, path)[0]

    def find(self, method: str, path: str) -> tuple[Needs, str, dict[str, str]]:
        """The same, with that route's pattern and what the path has in its place. Of a method none takes: the strictest of the path."""
        there = [
            (method in taken, needs, name, match.groupdict())
            for pattern, taken, needs, name in self._declared
            if (match := pattern.match(path))
        ]
        if not there:
            return "traffic", "other", {}
        _, needs, name, in_path = max(there, key=lambda found: (found[0], STRICTNESS[found[1]]))
        return needs, name, in_path

    def error_of(self, path: str) -> str | None:
        """The component that errors on it look like, if its route declares one of its own."""
        return next((error for pattern, error in self._errors if pattern.match(path)), None)


async def read_away(receive: Receive) -> None:
    """Take a body nobody wants, so that closing does not reset the connection before the answer is read."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READ_AWAY_S):
            while (await receive()).get("more_body", False):
                pass


class Guard:
    """Pure ASGI middleware around the application."""

    def __init__(
        self, app: ASGIApp, access: Access, responses: Counter[tuple[str, int]], routes: RouteNeeds, audit: AuditLog | None = None
    ) -> None:
        self._app, self._access, self._responses, self._routes = app, access, responses, routes
        self._audit = audit or AuditLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        needs, route, in_path = self._routes.find(scope["method"], scope["path"])
        if needs != "control":
            await self._answer(scope, receive, send, needs, {})
            return
        begun_at = time.monotonic()
        facts: dict[str, Any] = {"update": in_path.get("update_id")}
        try:
            await self._answer(scope, receive, send, needs, facts)
        finally:
            facts["ms"] = round(1000 * (time.monotonic() - begun_at), 1)
            self._audit.add({"method": scope["method"], "route": route, **facts})

    async def _answer(self, scope: Scope, receive: Receive, send: Send, needs: Needs, facts: dict[str, Any]) -> None:
        """Let the call through, or refuse it. `facts` gets what the audit log says of it."""
        path: str = scope["path"]
        scope["error_shape"] = self._routes.error_of(path)
        state = scope.setdefault("state", {})
        state["audit"] = facts if needs == "control" else None
        host, port = scope.get("client") or ("", 0)
        facts |= {"peer": f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "by": "refused", "status": GONE}

        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                facts["status"] = message["status"]
                found = getattr(scope.get("route"), "path", path)  # of "/v1/rollouts/abc" the pattern
                self._responses[found if found in self._routes.paths else "other", message["status"]] += 1
                if state.get("crowded") or state.get("over_limit"):  # the next try may find a place
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        try:
            if state.get("over_limit") and needs != "open":
                raise Overloaded("all connections that the file limit (ulimit -n) allows are taken: try again, or raise it")
            facts["by"] = check(self._access, needs, headers, state.get("listener", "traffic"), host)
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
