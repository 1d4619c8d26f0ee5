"""Where weights are kept while their memory is away."""

from __future__ import annotations

import contextlib
import tempfile
from typing import IO, Any, Protocol

from ...kernels.weights import Weights
from ..models.gguf_cache import cache_root


class Keeper(Protocol):
    """Holds one copy of a rank's live weights, or none."""

    def keep(self, weights: Weights) -> None:
        """Copy them. OSError or MemoryError if there is no room; then there is no copy."""

    def restore(self, weights: Weights) -> None:
        """Write the copy back, if there is one; it stays until `drop`. OSError: it cannot be read."""

    def drop(self) -> None:
        """Free the copy."""


class FileKeeper:
    """In a file without a name."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def keep(self, weights: Weights) -> None:
        cache_root().mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(prefix="rollsync-weights-", dir=cache_root())  # noqa: SIM115 (closed by drop)
        try:
            for view in weights.live_bytes():
                self._file.write(view)
            self._file.flush()
        except BaseException:
            self.drop()
            raise

    def restore(self, weights: Weights) -> None:
        if self._file is not None:
            self._file.seek(0)
            for view in weights.live_bytes():
                _fill(view, self._file)

    def drop(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what was not written yet need not be
                self._file.close()
            self._file = None


def _fill(view: memoryview, file: IO[bytes]) -> None:
    data: Any = file.read(len(view))
    if len(data) != len(view):
        raise OSError(f"the weights kept in a file end {len(view) - len(data)} bytes early")
    view[:] = data
