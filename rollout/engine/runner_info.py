"""What the engine must know of a runner, and what it asks of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .config import EngineConfig
from .types import StepPlan, StepResult


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
    fingerprint: str = ""
    """numerics fingerprint (kernels/fingerprint.py): runners with equal ones give equal bits"""


class Runner(Protocol):
    """Executes step plans. One rank, or the front of several."""

    @property
    def info(self) -> RunnerInfo:
        """Facts of the loaded model."""

    def execute(self, plan: StepPlan) -> StepResult:
        """One forward pass; one value per logits row of `plan`, in its order."""

    def close(self) -> None:
        """Free everything. Called once."""
