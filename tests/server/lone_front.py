"""The front's service over an engine process that is not there."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import msgpack
from rollsync import EngineConfig
from rollsync.rollout.server.engine_client import EngineProcess
from rollsync.rollout.server.rollouts import RolloutService
from rollsync.rollout.server.text import TextService


class Front:
    """What is sent to the engine is kept, what it says is said here."""

    def __init__(self) -> None:
        config = EngineConfig(model="fake")
        self.engine = EngineProcess(config)
        self.engine.snapshot.info = {"vocab_size": 100, "embed_size": 100, "max_model_len": 64}
        self.engine._ready.set()
        self.sent: list[Any] = []
        self.engine._send = lambda *message: self.sent.append(msgpack.unpackb(msgpack.packb(message)))  # type: ignore[method-assign]
        self.service = RolloutService(self.engine, TextService(config))

    def requests(self) -> list[Any]:
        return [message[1] for message in self.sent if message[0] == "request"]

    async def says(self, frames: list[bytes]) -> None:
        """Have all frames received at once, as those that came while the loop was busy are."""

        async def there(frame: bytes) -> bytes:
            return frame

        left = iter(frames)
        self.engine._from = SimpleNamespace(recv=lambda: there(next(left)))  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):  # no frame is left
            await self.engine._read_messages()
