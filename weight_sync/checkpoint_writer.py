"""Writing a checkpoint folder that readers see whole or not at all, from plain or sharded weights, by one rank or many.

Every rank writes what it holds at its place in files that all share; nothing is gathered. It all happens in a hidden folder, whose
files bear temporary names; they are synced, renamed, the marker last, and then the folder gets its name. Whoever is killed meanwhile
leaves a hidden folder that no reader takes and that the next writer beside it removes: a lock that its writer held is free then.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .boxes import Box
from .checkpoint_layout import INDEX, MARKER, PARTIAL, SHARD_BYTES, FileLayout, index_text, lay_out
from .digest import box_digest, combine
from .manifest import DTYPE_BYTES, TensorEntry
from .ranks import Alone, Ranks, agree, together
from .receiver import TORCH_DTYPES
from .sources import SharedSource, WeightSource, share_of

Digest = Callable[[Tensor, Box, tuple[int, ...]], int]

_SETTLED_S = 60.0
"""a hidden folder without a lock is its writer's, who is just making or naming it, for this long"""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", PARTIAL)


def write_folder(
    folder: str | os.PathLike[str],
    source: WeightSource | SharedSource,
    *,
    version: int | None = None,
    ranks: Ranks | None = None,
    files_from: str | os.PathLike[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    digest: Digest = box_digest,
) -> Path:
    """Write a checkpoint; every rank calls it, and all see the same outcome.

    Args:
        folder: the new folder, on a file system that all ranks share; it must not exist.
        source: this rank's weights; one tensor at a time is copied to the CPU.
        version: noted in the marker.
        files_from: a model folder whose other files (config, tokenizer) come along, so that an engine can start from the new one.
        shard_bytes: size of a file, about.

    Returns:
        The absolute folder.

    Raises:
        UpdateError: on every rank alike; then there is no such folder.
    """
    ranks = ranks or Alone()
    source = share_of(source, ranks)
    target = Path(os.path.abspath(folder))
    entries = agree(ranks, source)
    files = lay_out(entries, shard_bytes)
    draft = _Draft(target)  # rank 0's is used
    try:
        scratch = Path(together(ranks, "write", lambda: draft.begin(files), lead=True))
        parts = together(ranks, "write", lambda: _write_mine(scratch, files, entries, source, digest))
        digests = {e.name: combine([p[e.name] for p in parts if e.name in p]) for e in entries}
        together(ranks, "write", lambda: draft.finish(files, digests, version, files_from), lead=True)
    finally:
        draft.close()
    return target


class _Draft:
    """The hidden folder that rank 0 makes, locks and names; gone at `close` unless it was finished."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._scratch: Path | None = None
        self._lock = -1

    def begin(self, files: Sequence[FileLayout]) -> str:
        if os.path.lexists(self._target):
            raise FileExistsError(f"{self._target} exists: a checkpoint is never changed in place")
        self._target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self._target.parent)
        self._scratch = _hidden(self._target)
        self._scratch.mkdir()
        self._lock = os.open(self._scratch / (MARKER + PARTIAL), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for file in files:
            handle = os.open(self._scratch / (file.name + PARTIAL), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(handle, file.nbytes)
                _write_at(handle, memoryview(file.header), 0)
            finally:
                os.close(handle)
        return str(self._scratch)

    def finish(self, files: Sequence[FileLayout], digests: dict[str, int], version: int | None, files_from: Any) -> None:
        assert self._scratch is not None
        if files_from is not None:
            _copy_others(Path(files_from), self._scratch)
        if len(files) > 1:
            _put(self._scratch / INDEX, index_text(files).encode())
        for file in files:
            _sync(self._scratch / (file.name + PARTIAL))
            os.rename(self._scratch / (file.name + PARTIAL), self._scratch / file.name)
        sizes = {file.name: file.nbytes for file in files}
        marker = {"version": version, "files": sizes, "digests": {name: f"{value:016x}" for name, value in digests.items()}}
        _write_at(self._lock, memoryview(json.dumps(marker, indent=1).encode()), 0)
        os.fsync(self._lock)
        _sync(self._scratch)
        os.rename(self._scratch / (MARKER + PARTIAL), self._scratch / MARKER)
        _sync(self._scratch)
        try:
            os.rename(self._scratch, self._target)
        except OSError as error:
            raise FileExistsError(f"{self._target} cannot take its name: {error.strerror}") from error
        self._scratch = None
        _sync(self._target.parent)

    def close(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)


def _write_mine(
    scratch: Path, files: Sequence[FileLayout], entries: Sequence[TensorEntry], source: WeightSource, digest: Digest
) -> dict[str, int]:
    """Put this rank's boxes at their places and sync them; parts of the digests by name."""
    where = {name: (file, start) for file in files for name, start in file.places.items()}
    shapes = {e.name: e for e in entries}
    boxes = {meta.name: list(meta.boxes) for meta in source.metadata()}
    handles: dict[str, int] = {}
    parts: dict[str, int] = {}
    try:
        for name, values in source:
            file, start = where[name]
            if file.name not in handles:
                handles[file.name] = os.open(scratch / (file.name + PARTIAL), os.O_WRONLY | os.O_CLOEXEC)
            box, entry = boxes[name].pop(0), shapes[name]
            local = values.detach().to("cpu", TORCH_DTYPES[entry.dtype]).contiguous()
            raw = local.view(-1).view(torch.uint8).numpy().data
            _write_box(handles[file.name], raw, box, entry, start)
            parts[name] = combine([parts.get(name, 0), digest(local, box, entry.shape)])
        if left := [name for name, rest in boxes.items() if rest]:
            raise ValueError(f"the source ended before {left[0]}")
        for handle in handles.values():
            os.fsync(handle)
    finally:
        for handle in handles.values():
            os.close(handle)
    return parts


def _write_box(handle: int, raw: memoryview, box: Box, entry: TensorEntry, start: int) -> None:
    """Write a box of a tensor whose first byte is at `start`: one run per row of what it does not take whole."""
    item = DTYPE_BYTES[entry.dtype]
    if raw.nbytes != box.elements * item:
        raise ValueError(f"{entry.name}: the source gave {raw.nbytes} bytes for {list(box.length)} of {entry.dtype}")
    strides = [item]
    for size in reversed(entry.shape):
        strides.insert(0, strides[0] * size)
    cut = len(entry.shape)  # dimensions from here on are taken whole; the one before is a run
    while cut and box.length[cut - 1] == entry.shape[cut - 1]:
        cut -= 1
    outer = max(cut - 1, 0)
    run = raw.nbytes // max(int(np.prod(box.length[:outer])), 1)
    for number, index in enumerate(np.ndindex(*box.length[:outer])):
        full = (*index, *(0,) * (len(entry.shape) - outer))
        at = start + sum((o + i) * s for o, i, s in zip(box.offset, full, strides[1:], strict=True))
        _write_at(handle, raw[number * run : (number + 1) * run], at)


def _write_at(handle: int, raw: memoryview, at: int) -> None:
    while raw:
        count = os.pwrite(handle, raw, at)
        raw, at = raw[count:], at + count


def _put(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy_others(model: Path, scratch: Path) -> None:
    """The files of a model folder that are no weights."""
    for path in model.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name not in (INDEX, MARKER) and not path.name.startswith("."):
            shutil.copyfile(path, scratch / path.name)
            _sync(scratch / path.name)


def _hidden(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.urandom(4).hex()}{PARTIAL}")


def remove_abandoned(parent: Path) -> None:
    """Remove what writers and removers left in `parent` who were killed."""
    for path in parent.glob(f".*{PARTIAL}"):
        if _abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def _abandoned(path: Path) -> bool:
    try:
        handle = os.open(path / (MARKER + PARTIAL), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        try:
            return time.time() - path.stat().st_mtime > _SETTLED_S
        except OSError:
            return False
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # its writer lives
    finally:
        os.close(handle)
    return True


def remove_folder(folder: Path) -> None:
    """Take a checkpoint away at once: it loses its name before its files."""
    hidden = _hidden(folder)
    os.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
