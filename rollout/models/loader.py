"""Filling local parameters from a checkpoint: safetensors, GGUF, or random. Names and shapes are checked before any data is read."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import ConfigError
from .config import DecoderConfig
from .config_reader import read_json
from .gguf import GgufFile
from .gguf_cache import cached_checkpoint
from .params import HEAD, check_tensors, check_tp, hf_shapes, is_ignored, param_specs, plan, tied_name

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "WeightStore",
    "cached_checkpoint",
    "checked_checkpoint",
    "iter_checkpoint",
    "load_weights",
    "open_checkpoint",
]

Progress = Callable[[int, int], None]
"""called with (bytes done, bytes in all)"""

_DTYPES = {"BF16": 2, "F16": 2, "F32": 4}


class CheckpointError(ConfigError):
    """A checkpoint does not hold the model its config describes. The message lists every problem found."""

    code = "checkpoint"


class WeightStore(Protocol):
    """Where weights go; see `params.Write` for the coordinates."""

    def write(self, param: str, dst_row: int, dst_col: int, tensor: torch.Tensor) -> None:
        """Copy `tensor` (1-D for a vector, else 2-D; the engine's dtype) to (dst_row, dst_col) of `param`."""


class Checkpoint(Protocol):
    """Tensors by Hugging Face name, read one at a time."""

    shapes: dict[str, tuple[int, ...]]
    """in the order that reads fastest"""

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype; it may view the file."""

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor in the file."""


class SafetensorsCheckpoint:
    """A folder with model.safetensors, or model.safetensors.index.json and its shards."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._open: dict[str, Any] = {}
        self._file: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtype: dict[str, str] = {}
        for file in _safetensors_files(folder):
            try:
                handle = safe_open(file, framework="pt")
            except Exception as error:  # safetensors has no exception of its own to name
                raise CheckpointError(f"{file} is damaged ({error}): fetch it again, or delete its folder if Rollsync made it") from error
            self._open[file.name] = handle
            for name in handle.offset_keys() if hasattr(handle, "offset_keys") else handle.keys():
                piece = handle.get_slice(name)
                self.shapes[name] = tuple(piece.get_shape())
                self._dtype[name] = str(piece.get_dtype())
                self._file[name] = file.name
        bad = [
            f"{name} is {dtype}" for name, dtype in self._dtype.items() if dtype not in _DTYPES and not name.endswith("rotary_emb.inv_freq")
        ]
        if bad:
            raise CheckpointError(f"{folder}: {_listed(bad)} (supported: {', '.join(_DTYPES)})")

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._open[self._file[name]].get_tensor(name)
        return tensor

    def nbytes(self, name: str) -> int:
        return _elements(self.shapes[name]) * _DTYPES.get(self._dtype[name], 4)


class GgufCheckpoint:
    """A .gguf file, dequantised to float32 tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self._gguf = GgufFile(path)
        order = sorted(self._gguf.tensors.values(), key=lambda tensor: tensor.offset)
        self.shapes: dict[str, tuple[int, ...]] = {tensor.name: tensor.shape for tensor in order}

    def read(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._gguf.read(name))

    def nbytes(self, name: str) -> int:
        return self._gguf.tensors[name].nbytes


class RandomCheckpoint:
    """Random weights: norms that change nothing, the rest normal with deviation 0.02. A tensor depends on its name and shape alone."""

    def __init__(self, cfg: DecoderConfig) -> None:
        self._norm = 0.0 if cfg.norm_one_plus else 1.0
        self.shapes: dict[str, tuple[int, ...]] = hf_shapes(cfg)

    def read(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        if name.endswith("norm.weight"):
            return torch.full(shape, self._norm)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator).mul_(0.02)

    def nbytes(self, name: str) -> int:
        return _elements(self.shapes[name]) * 4


def open_checkpoint(path: str | os.PathLike[str], load_format: str, cfg: DecoderConfig) -> Checkpoint:
    """Open a checkpoint by its headers.

    Args:
        path: a model folder or a .gguf file.
        load_format: "auto" (by what `path` is), "safetensors", "gguf", "random", or "dummy" (the shapes of one, never read).

    Raises:
        ConfigError: `path` holds no weights of that format.
    """
    path = Path(path)
    if load_format == "auto":
        load_format = "gguf" if path.suffix == ".gguf" else "safetensors"
    if load_format in ("random", "dummy"):
        return RandomCheckpoint(cfg)
    if load_format == "gguf":
        if path.suffix != ".gguf":
            raise ConfigError(f"load_format gguf needs a .gguf file, got {path}")
        return GgufCheckpoint(path)
    if load_format == "safetensors":
        return SafetensorsCheckpoint(path)
    raise ConfigError(f"load_format must be auto, safetensors, gguf, random or dummy, got {load_format!r}")


def checked_checkpoint(cfg: DecoderConfig, path: str | os.PathLike[str], load_format: str) -> Checkpoint:
    """Open a checkpoint that holds the model `cfg` describes, by its headers alone.

    Raises:
        ConfigError: `path` holds no weights of that format.
        CheckpointError: tensors are missing, unknown or of another shape; names all of them.
    """
    checkpoint = open_checkpoint(path, load_format, cfg)
    if problems := check_tensors(cfg, checkpoint.shapes):
        headless = HEAD not in checkpoint.shapes and not cfg.tie_word_embeddings
        hint = " (if the head is the embedding, config.json must say tie_word_embeddings: true)" if headless else ""
        raise CheckpointError(f"{path} does not hold the model its config describes: {_listed(problems)}{hint}")
    return checkpoint


def iter_checkpoint(path: str | os.PathLike[str], load_format: str, cfg: DecoderConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint by its Hugging Face name, one in memory at a time, in stored dtype (GGUF: float32)."""
    checkpoint = open_checkpoint(path, load_format, cfg)
    for name in checkpoint.shapes:
        yield name, checkpoint.read(name)


def load_weights(
    cfg: DecoderConfig,
    path: str | os.PathLike[str],
    load_format: str,
    store: WeightStore,
    *,
    dtype: torch.dtype,
    tp_rank: int = 0,
    tp_size: int = 1,
    progress: Progress | None = None,
) -> None:
    """Write every local parameter of one rank, once and completely; of `dummy` nothing: the first full update does.

    Raises:
        ConfigError: `path` has no such checkpoint, or `tp_size` does not divide the model.
        CheckpointError: tensors are missing, unknown, of another shape, or a tied head differs; names all of them. Names and
            shapes are checked before anything is written.
    """
    check_tp(cfg, tp_size, tp_rank)
    if load_format == "dummy":
        return
    checkpoint = checked_checkpoint(cfg, path, load_format)
    specs = param_specs(cfg, tp_size, tp_rank)
    written = dict.fromkeys(specs, 0)
    total, done = sum(map(checkpoint.nbytes, checkpoint.shapes)), 0
    for name in checkpoint.shapes:
        if (twin := tied_name(cfg, name)) is not None:
            _check_tie(checkpoint, path, name, twin)
        elif not is_ignored(cfg, name):
            source = checkpoint.read(name)
            for w in plan(cfg, name, tp_rank, tp_size):
                piece = source[w.src_row : w.src_row + w.rows]
                if source.ndim == 2:
                    piece = piece[:, w.src_col : w.src_col + w.cols]
                store.write(w.param, w.dst_row, w.dst_col, piece.to(dtype))
                written[w.param] += w.rows * w.cols
        done += checkpoint.nbytes(name)
        if progress is not None:
            progress(done, total)
    for name, spec in specs.items():
        assert written[name] == _elements(spec.shape), f"the name table covers {written[name]} elements of {name} {spec.shape}"


def _check_tie(checkpoint: Checkpoint, path: str | os.PathLike[str], name: str, twin: str) -> None:
    if not torch.equal(checkpoint.read(name), checkpoint.read(twin)):
        raise CheckpointError(
            f"{path}: the config ties {name} to {twin}, but the checkpoint holds different values for them: "
            "tie_word_embeddings must be false in config.json if the head has weights of its own"
        )


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"{index}: weight_map must be an object of file names by tensor, got {shards!r:.80}")
        names = sorted(set(shards.values()))
        if outside := [name for name in names if name != Path(name).name]:
            raise CheckpointError(f"{index} may list only files beside it, got {', '.join(map(repr, outside))}")
        files = [folder / name for name in names]
        if missing := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(f"{folder}: {index.name} lists shards that are not there: {', '.join(missing)}")
        return files
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise ConfigError(f"{folder} holds neither model.safetensors nor {index.name} (other weight formats are not read)")


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _listed(problems: list[str], limit: int = 40) -> str:
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return f"{len(problems)} problem{'s' if len(problems) > 1 else ''}: " + "; ".join(problems[:limit]) + more
