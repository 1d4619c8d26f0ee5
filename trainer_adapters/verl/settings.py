"""verl's rollout settings as those of an engine. What an engine cannot do is refused by its name there; nothing is dropped in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...rollout.engine.config import EngineConfig, make_config
from ...rollout.errors import ConfigError
from . import NAME

DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32", "float": "float32", "auto": None}
LOGPROBS = {"processed_logprobs": "logprobs", "raw_logprobs": "model_logprobs", None: "logprobs"}
"""column by rollout.logprobs_mode"""
MUST_BE: dict[str, tuple[Any, ...]] = {
    "pipeline_model_parallel_size": (1,),
    "data_parallel_size": (1,),
    "expert_parallel_size": (1, None),
    "quantization": (None,),
    "quantization_config_file": (None,),
    "enable_rollout_routing_replay": (False,),
    "limit_images": (None, 0),
    "scheduling_policy": ("fcfs", None),
    "cudagraph_capture_sizes": (None,),
    "prometheus.enable": (False, None),
    "disaggregation.enabled": (False, None),
    "mtp.enable_rollout": (False, None),
    "qat.enable": (False, None),
    "profiler.enable": (False, None),
}
"""fields of `actor_rollout_ref.rollout` with the values that an engine serves"""
INSTEAD = {
    "pipeline_model_parallel_size": "tensor_model_parallel_size shares out a model",
    "data_parallel_size": "verl makes a replica of every tensor_model_parallel_size GPUs by itself",
    "prometheus.enable": "a replica serves no HTTP",
}
SYNC_TIMEOUT_S = 600.0
PARK_TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSettings:
    """What one replica is started with."""

    engine: dict[str, Any]
    """fields of EngineConfig, but the model"""
    column: str
    """which of an engine's columns are verl's log_probs"""
    prompt_length: int
    response_length: int
    repetition_penalty: float
    ignore_eos: bool
    seed: int | None
    """full_determinism: what seeds are made from, with a request's id and the weights' version; None: the system's entropy"""
    frees_memory: bool
    """rollout.free_cache_engine: sleep and release_kv_cache give memory back"""
    sync_timeout_s: float
    """for a weight update, from its first tensor on"""
    park_timeout_s: float
    """how long a request that came behind a closed gate waits"""


def field_of(config: Any, path: str, default: Any = None) -> Any:
    """A field of a dataclass, a dict or an OmegaConf node, by its path."""
    for name in path.split("."):
        if config is None:
            return default
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if config is None else config


def refusals(rollout: Any, model: Any) -> list[str]:
    """Everything that these settings ask for and an engine cannot do."""
    found = []
    for name, allowed in MUST_BE.items():
        value = field_of(rollout, name)
        if value is not None and value not in allowed:
            hint = f": {INSTEAD[name]}" if name in INSTEAD else ""
            found.append(f"rollout.{name} must be {allowed[0]}, got {value!r}{hint}")
    for name, known in (("dtype", DTYPES), ("logprobs_mode", LOGPROBS)):
        value = field_of(rollout, name)
        if value is not None and value not in known:
            found.append(f"rollout.{name} must be one of {', '.join(str(k) for k in known if k)}, got {value!r}")
    rank = field_of(model, "lora_rank", 0) or field_of(model, "lora.rank", 0)
    if rank > 0 and not field_of(model, "lora.merge", False):
        found.append(f"model.lora_rank is {rank}: set model.lora.merge=True, weights are sent with the adapter merged in")
    path, config_path = field_of(model, "path"), field_of(model, "hf_config_path")
    if config_path not in (None, path):
        found.append(f"model.hf_config_path must be model.path, got {config_path!r}")
    return found


def replica_settings(rollout: Any, model: Any, *, on_gpu: bool = False, alone: bool = True) -> ReplicaSettings:
    """Settings of one replica.

    Args:
        rollout: verl's RolloutConfig (`actor_rollout_ref.rollout`), or anything with its fields.
        model: its model config (`actor_rollout_ref.model`).
        on_gpu: whether the replica has GPUs: then `gpu_memory_utilization` sizes the KV pool.
        alone: its memory is not shared with a trainer (STANDALONE).

    Raises:
        ConfigError: lists everything that an engine cannot do.
    """
    problems = refusals(rollout, model)
    own = dict(field_of(rollout, f"engine_kwargs.{NAME}", {}))
    frees = bool(field_of(rollout, "free_cache_engine", True))
    limits = {name: own.pop(name, default) for name, default in (("sync_timeout_s", SYNC_TIMEOUT_S), ("park_timeout_s", PARK_TIMEOUT_S))}
    for name, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            problems.append(f"rollout.engine_kwargs.{NAME}.{name} must be a number of seconds > 0, got {value!r}")
    engine = {**_engine_fields(rollout, on_gpu=on_gpu, alone=alone), **own}
    if frees and not alone:
        engine.setdefault("apply", "in_place")  # what it slept on is gone: there is nothing that a second copy would keep
    try:
        make_config("any", engine)
    except ConfigError as error:
        problems.append(f"rollout.engine_kwargs.{NAME}: {error}")
    if problems:
        raise ConfigError(f"rollout.name={NAME} cannot run these settings: {'; '.join(problems)}")
    return ReplicaSettings(
        engine=engine,
        column=LOGPROBS[field_of(rollout, "logprobs_mode")],
        prompt_length=field_of(rollout, "prompt_length", 512),
        response_length=field_of(rollout, "response_length", 512),
        repetition_penalty=field_of(rollout, "repetition_penalty", 1.0),
        ignore_eos=field_of(rollout, "ignore_eos", False),
        seed=field_of(rollout, "seed", 0) if field_of(rollout, "full_determinism", False) else None,
        frees_memory=frees,
        **limits,
    )


def _engine_fields(rollout: Any, *, on_gpu: bool, alone: bool) -> dict[str, Any]:
    load_format = str(field_of(rollout, "load_format", "auto"))
    fields = {
        "load_format": "dummy" if "dummy" in load_format else load_format,
        "dtype": DTYPES.get(field_of(rollout, "dtype", "auto")),
        "max_model_len": field_of(rollout, "max_model_len"),
        "tp": field_of(rollout, "tensor_model_parallel_size", 1),
        "max_num_seqs": min(field_of(rollout, "max_num_seqs", 256), 4096),
        "max_batch_tokens": field_of(rollout, "max_num_batched_tokens", 1024),
        "prefix_cache": field_of(rollout, "enable_prefix_caching", True),
    }
    if on_gpu:
        share = field_of(rollout, "standalone_gpu_memory_utilization") if alone else None
        fields["memory_fraction"] = share or field_of(rollout, "gpu_memory_utilization", 0.5)
        fields["cuda_graphs"] = not field_of(rollout, "enforce_eager", False)
    return fields


def engine_config(settings: ReplicaSettings, model: str, tokenizer: str | None = None) -> EngineConfig:
    """The whole configuration, for a model folder of this host."""
    return make_config(model, {**settings.engine, **({"tokenizer": tokenizer} if tokenizer not in (None, model) else {})})
