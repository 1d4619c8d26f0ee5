"""The engines of one sender, each of which may fail alone: after each phase all ranks of the trainer know the same of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from .control import EngineLost, HttpControl, UpdateControl, UpdateError
from .ranks import Ranks

T = TypeVar("T")
LOOK_S = 10.0
"""how long an engine may take to say that it is there, before an update"""
LOST_LOOK_S = 1.0
"""likewise, if it did not answer the last time"""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one engine did not get an update."""

    phase: str
    """connect, open, send, read or commit"""
    words: str
    """the engine's own, with its address"""

    def __str__(self) -> str:
        return f"in {self.phase}: {self.words}"


class Replica:
    """One engine. Its calls run on a thread of its own: they keep their order, and no engine waits for another."""

    def __init__(self, control: UpdateControl) -> None:
        self.control, self.address = control, control.address
        self._lane = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollsync-send")
        self.is_lost = False
        """it did not answer the last time"""

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        return self._lane.submit(call, *args)

    def words(self, error: BaseException) -> str:
        """What an error says of this engine."""
        self.is_lost = self.is_lost or isinstance(error, EngineLost)
        said = f"{error}" if isinstance(error, UpdateError) else f"{type(error).__name__}: {error}"
        return said if self.address in said else f"{self.address}: {said}"

    def look(self) -> dict[str, Any]:
        """What it holds; an engine that is down costs LOOK_S once, and then little."""
        found = self.control.look(LOST_LOOK_S if self.is_lost else LOOK_S)
        self.is_lost = False
        return found

    def close(self) -> None:
        self._lane.shutdown()
        if isinstance(self.control, HttpControl):
            self.control.close()


class Round:
    """One update on its way to several engines: who is still in it, and why the others are not.

    Args:
        required: with fewer left in it, the round is over for all.
    """

    def __init__(self, ranks: Ranks, replicas: Sequence[Replica], required: int) -> None:
        self._ranks, self.required = ranks, required
        self._all = list(replicas)
        self.live = list(replicas)
        self.failed: dict[str, Failure] = {}
        """by address"""
        self.ids: dict[str, str] = {}
        """of the engines' updates, by address, once they are open"""

    def each(self, phase: str, call: Callable[[Replica], T], *, lead: bool = False) -> dict[str, T]:
        """`call` for every engine at once, on every rank (`lead`: on rank 0 only); rank 0's values by address."""

        def work(failed: dict[str, str]) -> dict[str, T]:
            if lead and self._ranks.rank > 0:
                return {}
            futures = [(replica, replica.submit(call, replica)) for replica in self.live]
            values = {}
            for replica, future in futures:
                try:
                    values[replica.address] = future.result()
                except Exception as error:  # told by `agree`
                    failed[replica.address] = replica.words(error)
            return values

        values = self.agree(phase, work)[0]
        return {replica.address: values[replica.address] for replica in self.live}

    def agree(self, phase: str, work: Callable[[dict[str, str]], T]) -> list[T]:
        """`work` on every rank, which notes the engines that fail it by address. An engine that failed on one rank is out on all.

        Returns:
            Each rank's value.

        Raises:
            UpdateError: on every rank alike, if a rank itself failed, or too few engines are left.
        """
        failed: dict[str, str] = {}
        outcome: tuple[Any, str | None] = (None, None)
        try:
            outcome = (work(failed), None)
        except Exception as error:  # raised on every rank below
            outcome = (None, f"{error}" if isinstance(error, UpdateError) else f"{type(error).__name__}: {error}")
        told = self._ranks.gather((outcome, failed))
        for rank, ((_, trouble), _) in enumerate(told):
            if trouble is not None:
                self._give_up(phase, trouble + self._where(rank))
                raise UpdateError(f"weight update failed in {phase}{self._where(rank)}: {trouble}")
        for rank, (_, failures) in enumerate(told):
            for address, words in failures.items():
                self.failed.setdefault(address, Failure(phase, words + self._where(rank)))
        self.live = [replica for replica in self.live if replica.address not in self.failed]
        if len(self.live) < self.required:
            self._give_up(phase, f"given up, because only {len(self.live)} of {self.required} engines required could take it")
            raise UpdateError(self.message())
        return [value for (value, _), _ in told]

    def _where(self, rank: int) -> str:
        return f" (on trainer rank {rank})" if self._ranks.size > 1 else ""

    def _give_up(self, phase: str, words: str) -> None:
        for replica in self.live:
            self.failed[replica.address] = Failure(phase, f"{replica.address}: {words}")
        self.live = []

    def message(self) -> str:
        """All failures as one text."""
        if len(self._all) == 1:
            return f"weight update failed {'; '.join(map(str, self.failed.values()))}"
        return f"weight update failed on {len(self.failed)} of {len(self._all)} engines: {'; '.join(map(str, self.failed.values()))}"


class Flights:
    """What is on its way to engines from each buffer of one rank. An engine that fails is noted in `failed`, and gets no more."""

    def __init__(self, replicas: Sequence[Replica], failed: dict[str, str], num_buffers: int) -> None:
        self._replicas, self._failed = replicas, failed
        self._flying: list[dict[Replica, Callable[[], Any]]] = [{} for _ in range(num_buffers)]

    @property
    def still(self) -> list[Replica]:
        """Those that have not failed."""
        return [replica for replica in self._replicas if replica.address not in self._failed]

    def launch(self, index: int, begin: Callable[[Replica], Callable[[], Any]]) -> None:
        """`begin` for each of them what reads buffer `index`; what it returns waits for the end of that."""
        for replica in self.still:
            with self._noted(replica):
                self._flying[index][replica] = begin(replica)

    def land(self, index: int) -> None:
        """Wait until that buffer is free."""
        for replica, wait in self._flying[index].items():
            with self._noted(replica):
                wait()
        self._flying[index] = {}

    @contextlib.contextmanager
    def _noted(self, replica: Replica) -> Iterator[None]:
        """An error within is that engine's."""
        try:
            yield
        except Exception as error:  # told by the round; the source goes on, for the other engines and ranks
            self._failed.setdefault(replica.address, replica.words(error))

    def land_all(self) -> None:
        for index in range(len(self._flying)):
            self.land(index)
