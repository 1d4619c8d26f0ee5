"""An engine without a model, for the server's tests: token i of a sample is a function of prompt, sample index and i.

`build` is named to the server as its engine factory. The model name says how it behaves: fake, fake-slow-load,
fake-fail-load, fake-crash-load; fake-short has a context of 24 tokens and never waits.
A prompt that begins with CRASH makes the step raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from rollsync.rollout.engine.config import EngineConfig
from rollsync.rollout.engine.lifecycle import Lifecycle
from rollsync.rollout.engine.types import RolloutRequest, SampleOutput
from rollsync.rollout.errors import (
    BadRequest,
    DuplicateRequest,
    IllegalState,
    PromptTooLong,
    UnknownUpdate,
    UnsupportedModel,
    UpdateRefused,
)
from rollsync.weight_sync.manifest import Manifest, ManifestError

CRASH = 99
VOCAB = 256
MAX_LEN, SHORT_LEN = 4096, 24
STEP_S = 0.002
SWITCH = 16
"""tokens made by each weight version"""


@dataclass
class _Running:
    request: RolloutRequest
    index: int
    max_len: int
    tokens: list[int] = field(default_factory=list)

    @property
    def limit(self) -> int:
        most = self.request.params.max_tokens
        room = self.max_len - len(self.request.prompt_token_ids)
        return room if most is None else min(most, room)


class FakeControl:
    """Checks what it is asked as the real one does, and gives a lease back at once: nobody's calls stand still."""

    weights_root = None

    def __init__(self) -> None:
        self.lifecycle = Lifecycle(time.monotonic)
        self.groups = FakeGroups()

    def status(self) -> dict[str, Any]:
        return {**self.lifecycle.status(), "update": None}

    def open_update_status(self) -> None:
        return None

    def pause(self, mode: str = "keep", owner: str = "operator", ttl_s: float | None = None, **rest: Any) -> dict[str, Any]:
        changed = self.lifecycle.pause(owner, mode, ttl_s)
        self.lifecycle.resume(owner)
        counts = {"aborted": 0, "recomputed": 0, "kept": 0, "drained": 0, "queued": 0, "request_ids": {}}
        return {"changed": changed, "mode": mode, "draining": False, **counts}

    def resume(self, owner: str = "operator") -> dict[str, Any]:
        return {"changed": self.lifecycle.resume(owner), "running": True, "reason": None}

    def renew_lease(self, owner: str = "operator", ttl_s: float | None = None) -> dict[str, Any]:
        return {"changed": True, "lease": self.lifecycle.renew(owner, ttl_s)}

    def revoke_lease(self, owner: str) -> dict[str, Any]:
        return self.resume(owner)

    def sleep(self, tags: list[str] | None = None, weights: str = "offload") -> dict[str, Any]:
        return {"changed": bool(self.lifecycle.plan_sleep(tags, weights)), "freed_bytes": {}}

    def wake(self, tags: list[str] | None = None) -> dict[str, Any]:
        return {"changed": bool(self.lifecycle.plan_wake(tags)), "asleep": [], "running": True, "reason": None}

    def open_update(self, manifest: Any = None, **rest: Any) -> Any:
        try:
            Manifest.from_wire(manifest)
        except ManifestError as error:
            raise UpdateRefused(str(error)) from None
        raise UpdateRefused("a fake engine has no weights")

    def find_update(self, update_id: str, **rest: Any) -> Any:
        raise UnknownUpdate(f"there is no weight update {update_id!r}")

    update_status = commit_update = abort_update = extend_update = take_chunk = find_update

    def digests(self) -> dict[str, str]:
        return {}

    def shards(self) -> Any:
        return [{}]

    def weight_values(self, name: str, rows: int) -> Any:
        raise BadRequest("a fake engine has no weights", field="name")


class FakeGroups:
    """There is nobody to meet."""

    def bind(self, name: str, **rest: Any) -> Any:
        raise IllegalState("a fake engine joins no group")

    join = bind

    def leave(self, name: str) -> dict[str, Any]:
        return {"changed": False}

    def status(self) -> dict[str, Any]:
        return {}


class FakeEngine:
    def __init__(self, config: EngineConfig) -> None:
        self.max_len = SHORT_LEN if config.model == "fake-short" else MAX_LEN
        blocks = {"num_blocks": 64, "block_tokens": 32, "kv_bytes": 1 << 20, "max_model_len": self.max_len}
        ids = {"vocab_size": VOCAB, "embed_size": VOCAB, "eos_token_ids": (2,)}
        self.info = SimpleNamespace(model=config.model, dtype="bfloat16", kernels="none", threads=1, weight_bytes=0, **blocks, **ids)
        self.control = FakeControl()
        self.runner = SimpleNamespace(updates=SimpleNamespace(digests=dict))
        self._running: list[_Running] = []
        self.steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def add_request(self, request: RolloutRequest) -> None:
        if any(r.request.request_id == request.request_id for r in self._running):
            raise DuplicateRequest(f"request_id {request.request_id!r} is still in flight")
        if len(request.prompt_token_ids) >= self.max_len:
            raise PromptTooLong(f"prompt_token_ids must hold less than {self.max_len} ids", field="prompt_token_ids")
        if request.priority == 13:
            raise BadRequest("priority must not be 13", field="priority")
        self._running += [_Running(request, request.first_sample + i, self.max_len) for i in range(request.params.n)]

    def _output(self, r: _Running, start: int = 0, **end: Any) -> SampleOutput:
        tokens = r.tokens[start:]
        logprobs = [-float("inf") if t == 0 else -1.0 / (1 + t) for t in tokens]
        extra = {name: logprobs for name in ("model_logprobs", "temperature_logprobs") if name in r.request.include}
        if end and "prompt_logprobs" in r.request.include:
            extra["prompt_logprobs"] = [None, *(-0.5 for _ in r.request.prompt_token_ids[1:])]
        spans = [(v, max(0, SWITCH * v - start), min(len(r.tokens), SWITCH * (v + 1)) - start) for v in range(len(r.tokens) // SWITCH + 1)]
        versions = [{"version": v, "start": low, "end": high} for v, low, high in spans if low < high]
        return SampleOutput(
            request_id=r.request.request_id,
            sample_index=r.index,
            token_ids=tokens,
            logprobs=logprobs,
            weight_versions=versions,
            seed=r.request.params.seed or 7,
            **extra,
            **end,
        )

    def abort(
        self, request_id: str | None = None, *, group: str | None = None, session: str | None = None, all: bool = False, reason: str = "?"
    ) -> list[SampleOutput]:
        keys = {("request_id", request_id), ("group", group), ("session", session)}
        gone = [r for r in self._running if all or any(v is not None and getattr(r.request, k) == v for k, v in keys)]
        self._running = [r for r in self._running if r not in gone]
        return [self._output(r, finish_reason="abort", abort_reason=reason) for r in gone]

    def step(self) -> list[SampleOutput]:
        time.sleep(STEP_S if self.max_len == MAX_LEN else 0)
        self.steps += 1
        done = []
        for r in self._running:
            if r.request.prompt_token_ids[0] == CRASH:
                raise RuntimeError("the fake step broke")
            if r.limit:
                r.tokens.append((sum(r.request.prompt_token_ids) + 31 * r.index + 7 * len(r.tokens)) % VOCAB)
            if len(r.tokens) >= r.limit:
                done.append(r)
        self._running = [r for r in self._running if r not in done]
        deltas = [self._output(r, len(r.tokens) - 1) for r in self._running if r.request.stream]
        return deltas + [self._output(r, finish_reason="length") for r in done]

    def reset_prefix_cache(self) -> int:
        return 0

    def poll(self) -> list[SampleOutput]:
        return []

    def next_deadline(self) -> float | None:
        return None

    def stats(self) -> dict[str, Any]:
        num = len(self._running)
        numbers = {"running": num, "waiting": 0, "free_blocks": 64 - min(64, num), "weight_version": 0, "steps": self.steps}
        return {**numbers, "state": self.control.status()}

    def close(self) -> None:
        pass


def build(config: EngineConfig, progress: Callable[[str, float], None]) -> FakeEngine:
    progress("loading", 0.5)
    if config.model == "fake-slow-load":
        time.sleep(60)
    if config.model == "fake-fail-load":
        raise UnsupportedModel("config.json: architecture Fake is not supported")
    if config.model == "fake-crash-load":
        raise RuntimeError("no such luck")
    return FakeEngine(config)
