"""The ranks that share a model, as a program meets them: gathers of partial sums and of logits, each with a deadline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

STEP_TIMEOUT_S = 60.0
"""a rank that is this much behind within a step is given up"""
MEET_TIMEOUT_S = 120.0
"""for all ranks to find each other"""


class RankLost(RuntimeError):
    """Another rank is gone, or far behind."""


def _joined(parts: list[Tensor]) -> Tensor:
    """Parts that lie one behind the other, as one tensor."""
    first = parts[0]
    assert all(part.data_ptr() == first.data_ptr() + rank * first.nbytes for rank, part in enumerate(parts)), "parts lie apart"
    return first.as_strided((len(parts) * first.numel(),), (1,))


class TPGroup:
    """One rank's end of a process group of its own: torch's default group, which may be a trainer's, is not touched.

    On the CPU parts go from rank to rank by gloo, straight out of and into the buffers; on CUDA by NCCL.

    Args:
        store_fd: an open file that all ranks share, through which they find each other once. Memory will do (memfd).
        device: where the parts will lie.

    Raises:
        RuntimeError: the others did not come in time.
    """

    def __init__(
        self, rank: int, size: int, store_fd: int, *, device: torch.device | str = "cpu", timeout_s: float = STEP_TIMEOUT_S
    ) -> None:
        self.rank, self.size = rank, size
        self._timeout = timedelta(seconds=timeout_s)
        self._peers = [r for r in range(size) if r != rank]
        store: Any = dist.FileStore(f"/proc/self/fd/{store_fd}", size)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=MEET_TIMEOUT_S))
        self._direct = torch.device(device).type == "cpu"
        self._group: Any = self._gloo(store) if self._direct else self._nccl(store)

    def _gloo(self, store: Any) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=MEET_TIMEOUT_S)
        options._threads = 1
        return gloo(store, self.rank, self.size, options)

    def _nccl(self, store: Any) -> Any:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        # Where NCCL finds a gather late by itself, it ends the process: only if `finish` could not say so before.
        options._timeout = self._timeout + timedelta(seconds=MEET_TIMEOUT_S)
        return nccl(store, self.rank, self.size, options)

    def all_gather(self, parts: list[Tensor]) -> None:
        """Fill `parts`, one 1-D tensor per rank, of which this rank's own is there. On CUDA they are so once the stream gets there.

        Raises:
            RankLost: a rank is gone, or did not come in time.
        """
        if self._direct:
            self._exchange(receive_from=self._peers, send_to=self._peers, parts=parts)
        else:
            whole = _joined(parts)
            self._queue(lambda: self._group._allgather_base(whole, parts[self.rank]))

    def gather(self, parts: list[Tensor]) -> None:
        """The same on rank 0; other ranks only give their own."""
        first = self.rank == 0
        if self._direct:
            self._exchange(receive_from=self._peers if first else [], send_to=[] if first else [0], parts=parts)
        else:
            self._queue(lambda: self._group.gather([parts] if first else [], [parts[self.rank]]))

    def _queue(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()  # the stream waits; given a time, the host would
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} cannot reach the others: {error}") from None

    def finish(self, wait: Callable[[float | None], None]) -> None:
        """`wait(seconds)` for what is on a stream.

        Raises:
            RankLost: it raised TimeoutError.
        """
        try:
            wait(self._timeout.total_seconds())
        except TimeoutError as error:
            raise RankLost(f"rank {self.rank} waited for the others: {error}") from None

    def _exchange(self, receive_from: list[int], send_to: list[int], parts: list[Tensor]) -> None:
        # Half the time of gloo's own gathers, which copy into buffers of theirs.
        group = self._group
        try:
            works = [group.recv([parts[rank]], rank, 0) for rank in receive_from]
            works += [group.send([parts[self.rank]], rank, 0) for rank in send_to]
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} cannot reach the others: {error}") from None
        self._wait(works, [*receive_from, *send_to])

    def _wait(self, works: list[Any], peers: list[int]) -> None:
        for work, peer in zip(works, peers, strict=True):
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                limit_s = self._timeout.total_seconds()
                raise RankLost(f"rank {self.rank} waited for rank {peer} within a step, at most {limit_s:g} s: {error}") from None

    def close(self) -> None:
        """End the group; a gather that waits in another thread fails."""
        group, self._group = self._group, None
        with contextlib.suppress(Exception):
            group.abort()
