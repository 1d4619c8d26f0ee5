"""The real engine over a runner without a model: real queues, chunks and blocks, quick to start."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from rollsync.rollout.engine.config import EngineConfig
from rollsync.rollout.engine.engine import Engine
from rollsync.rollout.engine.runner_info import RunnerInfo

sys.path.append(str(Path(__file__).parent.parent / "engine"))
from fake_runner import EMBED, VOCAB, FakeRunner

STEP_S = 0.005


def build(config: EngineConfig, progress: Callable[[str, float], None]) -> Engine:
    info = RunnerInfo(
        model="fake", num_blocks=config.cache.num_blocks or 64, block_tokens=config.cache.block_tokens, config=config,
        max_model_len=config.max_model_len or 256, vocab_size=VOCAB, embed_size=EMBED, eos_token_ids=(3, 4),
        dtype="float32", kernels="fake", weight_bytes=0, kv_bytes=0, threads=1,
    )  # fmt: skip
    return Engine(config, runner=FakeRunner(info=info, on_execute=lambda plan: time.sleep(STEP_S)))
