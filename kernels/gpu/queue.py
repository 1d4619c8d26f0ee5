"""The order of work on a device: one queue per runner, so that nothing waits for anything but results.

`CudaQueue` is a CUDA stream. `HostQueue` has the same calls on CPU tensors, where everything is done when a call returns: Triton's
interpreter runs the same programs through it, and tests put a recorder of graphs in the place of CUDA's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

POLL_S = 20e-6


class Graph(Protocol):
    """Recorded launches."""

    def replay(self) -> None:
        """Launch them again: the same kernels on the same addresses with the same arguments."""


class Queue(Protocol):
    """Work goes to the device in the order of the calls within `scope`."""

    device: torch.device
    processors: int
    """programs that it runs at once"""

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Launches and copies within go to this queue."""

    def host_buffer(self, nbytes: int) -> Tensor:
        """Zeroed bytes that the device copies from and to without a stop."""

    def record(self) -> None:
        """Mark what has been launched so far."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Until what was marked last is done. TimeoutError: it was not in time."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` launches, without running it. It must have run once before."""

    def release_graphs(self) -> None:
        """Free what captured graphs took; none of them is replayed any more."""


class CudaQueue:
    """A stream of its own on a CUDA device. One thread uses it; weights come in on other streams meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()
        self._pool: Any = None

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def record(self) -> None:
        self._done.record(self._stream)

    def wait(self, timeout_s: float | None = None) -> None:
        if timeout_s is None:
            self._done.synchronize()
            return
        end = time.monotonic() + timeout_s
        while not self._done.query():
            if time.monotonic() > end:
                raise TimeoutError(f"a step on {self.device} was not done within {timeout_s:g} s")
            time.sleep(POLL_S)

    def capture(self, work: Callable[[], None]) -> Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # of no one else, so that no tensor of ours moves into it
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads go on copying weights while this one records.
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except BaseException:
            self._pool = None  # torch may take it to be still in use
            raise
        return graph

    def release_graphs(self) -> None:
        self._pool = None


class HostQueue:
    """CPU tensors. `capture` is whoever records: by default it runs the work again at each replay."""

    def __init__(self, capture: Callable[[Callable[[], None]], Graph] | None = None) -> None:
        self.device, self.processors = torch.device("cpu"), 1
        self._capture = capture or Again

    def scope(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def record(self) -> None:
        return None

    def wait(self, timeout_s: float | None = None) -> None:
        return None

    def capture(self, work: Callable[[], None]) -> Graph:
        return self._capture(work)

    def release_graphs(self) -> None:
        return None


class Again:
    """A graph that runs its work anew."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work
