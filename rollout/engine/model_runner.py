"""One rank on CPU: a loaded model, its KV pool, and the program that runs a step."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ...kernels import native_lib
from ...kernels.fingerprint import failed_probes, numerics_fingerprint
from ...kernels.kv import KvLayout, NativeKv, ReferenceKv
from ...kernels.program import NativeProgram, Program
from ...kernels.rank_program import Group, NativeRankProgram, ReferenceRankProgram
from ...kernels.reference_program import ReferenceProgram
from ...kernels.step import StepArrays, StepLimits
from ...kernels.weights import NativeWeights, ReferenceWeights
from ..errors import ConfigError
from ..models import decoder
from ..models.config import DecoderConfig, load_decoder_config, resolve_model_path
from ..models.gguf_cache import cache_root
from ..models.layers import all_rope_tables
from ..models.loader import cached_checkpoint, checked_checkpoint, load_weights
from ..models.params import check_tp, num_parameters
from .admission import MAX_BANNED_IDS
from .batch import BatchBuilder, Slots
from .config import EngineConfig
from .planner import MAX_FORCED_ROWS
from .runner_info import RunnerInfo
from .types import StepPlan, StepResult
from .weight_updates import WeightUpdates

log = logging.getLogger(__name__)

NOTHING_LEFT = "no id is left that could be sampled here: what bans and allows ids leaves none with a finite logit"

Progress = Callable[[str, float], None]
"""called with (phase, fraction done)"""

_CGROUP_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def available_memory() -> int:
    """Bytes this process can have without swapping, within its container's limit."""
    free = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for limit, usage in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not this kind of cgroup, or "max"
            root = Path("/sys/fs/cgroup")
            free.append(max(0, int((root / limit).read_text()) - int((root / usage).read_text())))
    if free:
        return min(free)
    raise ConfigError("the available memory cannot be read here: give cache.memory_bytes or cache.num_blocks")


def total_memory() -> int:
    """Bytes this process could ever have: the machine's, or its container's limit. (What is free now may be page cache.)"""
    lines = Path("/proc/meminfo").read_text().splitlines()
    totals = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    for limit, _ in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            totals.append(int((Path("/sys/fs/cgroup") / limit).read_text()))
    return min(totals)


def resident_bytes() -> int:
    """Anonymous memory of this process that the system has behind it."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def choose_kernels(wanted: str | None) -> str:
    """The kernel build to use.

    Raises:
        ConfigError: `wanted` is not compiled or does not run on this CPU.
    """
    available = native_lib.available_builds()
    for build in available if wanted is None else ():
        try:
            return native_lib.load_build(build).build
        except OSError as error:
            log.warning("not using the %s kernels: %s", build, error)
    if wanted is None:
        log.warning(
            "no native CPU kernels: running the reference in plain torch, far slower. Install a C++ compiler and reinstall rollsync."
        )
        return "reference"
    if wanted != "reference" and wanted not in available:
        raise ConfigError(f"kernels {wanted!r} do not run here (available: {', '.join([*available, 'reference'])})")
    if wanted != "reference":
        try:
            native_lib.load_build(wanted)
        except OSError as error:
            raise ConfigError(f"kernels {wanted!r} do not run here: {error}") from error
    return wanted


def check_build(kernels: str, k_shards: int, head_dtype: str | None = None) -> str:
    """The numerics fingerprint of a build, once it is known to compute what the specification says.

    Raises:
        ConfigError: it computes something else; names the ops, and the builds to take instead.
    """
    library = None if kernels == "reference" else native_lib.load_build(kernels)
    if wrong := failed_probes(library):
        others = [build for build in (*native_lib.available_builds(), "reference") if build != kernels]
        raise ConfigError(
            f"the {kernels} kernels give other bits than the specification in {', '.join(wrong)}: rebuild them, or choose others "
            f"with --kernels (available: {', '.join(others)})"
        )
    return numerics_fingerprint(library, k_shards, head_dtype)


def ignore_progress(phase: str, fraction: float) -> None:
    return None


def _fill(view: memoryview, file: IO[bytes]) -> None:
    data = file.read(len(view))
    if len(data) != len(view):
        raise OSError(f"the weights kept in a file end {len(view) - len(data)} bytes early")
    view[:] = data


@dataclass(frozen=True, slots=True)
class FoundModel:
    """What a configuration names, checked by its headers; no weight has been read."""

    path: Path
    load_format: str
    model: DecoderConfig


def find_model(config: EngineConfig, progress: Progress = ignore_progress) -> FoundModel:
    """Find and check the model; a .gguf file is dequantised to a folder first.

    Raises:
        ConfigError: there is none, it is not one we compute, or `config.tp` ranks cannot share it.
    """
    path, load_format = resolve_model_path(config.model), config.load_format
    tokenizer = resolve_model_path(config.tokenizer, "tokenizer") if config.tokenizer is not None else None
    if path.suffix == ".gguf" and load_format in ("auto", "gguf"):
        load_format = "safetensors"
        path = cached_checkpoint(path, progress=lambda done, total: progress("dequantising", done / max(total, 1)))
    model = load_decoder_config(path, tokenizer)
    check_tp(model, config.tp, 0, config.numerics.k_shards)
    checked_checkpoint(model, path, load_format)
    return FoundModel(path, load_format, model)


class ModelRunner:
    """One rank: loads what `config` names, or its share of it, and executes step plans.

    Args:
        config: unresolved; `info.config` is the resolved one.
        progress: told of the phases of loading.
        group: the ranks that share the model, this one among them; None: it is alone.

    Raises:
        ConfigError: the model, or a setting for it, cannot be used here.
    """

    def __init__(self, config: EngineConfig, *, progress: Progress = ignore_progress, group: Group | None = None) -> None:
        self._group, rank, size = group, group.rank if group else 0, group.size if group else 1
        if config.tp != size:
            raise ConfigError(f"tp = {config.tp}, but this runner is one of {size} ranks: make_runner starts them")
        found = find_model(config, progress)  # before any memory is taken
        model = found.model
        kernels = choose_kernels(config.numerics.kernels)
        fingerprint = check_build(kernels, config.numerics.k_shards, config.numerics.head_dtype)
        self._vocab_limit = model.vocab_size if config.sample_padding else model.num_token_ids or model.vocab_size
        config = self.resolve(config, model)
        dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        assert config.max_model_len and config.cache.num_blocks and config.numerics.threads
        self._arrays = self._make_arrays(config)
        self._slots = Slots(self._arrays)
        self._batch = BatchBuilder(
            self._arrays,
            self._slots,
            block_tokens=config.cache.block_tokens,
            heads_per_kv=model.num_heads // model.num_kv_heads,
            kv_heads=model.num_kv_heads // size,
            threads=config.numerics.threads,
        )
        layout = KvLayout(
            num_blocks=config.cache.num_blocks,
            block_tokens=config.cache.block_tokens,
            num_layers=model.num_layers,
            kv_heads=model.num_kv_heads // size,
            head_dim=model.head_dim,
            dtype=dtype,
        )
        try:
            self._build(config, model, kernels, layout)
        except (OSError, MemoryError, OverflowError) as error:
            raise ConfigError(
                f"no memory for the weights and a KV pool of {layout.nbytes} bytes ({error}): lower cache.memory_bytes"
            ) from error
        self.updates = WeightUpdates(model, self.weights, rank, size)
        self._kept: IO[bytes] | None = None
        self._away: set[str] = set()
        """memory that sleeps"""
        try:
            report = lambda done, total: progress("loading weights", done / max(total, 1))  # noqa: E731
            load_weights(model, found.path, found.load_format, self.weights, dtype=dtype, tp_rank=rank, tp_size=size, progress=report)
        except BaseException:
            self.close()
            raise
        self.info = RunnerInfo(
            model=config.model,
            num_blocks=layout.num_blocks,
            block_tokens=layout.block_tokens,
            max_model_len=config.max_model_len,
            vocab_size=self._vocab_limit,
            embed_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            dtype=config.dtype or "",
            kernels=kernels,
            weight_bytes=self.weights.nbytes,
            kv_bytes=layout.nbytes,
            threads=config.numerics.threads,
            config=config,
            fingerprint=fingerprint,
        )

    @staticmethod
    def resolve(config: EngineConfig, model: DecoderConfig) -> EngineConfig:
        """Fill the defaults that depend on the model and this machine. Resolving twice changes nothing."""
        dtype = config.dtype or ("float32" if model.dtype == "float32" else "bfloat16")
        layout = KvLayout(
            num_blocks=1,
            block_tokens=config.cache.block_tokens,
            num_layers=model.num_layers,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=torch.float32 if dtype == "float32" else torch.bfloat16,
        )
        parameters = num_parameters(model)
        needed, total = parameters * layout.dtype.itemsize, total_memory()
        if needed > total:
            raise ConfigError(f"the model's {parameters} parameters take {needed} bytes as {dtype}, and there are {total} in all")
        return config.resolve(
            checkpoint_dtype=model.dtype,
            model_context=model.max_position_embeddings,
            kv_bytes_per_block=layout.block_bytes,
            available_bytes=available_memory(),
            weight_bytes=needed,
            total_bytes=total,
        )

    @staticmethod
    def _make_arrays(config: EngineConfig) -> StepArrays:
        rows = MAX_FORCED_ROWS + config.scheduler.max_num_seqs
        assert config.max_model_len is not None
        return StepArrays(
            StepLimits(
                tokens=config.scheduler.max_batch_tokens,
                rows=rows,
                slots=config.scheduler.max_num_seqs,
                table_blocks=-(-config.max_model_len // config.cache.block_tokens),
                banned=rows * MAX_BANNED_IDS,
            )
        )

    def _build(self, config: EngineConfig, model: DecoderConfig, kernels: str, layout: KvLayout) -> None:
        group = self._group
        rank, size = (group.rank, group.size) if group else (0, 1)
        specs = decoder.weight_specs(model, size, rank)
        assert config.max_model_len is not None and config.numerics.threads is not None
        fields: dict[str, Any] = {
            "heads": model.num_heads // size,
            "ropes": all_rope_tables(model, config.max_model_len, layout.dtype),
            "vocab_limit": self._vocab_limit,
            "k_shards": config.numerics.k_shards,
        }
        if group is not None:
            fields |= {"group": group, "vocab_size": model.vocab_size}
        self.weights: NativeWeights | ReferenceWeights
        self._kv: NativeKv | ReferenceKv
        program: Program
        if kernels == "reference":
            self.weights, self._kv = ReferenceWeights(specs, layout.dtype), ReferenceKv(layout)
            program = (ReferenceRankProgram if group else ReferenceProgram)(self.weights, self._arrays, self._kv, **fields)
        else:
            library, fields["threads"] = native_lib.load_build(kernels), config.numerics.threads
            self.weights, self._kv = NativeWeights(library, specs, layout.dtype), NativeKv(layout)
            program = (NativeRankProgram if group else NativeProgram)(library, self.weights, self._arrays, self._kv, **fields)
        if config.apply == "staged":
            self.weights.map_shadow()
        decoder.record(program, model, float32_logits=config.numerics.head_dtype == "float32")
        self._program = program

    def forward(self, plan: StepPlan) -> None:
        """One forward pass. What it drew lies in the arrays of rank 0."""
        self._slots.apply(plan)
        self._batch.build(plan)
        self._program.run()

    def execute(self, plan: StepPlan) -> StepResult:
        """One forward pass; one value per logits row of `plan`, in its order."""
        self.forward(plan)
        a, R = self._arrays, self._arrays.num_rows
        nonfinite = a["out_nonfinite"][:R]
        broken, faults = nonfinite.any(), self._slots.faulty_rows(plan.row_slot)
        top_ids, top_logprobs = self._top(R)
        return StepResult(
            step=plan.step,
            version=self.updates.version,
            token_ids=a["out_token"][:R].tolist(),
            logprobs=a["out_logprob"][:R].tolist(),
            temperature_logprobs=a["out_temperature_logprob"][:R].tolist(),
            model_logprobs=a["out_model_logprob"][:R].tolist(),
            entropy=a["out_entropy"][:R].tolist(),
            top_token_ids=top_ids,
            top_logprobs=top_logprobs,
            nonfinite=(nonfinite == 1).nonzero()[0].tolist() if broken else [],
            faults=faults + [(r, NOTHING_LEFT) for r in (nonfinite == 2).nonzero()[0].tolist()] if broken else faults,
        )

    def _top(self, num_rows: int) -> tuple[list[list[int]], list[list[float]]]:
        """The likeliest ids of each row and their logprobs, as many as it asked for; nothing if none asked."""
        a = self._arrays
        counts = a["top_n"][:num_rows]
        if not counts.any():
            return [], []
        found = []
        for name in ("out_top_id", "out_top_logprob"):
            values = a[name]
            found.append([values[r, :count].tolist() if count else [] for r, count in enumerate(counts.tolist())])
        return found[0], found[1]

    def check(self) -> None:
        """This rank is here."""

    def sleep(self, tag: str, keep: bool) -> int:
        """Give memory to the system: the KV pool's, or that of the weights (`keep`: written to a file without a name first).

        Returns the bytes freed, as the system counts them.
        """
        before = resident_bytes()
        self._release(tag, keep)
        self._away.add(tag)
        return max(0, before - resident_bytes())

    def _release(self, tag: str, keep: bool) -> None:
        if tag == "kv_cache":
            self._kv.release()
            return
        self._drop_kept()  # of weights that were kept and are now discarded
        if keep:
            self._keep()
        self.weights.release()

    def _keep(self) -> None:
        """Copy the weights to a file without a name. OSError if it cannot hold them; then there is none."""
        cache_root().mkdir(parents=True, exist_ok=True)
        self._kept = tempfile.TemporaryFile(prefix="rollsync-weights-", dir=cache_root())  # noqa: SIM115 (closed by wake)
        try:
            for view in self.weights.live_bytes():
                self._kept.write(view)
            self._kept.flush()
        except BaseException:
            self._drop_kept()
            raise

    def _drop_kept(self) -> None:
        if self._kept is not None:
            with contextlib.suppress(OSError):  # what was not written yet need not be
                self._kept.close()
            self._kept = None

    def wake(self, tag: str) -> None:
        """Have that memory again, if it is away; weights that were not kept are zeros, and the file of those that were is freed.

        Raises:
            MemoryError: says how much is needed and how much is free. OSError: the file cannot be read. Nothing is taken then.
        """
        if tag not in self._away:
            return
        needed, free = self._kv.layout.nbytes if tag == "kv_cache" else self.weights.nbytes, available_memory()
        if needed > free:
            raise MemoryError(f"{needed} bytes are needed, {free} are free")
        if tag == "kv_cache":
            self._kv.resume()
            self._away.remove(tag)
            return
        try:
            self.weights.resume()
            if self._kept is not None:
                self._kept.seek(0)
                for view in self.weights.live_bytes():
                    _fill(view, self._kept)
        except BaseException:
            self.weights.release()
            raise
        self._drop_kept()
        self._away.remove(tag)

    def close(self) -> None:
        """Free the KV pool, the weights and the buffers. Nothing runs after this."""
        self.updates.close()
        self._kv.close()
        self._program.close()
        self.weights.close()
