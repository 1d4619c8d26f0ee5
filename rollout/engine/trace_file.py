"""The file behind a trace: whole lines, appended by any number of engines."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator

from ..errors import ConfigError, show
from .trace_line import OPENING

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
"""read in one go when the last line's begin is looked for"""
LOCK_S = 5.0
"""how long another engine may write, or whoever else holds the file's lock, before the wait for it ends"""


class TraceFile:
    """Appends lines, each whole or not at all; while it does, other engines that write to this file wait.

    A half line at the end, which an engine leaves that is killed while it writes, is cut off when the file is opened. On a file system
    without locks an engine must have the file for itself; there, or where cutting fails too, what a full disk leaves of a line stays,
    as a line of its own that a reader names.

    Raises:
        ConfigError: the file cannot be written to, or holds something else.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._open()

    def _open(self) -> None:
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise ConfigError(f"trace: cannot write to {self.path}: {error.strerror}") from None
        path = self.path
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise ConfigError(f"trace: {path} is no ordinary file")
            with self._alone():
                self._mend()
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, OSError):
                raise ConfigError(f"trace: cannot write to {path}: {error.strerror or error}") from None
            raise

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """While no other engine writes; yields whether that is sure (not all file systems have locks).

        Raises:
            OSError: somebody holds the lock for longer than LOCK_S.
        """
        is_locked = self._lock()
        try:
            yield is_locked
        finally:
            if is_locked:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        deadline, pause_s = time.monotonic() + LOCK_S, 0.0002
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    words = f"another process has held its lock (flock) for {LOCK_S:g} s"
                    raise OSError(errno.EWOULDBLOCK, words) from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
            except OSError:
                return False
            else:
                return True

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
        """Raises OSError; then the line is not in the file, but for what the class says of half ones."""
        self._follow()
        with self._alone() as sure:
            if sure and self._ends_torn():
                with contextlib.suppress(OSError):  # else the half line stays, ended below
                    self._mend()
            end = os.lseek(self._fd, 0, os.SEEK_END)
            text, done = b"\n" + line if self._ends_torn() else line, 0
            try:
                while done < len(text):
                    done += os.write(self._fd, text[done:] if done else text)
            except OSError:
                if done and sure:
                    with contextlib.suppress(OSError):
                        os.ftruncate(self._fd, end)
                raise

    def _ends_torn(self) -> bool:
        """Whether what is written next would stand behind a half line: this engine's, or one's that died amid it."""
        end = os.fstat(self._fd).st_size
        return end > 0 and os.pread(self._fd, 1, end - 1) != b"\n"

    def _follow(self) -> None:
        """To the file that has the name now: what is written to one that was removed or moved away nobody would find."""
        held = os.fstat(self._fd)
        try:
            named = os.stat(self.path)
            if (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino):
                return
        except FileNotFoundError:
            pass
        log.warning("trace: %s was removed or replaced; going on in the file of that name", self.path)
        old = self._fd
        try:
            self._open()
        except ConfigError as error:
            self._fd = old
            raise OSError(errno.EIO, str(error)) from None
        os.close(old)

    def close(self) -> None:
        os.close(self._fd)


def check_trace_path(path: str) -> None:
    """ConfigError if no trace can be written there. The file is made if it is not there."""
    TraceFile(path).close()
