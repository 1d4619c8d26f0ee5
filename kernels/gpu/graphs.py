"""Decode steps as CUDA graphs: what the host launches once for each size, the device repeats by itself.

A graph keeps the addresses and the numbers it was recorded with. So all it reads lies at addresses that stand (weights, pages,
activations, the step's columns), and whatever changes from step to step lies in tensors, never in an argument. tests/gpu holds both:
it replays under a recorder that compares every launch with the recorded one.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence

from .queue import Graph, Queue

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""captures that fail before none is tried any more"""


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Steps of how many tokens are captured: powers of two up to 8, then multiples of 8, 16 and 32. A few rows more cost nothing.

    Args:
        largest: sequences that may run at once.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32)]
    return tuple(size for size in sizes if size < largest) + ((largest,) if largest <= 512 else ())


class Graphs:
    """One graph per size, made when a size comes for the second time; the first time compiles its kernels and warms them up.

    Args:
        sizes: ascending; empty: nothing is captured.
    """

    def __init__(self, queue: Queue, sizes: Sequence[int]) -> None:
        self._queue, self._sizes = queue, sizes
        self._graphs: dict[int, Graph | None] = {}
        self._failures = 0

    def size_for(self, tokens: int) -> int | None:
        """The size to pad a step of so many tokens to; None: it is not captured."""
        at = bisect_left(self._sizes, tokens)
        return self._sizes[at] if at < len(self._sizes) else None

    def run(self, size: int, work: Callable[[], None]) -> None:
        """`work`, or the launches it made for this size."""
        if size not in self._graphs:
            work()
            self._graphs[size] = None
            return
        graph = self._graphs[size] or self._capture(size, work)
        if graph is None:
            work()
        else:
            graph.replay()

    def _capture(self, size: int, work: Callable[[], None]) -> Graph | None:
        """None if it cannot be captured: a step goes without, as one of another size does."""
        if self._failures == MAX_FAILURES:
            return None
        try:
            graph = self._graphs[size] = self._queue.capture(work)
        except RuntimeError as error:
            self._failures += 1
            log.warning("steps of %d tokens were not captured as a graph (failure %d): %s", size, self._failures, error)
            return None
        return graph

    def release(self) -> None:
        """Forget all graphs: their addresses are about to go. They are made anew as sizes come."""
        self._graphs.clear()
        self._queue.release_graphs()
