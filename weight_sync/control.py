"""The few calls a trainer makes to an engine: what `WeightSender` needs, and a plain HTTP client that provides it."""

from __future__ import annotations

import contextlib
import functools
import http.client
import struct
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgpack  # type: ignore[import-untyped]


class UpdateError(RuntimeError):
    """An engine refused, or did not answer. The message is the engine's own, with its address in front."""

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.report: Any = None
        """of a sync: a SyncReport of what became of each engine"""


class EngineLost(UpdateError):
    """It did not answer."""


class UpdateControl(Protocol):
    """One engine, as a sender sees it."""

    address: str

    def look(self, timeout_s: float) -> dict[str, Any]:
        """What it holds: "version", "valid", and "epoch" and "instance", which together name its weights. EngineLost if it is down."""

    def require(self, capabilities: Iterable[str]) -> None:
        """UpdateError naming those that the engine's server lacks."""

    def open(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin an update, and hold it: if this process ends before the commit, so does the update."""

    def hold(self, update_id: str) -> None:
        """Hold an update that another rank opened."""

    def release(self, update_id: str) -> None:
        """Hold it no more; before the commit, that aborts it."""

    def chunk(self, update_id: str, sender: int, sequence: int, data: Any = None, **where: Any) -> dict[str, Any]:
        """Hand over a bucket: its bytes, or (`where`) what the transport says about where they lie."""

    def commit(self, update_id: str, digests: Mapping[str, int] | None) -> dict[str, Any]: ...

    def status(self, update_id: str) -> dict[str, Any]:
        """How far an update is: its state, and while it is open "missing_chunks"."""

    def abort(self, update_id: str, reason: str) -> dict[str, Any]: ...

    def bind_group(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Where a group will meet: name, host, port, rank of the engine's first, world_size, backend."""

    def join_group(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Have the engine join; answered once the group is formed."""

    def groups(self) -> dict[str, Any]:
        """State of the engine's groups by name."""

    def shards(self) -> list[dict[str, list[list[list[int]]]]]:
        """What every rank of the engine keeps: [offsets, lengths] of boxes by tensor name."""


class HttpControl:
    """The weight routes of one server over a kept connection, and one more for an update it holds. Not for use by two threads at once.

    Args:
        url: e.g. "http://127.0.0.1:8000".
        token: sent as a bearer token, if given.
        timeout_s: longest silence of the server within a call.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 60.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be like http://host:port, got {url!r}")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.address = url.rstrip("/")
        self._prefix = parts.path.rstrip("/")
        self._connect: Callable[[], http.client.HTTPConnection] = functools.partial(kind, parts.hostname, parts.port, timeout=timeout_s)
        self._timeout_s = timeout_s
        self._connection = self._connect()
        self._held: dict[str, tuple[http.client.HTTPConnection, http.client.HTTPResponse]] = {}
        self._capabilities: frozenset[str] | None = None
        self._headers = {"Accept": "application/msgpack", **({"Authorization": f"Bearer {token}"} if token else {})}

    def close(self) -> None:
        for update_id in list(self._held):
            self.release(update_id)
        self._connection.close()

    def look(self, timeout_s: float) -> dict[str, Any]:
        found = self.call("GET", "/v1/engine/status", timeout_s=timeout_s)
        if not isinstance(found, dict) or not {"reason", "weights"} <= found.keys():
            self.require(["weights.updates"])
            raise UpdateError(f"{self.address}: /v1/engine/status is not that of this rollsync: install the same one on both sides")
        if found["reason"] is not None or found["weights"] is None:
            raise EngineLost(f"{self.address}: {found['reason'] or 'the engine is still loading'}")
        held: dict[str, Any] = found["weights"]
        return held

    def _lost(self, error: Exception) -> EngineLost:
        self._capabilities = None  # another server may come in its place
        return EngineLost(f"{self.address}: {type(error).__name__}: {error}")

    def require(self, capabilities: Iterable[str]) -> None:
        if self._capabilities is None:
            told = self.call("GET", "/version")
            self._capabilities = frozenset(told.get("capabilities", ()) if isinstance(told, dict) else ())
        if lacking := sorted(set(capabilities) - self._capabilities):
            raise UpdateError(f"{self.address} lacks {', '.join(lacking)}: install the same rollsync on both sides, or choose another way")

    def call(
        self, method: str, path: str, body: Any = None, content_type: str = "application/msgpack", timeout_s: float | None = None
    ) -> Any:
        """One call; the decoded reply. Raises UpdateError with the server's words."""
        headers = {**self._headers, **({"Content-Type": content_type} if body is not None else {})}
        self._connection.timeout = timeout_s or self._timeout_s
        for attempt in (0, 1):
            fresh = self._connection.sock is None
            if not fresh:
                self._connection.sock.settimeout(self._connection.timeout)
            try:
                self._connection.request(method, self._prefix + path, body, headers)
                response = self._connection.getresponse()
                raw = response.read()
                break
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as error:
                self._connection.close()
                if fresh or attempt:  # only a kept connection may have been closed in between
                    raise self._lost(error) from error
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                raise self._lost(error) from error
        return self._value(response.status, raw)

    def _value(self, status: int, raw: bytes) -> Any:
        """A decoded reply; UpdateError for a refusal."""
        try:
            value = msgpack.unpackb(raw)
        except ValueError:
            value = {"error": {"code": "http", "message": raw[:200].decode(errors="replace")}}
        if status >= 400:
            told = value.get("error", {}) if isinstance(value, dict) else {}
            told = told if isinstance(told, dict) else {"message": told}
            words = f"{self.address} answered {status}: {told.get('message', value)}"
            raise UpdateError(words, status=status, code=told.get("code"))
        return value

    def open(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._hold("POST", "/v1/weights/updates", msgpack.packb({**body, "hold": True}))

    def hold(self, update_id: str) -> None:
        self._hold("GET", f"/v1/weights/updates/{update_id}/hold")

    def _hold(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        """A call whose reply is a stream: its first event. The connection is kept until `release`, or this process ends."""
        connection = self._connect()
        try:
            connection.request(method, self._prefix + path, body, {**self._headers, "Content-Type": "application/msgpack"})
            response = connection.getresponse()
            if response.status >= 400:
                self._value(response.status, response.read())
            first: dict[str, Any] = msgpack.unpackb(response.read(*struct.unpack("<I", response.read(4))))
        except (OSError, http.client.HTTPException, struct.error, ValueError) as error:
            connection.close()
            raise self._lost(error) from error
        except UpdateError:
            connection.close()
            raise
        self._held[first["id"]] = (connection, response)
        return first

    def release(self, update_id: str) -> None:
        for held in self._held.pop(update_id, ()):
            with contextlib.suppress(OSError):
                held.close()

    def chunk(self, update_id: str, sender: int, sequence: int, data: Any = None, **where: Any) -> dict[str, Any]:
        path = f"/v1/weights/updates/{update_id}/chunks"
        if data is not None:
            query = f"?sender={sender}&sequence={sequence}"
            reply: dict[str, Any] = self.call("POST", path + query, data, "application/octet-stream")
        else:
            reply = self.call("POST", path, msgpack.packb({"sender": sender, "sequence": sequence, **where}))
        return reply

    def commit(self, update_id: str, digests: Mapping[str, int] | None) -> dict[str, Any]:
        shown = None if digests is None else {name: f"{value:016x}" for name, value in digests.items()}
        reply: dict[str, Any] = self.call("POST", f"/v1/weights/updates/{update_id}/commit", msgpack.packb({"digests": shown}))
        self.release(update_id)
        return reply

    def bind_group(self, body: Mapping[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = self.call("POST", "/v1/weights/groups", msgpack.packb(body))
        return reply

    def join_group(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        path = f"/v1/weights/groups/{urllib.parse.quote(name, safe='')}/join"
        reply: dict[str, Any] = self.call("POST", path, msgpack.packb(body))
        return reply

    def groups(self) -> dict[str, Any]:
        reply: dict[str, Any] = self.call("GET", "/v1/weights/groups")["groups"]
        return reply

    def shards(self) -> list[dict[str, list[list[list[int]]]]]:
        reply: list[dict[str, list[list[list[int]]]]] = self.call("GET", "/v1/weights/shards")["ranks"]
        return reply

    def status(self, update_id: str) -> dict[str, Any]:
        reply: dict[str, Any] = self.call("GET", f"/v1/weights/updates/{update_id}")
        return reply

    def abort(self, update_id: str, reason: str) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = self.call("POST", f"/v1/weights/updates/{update_id}/abort", msgpack.packb({"reason": reason}))
        finally:
            self.release(update_id)
        return reply
