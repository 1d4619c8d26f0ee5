"""Leases and drains: who keeps an engine from stepping, and what becomes of its requests. `Control` adds memory and weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .lifecycle import DEFAULT_OWNER, Lifecycle, check_choice, check_seconds, is_own
from .types import RolloutRequest, SampleOutput

if TYPE_CHECKING:
    from .engine import Engine
    from .sequence import Request

log = logging.getLogger(__name__)

Reply = Callable[[dict[str, Any]], None]
MAX_NAMED = 256
"""ids of requests that a report lists of each kind; it counts all"""
DUMMY = "dummy: commit a full update first"
COUNTS = ("aborted", "recomputed", "kept", "drained", "queued")


def named(ids: Iterable[str]) -> list[str]:
    """The first MAX_NAMED distinct ids."""
    return list(dict.fromkeys(ids))[:MAX_NAMED]


@dataclass(kw_only=True, slots=True)
class Drain:
    """A pause that waits for the requests it found."""

    owner: str
    expires_at: float | None
    then: str
    """keep or abort: what becomes of the rest at the deadline"""
    changed: bool
    requests: list[Request]
    """those it waits for; later ones do not begin before it is over"""
    finished: int
    """samples that had finished when it began"""
    reply: Reply | None = None


class Pauses:
    """Pause, resume, leases. Owned by the thread that steps."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self.lifecycle = Lifecycle(clock, invalid=DUMMY if engine.config.load_format == "dummy" else None)
        self._drains: dict[str, Drain] = {}
        """those that have not come to rest yet, by owner"""
        self._outputs: list[SampleOutput] = []

    # Facts

    @property
    def may_step(self) -> bool:
        """Whether a step may run: also under a pause, if all who asked for it wait for running requests."""
        return self.lifecycle.usable and self.lifecycle.leases.keys() <= self._drains.keys()

    @property
    def freezes(self) -> bool:
        """Whether a pause that somebody took, and that is no drain under way, decides what running requests do."""
        return any(not is_own(owner) and owner not in self._drains for owner in self.lifecycle.leases)

    def status(self) -> dict[str, Any]:
        return self.lifecycle.status()

    def next_deadline(self) -> float | None:
        """Clock time at which `poll` has something to do even if nothing comes in."""
        times = [lease.expires_at for lease in self.lifecycle.leases.values()] + [d.expires_at for d in self._drains.values()]
        return min((t for t in times if t is not None), default=None)

    def take_outputs(self) -> list[SampleOutput]:
        """Final outputs that verbs brought about since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def expire_leases(self) -> int:
        """Between two steps: end the pauses whose time is over. Returns how many."""
        over = self.lifecycle.expire()
        for lease in over:
            log.warning("the pause of %s (%s) expired after its %g s: nobody renewed it", lease.owner, lease.mode, lease.ttl_s)
        return len(over)

    def poll_drains(self) -> None:
        """Between two steps: end the drains that are through, or whose time is over."""
        for drain in list(self._drains.values()):
            self._poll_drain(drain)

    # Requests

    def admit(self, request: RolloutRequest) -> bool:
        """Whether a new request may begin with the next step; False: the scheduler holds it back until `release_held`.

        Raises:
            IllegalState: the weights are invalid; or nothing runs now and it does not wait. VersionUnavailable: likewise, for a version.
        """
        refuse = request.on_unavailable == "refuse"
        return self.lifecycle.admit(request.min_version, refuse=refuse) and not self._drains

    def release_held(self) -> None:
        """Let those begin whose version is there and that came during a drain that is over."""
        if not self._drains:
            version = self.lifecycle.version
            for request in [r for r in self._engine.scheduler.held.values() if (r.spec.min_version or 0) <= version]:
                self._engine.scheduler.release(request)

    # Pause and resume

    def pause(
        self,
        mode: str = "keep",
        owner: str = DEFAULT_OWNER,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
        at_timeout: str = "abort",
        reply: Reply | None = None,
    ) -> dict[str, Any]:
        """Stop stepping, under a lease of `owner`'s. Returns what became of the requests: counts of samples, and ids of requests by kind.

        Args:
            mode: keep (they freeze with their KV), recompute (KV freed, prefilled again after), abort (they end with what they have),
                drain (they finish first; "draining" is true in the reply, and `reply` gets the report once it is over).
            ttl_s: the lease's life; None: `default_pause_ttl_s`, and without that until resumed.
            timeout_s: how long a drain may take; then the rest is aborted or kept (`at_timeout`).
        """
        self._engine.check_alive()
        check_choice("at_timeout", at_timeout, ("abort", "keep"))
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        scheduler = self._engine.scheduler
        changed = self.lifecycle.pause(owner, mode, self._engine.config.default_pause_ttl_s if ttl_s is None else ttl_s)
        before = self._drains.pop(owner, None)
        requests = [r for r in scheduler.requests.values() if r.id not in scheduler.held]
        if mode == "drain" and requests:
            drain = Drain(
                owner=owner, expires_at=None if timeout_s is None else self._clock() + timeout_s, then=at_timeout, changed=changed,
                requests=requests, finished=scheduler.counters["finished"], reply=reply,
            )  # fmt: skip
            self._drains[owner] = drain
            report = {**self._report(changed, mode, {}), "draining": True}
        else:
            report = self._report(changed, mode, self._come_to_rest(mode))
            if reply is not None:
                reply(report)
        if before is not None:
            self._end_drain(before, {"superseded": True})
        return report

    @staticmethod
    def _report(changed: bool, mode: str, what: dict[str, Any]) -> dict[str, Any]:
        return {"changed": changed, "mode": mode, "draining": False, **dict.fromkeys(COUNTS, 0), "request_ids": {}, **what}

    def _come_to_rest(self, mode: str, requests: Iterable[Request] | None = None) -> dict[str, Any]:
        """What a mode does to requests (an abort: to `requests` only, if given), as a report says it."""
        scheduler = self._engine.scheduler
        if mode == "abort":
            outputs = scheduler.abort(scheduler.requests.values() if requests is None else requests, "paused")
            self._outputs += outputs
            return {"aborted": len(outputs), "request_ids": {"aborted": named(o.request_id for o in outputs)}}
        running = [seq.request.id for seq in scheduler.running]
        kind = "recomputed" if mode == "recompute" else "kept"
        found: dict[str, Any] = {kind: len(running), "queued": scheduler.num_waiting, "request_ids": {kind: named(running)}}
        return {**found, "recompute_tokens": scheduler.preempt_all()} if mode == "recompute" else found

    def _poll_drain(self, drain: Drain) -> None:
        left = [r for r in drain.requests if r.live]
        if drain.owner not in self.lifecycle.leases:  # resumed, or its lease expired
            self._end_drain(drain, {"resumed": True})
        elif drain.expires_at is not None and self._clock() >= drain.expires_at:
            self._end_drain(drain, self._come_to_rest(drain.then, left), left)
        elif not left:
            self._end_drain(drain, {})
        # Until then it goes on, also where another's pause or a sleep makes it wait.

    def _end_drain(self, drain: Drain, rest: dict[str, Any], left: Iterable[Request] = ()) -> None:
        """Report and let newcomers begin. `left` had not finished, though they may be over by now."""
        if self._drains.get(drain.owner) is drain:
            del self._drains[drain.owner]
        scheduler = self._engine.scheduler
        report = self._report(drain.changed, "drain", rest)
        report["drained"], report["queued"] = scheduler.counters["finished"] - drain.finished, scheduler.num_waiting
        unfinished = set(left)
        report["request_ids"]["drained"] = named(r.id for r in drain.requests if not r.live and r not in unfinished)
        self.release_held()
        if drain.reply is not None:
            drain.reply(report)

    def resume(self, owner: str | None = DEFAULT_OWNER) -> dict[str, Any]:
        """Give back a lease (None: all that callers took); steps go on once no lease is left."""
        self._engine.check_alive()
        changed = self.lifecycle.resume(owner)
        reason = self.lifecycle.why_not_running()
        return {"changed": changed, "running": reason is None, "reason": reason}

    # Leases

    def leases(self) -> dict[str, Any]:
        return {"leases": self.lifecycle.status()["scheduling"]["leases"]}

    def renew_lease(self, owner: str = DEFAULT_OWNER, ttl_s: float | None = None) -> dict[str, Any]:
        """Let a lease live for `ttl_s` from now (None: as long as it was given first).

        Raises:
            IllegalState: `owner` has none: it expired, was given back or revoked, and the engine may have run since.
        """
        self._engine.check_alive()
        return {"changed": True, "lease": self.lifecycle.renew(owner, ttl_s)}

    def revoke_lease(self, owner: str) -> dict[str, Any]:
        """Take a lease away from whoever holds it. Those of sleep and of updates end by `wake` and by the update's end."""
        report = self.resume(owner)
        if report["changed"]:
            log.warning("the pause of %s was revoked", owner)
        return report
