"""What makes and surrounds the engine inside a trainer: its model's configuration, its share of the host, its own settings of torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..rollout.engine.config import make_config
from ..rollout.engine.engine import Engine
from ..rollout.engine.host_memory import available_memory
from ..rollout.errors import ConfigError
from ..rollout.models.tokenizer import Tokenizer
from .model_folder import compute_dtype, model_folder


@dataclass(kw_only=True, slots=True)
class PhaseReport:
    """What one phase of generation took on this rank."""

    version: int | None = None
    """of the weights it sampled from"""
    num_samples: int = 0
    num_tokens: int = 0
    synced_bytes: int = 0
    """of weights that were written into the engine"""
    seconds: dict[str, float] = field(default_factory=dict)
    """wake, sync, generate, sleep, total"""
    rss_bytes: dict[str, int] = field(default_factory=dict)
    """anonymous memory of this process, as the system counts it: "before", "synced" (weights are there, the KV pool is not), "generated"
    and "after" """
    freed_bytes: dict[str, int] = field(default_factory=dict)
    """weights and kv_cache: what went back to the system at the end, as it counts that"""

    def __str__(self) -> str:
        mib = {name: f"{value / 2**20:.0f}" for name, value in self.rss_bytes.items()}
        freed = ", ".join(f"{name} {value / 2**20:.0f}" for name, value in self.freed_bytes.items())
        times = ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items())
        return (
            f"version {self.version}: {self.num_tokens} tokens in {self.num_samples} samples; seconds: {times}; "
            f"MiB: {' -> '.join(mib.values())} ({', '.join(mib)}), given back: {freed}"
        )


def model_reader(trained: Any) -> Callable[[], Any]:
    """What gives the model at each sync."""
    if hasattr(trained, "model_wrapped") and hasattr(trained, "accelerator"):  # a Trainer: it wraps its model when it trains
        return lambda: trained.model_wrapped
    if hasattr(trained, "unwrap_model"):  # an Accelerator
        return lambda: _prepared(trained)
    if isinstance(trained, torch.nn.Module):
        return lambda: trained
    if callable(trained):
        return trained  # type: ignore[no-any-return]
    raise TypeError(f"a model, a Trainer, an Accelerator, or a function that gives the model is needed, got {type(trained).__name__}")


def _prepared(accelerator: Any) -> Any:
    models = accelerator._models
    if len(models) != 1:
        raise ValueError(f"the Accelerator has prepared {len(models)} models, not one: give the engine the model itself")
    return models[0]


def make_engine(trained: Any, dtype: str | None, tokenizer: Any, sharing: int, options: dict[str, Any]) -> Engine:
    """An engine of the configuration of a model, without weights.

    Args:
        trained: what `model_reader` takes.
        dtype, tokenizer, options: see ColocatedEngine.
        sharing: ranks on this host, this one included.
    """
    if clash := sorted({"load_format", "apply"} & options.keys()):
        raise ValueError(f"{', '.join(clash)} cannot be chosen: weights come from the trainer, in place")
    model = model_reader(trained)()
    dtype = dtype or compute_dtype(model, getattr(getattr(trained, "accelerator", trained), "mixed_precision", None))
    device = next(model.parameters()).device
    given = {"load_format": "dummy", "apply": "in_place", "dtype": dtype, "device": str(device)}
    by_name = isinstance(tokenizer, str)
    with model_folder(model, dtype, None if by_name or tokenizer is None else tokenizer) as folder:
        if by_name:
            given["tokenizer"] = tokenizer
        loaded = None if tokenizer is None else Tokenizer.from_model(tokenizer if by_name else folder)
        return _EngineOfAModel(make_config(folder, {**given, **_shared_out(sharing, options), **options}), tokenizer=loaded)


class _EngineOfAModel(Engine):
    """Its folder is gone once it is made: there is no tokenizer but the one it was given."""

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError("this engine has no tokenizer: ColocatedEngine(model, tokenizer=...), or give token ids and no stop strings")
        return self._tokenizer


def _shared_out(sharing: int, options: dict[str, Any]) -> dict[str, Any]:
    """Defaults for ranks that share a host: threads and the KV pool."""
    found: dict[str, Any] = {}
    if sharing > 1 and not any(name in options for name in ("threads", "numerics.threads", "numerics_threads")):
        found["threads"] = max(1, len(os.sched_getaffinity(0)) // sharing)
    sized = any(name.removeprefix("cache.").removeprefix("cache_") in ("memory_bytes", "memory_fraction", "num_blocks") for name in options)
    if sharing > 1 and not sized:
        found["memory_bytes"] = min(2 << 30, available_memory() // 4) // sharing
    return found


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """The engine's own settings of torch, whatever the trainer's are; these are as before afterwards."""
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_default_dtype(dtype)
