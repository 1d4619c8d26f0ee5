"""The engine's state: three facts that are never inferred from each other, and which moves are legal. No clock of its own, no I/O.

    scheduling   running, or paused while anybody holds a lease
    memory       per tag: resident, offloaded or discarded; a forward pass needs all of it resident
    weights      version, commit epoch, and valid or why not; generation is refused while they are not valid

Every verb is idempotent: it returns whether it changed anything. An illegal one raises IllegalState, which names the state and the
moves that are legal, and changes nothing.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import BadRequest, IllegalState, VersionUnavailable

PAUSE_MODES = ("keep", "recompute", "abort", "drain")
MEMORY_TAGS = ("weights", "kv_cache")
WEIGHTS_ASLEEP = ("offload", "discard")
SLEEP_OWNER = "sleep"
"""owner of the lease that sleep takes and wake gives back"""
UPDATE_OWNER = "update "
"""and the id: owner of the lease of an update in place"""
DEFAULT_OWNER = "operator"


@dataclass(slots=True)
class Lease:
    """Somebody's wish that the engine stand still."""

    owner: str
    mode: str
    expires_at: float | None
    """by the lifecycle's clock; None: never"""
    ttl_s: float | None = None


def check_owner(owner: Any) -> None:
    """BadRequest for what is no name."""
    if not isinstance(owner, str) or not owner:
        raise BadRequest(f"owner must be a non-empty string, got {owner!r}", field="owner")


def check_seconds(field: str, value: Any) -> None:
    """BadRequest for what is not a finite number > 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadRequest(f"{field} must be a finite number of seconds > 0, got {value!r}", field=field)


def check_ttl(ttl_s: Any) -> None:
    """BadRequest for what is neither None nor a finite number of seconds > 0."""
    if ttl_s is not None:
        check_seconds("ttl_s", ttl_s)


def is_own(owner: str) -> bool:
    """Whether a lease is the engine's own: taken and given back by what needs it, not by callers."""
    return owner == SLEEP_OWNER or owner.startswith(UPDATE_OWNER)


def check_choice(field: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise BadRequest(f"{field} must be one of {', '.join(allowed)}, got {value!r}", field=field)
    return str(value)


def check_tags(tags: Iterable[str] | None) -> tuple[str, ...]:
    """The tags meant, in order; None or none given means all."""
    chosen = tuple(tags or MEMORY_TAGS)
    for tag in chosen:
        check_choice("tags", tag, MEMORY_TAGS)
    return tuple(tag for tag in MEMORY_TAGS if tag in chosen)


class Lifecycle:
    """State and its legal moves. The engine carries out what a verb reports as changed.

    Args:
        clock: seconds, monotonic.
        invalid: why the weights must not be used from the start (`load_format=dummy`).
    """

    def __init__(self, clock: Callable[[], float], *, version: int = 0, invalid: str | None = None) -> None:
        self._clock = clock
        self.leases: dict[str, Lease] = {}
        self.memory = dict.fromkeys(MEMORY_TAGS, "resident")
        self.memory_moves = 0
        """how often memory went or came"""
        self.version = version
        self.instance = uuid.uuid4().hex
        """names this engine's life: with the epoch, what weights are served, whatever their version says"""
        self.epoch = 0
        """grows by one with every commit and never repeats"""
        self.invalid = invalid
        """why the weights must not be used; None: they may"""
        self.update: str | None = None
        """id of the weight update that is open"""

    # Facts

    @property
    def paused(self) -> bool:
        return bool(self.leases)

    @property
    def asleep(self) -> tuple[str, ...]:
        return tuple(tag for tag, state in self.memory.items() if state != "resident")

    @property
    def usable(self) -> bool:
        """Whether memory and weights are there, whoever may have paused."""
        return self.invalid is None and not self.asleep

    def why_not_running(self) -> str | None:
        """None if steps may run, else why not."""
        if self.invalid is not None:
            return f"the weights are invalid ({self.invalid})"
        if self.asleep:
            return f"asleep: {', '.join(f'{tag} {self.memory[tag]}' for tag in self.asleep)}"
        if self.paused:
            return f"paused by {', '.join(sorted(self.leases))}"
        return None

    def legal(self) -> tuple[str, ...]:
        """The moves that would not be refused now."""
        moves = ["pause"]
        if self.paused and not self._torn:
            moves.append("resume")
        if not self.asleep or len(self.asleep) < len(MEMORY_TAGS):
            moves.append("sleep")
        if self.asleep:
            moves.append("wake")
        if self.update is None and self.memory["weights"] == "resident":
            moves.append("open an update")
        if self.update is not None:
            moves += ["commit the update", "abort the update"]
        return tuple(moves)

    def status(self) -> dict[str, Any]:
        """All three facts as one plain object."""
        leases = [self._shown(lease) for lease in self.leases.values()]
        return {
            "scheduling": {"state": "paused" if leases else "running", "leases": leases},
            "memory": dict(self.memory),
            "weights": {
                "version": self.version,
                "epoch": self.epoch,
                "instance": self.instance,
                "valid": self.invalid is None,
                "reason": self.invalid,
                "update": self.update,
            },
            "legal": list(self.legal()),
            "why_not_running": self.why_not_running(),
        }

    def _shown(self, lease: Lease) -> dict[str, Any]:
        left = None if lease.expires_at is None else max(0.0, lease.expires_at - self._clock())
        return {"owner": lease.owner, "mode": lease.mode, "expires_in_s": left}

    def admit(self, min_version: int | None = None, *, refuse: bool = False) -> bool:
        """Whether a new request may begin with the next step; False: not before its version is there.

        Raises:
            IllegalState: the weights are invalid, so waiting may never end; or no step runs now, and `refuse`.
            VersionUnavailable: the weights are older than `min_version`, and `refuse`.
        """
        if self.invalid is not None or (refuse and self.why_not_running() is not None):
            raise self.illegal("generation")
        if min_version is None or min_version <= self.version:
            return True
        if refuse:
            raise VersionUnavailable(f"min_version is {min_version}, and version {self.version} is served: try again later")
        return False

    def illegal(self, what: str) -> IllegalState:
        state = self.why_not_running() or "running"
        update = f"; update {self.update} is open" if self.update else ""
        return IllegalState(f"{what} is not possible now ({state}{update}); legal: {', '.join(self.legal())}")

    # Scheduling

    def pause(self, owner: str = DEFAULT_OWNER, mode: str = "keep", ttl_s: float | None = None) -> bool:
        """Take a lease, or renew one's own. True if the owner had none.

        Raises:
            BadRequest: an unknown mode, or a ttl that is no finite number > 0.
        """
        check_choice("mode", mode, PAUSE_MODES)
        check_owner(owner)
        if is_own(owner):
            raise BadRequest(f"owner {owner!r} stands for a lease of the engine's own: choose another name", field="owner")
        check_ttl(ttl_s)
        new = owner not in self.leases
        self.leases[owner] = Lease(owner, mode, None if ttl_s is None else self._clock() + ttl_s, ttl_s)
        return new

    def renew(self, owner: str, ttl_s: float | None = None) -> dict[str, Any]:
        """Let a lease live for `ttl_s` from now (None: as it was given). Returns it. IllegalState if there is none."""
        check_owner(owner)
        check_ttl(ttl_s)
        lease = self.leases.get(owner)
        if lease is None or is_own(owner):
            raise self.illegal(f"renewing the lease of {owner!r}, who has none,")
        lease.ttl_s = lease.ttl_s if ttl_s is None else ttl_s
        lease.expires_at = None if lease.ttl_s is None else self._clock() + lease.ttl_s
        return self._shown(lease)

    def resume(self, owner: str | None = DEFAULT_OWNER) -> bool:
        """Give back one owner's lease (None: all that callers took). True if there was one.

        Raises:
            IllegalState: the weights are torn: nothing may run on them; or the lease is the engine's own.
        """
        if owner is not None:
            check_owner(owner)
        owners = [owner] if owner is not None else [o for o in self.leases if not is_own(o)]
        held = [o for o in owners if o in self.leases]
        if held and (self._torn or is_own(held[0])):
            raise self.illegal("resume")
        for o in held:
            del self.leases[o]
        return bool(held)

    def hold(self, owner: str, mode: str) -> None:
        """Take a lease of the engine's own; `release` ends it."""
        self.leases[owner] = Lease(owner, mode, None)

    def release(self, owner: str) -> None:
        self.leases.pop(owner, None)

    def expire(self) -> list[Lease]:
        """Drop the leases whose time is over; returns them."""
        now = self._clock()
        over = [lease for lease in self.leases.values() if lease.expires_at is not None and lease.expires_at <= now]
        for lease in over:
            del self.leases[lease.owner]
        return over

    # Memory

    def plan_sleep(self, tags: Iterable[str] | None, weights: str = "offload") -> dict[str, str]:
        """New state by tag of what would change; nothing changes yet (`moved` records it once it is done).

        Raises:
            BadRequest: an unknown tag or way. IllegalState: an update is open and its weights would go.
        """
        check_choice("weights", weights, WEIGHTS_ASLEEP)
        chosen = check_tags(tags)
        if "weights" in chosen and self.update is not None:
            raise self.illegal("sleep of the weights")
        target = {"weights": "offloaded" if weights == "offload" else "discarded", "kv_cache": "discarded"}
        moves = {tag: target[tag] for tag in chosen if self.memory[tag] == "resident"}
        if "weights" in chosen and weights == "discard" and self.memory["weights"] == "offloaded":
            moves["weights"] = "discarded"
        return moves

    def plan_wake(self, tags: Iterable[str] | None) -> dict[str, str]:
        """The tags that would become resident again; nothing changes yet."""
        return {tag: "resident" for tag in check_tags(tags) if self.memory[tag] != "resident"}

    def moved(self, tag: str, state: str) -> None:
        """A tag's memory is now in `state`. Discarded weights are invalid until a full update commits."""
        if tag == "weights" and state == "discarded":
            self.invalid = self.invalid or "discarded by sleep: commit a full update"
        self.memory[tag] = state
        self.memory_moves += 1

    # Weights

    @property
    def _torn(self) -> bool:
        return self.invalid is not None and self.invalid.startswith("torn")

    def open_update(self, update_id: str) -> None:
        """Raises IllegalState if another is open, or the weights' memory is away."""
        if self.update is not None or self.memory["weights"] != "resident":
            raise self.illegal("opening an update")
        self.update = update_id

    def close_update(self, update_id: str, *, torn: str | None = None) -> None:
        """The update ended without a commit; `torn` says why the live weights are no longer whole."""
        if self.update == update_id:
            self.update = None
        if torn is not None:
            self.invalid = f"torn: {torn}"

    def commit(self, update_id: str, version: int, *, full: bool) -> int:
        """The update's weights are live. Returns the new epoch."""
        assert self.update == update_id, "only the open update commits"
        self.update = None
        self.version, self.epoch = version, self.epoch + 1
        if full:
            self.invalid = None
        return self.epoch
