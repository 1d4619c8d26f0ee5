"""Processes that end with the one that started them, and what is said of how one ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, folder: str) -> None:
    """End this process, and remove `folder`, when its parent ends: seen by a watching thread."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(0.1 if os.path.exists(folder) else 0.5)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="rollsync-parent-watch", daemon=True).start()


def killed_with_parent(parent_pid: int) -> None:
    """Let the kernel end this process with its parent, where it can: a thread may not get to run in time."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def exit_words(code: int) -> str:
    """An exit status in words: "exit status 1", "killed by SIGKILL"."""
    if code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
