"""The file behind a trace: lines stay whole, whoever writes beside and whatever the disk does."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest
from rollsync.rollout.engine import trace_file
from rollsync.rollout.engine.trace_file import TraceFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_without_locks_half_a_line_spoils_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    real, room = os.write, [10**9]

    def write(fd: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(fd, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(trace_file.fcntl, "flock", no_locks)
    monkeypatch.setattr(trace_file.os, "write", write)
    line = b'{"rollsync_trace":1}\n'
    file = TraceFile(str(path))
    for space in (100, 7, 1, 0, 100, 100):  # the second stops in the line, the third behind the newline that ends it
        room[0] = space
        with contextlib.suppress(OSError):
            file.append(line)
    file.close()
    assert path.read_bytes() == line + line[:7] + b"\n" + line + line


def test_engines_share_a_file_and_a_torn_end_is_mended(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = b'{"rollsync_trace":1,"x":"' + b"y" * 40_000 + b'"}\n'
    path.write_bytes(line + line[:500])

    def write() -> None:
        file = TraceFile(str(path))
        for _ in range(50):
            file.append(line)
        file.close()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() == line * 201
    assert "its 500 bytes are cut off" in caplog.text
