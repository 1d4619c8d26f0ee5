"""What the engine must know of a runner, and what it asks of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...weight_sync.boxes import Box
from ...weight_sync.manifest import Manifest, TensorEntry
from .config import EngineConfig
from .types import StepPlan, StepResult
from .weight_groups import GroupsLike


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerInfo:
    """Facts of a loaded model and its KV pool. They do not change while the runner lives."""

    model: str
    """the model as it was named"""
    num_blocks: int
    """KV blocks in the pool"""
    block_tokens: int
    """tokens per KV block"""
    max_model_len: int
    """tokens of prompt and output together"""
    vocab_size: int
    """ids below this can be sampled"""
    embed_size: int
    """ids below this can be fed (at least vocab_size; the rest is padding)"""
    eos_token_ids: tuple[int, ...]
    """ids that end a sample, from the model folder"""
    dtype: str
    """bfloat16 or float32"""
    kernels: str
    """kernel build in use: amx, avx512, avx2, reference, ..."""
    weight_bytes: int
    """memory of the weights as loaded"""
    kv_bytes: int
    """memory of the KV pool"""
    threads: int
    """CPU threads of a step"""
    config: EngineConfig
    """the configuration with every default filled in"""
    device: str = "cpu"
    """cpu, cuda:0, ..."""
    fingerprint: str = ""
    """numerics fingerprint (kernels/fingerprint.py): runners with equal ones give equal bits"""
    model_digest: str = ""
    """of what is computed and which ids may be drawn or end a sample, whatever the weights: the same for every copy of a model"""
    computation: dict[str, Any] = field(default_factory=dict)
    """what a forward pass computes, by the names of DecoderConfig, for a trainer to compare with its own model"""


class ChunkRun(Protocol):
    """Where the chunks of a call that brings several lie, by sequence."""

    def next(self, sequence: int, patience_s: float) -> Mapping[str, Any] | None:
        """What a call for this one alone would say of its place, once it is ready; None if it is not in time. ValueError: it cannot be."""

    def taken(self, sequence: int) -> None:
        """Tell the sender that it is taken in."""

    def close(self) -> None: ...


class UpdatesLike(Protocol):
    """What the engine asks of the ranks. One rank here; several answer as one (every rank prepared, then all flip)."""

    @property
    def version(self) -> int:
        """Weight version of the next forward pass."""

    @property
    def groups(self) -> GroupsLike:
        """Those that trainers send over."""

    def open(self, update_id: str, manifest: Manifest | None, *, mode: str | None, staged: bool, transport: Any) -> list[str]:
        """Get ready for an update, or say all that keeps it from fitting and change nothing. No manifest: `extend` will name tensors.

        Raises:
            ValueError: the transport cannot be set up.
        """

    def extend(self, update_id: str, tensors: Sequence[TensorEntry], layout: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Name more tensors of an update; (sender, sequence) of the chunks that will bring them. From any thread.

        Raises:
            ManifestError: they do not fit; nothing changed. ChunkError: that update is not open.
        """

    def chunk(self, update_id: str, sender: int, sequence: int, where: Mapping[str, Any]) -> bool:
        """Receive a bucket and take it in; from any thread but the engine's. False for one that had come before.

        Args:
            where: its bytes ("data"), or what its transport says of their place.

        Raises:
            ChunkError, or another ValueError of the transport: it did not come, or does not fit. It may be tried again.
        """

    def run(self, update_id: str, sender: int, where: Mapping[str, Any]) -> ChunkRun:
        """For a call that brings several chunks of a sender: says where each lies, for `chunk`; on the thread of that call.

        Raises:
            ChunkError, or another ValueError of the transport: it brings one chunk a call, or its sender is gone.
        """

    def missing(self) -> list[str]:
        """What the open update lacks to be a full one."""

    def prepare(self, digests: Mapping[str, int] | None, *, refuse_nonfinite: bool) -> list[str]:
        """First phase of a commit: everything wrong with what has come. If nothing is, nothing more comes in until `commit` or `abort`."""

    def commit(self, version: int) -> None:
        """Second phase, between two steps: what was written is live, under this version. If it raises, some of it may be live."""

    def abort(self) -> bool:
        """Forget the update, without waiting for a sender. True if a byte of it had been applied."""

    def lost(self) -> str | None:
        """Why the open update can never be completed (its sender is gone); None while it can. From any thread."""

    def progress(self) -> dict[str, Any]:
        """bytes, received_bytes and missing_chunks of the open update; from any thread."""

    def wanted(self) -> list[dict[str, list[Box]]]:
        """What each rank keeps of a checkpoint, by name; from any thread."""

    def digests(self) -> dict[str, int]:
        """Of the live weights, by checkpoint name, in the engine's dtype; from any thread."""

    def values(self, name: str, rows: int) -> dict[str, Any]:
        """The first rows of a live tensor: its "shape", and "pieces" (first row, first column, rows of values); from any thread.

        Raises:
            ValueError: the model has no tensor of this name.
        """


class Runner(Protocol):
    """Executes step plans. One rank, or the front of several."""

    @property
    def updates(self) -> UpdatesLike:
        """Where new weights go."""

    @property
    def info(self) -> RunnerInfo:
        """Facts of the loaded model."""

    def check(self) -> None:
        """Raise EngineDead if a rank of it is gone. Cheap."""

    def sleep(self, tag: str, keep: bool) -> int:
        """Give the memory of "weights" or "kv_cache" to the system; `keep` the weights' contents elsewhere. Bytes freed, over all ranks."""

    def wake(self, tag: str) -> None:
        """Have it back, with what was kept. Raises OSError or MemoryError, and may then be tried again."""

    def execute(self, plan: StepPlan) -> StepResult:
        """One forward pass; one value per logits row of `plan`, in its order."""

    def close(self) -> None:
        """Free everything. Called once."""
