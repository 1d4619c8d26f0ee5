"""Takes chunks of a weight update in beside the engine's thread, so that no transfer ever holds up a step."""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...weight_sync.manifest import ChunkError
from ..errors import BadRequest, RollsyncError, describe

if TYPE_CHECKING:
    from .control import Control

Reply = Callable[[Any], None]


class WeightLane:
    """One thread and a queue of chunks; `reply` is called on that thread with a dict, or with the error."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._queue: queue.SimpleQueue[tuple[str, int, int, dict[str, Any], Reply] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollsync-weights", daemon=True)
        self._thread.start()

    def chunk(self, update_id: str, sender: int, sequence: int, where: dict[str, Any], reply: Reply) -> None:
        """Queue a chunk. `where` holds its bytes ("data"), or what its transport says of their place."""
        self._queue.put((update_id, sender, sequence, where, reply))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(2.0)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            update_id, sender, sequence, where, reply = item
            try:
                value: Any = self._control.take_chunk(update_id, sender, sequence, where)
            except RollsyncError as error:
                value = error
            except (ChunkError, ValueError) as error:
                value = BadRequest(str(error))
            except Exception as error:  # thread edge: the caller hears of it, the lane goes on
                traceback.print_exc(file=sys.stderr)
                value = RollsyncError(describe(error))
            try:
                reply(value)
            except Exception:  # the caller is gone
                traceback.print_exc(file=sys.stderr)
