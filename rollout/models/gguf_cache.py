"""A GGUF file dequantised once to an ordinary Hugging Face folder, which transformers reads too. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from .config import parse_hf_config
from .dequantize import Floats
from .gguf import GgufFile
from .params import FINAL_NORM, check_tensors

_ABANDONED_S = 600.0
_FORMAT = 1
"""part of the folder's name: raise it when what is written changes"""


def cache_root() -> Path:
    """$ROLLSYNC_CACHE, else ~/.cache/rollsync."""
    return Path(os.environ.get("ROLLSYNC_CACHE") or "~/.cache/rollsync").expanduser()


def cached_checkpoint(
    gguf_path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """The bfloat16 model folder of a GGUF file, made on first use.

    The folder holds config.json, generation_config.json, model.safetensors, tokenizer.json and
    tokenizer_config.json. Its name has a digest of the file's size, time and first bytes; it appears complete or not at all, also
    when several processes make it at once.

    Args:
        gguf_path: the file.
        cache_dir: parent folder; default: $ROLLSYNC_CACHE, else ~/.cache/rollsync.
        progress: called with (bytes written, bytes in all) of the weights.

    Raises:
        ConfigError, UnsupportedModel: the file cannot be read, or its tokenizer cannot be rebuilt.
    """
    path = Path(gguf_path).resolve()
    gguf = GgufFile(path)
    root = Path(cache_dir).expanduser() if cache_dir else cache_root()
    target = root / f"{path.stem}-{_digest(path)}"
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=root))
    except OSError as error:
        raise ConfigError(f"the cache folder {root} cannot be written ({error}); name another with ROLLSYNC_CACHE") from error
    try:
        _write_folder(gguf, scratch, progress)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same bytes
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _sweep(root: Path) -> None:
    """Remove what a conversion that was killed left behind; a living one touches its folder every few seconds at most."""
    for left in root.glob(".*-*"):
        newest = max((f.stat().st_mtime for f in [left, *left.glob("*")]), default=0.0)
        if left.is_dir() and time.time() - newest > _ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)


def _digest(path: Path) -> str:
    stat = path.stat()
    with path.open("rb") as file:
        head = file.read(1 << 16)
    return hashlib.sha256(f"{_FORMAT} {stat.st_size} {stat.st_mtime_ns} ".encode() + head).hexdigest()[:12]


def _write_folder(gguf: GgufFile, folder: Path, progress: Callable[[int, int], None] | None) -> None:
    from .gguf_tokenizer import build_tokenizer, tokenizer_config

    config = gguf.hf_config()
    model = parse_hf_config(config, where=str(gguf.path))
    if problems := check_tensors(model, {name: tensor.shape for name, tensor in gguf.tensors.items()}):
        raise ConfigError(f"{gguf.path} does not hold the model its metadata describes: {'; '.join(problems[:20])}")
    build_tokenizer(gguf).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(gguf))
    _write_json(folder / "config.json", config)
    generation: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    _write_json(folder / "generation_config.json", {"_from_model_config": True} | generation)
    with (folder / "model.safetensors").open("wb") as file:
        _write_safetensors(gguf, file, progress)


def _write_json(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_safetensors(gguf: GgufFile, file: BinaryIO, progress: Callable[[int, int], None] | None) -> None:
    """Stream all tensors as bfloat16 (safetensors: header length, JSON header, data back to back), a few MB in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = sorted(gguf.tensors, key=_checkpoint_order)
    total = 0
    for name in names:
        shape = gguf.tensors[name].shape
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [total, total + size]}
        total += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    done = 0
    for name in names:
        for block in gguf.row_blocks(name):
            file.write(_bfloat16(block).tobytes())
            done += 2 * block.size
            if progress is not None:
                progress(done, total)


def _checkpoint_order(name: str) -> tuple[int, int, str]:
    """Embedding, layers by number, final norm, head."""
    parts = name.split(".")
    if parts[1] == "layers":
        return 1, int(parts[2]), name
    return (2 if name == FINAL_NORM else 3 if name.startswith("lm_head") else 0), 0, name


def _bfloat16(x: Floats) -> npt.NDArray[np.uint16]:
    """Bits of `x` rounded to bfloat16, nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded
