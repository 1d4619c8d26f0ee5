"""A checkpoint folder as where an update's bytes come from: all of it checked by headers and sizes before a tensor is read.

Files are opened once and read from those handles. They are not mapped: a mapped file that somebody truncates kills its reader.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .boxes import Box
from .checkpoint_layout import DTYPES, HEADER_LIMIT_BYTES, INDEX, MARKER, PARTIAL, SINGLE, Place, read_places
from .manifest import DEFAULT_BUCKET_BYTES, DTYPE_BYTES, Bucket, Manifest, ManifestError, TensorEntry, TensorSlice, plan

JSON_LIMIT_BYTES = 256 << 20


class FolderError(ValueError):
    """A folder that must not be loaded from, for where it is."""


class DiskError(ValueError):
    """A folder that cannot be read any more, or is another one than was checked."""


def _nothing(name: str) -> bool:
    return False


def _is_plain(file: Any) -> bool:
    """Whether this is the name of a file right in its folder."""
    return isinstance(file, str) and file == os.path.basename(file) and file not in ("", ".", "..") and "\0" not in file


class CheckpointFolder:
    """A complete checkpoint. `manifest` names its tensors, in the order that reads fastest.

    Complete means: each file that the index names (or the one file) is there, as long as its header says, with the tensors that the
    index says. With a marker, also exactly those sizes. A writer of ours makes the marker last; `save_pretrained` the index.

    Args:
        name: the folder: absolute, or below `root`.
        root: nothing outside it is opened, by whatever name.
        skip: whether a tensor of a dtype that is no weight's may be left out, by name.

    Raises:
        FolderError: it is not a folder, or it or a file of it is not inside `root`.
        ManifestError: everything that is wrong with its files.
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        *,
        root: str | os.PathLike[str],
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        skip: Callable[[str], bool] = _nothing,
    ) -> None:
        self._handles: dict[str, int] = {}
        self.stamps: dict[str, list[int]] = {}
        """by file: what tells whether it is still the one that was checked"""
        self._places: dict[str, tuple[str, int]] = {}
        self._given_root, self._root = os.path.abspath(root), Path(os.path.realpath(root))
        self._shown = os.fspath(name)
        try:
            self._folder = self._open_folder(self._shown)
            self.path = Path(os.readlink(f"/proc/self/fd/{self._folder}"))
            problems, entries, marker = self._read_all(skip)
            if problems:
                raise ManifestError([f"{self._shown}: {problem}" for problem in problems])
        except BaseException:
            self.close()
            raise
        self.manifest: Manifest = plan(entries, bucket_bytes)
        self.digests: dict[str, int] = {n: int(v, 16) for n, v in marker.get("digests", {}).items()}
        """as the writer took them; empty if it was none of ours"""
        self._buffer = bytearray()

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def link(self) -> dict[str, Any]:
        """What another process needs to read this folder and no other: plain values, for `DiskLink`."""
        where = {"name": "disk", "folder": str(self.path), "root": str(self._root), "files": self.stamps}
        return {**where, "bucket_bytes": self.manifest.bucket_bytes}

    def close(self) -> None:
        for handle in [*self._handles.values(), getattr(self, "_folder", -1)]:
            if handle >= 0:
                os.close(handle)
        self._handles, self._folder = {}, -1

    # Opening: what a name leads to is opened first and judged then, so nothing can change in between

    def _inside(self, handle: int, shown: str) -> None:
        real = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if not real.is_relative_to(self._root):
            raise FolderError(f"{shown} is not inside {self._root}, the folder that may be loaded from")

    def _open_folder(self, name: str) -> int:
        if not name or "\0" in name or ".." in Path(name).parts:
            raise FolderError(f"folder must be a path without '..', got {name!r}")
        path = os.path.join(self._given_root, name)
        if not any(Path(path).is_relative_to(root) for root in (self._given_root, self._root)):
            raise FolderError(f"folder {name!r} is not inside {self._given_root}, the folder that may be loaded from")  # nothing looked up
        try:
            handle = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise FolderError(f"folder {name!r} cannot be opened: {getattr(error, 'strerror', None) or error}") from None
        try:
            self._inside(handle, f"folder {name!r}")
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _open_file(self, name: str) -> tuple[int, int]:
        """(handle, size) of a regular file of the folder."""
        found = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=self._folder)
        try:
            self._inside(found, f"{self._shown}/{name}")
            if not stat.S_ISREG(os.fstat(found).st_mode):
                raise FolderError(f"{self._shown}/{name} is not a regular file")
            handle = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(found)
        self._handles[name] = handle
        self.stamps[name] = _stamp(os.fstat(handle))
        return handle, os.fstat(handle).st_size

    # Checking

    def _read_all(self, skip: Callable[[str], bool]) -> tuple[list[str], list[TensorEntry], dict[str, Any]]:
        """(problems, entries, marker); the entries are of use only without problems."""
        names = set(os.listdir(f"/proc/self/fd/{self._folder}"))
        if unfinished := sorted(n for n in names if n.endswith(PARTIAL)):
            return [f"it is being written, or its writer died ({', '.join(unfinished[:3])})"], [], {}
        if INDEX not in names and SINGLE not in names:
            return [f"it holds neither {SINGLE} nor {INDEX}: it is not complete, or no checkpoint"], [], {}
        problems: list[str] = []
        marker = self._read_marker(problems) if MARKER in names else {}
        weight_map = self._read_index(problems) if INDEX in names else None
        files = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        if marker and not problems and marker["files"].keys() != set(files):
            problems.append(f"{MARKER} is about {', '.join(sorted(marker['files']))}, the weights are in {', '.join(files)}")
        entries: list[TensorEntry] = []
        seen: dict[str, str] = {}
        for file in files:
            for place in self._read_file(file, marker.get("files", {}).get(file), problems):
                if place.name in seen:
                    problems.append(f"{place.name} is in both {seen[place.name]} and {file}")
                seen[place.name] = file
                self._places[place.name] = file, place.start
                if place.code in DTYPES:
                    entries.append(TensorEntry(place.name, DTYPES[place.code], place.shape, (TensorSlice(0, Box.whole(place.shape)),)))
                elif not skip(place.name):
                    problems.append(f"{place.name} is {place.code} (must be {', '.join(DTYPES)})")
        if weight_map is not None and not problems:
            problems += [f"{INDEX} says {n} is in {f}, it is {seen.get(n, 'nowhere')}" for n, f in weight_map.items() if seen.get(n) != f]
            problems += [f"{n} is in {f}, {INDEX} does not name it" for n, f in seen.items() if n not in weight_map]
        return problems, entries, marker

    def _read_json(self, name: str) -> Any:
        handle, size = self._open_file(name)
        if size > JSON_LIMIT_BYTES:
            raise ValueError(f"{size} bytes")
        return json.loads(os.pread(handle, size, 0))

    def _read_marker(self, problems: list[str]) -> dict[str, Any]:
        def take(marker: Any) -> dict[str, Any]:
            files, digests = marker["files"], marker.get("digests", {})
            sizes = bool(files) and all(type(size) is int for size in files.values())
            if not sizes or not all(int(v, 16) < 1 << 64 for v in digests.values()):
                raise ValueError("files must be sizes by name, digests hexadecimal by tensor")
            return dict(marker)

        return self._read_taken(MARKER, take, problems)

    def _read_index(self, problems: list[str]) -> dict[str, str]:
        def take(index: Any) -> dict[str, str]:
            weight_map = index["weight_map"]
            if not weight_map or not all(map(_is_plain, weight_map.values())):
                raise ValueError("it may name only files beside it")
            return dict(weight_map)

        return self._read_taken(INDEX, take, problems)

    def _read_taken(self, name: str, take: Callable[[Any], dict[str, Any]], problems: list[str]) -> dict[str, Any]:
        """What `take` makes of a JSON file; empty, and a problem more, if it can make nothing of it."""
        try:
            return take(self._read_json(name))
        except FolderError:
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            problems.append(f"{name} is damaged ({type(error).__name__}: {error})")
        return {}

    def _read_file(self, name: str, marked_bytes: int | None, problems: list[str]) -> list[Place]:
        try:
            handle, size = self._open_file(name)
            raw = os.pread(handle, 8, 0)
            length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else -1
            header = os.pread(handle, length, 8) if 0 < length <= min(size - 8, HEADER_LIMIT_BYTES) else None
        except (OSError, ValueError) as error:
            if isinstance(error, FolderError):
                raise
            problems.append(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}")
            return []
        if marked_bytes is not None and size != marked_bytes:
            problems.append(f"{name} has {size} bytes, {MARKER} says {marked_bytes}")
        if header is None or len(header) != length:
            problems.append(f"{name} is no whole safetensors file: its header would have {length} bytes of {size}")
            return []
        places, faults = read_places(header, size)
        problems += [f"{name}: {fault}" for fault in faults]
        return places if not faults else []

    # Reading

    def read(self, bucket: Bucket) -> memoryview:
        """The bytes of a bucket of `manifest`. Valid until the next call.

        Raises:
            DiskError: a file ended early, or is another one by now than was checked.
        """
        if len(self._buffer) < bucket.nbytes:
            self._buffer = bytearray(bucket.nbytes)
        view = memoryview(self._buffer)[: bucket.nbytes]
        files = set()
        for piece in bucket.pieces:
            tensor = self.manifest.tensors[piece.tensor]
            file, base = self._places[tensor.name]
            item = DTYPE_BYTES[tensor.dtype]
            row_bytes = tensor.nbytes // tensor.shape[0] if tensor.shape else item
            start = base + (piece.box.offset[0] * row_bytes if piece.box.offset else 0)
            part = view[piece.start : piece.start + piece.box.elements * item]
            while part:
                count = os.preadv(self._handles[file], [part], start)
                if count == 0:
                    raise DiskError(f"{self._shown}/{file} ended within {tensor.name}: it changed while it was read")
                part, start = part[count:], start + count
            files.add(file)
        for file in files:
            self._check_still(file)
        return view

    def _check_still(self, file: str) -> None:
        """That what was read is what was checked: the handle's file has not changed, and the name still leads to it."""
        here: list[int] | None = None
        with contextlib.suppress(OSError):
            here = _stamp(os.stat(self.path / file))
        if not self.stamps[file] == _stamp(os.fstat(self._handles[file])) == here:
            raise DiskError(f"{self._shown}/{file} was changed, replaced or removed while it was read")


def _stamp(found: os.stat_result) -> list[int]:
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
