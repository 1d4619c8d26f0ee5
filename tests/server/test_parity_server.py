"""The server of `rollsync parity`: one that does not start costs no wait without an end, and is gone then."""

from __future__ import annotations

import os
import re

import pytest
from rollsync import ConfigError, EngineDead
from rollsync.rollout import parity_server
from rollsync.rollout.errors import RollsyncError
from rollsync.rollout.parity_server import OwnServer

SAYS = "import os, sys, time; print(os.getpid(), 'is loading', file=sys.stderr, flush=True); "


@pytest.mark.parametrize(("child", "error", "words"), [
    (SAYS + "time.sleep(60)", EngineDead, r"does not listen after 2 s; \d+ is loading"),
    (SAYS + "print('listening', end='', flush=True); time.sleep(60)", EngineDead, "does not listen after 2 s"),
    (SAYS + "os.close(1); time.sleep(60)", EngineDead, "does not listen after 2 s"),
    ("import sys; sys.exit('error: no such model')", EngineDead, "did not start: no such model"),
    ("import sys; print('error: --x is no flag', file=sys.stderr); sys.exit(2)", ConfigError, "did not start: --x is no flag"),
    ("import sys; sys.exit(3)", EngineDead, "did not start: exit status 3"),
])  # fmt: skip
def test_a_server_that_does_not_start_is_told_of(
    child: str, error: type[RollsyncError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity_server, "_CHILD", child)
    monkeypatch.setattr(parity_server, "START_S", 2.0)
    with pytest.raises(error, match=words) as told:
        OwnServer("a model")
    if found := re.search(r"(\d+) is loading", str(told.value)):
        with pytest.raises(ProcessLookupError):
            os.kill(int(found.group(1)), 0)
