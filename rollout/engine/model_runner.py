"""One rank: a loaded model, its KV pool, and the program that runs a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ...kernels.kv import KvLayout
from ...kernels.program import Program
from ...kernels.rank_program import Group
from ...kernels.step import StepLimits
from ..errors import ConfigError
from ..models import decoder
from ..models.config import DecoderConfig, computation, config_digest, load_decoder_config, resolve_model_path
from ..models.layers import all_rope_tables
from ..models.loader import cached_checkpoint, checked_checkpoint, load_weights
from ..models.params import check_tp, num_parameters, plan
from .admission import MAX_BANNED_IDS
from .batch import BatchBuilder, Slots
from .config import EngineConfig
from .devices import Device, open_device
from .planner import MAX_FORCED_ROWS
from .runner_info import RunnerInfo
from .runner_memory import RunnerMemory
from .types import StepPlan, StepResult
from .weight_updates import WeightUpdates

NOTHING_LEFT = "no id is left that could be sampled here: what bans and allows ids leaves none with a finite logit"

Progress = Callable[[str, float], None]
"""called with (phase, fraction done)"""


def ignore_progress(phase: str, fraction: float) -> None:
    return None


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
        device: where it computes; None: what `config` names.

    Raises:
        ConfigError: the model, or a setting for it, cannot be used here.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress = ignore_progress,
        group: Group | None = None,
        device: Device | None = None,
    ) -> None:
        self._group, rank, size = group, group.rank if group else 0, group.size if group else 1
        if config.tp != size:
            raise ConfigError(f"tp = {config.tp}, but this runner is one of {size} ranks: make_runner starts them")
        found = self._found = find_model(config, progress)  # before any memory is taken
        self._device = device or open_device(config, rank)
        self._vocab_limit = found.model.vocab_size if config.sample_padding else found.model.num_token_ids or found.model.vocab_size
        config = self._build(config, progress)
        assert config.max_model_len and config.cache.num_blocks and config.numerics.threads
        self.memory = RunnerMemory(self._device, self.weights, self._kv)
        self.info = RunnerInfo(
            model=config.model,
            num_blocks=self._kv.layout.num_blocks,
            block_tokens=self._kv.layout.block_tokens,
            max_model_len=config.max_model_len,
            vocab_size=self._vocab_limit,
            embed_size=found.model.vocab_size,
            eos_token_ids=found.model.eos_token_ids,
            dtype=config.dtype or "",
            device=self._device.name,
            kernels=self._device.kernels,
            weight_bytes=self.weights.nbytes,
            kv_bytes=self._kv.layout.nbytes,
            threads=config.numerics.threads,
            config=config,
            fingerprint=self._device.fingerprint,
            model_digest=config_digest(found.model, self._vocab_limit),
            computation=computation(found.model),
        )

    @staticmethod
    def resolve(config: EngineConfig, model: DecoderConfig, device: Device, loaded_bytes: int = 0) -> EngineConfig:
        """Fill the defaults that depend on the model and this machine. Resolving twice changes nothing.

        Args:
            loaded_bytes: of the weights that the device holds already, on each rank.
        """
        dtype = _dtype(config, model)
        layout = KvLayout(
            num_blocks=1,
            block_tokens=config.cache.block_tokens,
            num_layers=model.num_layers,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
        )
        devices = 1 if device.pool_fraction is None else config.tp  # ranks on the CPU share its memory
        parameters = num_parameters(model)
        needed, total = parameters * dtype.itemsize, devices * device.total_bytes()
        if needed > total:
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(f"the model's {parameters} parameters take {needed} bytes as {name}, and there are {total} in all")
        return config.resolve(
            checkpoint_dtype=model.dtype,
            model_context=model.max_position_embeddings,
            kv_bytes_per_block=layout.block_bytes,
            available_bytes=devices * (device.available_bytes() + loaded_bytes),
            weight_bytes=needed,
            total_bytes=total,
            pool_fraction=device.pool_fraction,
        )

    def _build(self, config: EngineConfig, progress: Progress) -> EngineConfig:
        """Take all memory there will be, and load the weights. Returns the configuration with every default filled in."""
        model, device, group = self._found.model, self._device, self._group
        rank, size = (group.rank, group.size) if group else (0, 1)
        loads_first = device.pool_fraction is not None
        if not loads_first:
            config = self.resolve(config, model, device)
        with _memory_for(config):
            self.weights = device.weights(decoder.weight_specs(model, size, rank), _dtype(config, model))
        if loads_first:
            self._load(progress)
            config = self.resolve(config, model, device, self.weights.nbytes)
        with _memory_for(config):
            self._take_pool(config)
        self.updates = WeightUpdates(model, self.weights, rank, size, torch.device(device.name))
        if not loads_first:
            try:
                self._load(progress)
            except BaseException:
                self.close()
                raise
        return config

    def _load(self, progress: Progress) -> None:
        group, found = self._group, self._found
        rank, size = (group.rank, group.size) if group else (0, 1)

        def report(done: int, total: int) -> None:
            progress("loading weights", done / max(total, 1))

        fields = {"dtype": self.weights.dtype, "tp_rank": rank, "tp_size": size}
        load_weights(found.model, found.path, found.load_format, self.weights, progress=report, **fields)  # type: ignore[arg-type]

    def _take_pool(self, config: EngineConfig) -> None:
        """The step's arrays, the KV pool and the program."""
        model, size, dtype = self._found.model, config.tp, self.weights.dtype
        assert config.max_model_len and config.cache.num_blocks and config.numerics.threads
        rows = MAX_FORCED_ROWS + config.scheduler.max_num_seqs
        limits = StepLimits(
            tokens=config.scheduler.max_batch_tokens,
            rows=rows,
            slots=config.scheduler.max_num_seqs,
            table_blocks=-(-config.max_model_len // config.cache.block_tokens),
            banned=rows * MAX_BANNED_IDS,
            vocab=self._vocab_limit,
        )
        layout = KvLayout(
            num_blocks=config.cache.num_blocks,
            block_tokens=config.cache.block_tokens,
            num_layers=model.num_layers,
            kv_heads=model.num_kv_heads // size,
            head_dim=model.head_dim,
            dtype=dtype,
        )
        self._arrays = self._device.arrays(limits)
        self._slots = Slots(self._arrays)
        self._batch = BatchBuilder(
            self._arrays,
            self._slots,
            block_tokens=layout.block_tokens,
            heads_per_kv=model.num_heads // model.num_kv_heads,
            kv_heads=layout.kv_heads,
            threads=config.numerics.threads,
        )
        self._kv = self._device.kv(layout)
        self._program: Program = self._device.program(
            self._arrays,
            group=self._group,
            vocab_size=model.vocab_size,
            threads=config.numerics.threads,
            heads=model.num_heads // size,
            ropes=all_rope_tables(model, config.max_model_len, dtype, self._device.name),
            vocab_limit=self._vocab_limit,
            k_shards=config.numerics.k_shards,
        )
        if config.apply == "staged":
            self.weights.map_shadow()
        decoder.record(self._program, model, float32_logits=config.numerics.head_dtype == "float32")

    def forward(self, plan: StepPlan) -> None:
        """One forward pass. What it drew lies in the arrays of rank 0."""
        self._launch(plan)
        self._program.wait()

    def _launch(self, plan: StepPlan) -> None:
        self._slots.apply(plan)
        self._batch.build(plan)
        self._program.run()

    def execute(self, plan: StepPlan) -> StepResult:
        """One forward pass; one value per logits row of `plan`, in its order."""
        self._launch(plan)
        a, R = self._arrays, self._arrays.num_rows
        faults = self._slots.faulty_rows(plan.row_slot)  # what hangs on no result comes before the wait
        self._program.wait()
        nonfinite = a["out_nonfinite"][:R]
        broken = nonfinite.any()
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
            sampling_mask=a.masks(),
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

    def lend(self, name: str) -> torch.Tensor | None:
        """A checkpoint's tensor where its values lie, in the engine's dtype, for a trainer to keep its parameter there: `Weights.lend`.

        None: it lies in another order here, or nowhere.
        """
        writes = plan(self._found.model, name) if self._group is None else ()
        whole = self.weights.lend(writes[0].param) if writes else None
        return None if whole is None else whole[writes[0].dst_row : writes[0].dst_row + writes[0].rows]

    def sleep(self, tag: str, keep: bool) -> int:
        return self.memory.sleep(tag, keep)

    def wake(self, tag: str) -> None:
        self.memory.wake(tag)

    def close(self) -> None:
        """Free the KV pool, the weights and the buffers. Nothing runs after this."""
        self.updates.close()
        self._kv.close()
        self._program.close()
        self.weights.close()


@contextlib.contextmanager
def _memory_for(config: EngineConfig) -> Iterator[None]:
    try:
        yield
    except (OSError, MemoryError, OverflowError) as error:
        pool = f" and a KV pool of {config.cache.memory_bytes} bytes" if config.cache.memory_bytes else ""
        raise ConfigError(f"no memory for the weights{pool} ({error}): lower cache.memory_bytes") from error


def _dtype(config: EngineConfig, model: DecoderConfig) -> torch.dtype:
    return getattr(torch, config.dtype or ("float32" if model.dtype == "float32" else "bfloat16"))  # type: ignore[no-any-return]
