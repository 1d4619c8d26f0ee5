"""Status, health, abort: what must be answered whatever the engine is at. Nothing here waits for a step.

Status and health are what the engine published last; an abort that waits for a step to end says so instead of waiting along.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from ...weight_sync.names import TRANSPORTS
from ..engine.config import APPLY
from ..engine.process import memory_bytes
from ..engine.update_record import KV_POLICIES, MODES
from ..errors import NotReady
from ..wire import PROTOCOL_VERSION
from .rollouts import RolloutService

SOON_S = 0.4
"""after which a call answers that what it asked for is pending"""
ABORT_S = 600.0
"""how long that may be"""
COMMIT_S = 600.0
"""how long a commit may take, which checks every value"""
CAPABILITIES = (
    "rollouts",
    "rollouts.stream",
    "rollouts.stream_tokens",
    "rollouts.msgpack",
    "rollouts.text",
    "rollouts.continue_from",
    "rollouts.forced_token_ids",
    "rollouts.deadline_s",
    "rollouts.detach_s",
    "rollouts.on_unavailable",
    "rollouts.min_version",
    "rollouts.max_version_lag",
    "rollouts.prompt_logprobs_start",
    "logprobs",
    "tokenize",
    "detokenize",
    "render",
    "openai.completions",
    "openai.chat",
    "openai.token_ids",
    *(f"weights.transport.{name}" for name in TRANSPORTS),
    "weights.chunks.count",
    *(f"weights.apply.{name}" for name in APPLY),
    *(f"weights.mode.{name}" for name in MODES),
    *(f"weights.kv_policy.{name}" for name in KV_POLICIES),
)
"""what bodies may ask for"""
DIALECTS = {"vLLM": "dialect.vllm", "SGLang": "dialect.sglang"}
"""by the tag of their routes"""


def capabilities(routes: Iterable[BaseRoute]) -> list[str]:
    """Names of what this server can do: CAPABILITIES, its verbs (of "POST /v1/engine/pause", engine.pause) and its dialects."""
    found = set(CAPABILITIES)
    for route in routes:
        if isinstance(route, APIRoute):
            found |= {DIALECTS[tag] for tag in (route.openapi_extra or {}).get("tags", ()) if tag in DIALECTS}
            parts = [part for part in route.path.split("/")[2:] if not part.startswith("{")]
            if route.path.startswith(("/v1/engine/", "/v1/weights")):
                found.add(".".join(parts))
    return sorted(found)



def live(service: RolloutService) -> tuple[dict[str, Any], int]:
    """Whether the engine's loop moves or idles."""
    reason = service.engine.why_not_live()
    state = {"live": reason is None, "phase": service.engine.snapshot.phase}
    return (state, 200) if reason is None else ({**state, "reason": reason}, 503)


def ready(service: RolloutService) -> tuple[dict[str, Any], int]:
    """Whether a request would be served now."""
    engine = service.engine
    reason = engine.why_not_live()
    if reason is None and not engine.is_ready:
        phase, done = engine.snapshot.progress
        return {"ready": False, "reason": f"the engine is starting: {phase}", "progress": done}, 503
    if reason is None:
        reason = (engine.snapshot.stats.get("state") or {}).get("why_not_running")
    return ({"ready": True}, 200) if reason is None else ({"ready": False, "reason": reason}, 503)


def health(service: RolloutService) -> tuple[dict[str, Any], int]:
    """Whether there is a live engine, loaded: also one that is paused or asleep, which whoever starts against it can change."""
    shown, _ = ready(service)
    return shown, 200 if service.engine.why_not_live() is None and service.engine.is_ready else 503


def state(service: RolloutService) -> dict[str, Any]:
    """The facts of the engine's state. NotReady while it loads."""
    if service.engine.dead is not None:
        raise service.engine.lost()
    found = service.engine.snapshot.state(time.monotonic())
    if found is None:
        raise NotReady("the engine is still starting: ask /health/ready")
    return found


def version(service: RolloutService, package_version: str, routes: Iterable[BaseRoute]) -> dict[str, Any]:
    return {
        "version": package_version,
        "protocol_version": PROTOCOL_VERSION,
        "capabilities": capabilities(routes),
        "model": service.model,
        "fingerprint": service.fingerprint,
    }


def status(service: RolloutService) -> dict[str, Any]:
    """The snapshot, as one object."""
    engine = service.engine
    snapshot = engine.snapshot
    facts = snapshot.state(time.monotonic()) or {"scheduling": None, "memory": None, "weights": None, "update": None, "legal": []}
    return {
        "state": "dead" if engine.dead is not None else "running" if engine.is_ready else "loading",
        "reason": engine.why_not_live(),
        "phase": snapshot.phase,
        "phase_age_s": snapshot.phase_age_s,
        "progress": {"phase": snapshot.progress[0], "fraction": snapshot.progress[1]},
        "steps": snapshot.steps,
        "calls_in_flight": len(service.in_flight),
        "calls_unread": sum(not t.is_read for t in service.in_flight.values()),
        "info": snapshot.info,
        "stats": {name: value for name, value in snapshot.stats.items() if name != "state"},
        **{name: facts[name] for name in ("scheduling", "memory", "weights", "update", "legal")},
        "memory_bytes": {"front": memory_bytes(), "engine": snapshot.memory},
        "engine_pid": engine.pid,
    }


async def pause(service: RolloutService, patience_s: float, **args: Any) -> dict[str, Any]:
    """Have the engine come to rest (see engine/control.py), within `patience_s`. Mode abort also ends what is on its way to it."""
    if args.get("mode") == "abort":
        for ticket in list(service.in_flight.values()):
            ticket.mark_aborted("paused")
    report: dict[str, Any] = await service.engine.run("pause", args, patience_s)
    calls = {kind: sorted({i.rpartition("#")[0] for i in ids}) for kind, ids in report.get("request_ids", {}).items()}
    return {**report, "request_ids": calls}


async def abort(service: RolloutService, kind: str, value: Any, reason: str) -> dict[str, Any]:
    """End the calls chosen, also those still between front and engine. Their own replies carry the partial outputs.

    Idempotent: with nothing to end, "changed" is false. While the engine is in a long step or command, "pending" is true: they end with it.
    """
    chosen = [t for t in service.in_flight.values() if kind == "all" or value == (t.id if kind == "request_id" else getattr(t.call, kind))]
    for ticket in chosen:
        ticket.mark_aborted(reason)
    ids = [i for t in chosen for i in t.open_request_ids]
    ended: Any = {"samples": 0}
    if ids:
        ended = await soon(service, service.engine.command("abort", ABORT_S, request_ids=ids, reason=reason))
    shown = {"changed": bool(chosen), "request_ids": sorted(t.id for t in chosen)}
    return {**shown, "samples": 0, "pending": True} if ended is None else {**shown, "samples": ended["samples"]}


async def abort_update(service: RolloutService, update_id: str, reason: dict[str, str]) -> dict[str, Any]:
    """Drop a weight update. Where the engine is in a long step or command, the reply shows the update as it is, "pending"."""
    ended = await soon(service, service.engine.command("abort_update", ABORT_S, update_id=update_id, **reason))
    if ended is not None:
        shown: dict[str, Any] = ended
        return shown
    return {**await update_status(service, update_id), "changed": False, "pending": True}


async def update_status(service: RolloutService, update_id: str) -> dict[str, Any]:
    """How far an update is, or how it ended."""
    found: dict[str, Any] = await service.engine.aside("reads", "update_status", update_id=update_id)
    return found


async def soon(service: RolloutService, work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` gives, or None if that takes longer than SOON_S; it goes on, and then nobody hears what it raises."""
    task = asyncio.create_task(work)
    service.going_on.add(task)
    task.add_done_callback(service.going_on.discard)
    done, _ = await asyncio.wait({task}, timeout=SOON_S)
    if done:
        return task.result()
    task.add_done_callback(lambda late: None if late.cancelled() else late.exception())
    return None
