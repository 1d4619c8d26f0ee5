"""A weight update whose bytes the engine fetches itself, from a checkpoint folder. The slow parts run beside the engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...weight_sync.checkpoint_reader import CheckpointFolder, FolderError
from ...weight_sync.manifest import DEFAULT_BUCKET_BYTES, ManifestError
from ..errors import BadRequest, UpdateRefused, describe
from ..models.params import is_buffer

if TYPE_CHECKING:
    from .control import Control

Call = Callable[..., Any]
"""runs a method of `Control`, by name and with its arguments, on the engine's thread, and returns its value"""


class FolderUpdate:
    """One update from a folder: `open`, then `read`, then maybe `commit`, each from any one thread.

    Args:
        root: the folder that may be loaded from; None refuses.
    """

    def __init__(self, control: Control, call: Call, root: str | None) -> None:
        self._control, self._call, self._root = control, call, root
        self._chunks: list[tuple[int, int]] = []
        self._id = ""

    def open(self, folder: Any, bucket_bytes: int = DEFAULT_BUCKET_BYTES, **options: Any) -> dict[str, Any]:
        """Check the folder by its headers, and open an update with what it holds. The update's status.

        Args:
            bucket_bytes: how much is read at once.
            options: those of `Control.open_update` but manifest and transport.

        Raises:
            BadRequest: the folder is not one that may be loaded. UpdateRefused: all that is wrong with it.
        """
        if self._root is None:
            raise BadRequest("the disk transport is off: start with weights_root (--weights-root FOLDER)", field="transport.name")
        if not isinstance(folder, str):
            raise BadRequest(f"transport.folder must be a string, got {type(folder).__name__}", field="transport.folder")
        try:
            found = CheckpointFolder(folder, root=self._root, bucket_bytes=bucket_bytes, skip=is_buffer)
        except FolderError as error:
            raise BadRequest(f"transport.folder: {error}", field="transport.folder") from None
        except ManifestError as error:
            raise UpdateRefused(str(error)) from None
        with found:
            transport, manifest, digests = found.link(), found.manifest, found.digests
        status: dict[str, Any] = self._call("open_update", manifest=manifest, transport=transport, expected=digests, **options)
        self._id, self._chunks = status["id"], [(b.sender, b.sequence) for b in manifest.buckets]
        return status

    def read(self) -> None:
        """Take in every chunk. What goes wrong ends the update.

        Raises:
            UpdateRefused: why; also if somebody else ended it meanwhile.
        """
        for sender, sequence in self._chunks:
            try:
                self._control.receive_chunk(self._id, sender, sequence, {})
            except Exception as error:
                words = str(error) if isinstance(error, ValueError) else describe(error)
                if self._control.find_update(self._id).state == "open":
                    self._call("abort_update", update_id=self._id, reason=words)
                raise UpdateRefused(words) from error

    def commit(self) -> dict[str, Any]:
        """Make it current; refused, it ends. The update's status."""
        try:
            status: dict[str, Any] = self._call("commit_update", update_id=self._id)
        except UpdateRefused as error:
            self._call("abort_update", update_id=self._id, reason=str(error))
            raise
        return status
