"""The entry point: verl imports this at the end of `import verl`, in the driver and in every Ray worker, and hides what it raises.

So each registration stands for itself, and `problems` keeps what went wrong for `rollsync verl-check`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import NAME

ROLLOUT = f"{__package__}.rollout.RollsyncRollout"
"""what verl imports in each worker that holds weights"""
problems: list[str] = []
"""of registering, in this process"""


def load_replica() -> Any:
    """The replica's class, imported when a job launches its servers."""
    from .replica import RollsyncReplica

    return RollsyncReplica


def _replica() -> None:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(NAME, load_replica)


def _rollout() -> None:
    from verl.workers.rollout import base

    base._ROLLOUT_REGISTRY[NAME, "async"] = ROLLOUT  # verl has no call for it


def _checkpoint_engine() -> None:
    from . import checkpoint  # noqa: F401  (registers its class)


def _register() -> None:
    steps: tuple[Callable[[], None], ...] = (_replica, _rollout, _checkpoint_engine)
    for step in steps:
        try:
            step()
        except Exception as error:  # verl would swallow it
            problems.append(f"{step.__name__.strip('_')}: {type(error).__name__}: {error}")


_register()
