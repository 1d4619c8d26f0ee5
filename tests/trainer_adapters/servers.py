"""`rollsync serve` for tests of adapters: it ends with the test."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    def kill(self) -> None:
        """As a machine that is gone; the engine ends with its front."""
        self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def serving(model: str, *flags: str, port: int = 0) -> Iterator[Server]:
    """A server that has said where it listens."""
    command = [sys.executable, "-m", "rollsync.rollout.cli", "serve", model, "--port", str(port), "--threads", "1", *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            assert process.stdout is not None
            found = re.search(r"listening on (http://\S+)", process.stdout.readline())
            if found is None:
                process.wait(10)
                log.seek(0)
                raise AssertionError(f"no server: {log.read()[-2000:]}")
            yield Server(process, found[1])
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
            process.kill()
            process.communicate()


def until_free(port: int, deadline_s: float = 10.0) -> None:
    """Wait until nobody listens there any more."""
    import socket

    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"port {port} is still in use")
