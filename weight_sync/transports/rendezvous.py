"""How the ranks of a group find each other: a key-value store (torch's TCPStore) that one of them hosts, and what they write there.

Three layouts of keys are understood, so that trainers written for other engines can join: `native` (this package's own: every rank
says its size and backend, and failures are told), `plain` (a process group right on the store, as vLLM's clients make it) and `torch`
(torch.distributed's own prefixes, as SGLang's clients make it).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed

from ..names import GroupError

dist: Any = torch.distributed

POLL_S = 0.01
VLLM_ID_KEY = "broadcast_from/0/0"
"""where vLLM's trainer puts its NCCL id"""


def words(error: BaseException) -> str:
    """The first line of a torch error, without the stack and source places it carries."""
    line = str(error).strip().split("\n")[0] or type(error).__name__
    line = line.rpartition("] ")[2] if "[/" in line and "] " in line else line
    return line.split(". This is typically", 1)[0]


class Store:
    """One rank's connection to the store; the host's also is the server. Not for use by two threads at once.

    Raises:
        GroupError: the port is taken, or nobody answered there within `timeout_s`.
    """

    def __init__(self, raw: Any, name: str, host: str, port: int) -> None:
        self.raw, self.name, self.host, self.port = raw, name, host, port

    @classmethod
    def bind(cls, name: str, host: str, port: int = 0) -> Store:
        """Host a store on `host`; port 0 takes a free one. Returns at once."""
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise GroupError("binding", name, host, port, str(error)) from None
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(64)
            port = listener.getsockname()[1]
        except OSError as error:
            listener.close()
            raise GroupError("binding", name, host, port, f"{error.strerror}; give another port, or 0 for a free one") from None
        limit = timedelta(seconds=5)
        raw = dist.TCPStore(host, port, None, True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach())
        return cls(raw, name, host, port)

    @classmethod
    def connect(cls, name: str, host: str, port: int, size: int, timeout_s: float, gone: Callable[[], bool] = lambda: False) -> Store:
        """Reach a store that another rank hosts, or will within `timeout_s`."""
        began = time.monotonic()
        while True:
            left = began + timeout_s - time.monotonic()
            try:
                # Tried here first: torch's own attempt doubles its timeout and writes a stack trace for every failure.
                socket.create_connection((host, port), max(0.05, min(left, 2.0))).close()
                raw = dist.TCPStore(host, port, size, False, timeout=timedelta(seconds=max(left, 0.5)), wait_for_workers=True)
                return cls(raw, name, host, port)
            except socket.gaierror as error:
                raise GroupError("connecting", name, host, port, str(error), elapsed_s=time.monotonic() - began) from None
            except (OSError, RuntimeError) as error:
                if left <= 0 or gone():
                    cause = "it was closed" if gone() else f"nobody answers there ({words(error)})"
                    raise GroupError("connecting", name, host, port, cause, elapsed_s=time.monotonic() - began) from None
            time.sleep(0.05)

    @property
    def local_host(self) -> str:
        """The address of this host by which the store's host is reached: where this rank can be reached in turn."""
        family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            found: str = probe.getsockname()[0]
            return found

    def prefixed(self, layout: str, backend: str) -> Any:
        """The part of the store in which that layout's process group meets."""
        if layout == "torch":
            inner = dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, self.raw))
            return dist.PrefixStore("cuda/" if backend == "nccl" else "cpu/", inner)
        return self.raw if layout == "plain" else dist.PrefixStore(f"rollsync/{self.name}", self.raw)

    def has(self, layout: str, backend: str, key: str) -> bool:
        found: bool = self.prefixed(layout, backend).check([key])
        return found

    def find_layout(self, backend: str) -> str | None:
        """By what rank 0 has written so far; None if it has not."""
        if self.has("native", backend, "hello/0"):
            return "native"
        if self.has("plain", backend, VLLM_ID_KEY if backend == "nccl" else "0/0"):
            return "plain"
        return "torch" if backend == "gloo" and self.has("torch", backend, "0/0") else None


def _hello(size: int, backend: str) -> dict[str, Any]:
    return {"size": size, "backend": backend, "pid": os.getpid(), "host": socket.gethostname()}


def meet(store: Store, rank: int, size: int, backend: str, deadline: float, layout: str | None, gone: Callable[[], bool]) -> str:
    """Wait until every rank is there and agrees on size and backend; the layout they use.

    Args:
        deadline: time.monotonic() by which they must be.
        layout: None finds out by what rank 0 writes.
        gone: true once this rank is not wanted any more.

    Raises:
        GroupError: naming who is missing or disagrees.
    """
    began = time.monotonic()

    def fail(cause: str, peer: str = "") -> GroupError:
        return GroupError("joining", store.name, store.host, store.port, cause, peer=peer, elapsed_s=time.monotonic() - began)

    while layout is None and rank != 0:
        layout = store.find_layout(backend)
        if layout is None:
            if gone() or time.monotonic() > deadline:
                raise fail("it was closed" if gone() else "it did not join in time", "rank 0")
            time.sleep(POLL_S)
    layout = layout or "native"
    if layout != "native":
        return layout
    own = store.prefixed("native", backend)
    own.set(f"hello/{rank}", json.dumps(_hello(size, backend)))
    for peer in range(size):
        while not own.check([f"hello/{peer}"]):
            if gone() or time.monotonic() > deadline:
                raise fail("it was closed" if gone() else "it did not join in time", f"rank {peer}")
            time.sleep(POLL_S)
        theirs = json.loads(own.get(f"hello/{peer}"))
        for what, mine in (("size", size), ("backend", backend)):
            if theirs.get(what) != mine:
                raise fail(f"{what} is {theirs.get(what)} there and {mine} here", f"rank {peer} (pid {theirs.get('pid')})")
    return layout
