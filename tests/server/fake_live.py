"""A fake engine under the real `Control`: pause, sleep and weight updates do to its state what they do to a real one's.

It takes its time where the owner of an update says so: "slow-check", "slow-switch" and "slow-chunk" last SLOW_S. A prompt that begins with
SLOW_STEP makes one step last as long.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fake_engine import FakeEngine
from rollsync.rollout.engine.config import EngineConfig
from rollsync.rollout.engine.control import Control
from rollsync.rollout.engine.types import RolloutRequest, SampleOutput

SLOW_S = 1.2
SLOW_STEP = 98


class FakeUpdates:
    """What `Control` asks of the ranks' weights."""

    def __init__(self, engine: FakeLive) -> None:
        self._engine = engine
        self._chunks: set[tuple[int, int]] = set()
        self.nbytes = 0

    def _slow(self, what: str) -> None:
        update = next((u for u in self._engine.control.updates.values() if u.state == "open"), None)
        if update is not None and update.owner == what:
            time.sleep(SLOW_S)

    def open(self, update_id: str, manifest: Any, **how: Any) -> list[str]:
        if manifest is not None and manifest.tensors[0].name == "slow":
            time.sleep(SLOW_S)
        self.nbytes, self._chunks = manifest.nbytes if manifest else 0, set()
        return []

    def chunk(self, update_id: str, sender: int, sequence: int, where: Any) -> bool:
        self._slow("slow-chunk")
        fresh = (sender, sequence) not in self._chunks
        self._chunks.add((sender, sequence))
        return fresh

    def digests(self) -> dict[str, int]:
        return {}

    def lost(self) -> None:
        return None

    def missing(self) -> list[str]:
        return []

    def prepare(self, digests: Any, **how: Any) -> list[str]:
        self._slow("slow-check")
        return ["nothing came"] if not self._chunks else []

    def commit(self, version: int) -> None:
        self._slow("slow-switch")

    def abort(self) -> bool:
        return bool(self._chunks)

    def progress(self) -> dict[str, Any]:
        return {"bytes": self.nbytes, "received_bytes": 4 * len(self._chunks), "missing_chunks": 1 - min(1, len(self._chunks))}


class FakeLive(FakeEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.config = config
        blocks = SimpleNamespace(reset_cache=lambda: 0)
        self.scheduler = SimpleNamespace(
            requests={}, held={}, counters=Counter(), num_waiting=0, blocks=blocks, preempt_all=lambda: 0,
            new_epoch=lambda epoch, keep_kv: 0, lagging=lambda version: [], abort_samples=lambda doomed, reason: [],
            begun=lambda: list(self.scheduler.requests.values()), abort=self._abort_requests,
        )  # fmt: skip
        self.control: Any = Control(self)  # type: ignore[arg-type]
        self.runner = SimpleNamespace(updates=FakeUpdates(self), sleep=lambda tag, keep: None, wake=lambda tag: None)
        self.weight_version = 0
        self._list()

    def check_alive(self) -> None:
        """It always is."""

    def _list(self) -> None:
        before, self.scheduler.requests = self.scheduler.requests, {}
        for r in self._running:
            rid = r.request.request_id
            self.scheduler.requests[rid] = before.pop(rid, None) or SimpleNamespace(id=rid, live=1, spec=r.request)
        for ended in before.values():
            ended.live = 0
        self.scheduler.running = [SimpleNamespace(request=request) for request in self.scheduler.requests.values()]
        self.scheduler.has_work = bool(self._running)

    def _abort_requests(self, doomed: Any, reason: str) -> list[SampleOutput]:
        return [output for request in list(doomed) for output in self.abort(request.id, reason=reason)]

    @property
    def has_work(self) -> bool:
        return bool(self._running) and self.control.may_step

    def add_request(self, request: RolloutRequest) -> None:
        super().add_request(request)
        self._list()

    def abort(self, *which: Any, **how: Any) -> list[SampleOutput]:
        outputs = super().abort(*which, **how)
        self._list()
        return outputs

    def step(self) -> list[SampleOutput]:
        if any(r.request.prompt_token_ids[0] == SLOW_STEP and not r.tokens for r in self._running):
            time.sleep(SLOW_S)
        outputs = super().step()
        self._list()
        return outputs

    def poll(self) -> list[SampleOutput]:
        self.control.poll()
        return self.control.take_outputs()

    def next_deadline(self) -> float | None:
        return self.control.next_deadline()

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "weight_version": self.weight_version, "updates": self.control.update_stats.to_stats()}


def build(config: EngineConfig, progress: Callable[[str, float], None]) -> FakeLive:
    return FakeLive(config)
