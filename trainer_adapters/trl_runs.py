"""When a TRL trainer's weights may have changed although its step has not: a run that begins, and evaluation outside of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from .targets import Target


class Runs(TrainerCallback):
    """TRL syncs when the step is another than at the last sync. A second run may begin at that very step, and weights that are changed
    by hand between two evaluations have no step at all.
    """

    def __init__(self, trainer: Any, target: Target, sync_next: Callable[[], None]) -> None:
        self._trainer, self._target, self._sync_next = trainer, target, sync_next

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """A run of its own, as after `attach`: its versions begin where its steps do."""
        self._target.restart()
        self._sync_next()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._sync_next()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if not self._trainer.is_in_train:
            self._sync_next()

    on_predict = on_evaluate


def watch_runs(trainer: Any, target: Target, sync_next: Callable[[], None]) -> None:
    """Call `sync_next` wherever the next rollout needs a sync that the step does not tell of. Takes the place of one that was there."""
    trainer.remove_callback(Runs)
    trainer.add_callback(Runs(trainer, target, sync_next))
