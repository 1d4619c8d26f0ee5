"""Weights by way of a folder: for any trainer, for engines it cannot reach, and for those that join later.

The trainer writes a checkpoint once and names it to every engine; each engine rank reads it for itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint_layout import MARKER
from ..checkpoint_reader import CheckpointFolder, DiskError, FolderError
from ..checkpoint_writer import remove_abandoned, remove_folder, write_folder
from ..control import UpdateControl, UpdateError
from ..digest import box_digest
from ..manifest import Bucket, ManifestError
from ..ranks import Ranks
from ..sources import WeightSource
from .runs import OneByOne

DEFAULT_KEPT = 2


class DiskLink(OneByOne):
    """The receiving end on one rank: the folder, opened when the first chunk is asked for (a file system may take its time).

    Args:
        transport: what `CheckpointFolder.link` made.
    """

    def __init__(self, transport: Mapping[str, Any]) -> None:
        self._transport = transport
        self._folder: CheckpointFolder | None = None
        self._reading = threading.Lock()
        self._over = False

    def view(self, bucket: Bucket, where: Mapping[str, Any]) -> memoryview:
        try:
            with self._reading:
                if self._over:
                    raise DiskError("the update is over")
                if self._folder is None:
                    self._folder = self._open()
                return self._folder.read(bucket)
        finally:
            self._end()

    def _open(self) -> CheckpointFolder:
        told = self._transport
        try:
            folder = CheckpointFolder(told["folder"], root=told["root"], bucket_bytes=told["bucket_bytes"], skip=lambda name: True)
        except (FolderError, ManifestError) as error:
            raise DiskError(f"{told['folder']} changed since it was checked: {error}") from None
        if folder.stamps != told["files"]:
            folder.close()
            raise DiskError(f"{told['folder']} was changed or replaced since it was checked")
        return folder

    def lost(self) -> str | None:
        return None

    def close(self) -> None:
        """A read that is under way, maybe stuck, is not waited for; it then closes the files itself."""
        self._over = True
        self._end()

    def _end(self) -> None:
        if self._over and self._reading.acquire(blocking=False):
            folder, self._folder = self._folder, None
            self._reading.release()
            if folder is not None:
                folder.close()


class DiskTransport:
    """The trainer's end: a folder `step-VERSION` for every sync, below one that all ranks and engines share.

    Args:
        folder: where those folders go; engines allow it by `--weights-root`.
        seen_as: the same folder by the name that engines have for it; default: the same.
        keep: so many of the newest stay, for engines that join late.
        files_from: a model folder whose config and tokenizer come along, so that an engine can start from each of them.
    """

    name = "disk"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        seen_as: str | None = None,
        keep: int = DEFAULT_KEPT,
        files_from: str | os.PathLike[str] | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._folder, self._seen_as = Path(os.path.abspath(folder)), seen_as
        self._keep, self._files_from = keep, files_from

    def write(self, source: WeightSource, ranks: Ranks, version: int | None, digest: Any = box_digest) -> Path:
        """Write the source's weights; every rank calls it. Raises UpdateError on all of them alike."""
        name = ranks.gather(self._free_name(version) if ranks.rank == 0 else None)[0]
        return write_folder(self._folder / name, source, version=version, ranks=ranks, files_from=self._files_from, digest=digest)

    def _free_name(self, version: int | None) -> str:
        base = f"step-{version}" if version is not None else "step"
        names = (base if i == 0 and version is not None else f"{base}-{i}" for i in range(1 << 30))
        return next(name for name in names if not os.path.lexists(self._folder / name))

    def told(self, written: Path) -> dict[str, Any]:
        """How an engine is told of a folder."""
        return {"name": self.name, "folder": os.path.join(self._seen_as, written.name) if self._seen_as is not None else str(written)}

    def remove(self, folder: Path) -> None:
        """Take away a folder written here that nobody is to load. Best effort."""
        with contextlib.suppress(OSError):
            remove_folder(folder)

    def tidy(self, written: Path) -> None:
        """Remove all but the newest of the folders written here. Best effort."""
        found = []
        for marker in self._folder.glob(f"step-*/{MARKER}"):
            with contextlib.suppress(OSError):
                found.append((marker.stat().st_mtime_ns, marker.parent))
        for _, folder in sorted(found)[: -self._keep]:
            if folder != written:
                self.remove(folder)
        remove_abandoned(self._folder)


def until_read(engine: UpdateControl, update_id: str) -> None:
    """Wait until an engine has read its folder. It ends the update itself if that goes wrong, or at the update's deadline."""
    began = time.monotonic()
    while (status := engine.status(update_id))["state"] == "open" and status.get("missing_chunks", 1):
        time.sleep(min(0.005 + (time.monotonic() - began) / 20, 0.5))  # so the wait adds little to what is waited for
    if status["state"] != "open":
        raise UpdateError(f"{engine.address}: the update was {status['state']}: {status['reason']}")
