"""Status, health, abort: what looks at the engine or steers it. Nothing here waits for a step, except abort."""

from __future__ import annotations

from typing import Any

from ..engine.process import memory_bytes
from ..wire import PROTOCOL_VERSION
from .rollouts import RolloutService

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
    "rollouts.prompt_logprobs_start",
    "logprobs",
    "tokenize",
    "detokenize",
    "render",
    "openai.completions",
    "openai.chat",
    "openai.token_ids",
    "engine.abort",
    "engine.status",
)


def live(service: RolloutService) -> tuple[dict[str, Any], int]:
    """Whether the engine's loop moves or idles."""
    reason = service.engine.why_not_live()
    state = {"live": reason is None, "phase": service.engine.snapshot.phase}
    return (state, 200) if reason is None else ({**state, "reason": reason}, 503)


def ready(service: RolloutService) -> tuple[dict[str, Any], int]:
    """Whether a request would be served now."""
    reason = service.engine.why_not_live()
    if reason is None and not service.engine.is_ready:
        phase, done = service.engine.snapshot.progress
        return {"ready": False, "reason": f"the engine is starting: {phase}", "progress": done}, 503
    return ({"ready": True}, 200) if reason is None else ({"ready": False, "reason": reason}, 503)


def version(service: RolloutService, package_version: str) -> dict[str, Any]:
    return {
        "version": package_version,
        "protocol_version": PROTOCOL_VERSION,
        "capabilities": list(CAPABILITIES),
        "model": service.model,
        "fingerprint": service.fingerprint,
    }


def status(service: RolloutService) -> dict[str, Any]:
    """The snapshot, as one object."""
    engine = service.engine
    snapshot = engine.snapshot
    state = "dead" if engine.dead is not None else "running" if engine.is_ready else "loading"
    return {
        "state": state,
        "reason": engine.why_not_live(),
        "phase": snapshot.phase,
        "phase_age_s": snapshot.phase_age_s,
        "progress": {"phase": snapshot.progress[0], "fraction": snapshot.progress[1]},
        "steps": snapshot.steps,
        "calls_in_flight": len(service.in_flight),
        "calls_unread": sum(not t.is_read for t in service.in_flight.values()),
        "info": snapshot.info,
        "stats": snapshot.stats,
        "weights": {"version": snapshot.stats.get("weight_version"), "valid": engine.is_ready},
        "memory_bytes": {"front": memory_bytes(), "engine": snapshot.memory},
        "engine_pid": engine.pid,
    }


async def abort(service: RolloutService, kind: str, value: Any, reason: str) -> dict[str, Any]:
    """End the calls chosen, also those still between front and engine. Their own replies carry the partial outputs.

    Idempotent: with nothing to end, "changed" is false.
    """
    chosen = [t for t in service.in_flight.values() if kind == "all" or value == (t.id if kind == "request_id" else getattr(t.call, kind))]
    for ticket in chosen:
        ticket.mark_aborted(reason)
    ids = [i for t in chosen for i in t.open_request_ids]
    ended = await service.engine.command("abort", request_ids=ids, reason=reason) if ids else {"samples": 0}
    return {"changed": bool(chosen), "request_ids": sorted(t.id for t in chosen), "samples": ended["samples"]}
