"""The file behind a trace: whole lines, appended by any number of engines."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Iterator

from ..errors import ConfigError, show
from .trace_line import OPENING

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
"""read in one go when the last line's begin is looked for"""


class TraceFile:
    """Appends lines, each whole or not at all; while it does, other engines that write to this file wait.

    A half line at the end, which an engine leaves that is killed while it writes, is cut off when the file is opened.

    Raises:
        ConfigError: the file cannot be written to, or holds something else.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise ConfigError(f"trace: cannot write to {path}: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise ConfigError(f"trace: {path} is no ordinary file")
            with self._alone():
                self._mend()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ConfigError(f"trace: cannot write to {path}: {error.strerror}") from None
            raise

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """While no other engine writes; yields whether that is sure (not all file systems have locks)."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _mend(self) -> None:
        size = os.fstat(self._fd).st_size
        begins = os.pread(self._fd, len(OPENING), 0)
        if not OPENING.startswith(begins):
            raise ConfigError(f"trace: {self.path} exists and is no trace (it begins with {show(begins)}): name another file")
        end = size
        while end > 0:
            start = max(0, end - BLOCK_BYTES)
            found = os.pread(self._fd, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            log.warning("trace: %s ended in half a line: its %d bytes are cut off", self.path, size - end)
            os.ftruncate(self._fd, end)

    def append(self, line: bytes) -> None:
        """Raises OSError; then nothing of the line is in the file."""
        with self._alone() as sure:
            end = os.lseek(self._fd, 0, os.SEEK_END)
            done = 0
            try:
                while done < len(line):
                    done += os.write(self._fd, line[done:] if done else line)
            except OSError:
                if done and sure:
                    os.ftruncate(self._fd, end)
                raise

    def close(self) -> None:
        os.close(self._fd)


def check_trace_path(path: str) -> None:
    """ConfigError if no trace can be written there. The file is made if it is not there."""
    TraceFile(path).close()
