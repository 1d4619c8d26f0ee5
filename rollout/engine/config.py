"""Engine configuration: frozen, validated, torch-free. The command line is generated from it (`rollout/cli.py`)."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
import reprlib
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from ..fields import did_you_mean

DTYPES = ("bfloat16", "float32")
APPLY = ("staged", "in_place")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "random", "dummy")


def _power_of_two(x: int) -> bool:
    return x > 0 and x & (x - 1) == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV pool."""

    block_tokens: int = 32
    """tokens per KV block; a power of two (32 is the layout the AMX kernels read in place)"""
    memory_bytes: int | None = None
    """size of the KV pool in bytes, over all ranks; all of it is resident soon after the start; default: on the CPU a quarter of the free
    memory, at most 2 GiB, on a GPU nine tenths of what is free once the weights are loaded"""
    memory_fraction: float | None = None
    """size of the KV pool as a part of the memory that is free beside the weights (all copies of them), in (0, 1); memory_bytes wins"""
    num_blocks: int | None = None
    """size of the KV pool in blocks; wins over memory_bytes"""
    prefix_cache: bool = True
    """reuse the KV of equal prefixes (never changes a bit of the output)"""

    def __post_init__(self) -> None:
        if not _power_of_two(self.block_tokens) or self.block_tokens > 1024:
            raise ConfigError(f"cache.block_tokens must be a power of two up to 1024, got {self.block_tokens}")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ConfigError(f"cache.memory_bytes must be positive, got {self.memory_bytes}")
        if self.memory_fraction is not None and not 0 < self.memory_fraction < 1:
            raise ConfigError(f"cache.memory_fraction must be a part of the free memory, in (0, 1), got {self.memory_fraction}")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigError(f"cache.num_blocks must be at least 1, got {self.num_blocks}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """What one step may hold."""

    max_batch_tokens: int = 1024
    """tokens fed per step over all sequences; longer prefills run in chunks"""
    max_num_seqs: int = 256
    """sequences running at once"""
    max_waiting: int = 65536
    """samples waiting for admission before new requests are refused with 503"""

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 1:
            raise ConfigError(f"scheduler.max_batch_tokens must be at least 1, got {self.max_batch_tokens}")
        if not 1 <= self.max_num_seqs <= 4096:
            raise ConfigError(f"scheduler.max_num_seqs must be in [1, 4096], got {self.max_num_seqs}")
        if self.max_waiting < 1:
            raise ConfigError(f"scheduler.max_waiting must be at least 1, got {self.max_waiting}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsConfig:
    """What the bits depend on, and on what they run."""

    k_shards: int = 4
    """partial sums of a row-parallel linear layer, added in a fixed tree; part of the numerics specification"""
    head_dtype: str | None = None
    """float32: logits of a bfloat16 model stay in float32, as a float32 head over its weights gives them; default: the model's dtype"""
    threads: int | None = None
    """CPU threads of a step, on each rank; default: all cores available, divided among ranks (never changes a bit)"""
    kernels: str | None = None
    """CPU kernel build: amx, avx512, avx2 or reference; default: the best this machine runs (never changes a bit)"""
    cuda_graphs: bool = True
    """on a GPU, replay steps that only decode as CUDA graphs (never changes a bit)"""

    def __post_init__(self) -> None:
        if not _power_of_two(self.k_shards) or self.k_shards > 16:
            raise ConfigError(f"numerics.k_shards must be 1, 2, 4, 8 or 16, got {self.k_shards}")
        if self.head_dtype not in (None, "float32"):
            raise ConfigError(f"numerics.head_dtype must be float32 or left out, got {self.head_dtype!r}")
        if self.threads is not None and not 1 <= self.threads <= 256:
            raise ConfigError(f"numerics.threads must be in [1, 256], got {self.threads}")
        if self.kernels not in (None, "amx", "avx512", "avx2", "reference"):
            raise ConfigError(f"numerics.kernels must be amx, avx512, avx2 or reference, got {self.kernels!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything an engine needs to start. `resolve` fills what was left to choose and returns a new object."""

    model: str
    """a local folder (config.json and safetensors), a .gguf file, or a hub id already in the local cache"""
    tokenizer: str | None = None
    """where the tokenizer is, if not with the model"""
    load_format: str = "auto"
    """auto, safetensors, gguf, random (random weights from config.json), or dummy (none: nothing is served before a full update commits)"""
    device: str | None = None
    """cpu, cuda or cuda:N (the first device of several ranks); default: cuda where torch has one and no CPU kernels are named, else cpu"""
    dtype: str | None = None
    """bfloat16 or float32; default: the checkpoint's, float16 read as bfloat16"""
    max_model_len: int | None = None
    """tokens of prompt and output together; default: the model's context, or what the KV pool holds if that is less"""
    weights_root: str | None = None
    """the folder that weight updates may be loaded from (transport disk), with all below it; default: none"""
    apply: str = "staged"
    """where weight updates land. staged: in a second copy that is set aside (memory for it is taken by the first update), so that the old
    weights serve on; in_place: over the weights in use, with the engine paused, at no memory"""
    tp: int = 1
    """tensor parallel ranks, each a process with its share of heads and MLP, which it must divide (never changes a bit)"""
    sample_padding: bool = False
    """let ids be sampled that the tokenizer does not know: rows that pad the embedding to a round size"""
    seed: int | None = None
    """source of the seeds of unseeded requests; default: the system's entropy"""
    trace: str | None = None
    """file to which every finished sample is appended as a line of JSON, for `rollsync replay`; default: none"""
    default_pause_ttl_s: float | None = None
    """seconds after which a pause that names no ttl_s ends by itself; default: never"""
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model must name a folder, a .gguf file or a hub id, got an empty string")
        if self.trace is not None:
            path = os.path.expanduser(os.fspath(self.trace)) if isinstance(self.trace, str | os.PathLike) else None
            if not isinstance(path, str) or not path or "\0" in path:
                raise ConfigError(f"trace must name a file, got {self.trace!r}")
            object.__setattr__(self, "trace", path)
        if self.tokenizer == "":
            raise ConfigError("tokenizer must name a folder, a .gguf file or a hub id, got an empty string")
        if self.load_format not in LOAD_FORMATS:
            raise ConfigError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {self.load_format!r}")
        if self.device is not None and not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", self.device):
            raise ConfigError(f"device must be cpu, cuda or cuda:N, got {self.device!r}")
        if self.device not in (None, "cpu") and self.numerics.kernels is not None:
            raise ConfigError(f"numerics.kernels = {self.numerics.kernels} names a CPU build: leave it out with device = {self.device}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.weights_root is not None and not os.path.isdir(self.weights_root):
            raise ConfigError(f"weights_root must be a folder that exists, got {self.weights_root!r}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if not 1 <= self.tp <= 16:
            raise ConfigError(f"tp must be in [1, 16], got {self.tp}")
        if self.apply not in APPLY:
            raise ConfigError(f"apply must be {' or '.join(APPLY)}, got {self.apply!r}")
        if self.default_pause_ttl_s is not None and not 0 < self.default_pause_ttl_s < math.inf:
            raise ConfigError(f"default_pause_ttl_s must be a finite number > 0, got {self.default_pause_ttl_s}")

    @property
    def weight_copies(self) -> int:
        """How often the weights may be in memory at the same time."""
        return 2 if self.apply == "staged" else 1

    def resolve(
        self,
        *,
        checkpoint_dtype: str,
        model_context: int,
        kv_bytes_per_block: int,
        available_bytes: int,
        weight_bytes: int = 0,
        total_bytes: int | None = None,
        pool_fraction: float | None = None,
    ) -> EngineConfig:
        """Fill every default that depends on the model and the machine.

        Args:
            checkpoint_dtype: "bfloat16", "float16" or "float32".
            model_context: max_position_embeddings.
            kv_bytes_per_block: bytes of one KV block over all layers and ranks, for the dtype chosen.
            available_bytes: memory that is free before the weights are loaded.
            weight_bytes: of one copy of the weights, over all ranks.
            total_bytes: memory of the machine; None: not known.
            pool_fraction: part of the free memory that the pool takes by default; None: a quarter, at most 2 GiB, as on the CPU.

        Raises:
            ConfigError: the pool would hold no whole block, max_model_len exceeds the model's context or the pool, or the copies of
                the weights and the pool exceed all memory.
        """
        dtype = self.dtype or ("float32" if checkpoint_dtype == "float32" else "bfloat16")
        memory = self._pool_bytes(available_bytes, weight_bytes, pool_fraction)
        num_blocks = self.cache.num_blocks if self.cache.num_blocks is not None else memory // kv_bytes_per_block
        if num_blocks < 1:
            raise ConfigError(f"the KV pool ({memory} bytes) holds no whole block of {kv_bytes_per_block} bytes: raise cache.memory_bytes")
        self._check_memory(num_blocks * kv_bytes_per_block, weight_bytes, total_bytes)
        pool_tokens = num_blocks * self.cache.block_tokens
        if self.max_model_len is not None and self.max_model_len > model_context:
            raise ConfigError(f"max_model_len {self.max_model_len} exceeds the model's context of {model_context} tokens")
        if self.max_model_len is not None and self.max_model_len > pool_tokens:
            raise ConfigError(f"max_model_len {self.max_model_len} exceeds the KV pool of {pool_tokens} tokens: raise cache.memory_bytes")
        return dataclasses.replace(
            self,
            dtype=dtype,
            max_model_len=self.max_model_len or min(model_context, pool_tokens),
            cache=dataclasses.replace(self.cache, memory_bytes=num_blocks * kv_bytes_per_block, num_blocks=num_blocks),
            numerics=dataclasses.replace(self.numerics, threads=self.numerics.threads or max(1, len(os.sched_getaffinity(0)) // self.tp)),
        )

    def _pool_bytes(self, available_bytes: int, weight_bytes: int, pool_fraction: float | None) -> int:
        if self.cache.memory_bytes is not None:
            return self.cache.memory_bytes
        free = available_bytes - self.weight_copies * weight_bytes
        if pool_fraction is None:
            # What is free now may look small beside a page cache that would make room: never less than a quarter of it is counted on.
            free = max(free, available_bytes // 4)
        fraction = self.cache.memory_fraction or pool_fraction
        return min(2 << 30, free // 4) if fraction is None else max(0, int(free * fraction))

    def to_flat(self) -> dict[str, Any]:
        """What `from_flat` reads back."""
        flat: dict[str, Any] = {}
        for key, value in dataclasses.asdict(self).items():
            flat.update({f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value})
        return flat

    def _check_memory(self, kv_bytes: int, weight_bytes: int, total_bytes: int | None) -> None:
        """ConfigError, with what to do, if the weights and the pool cannot be in memory together."""
        copies = self.weight_copies
        if total_bytes is None or copies * weight_bytes + kv_bytes <= total_bytes:
            return
        needed = f"{copies} x {weight_bytes} bytes of weights and {kv_bytes} of KV pool exceed the {total_bytes} of this machine"
        if copies == 2 and weight_bytes + kv_bytes <= total_bytes:
            raise ConfigError(f"{needed}: start with apply = in_place (--apply in_place), so that weight updates need no second copy")
        raise ConfigError(f"{needed}: lower cache.memory_bytes, or take a smaller model")

    @classmethod
    def from_flat(cls, values: dict[str, Any]) -> EngineConfig:
        """Build from {"model": …, "cache.block_tokens": …}. An unknown key is an error that lists the known ones."""
        parts = {"cache": CacheConfig, "scheduler": SchedulerConfig, "numerics": NumericsConfig}
        own = {f.name for f in dataclasses.fields(cls)} - parts.keys()
        known = own | {f"{p}.{f.name}" for p, c in parts.items() for f in dataclasses.fields(c)}
        unknown = sorted(values.keys() - known)
        if unknown:
            raise ConfigError(f"unknown configuration keys: {', '.join(unknown)} (known: {', '.join(sorted(known))})")
        top = {k: v for k, v in values.items() if k in own}
        for p, c in parts.items():
            top[p] = c(**{k.split(".", 1)[1]: v for k, v in values.items() if k.startswith(p + ".")})
        return cls(**top)


def _flat_names() -> dict[str, list[str]]:
    """Dotted configuration keys by every name a keyword may give them: the key itself, with "_" for ".", or its last part."""
    names: dict[str, list[str]] = {}
    parts = {"cache": CacheConfig, "scheduler": SchedulerConfig, "numerics": NumericsConfig}
    for f in dataclasses.fields(EngineConfig):
        keys = [f"{f.name}.{leaf.name}" for leaf in dataclasses.fields(parts[f.name])] if f.name in parts else [f.name]
        for key in keys:
            for name in {key, key.replace(".", "_"), key.rpartition(".")[2]}:
                names.setdefault(name, []).append(key)
    return names


def _check_kinds(flat: dict[str, Any]) -> None:
    """ConfigError, naming the key, for a number, a switch or a text where another of the three belongs."""
    parts = {"cache": CacheConfig, "scheduler": SchedulerConfig, "numerics": NumericsConfig}
    for key, value in flat.items():
        part, _, leaf = key.rpartition(".")
        kind, _, or_none = str(next(f.type for f in dataclasses.fields(parts.get(part, EngineConfig)) if f.name == leaf)).partition(" | ")
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        good, allowed = {
            "int": (number and isinstance(value, numbers.Integral), "a whole number"),
            "float": (number, "a number"),
            "bool": (isinstance(value, bool) or (number and value in (0, 1)), "true or false"),
            "str": (isinstance(value, str | os.PathLike), "text"),
        }[kind]
        if not good and not (or_none and value is None) and key != "trace":  # which says it itself
            raise ConfigError(f"{key} must be {allowed}{' or left out' if or_none else ''}, got {reprlib.repr(value)}")


def make_config(model: str | EngineConfig, options: dict[str, Any]) -> EngineConfig:
    """A configuration from a model name and keywords: `block_tokens=4`, `cache_block_tokens=4` or `**{"cache.block_tokens": 4}`.

    Raises:
        ConfigError: an unknown or ambiguous name; lists the known ones. A value of another kind than the option's, or out of its range.
    """
    if isinstance(model, EngineConfig):
        if options:
            raise ConfigError(f"give an EngineConfig or options, not both; got an EngineConfig and {', '.join(sorted(options))}")
        return model
    names = _flat_names()
    flat: dict[str, Any] = {"model": model}
    for name, value in options.items():
        keys = names.get(name, [])
        if len(keys) != 1 or keys[0] in flat:
            known = ", ".join(sorted({key for found in names.values() for key in found} - {"model"}))
            hint = "" if keys else did_you_mean(name, names)
            raise ConfigError(f"{'ambiguous or repeated' if keys else 'unknown'} engine option {name!r}{hint}; known: {known}")
        flat[keys[0]] = value
    _check_kinds(flat)
    return EngineConfig.from_flat(flat)
