"""What steers an engine between two steps: pause, sleep, and weight updates as transactions. Owned by the thread that steps.

A verb changes nothing when it raises. `poll` carries out what time brings: leases that expire, updates whose deadline passes, drains
that end.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...weight_sync.manifest import Manifest, ManifestError, read_tensors
from ..errors import BadRequest, IllegalState, UpdateRefused, describe
from .chunks import ChunkVerbs
from .folder_update import FolderUpdate
from .lifecycle import UPDATE_OWNER, check_choice
from .update_record import DEFAULT_UPDATE_S, Update, check_options
from .update_stats import CAUSES, UpdateStats
from .weight_groups import GroupCalls

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)

REMEMBERED_UPDATES = 64


class Control(ChunkVerbs):
    """The verbs of one engine. `engine.control`."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(engine, clock)
        self.update_stats = UpdateStats(clock)
        self.updates = {}
        self.groups = GroupCalls(lambda: engine.runner.updates.groups)

    @property
    def weights_root(self) -> str | None:
        return self._engine.config.weights_root

    def status(self) -> dict[str, Any]:
        """The three facts, and the update that is open."""
        return {**self.lifecycle.status(), "update": self.open_update_status()}

    def open_update_status(self) -> dict[str, Any] | None:
        """How far the open update is; None if none is. From any thread, and never waits."""
        update = self.updates.get(self.lifecycle.update or "")
        return None if update is None else self._update_status(update)

    def _update_status(self, update: Update) -> dict[str, Any]:
        if update.state != "open":
            return update.status()
        now = self._clock()
        times = {"elapsed_s": now - update.opened_at, "deadline_in_s": update.expires_at - now}
        return {**update.status(), "phase": update.phase, **times, **self._engine.runner.updates.progress()}

    def next_deadline(self) -> float | None:
        times = [super().next_deadline()]
        if self.lifecycle.update is not None:
            times.append(self.updates[self.lifecycle.update].expires_at)
        return min((t for t in times if t is not None), default=None)

    def poll(self) -> None:
        """Between two steps: end what is over."""
        self.update_stats.leases_expired += self.expire_leases()
        self.poll_drains()
        if self.lifecycle.update is not None:
            update = self.updates[self.lifecycle.update]
            if self._clock() >= update.expires_at:
                self.abort_update(update.id, f"deadline of {update.deadline_s:g} s passed", "deadline")
            else:
                self._abort_lost()
        self.update_stats.note_pause(self.lifecycle.paused)

    # Weight updates

    def open_update(
        self,
        manifest: Manifest | Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
        base_version: int | None = None,
        mode: str | None = None,
        apply: str | None = None,
        kv_policy: str = "recompute",
        owner: str = "trainer",
        deadline_s: float = DEFAULT_UPDATE_S,
        refuse_nonfinite: bool = True,
        force: bool = False,
        transport: Mapping[str, Any] | None = None,
        expected: Mapping[str, int] | None = None,
    ) -> Update:
        """Begin a transaction. Nothing that is served changes before the commit (`staged`).

        Args:
            manifest: the tensors; None for an update that grows by `extend_update`.
            mode: full (the default of a manifest) or partial; an update that grew is full if it came to be.
            version: of the new weights; None takes the current one plus 1. Not below the current one, unless `force`.
            base_version: what an update that may be partial builds on; refused on any other.
            apply: None takes what the engine was started with; staged needs that it was, in_place is always possible.
            expected: digests by name, for a commit that brings none.

        Raises:
            BadRequest, IllegalState; UpdateRefused: tensors do not fit, all of them listed.
        """
        self._engine.check_alive()
        state = self.lifecycle
        mode = "full" if mode is None and manifest is not None else mode
        apply = self._engine.config.apply if apply is None else apply
        check_options(self._engine.config.apply, mode, apply, kv_policy, version, deadline_s)
        version = state.version + 1 if version is None else version
        self._check_base(version, base_version, mode, force)
        try:
            read = manifest if manifest is None or isinstance(manifest, Manifest) else Manifest.from_wire(manifest)
        except ManifestError as error:
            raise UpdateRefused(str(error)) from None
        update_id = uuid.uuid4().hex
        self._abort_lost()
        if state.update is not None or state.memory["weights"] != "resident":
            raise state.illegal("opening an update")
        try:
            problems = self._engine.runner.updates.open(update_id, read, mode=mode, staged=apply == "staged", transport=transport)
        except ValueError as error:
            raise BadRequest(f"transport: {error}", field="transport") from None
        if problems:
            raise UpdateRefused(str(ManifestError(problems)))
        state.open_update(update_id)
        now = self._clock()
        update = Update(
            id=update_id,
            version=version,
            mode=mode,
            apply=apply,
            kv_policy=kv_policy,
            owner=owner,
            expires_at=now + deadline_s,
            deadline_s=deadline_s,
            refuse_nonfinite=refuse_nonfinite,
            expected=expected,
            opened_at=now,
            reads_folder=transport is not None and transport.get("name") == "disk",
        )
        update.name(read.tensors if read is not None else ())
        self._remember(update)
        if apply == "in_place":
            state.hold(self._update_owner(update), "recompute" if kv_policy == "recompute" else "keep")
        return update

    def _remember(self, update: Update) -> None:
        """Keep it by its id, and the last ones before it."""
        self.updates[update.id] = update
        for old in list(self.updates)[:-REMEMBERED_UPDATES]:
            del self.updates[old]

    def _abort_lost(self) -> None:
        """End an update whose sender is gone, so that the next one need not wait for its deadline."""
        if self.lifecycle.update is not None and (why := self._engine.runner.updates.lost()):
            self.abort_update(self.lifecycle.update, why, "group")

    def load_folder(self, folder: str, **options: Any) -> dict[str, Any]:
        """An update from a checkpoint folder below `weights_root`, from open to commit, on the engine's own thread.

        Args:
            options: those of `open_update` but manifest and transport; bucket_bytes: how much is read at once.

        Raises:
            BadRequest, IllegalState; UpdateRefused: all that is wrong with the folder, or with what was read.
        """

        self._engine.check_alive()

        def call(verb: str, **args: Any) -> Any:
            found = getattr(self, verb)(**args)
            return found.status() if isinstance(found, Update) else found

        update = FolderUpdate(self, call, self.weights_root)
        update.open(folder, **options)
        update.read()
        return update.commit()

    def _check_base(self, version: int, base_version: int | None, mode: str | None, force: bool) -> None:
        """What the weights that are served say to an update of this version."""
        state = self.lifecycle
        if version < state.version and not force:
            raise BadRequest(f"version must not go back from {state.version} to {version} (unless force is true)", field="version")
        if mode != "full" and base_version is not None and base_version != state.version:
            raise IllegalState(f"the update builds on version {base_version}, but version {state.version} is served")
        if mode == "partial" and state.invalid is not None:
            raise state.illegal("a partial update")

    @staticmethod
    def _update_owner(update: Update) -> str:
        return UPDATE_OWNER + update.id

    def extend_update(self, update_id: str, tensors: Any, layout: Mapping[str, Any]) -> dict[str, Any]:
        """Name more tensors of an update that was opened without a manifest; from any thread.

        Args:
            tensors: objects with name, dtype and shape.
            layout: how their bytes are cut into chunks; see `Manifest.grown`.

        Returns:
            "chunks": [sender, sequence] of those that bring them, in order.

        Raises:
            ManifestError: everything that does not fit; nothing changed.
        """
        self._engine.check_alive()
        update = self._still_open(update_id)
        entries = read_tensors(tensors)
        chunks = self._engine.runner.updates.extend(update_id, entries, layout)
        update.name(entries)
        return {"chunks": [list(c) for c in chunks]}

    def update_status(self, update_id: str) -> dict[str, Any]:
        """How far an update is, or how it ended. From any thread, and never waits."""
        return self._update_status(self.find_update(update_id))

    def commit_update(self, update_id: str, digests: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Check everything, then make the new weights current, between two steps. Committing twice answers the same.

        Raises:
            IllegalState: it is not open. UpdateRefused: chunks are missing, digests differ, values are not finite; it stays open.
        """
        self._engine.check_alive()
        update = self.find_update(update_id)
        if update.state == "committed":
            return {**update.status(), "changed": False}
        if update.state != "open":
            raise IllegalState(f"update {update_id} is {update.state} ({update.reason}): open a new one")
        asked_at = self._clock()
        update.mode = self._prepare(update, update.expected if digests is None else digests)
        checked_at = self._clock()
        self._switch(update)
        self._engine.weight_version = update.version
        self.release_held()
        update.report["seconds"] = self._clock() - update.opened_at
        if update.mode == "partial":
            update.report["names"] = update.names
        times = {"opened_at": update.opened_at, "asked_at": asked_at, "checked_at": checked_at}
        self.update_stats.committed(**times, num_bytes=update.nbytes, in_place=update.apply == "in_place")
        return {**update.status(), "changed": True}

    def _prepare(self, update: Update, digests: Mapping[str, int] | None) -> str:
        """First half of a commit: check all that came. The update's mode, or UpdateRefused."""
        update.phase = "checking"
        try:
            if not update.tensors:
                raise UpdateRefused("no tensor came: nothing would change")
            mode = self._final_mode(update)
            if problems := self._engine.runner.updates.prepare(digests, refuse_nonfinite=update.refuse_nonfinite):
                raise UpdateRefused(str(ManifestError(problems)))
        except BaseException:
            update.phase = "receiving"
            raise
        update.phase = "switching"
        return mode

    def _switch(self, update: Update) -> None:
        """Second half of a commit. If it fails, ranks, version and KV may be at odds: no step runs on that."""
        try:
            self._engine.runner.updates.commit(update.version)
            keep_kv = self._settle_requests(update)
            epoch = self.lifecycle.commit(update.id, update.version, full=update.mode == "full")
            update.report |= {"epoch": epoch, "recompute_tokens": self._engine.scheduler.new_epoch(epoch, keep_kv=keep_kv)}
        except BaseException as error:
            reason = f"the switch to update {update.id} failed half way: {describe(error)}"
            self._close_update(update, "aborted", reason, torn=reason)
            self.update_stats.aborts["failure"] += 1
            self._engine.runner.updates.abort()  # on ranks that have not switched
            raise
        self._close_update(update, "committed")

    def _close_update(self, update: Update, state: str, reason: str | None = None, *, torn: str | None = None) -> None:
        self.lifecycle.close_update(update.id, torn=torn)
        self.lifecycle.release(self._update_owner(update))
        update.state, update.reason = state, reason

    def _final_mode(self, update: Update) -> str:
        """full or partial. Raises UpdateRefused for an update that grew and must be full, but is not."""
        if update.mode == "partial":
            return "partial"
        missing = self._engine.runner.updates.missing()
        if missing and (update.mode == "full" or self.lifecycle.invalid is not None):
            raise UpdateRefused(str(ManifestError(missing)))
        return "partial" if missing else "full"

    def _settle_requests(self, update: Update) -> bool:
        """Apply the KV policy, or what a pause already decided. Returns whether running requests keep their KV."""
        scheduler = self._engine.scheduler
        too_old = scheduler.abort_samples(scheduler.lagging(update.version), "max_version_lag")
        too_new = scheduler.abort([r for r in scheduler.begun() if (r.spec.min_version or 0) > update.version], "min_version")
        self._outputs += too_old + too_new
        update.report["outdated"] = len(too_old) + len(too_new)
        if self.freezes:  # what runs was frozen with its KV; other modes left nothing running
            if update.kv_policy != "keep":
                update.report["kept_by_pause"] = len(scheduler.begun())
            return True
        if update.kv_policy == "abort":
            outputs = scheduler.abort(scheduler.begun(), "weight update")
            self._outputs += outputs
            update.report["aborted"] = len(outputs)
        return update.kv_policy == "keep"

    def abort_update(self, update_id: str, reason: str = "aborted by request", cause: str = "request") -> dict[str, Any]:
        """End an update without a commit. Staged: nothing happened. In place, after a byte was applied: the weights are torn.

        Args:
            cause: of update_stats.CAUSES, for the metrics.
        """
        self._engine.check_alive()
        check_choice("cause", cause, CAUSES)
        update = self.find_update(update_id)
        if update.state == "committed":
            raise IllegalState(f"update {update_id} is committed")
        if update.state == "aborted":
            return {**update.status(), "changed": False}
        touched = self._engine.runner.updates.abort()
        torn = f"update {update_id} ended half applied ({reason})" if update.apply == "in_place" and touched else None
        self._close_update(update, "aborted", reason, torn=torn)
        self.update_stats.aborts[cause] += 1
        return {**update.status(), "changed": True}
