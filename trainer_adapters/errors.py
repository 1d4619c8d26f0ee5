"""What the adapters raise."""

from __future__ import annotations

from collections.abc import Sequence


class ParityError(ValueError):
    """Equal bits cannot be had, or cannot be claimed: the message names the module, setting or pair of things that stands in the way."""


class TargetError(RuntimeError):
    """What engines gave cannot be trained on, or they gave nothing. `problems` lists everything wrong; on every rank alike."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        more = f"; and {len(self.problems) - 10} more" if len(self.problems) > 10 else ""
        super().__init__("; ".join(self.problems[:10]) + more)
