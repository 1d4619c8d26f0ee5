"""Rank 0's end of the other ranks: starts their processes, talks to them, and notices when one ends."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from multiprocessing.connection import wait
from typing import Any

from ..errors import EngineDead, RollsyncError
from ..wire import error_from_wire
from .lifeline import exit_words
from .rank_wire import fault_from_wire
from .worker import Channel

START_TIMEOUT_S = 300.0
"""for a rank to load its share"""
CALL_TIMEOUT_S = 120.0
"""for a rank to read what it is sent, and to answer; what moves weights has `WEIGHTS_TIMEOUT_S`"""
WEIGHTS_TIMEOUT_S = 600.0
BLAME_S = 1.0
"""how long to look for the rank that began it, once one says that it lost another"""
END_S = 1.5
"""for a rank to end by itself"""


class _Rank:
    """One child: its process, and what it said."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.rank, self.process, self.channel = rank, process, channel
        self.said: dict[str, Future[Any]] = {"hello": Future(), "ready": Future()}
        self.pending: dict[int, Future[Any]] = {}
        self.ended = False


class RankProcesses:
    """Ranks 1 .. size - 1, started at once; they load nothing before `begin`. No torch here: it is imported on all ranks at one time.

    One thread starts them and hears them, since the kernel ends a child with the thread that started it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.store_fd, self.bytes_fd = (os.memfd_create(f"rollsync-{name}", os.MFD_CLOEXEC) for name in ("ranks", "chunks"))
        """see TPGroup and SharedBytes"""
        self._ranks: list[_Rank] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._started: Future[None] = Future()
        self._suspect: tuple[str, float] | None = None
        """a rank that says it lost another, and until when to look for that one"""
        self._closing = False
        self._lost: Callable[[], RollsyncError] | None = None
        """makes what tells why the ranks are gone, once they are (an error that is raised twice would keep what both had at hand)"""
        self._thread = threading.Thread(target=self._main, name="rollsync-ranks", daemon=True)
        self._thread.start()
        self._started.result(START_TIMEOUT_S)

    # The thread

    def _main(self) -> None:
        try:
            self._ranks = [self._spawn(rank) for rank in range(1, self.size)]
        except BaseException as error:  # thread edge: the constructor raises it
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        while any(not rank.ended for rank in self._ranks):
            self._hear()

    def _spawn(self, rank: int) -> _Rank:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(CALL_TIMEOUT_S), 0))
        fds = (theirs.fileno(), self.store_fd, self.bytes_fd)
        command = [sys.executable, "-m", "rollsync.rollout.engine.worker", *map(str, (rank, self.size, os.getpid(), *fds))]
        with theirs:
            process = subprocess.Popen(
                command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0
            )  # a terminal's Ctrl-C reaches rank 0 only
        return _Rank(rank, process, Channel(ours.detach()))

    def _hear(self) -> None:
        by_connection = {rank.channel.connection: rank for rank in self._ranks if not rank.ended}
        for connection in wait(list(by_connection), timeout=0.1 if self._suspect else None):
            rank = by_connection[connection]  # type: ignore[index]
            try:
                self._handle(rank, *rank.channel.receive())
            except (EOFError, OSError):
                rank.ended = True
                rank.channel.connection.close()
                if not self._closing:
                    self._lose(f"tensor parallel rank {rank.rank} (pid {rank.process.pid}) ended: {self._how(rank)}")
        if self._suspect is not None and time.monotonic() > self._suspect[1]:
            self._lose(self._suspect[0])

    @staticmethod
    def _how(rank: _Rank) -> str:
        try:
            return exit_words(rank.process.wait(END_S))
        except subprocess.TimeoutExpired:
            return "it closed its socket"

    def _handle(self, rank: _Rank, kind: str, *message: Any) -> None:
        if kind in rank.said:
            rank.said[kind].set_result(message)
        elif kind == "failed":
            self._failed(rank, message[0])
        else:
            with self._lock:
                future = rank.pending.pop(message[0], None)
            if future is not None and kind == "reply":
                future.set_result(message[1])
            elif future is not None:
                future.set_exception(fault_from_wire(message[1], rank.rank))

    def _failed(self, rank: _Rank, fault: list[Any]) -> None:
        words = f"tensor parallel rank {rank.rank} (pid {rank.process.pid}) failed"
        if fault[0] == "lost":
            self._suspect = self._suspect or (f"{words}: {fault[1]}", time.monotonic() + BLAME_S)
            rank.ended = True
            rank.channel.connection.close()
            return
        if fault[0] == "named":
            self._lose(words, lambda: error_from_wire(fault[1]))
        else:
            self._lose(f"{words}: {fault_from_wire(fault, rank.rank)}")

    def _lose(self, words: str, error: Callable[[], RollsyncError] | None = None) -> None:
        """One is gone, so all go: the others could only wait for it."""
        if self._lost is None and not self._closing:
            self._lost = error or (lambda: EngineDead(words))
        self._suspect = None
        self._fail_pending()
        for rank in self._ranks:
            rank.process.kill()

    def _fail_pending(self) -> None:
        with self._lock:
            pending = [future for rank in self._ranks for future in (*rank.pending.values(), *rank.said.values())]
            for rank in self._ranks:
                rank.pending.clear()
        for future in pending:
            if not future.done():
                future.set_exception(self.lost or EngineDead("the engine is closed"))

    # Rank 0's calls

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    @property
    def lost(self) -> RollsyncError | None:
        """Why the ranks are gone, once they are."""
        return self._lost() if self._lost is not None else None

    def check(self) -> None:
        """Raise what ended them, if they ended."""
        if self._lost is not None:
            raise self._lost()

    def why_lost(self, patience_s: float = BLAME_S + END_S) -> RollsyncError | None:
        """What ended them, for which it may take a moment to show; None if they live."""
        deadline = time.monotonic() + patience_s
        while self._lost is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.lost

    def wait_said(self, what: str) -> list[Any]:
        """Wait for every rank to say "hello" or "ready"; what came with it."""
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            return [rank.said[what].result(max(0.0, deadline - time.monotonic())) for rank in self._ranks]
        except TimeoutError:
            raise EngineDead(f"the tensor parallel ranks did not say {what!r} within {START_TIMEOUT_S:g} s of their start") from None

    def begin(self, settings: dict[str, Any]) -> None:
        """Once all are there, let them load.

        Args:
            settings: of their configuration (`EngineConfig.to_flat`), with every default filled in.
        """
        self.wait_said("hello")
        self.post(settings)

    def post(self, *message: Any) -> None:
        """Send to all, expecting no answer."""
        self.check()
        for rank in self._ranks:
            self._tell(rank, *message)

    def call(self, name: str, args: list[Any], own: Callable[[], Any], *, timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """Call all ranks, `own` being rank 0's part. Their values in order of rank; all are waited for before an error is raised.

        Rank 0's part has deadlines of its own; the others have `timeout_s` more, since what they wait for may be what it waits for.

        Raises:
            EngineDead: a rank ended, or did not answer in time. Else what the first one raised.
        """
        return self._call(range(self.size), name, args, own, timeout_s)

    def call_one(self, rank: int, name: str, args: list[Any], own: Callable[[], Any], *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """`call`, of one rank."""
        return self._call([rank], name, args, own, timeout_s)[0]

    def _call(self, ranks: Sequence[int], name: str, args: list[Any], own: Callable[[], Any], timeout_s: float) -> list[Any]:
        self.check()
        futures = {rank: self._send(self._ranks[rank - 1], name, args) for rank in ranks if rank}
        values: dict[int, Any] = {}
        errors: list[Exception] = []
        if 0 in ranks:
            try:
                values[0] = own()
            except Exception as error:  # raised below, once the others are through
                errors.append(error)
        late = futures_wait(futures.values(), timeout_s).not_done
        for rank, future in futures.items():
            if future in late:
                self._lose(f"tensor parallel rank {rank} did not answer {name} within {timeout_s:g} s")
                raise self.lost or EngineDead("the engine is closed")
            try:
                values[rank] = future.result()
            except Exception as error:
                errors.append(error)
        futures.clear()
        if errors:
            try:
                raise next((e for e in errors if isinstance(e, EngineDead)), errors[0])
            finally:
                errors.clear()  # it holds this frame: were it held in turn, what it is about (sockets) would stay open for a while
        return [values[rank] for rank in ranks]

    def _send(self, rank: _Rank, name: str, args: list[Any]) -> Future[Any]:
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            rank.pending[number] = future
        self._tell(rank, "call", number, name, args)
        return future

    def _tell(self, rank: _Rank, *message: Any) -> None:
        """Send to one. Raises EngineDead if it does not read: half a message may be under way, so the ranks are lost."""
        try:
            rank.channel.send(*message)
        except OSError:
            if self.why_lost() is None:
                self._lose(f"tensor parallel rank {rank.rank} (pid {rank.process.pid}) does not read")
            raise self.lost or EngineDead("the engine is closed") from None

    def close(self) -> None:
        """End them all; returns when they are gone. Twice is fine."""
        if self._closing:
            return
        self._closing = True
        for rank in self._ranks:
            try:
                rank.channel.send("close")
            except (OSError, ValueError):  # it is gone, or its channel is
                rank.process.kill()
        deadline = time.monotonic() + END_S
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        self._fail_pending()
        self._thread.join(END_S)
        os.close(self.store_fd)
        os.close(self.bytes_fd)
