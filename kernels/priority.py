"""Threads that step back for others."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def give_way(nice: int) -> None:
    """Make this thread nicer by so much, where a thread has a priority of its own (Linux)."""
    if sys.platform != "linux":  # there the number of a thread may be that of another process
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + nice))
