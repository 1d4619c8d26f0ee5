"""`python -m rollsync.rollout.server.wandb_child`: logs rows of numbers to wandb, apart from the server.

Lines of JSON on stdin: the run's config, then a row each. It ends with its stdin, and thereby with the server. In a process of its own
because importing wandb alone holds the interpreter for longer than a health check may take.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

END_S = 10.0
"""how long a run may take to end after the server has"""


def begin(config: Mapping[str, Any]) -> Any:
    import wandb

    project = None if os.environ.get("WANDB_PROJECT") else "rollsync"
    return wandb.init(project=project, job_type="rollout", config=dict(config), settings=wandb.Settings(console="off", quiet=True))


def log_rows(lines: Iterable[str], begin: Callable[[Mapping[str, Any]], Any] = begin) -> int:
    """Log until `lines` end. 0, or 1 after a warning if wandb failed."""
    try:
        rows = iter(lines)
        run = begin(json.loads(next(rows, "{}")))
        for row in rows:
            run.log(json.loads(row))
        _end_within(END_S)
        run.finish()
    except Exception as error:  # process edge
        print(f"warning: nothing more is reported to wandb: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _end_within(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    os.nice(10)  # the engine's work comes first
    sys.exit(log_rows(sys.stdin))
