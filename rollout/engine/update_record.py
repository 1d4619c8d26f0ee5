"""What is known of one weight update, and what it may be opened with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...weight_sync.manifest import TensorEntry
from ..errors import BadRequest
from .config import APPLY
from .lifecycle import check_choice, check_seconds
from .pauses import named

KV_POLICIES = ("recompute", "keep", "abort")
MODES = ("full", "partial")
DEFAULT_UPDATE_S = 600.0


@dataclass(kw_only=True, slots=True)
class Update:
    """One weight update, from open to its end."""

    id: str
    version: int
    mode: str | None
    """full or partial; None until the commit of an update that grew"""
    apply: str
    kv_policy: str
    owner: str
    expires_at: float
    deadline_s: float
    refuse_nonfinite: bool
    expected: Mapping[str, int] | None = None
    """digests by name known at open; a commit that brings its own has the last word"""
    state: str = "open"
    """open, committed or aborted"""
    phase: str = "receiving"
    """while open: receiving, or checking or switching in a commit"""
    reason: str | None = None
    report: dict[str, Any] = field(default_factory=dict)
    """what the commit did"""
    nbytes: int = 0
    """of the tensors it names"""
    tensors: int = 0
    """how many it names"""
    names: list[str] = field(default_factory=list)
    """the first of them, unless it is full"""
    opened_at: float = 0.0
    reads_folder: bool = False
    """its bytes come from a folder, by nobody's calls"""

    def status(self) -> dict[str, Any]:
        shown = {name: getattr(self, name) for name in ("id", "version", "mode", "apply", "kv_policy", "owner", "state", "reason")}
        return {**shown, "bytes": self.nbytes, "tensors": self.tensors, **self.report}

    def name(self, tensors: Sequence[TensorEntry]) -> None:
        """Count tensors that it brings."""
        self.nbytes += sum(t.nbytes for t in tensors)
        self.tensors += len(tensors)
        if self.mode != "full":
            self.names = named([*self.names, *(t.name for t in tensors)])


def check_options(offered: str, mode: str | None, apply: str, kv_policy: str, version: int | None, deadline_s: float) -> None:
    """BadRequest for a value that no update can be opened with on an engine that was started with apply = `offered`."""
    if mode is not None:
        check_choice("mode", mode, MODES)
    check_choice("kv_policy", kv_policy, KV_POLICIES)
    check_choice("apply", apply, APPLY)
    if apply == "staged" and offered != "staged":
        raise BadRequest("apply must be in_place: this engine was started with apply = in_place, without a second copy", "apply")
    if version is not None and (isinstance(version, bool) or not isinstance(version, int) or version < 0):
        raise BadRequest(f"version must be an int >= 0, got {version!r}", field="version")
    check_seconds("deadline_s", deadline_s)
