"""Groups of a sender and an engine: formed and torn down at will, and every failure an error in time, on both sides."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
from rollsync.weight_sync.boxes import Box
from rollsync.weight_sync.manifest import ChunkError, Manifest, TensorEntry, TensorSlice, plan
from rollsync.weight_sync.transports.collective import Group, form
from rollsync.weight_sync.transports.groups import CollectiveLink, Groups
from rollsync.weight_sync.transports.rendezvous import GroupError, Store

HERE = "127.0.0.1"


@pytest.fixture
def engine() -> Iterator[Groups]:
    """The groups of an engine's rank."""
    groups = Groups()
    yield groups
    groups.close()


def open_files() -> tuple[int, int]:
    """Threads and descriptors of this process, once destructors have run."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def meet(engine: Groups, name: str = "g", timeout_s: float = 10.0, **facts: Any) -> tuple[Group, Group]:
    """(sender's end, engine's end) of a new group."""
    host, port = engine.bind(name, HERE)
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(lambda: form(Store.connect(name, host, port, 2, timeout_s), 0, 2, timeout_s=timeout_s, layout="native"))
        ours = engine.join(name, host=host, port=port, rank=1, world_size=2, timeout_s=timeout_s, **facts)
        return theirs.result(), ours


def test_a_group_is_formed_again_and_again_and_leaves_nothing(engine: Groups) -> None:
    """The old one is not even closed: its trainer was killed, so to speak, and came back."""
    before: tuple[int, int] | None = None
    for i in range(20):
        sender, receiver = meet(engine)
        sent, got = torch.full((1000,), i, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
        operation = sender.broadcast(sent)
        receiver.broadcast(got).wait()
        operation.wait()
        assert torch.equal(sent, got)
        sender.close()
        if i == 2:
            before = open_files()
    engine.close()
    end = time.monotonic() + 5
    while (found := open_files()) > before and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.05)
    assert all(now <= then for now, then in zip(found, before, strict=True))  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_an_error_at_once_and_another_one_works(engine: Groups) -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(GroupError, match=rf"{HERE}:{port} .*in use.*another port"):
            engine.bind("g", HERE, port)
    host, given = engine.bind("g", HERE, port)
    assert (host, given) == (HERE, port)
    assert engine.bind("h", HERE)[1] not in (0, port)


@pytest.mark.parametrize("who", ["nobody hosts it", "the sender never comes", "a name that is none"])
def test_a_group_that_is_not_formed_says_where_and_who_is_missing(engine: Groups, who: str) -> None:
    host, port = (HERE, 1) if who == "nobody hosts it" else engine.bind("g", HERE) if "sender" in who else ("no.such.host.invalid", 9)
    words = {"nobody hosts it": "nobody answers there", "the sender never comes": "with rank 0 .*did not join in time"}
    began = time.monotonic()
    with pytest.raises(GroupError, match=f"'g' at {host}:{port}.*{words.get(who, 'Name or service|resolution')}"):
        engine.join("g", host=host, port=port, rank=1, world_size=2, timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert engine.status() == {}
    assert meet(engine)


@pytest.mark.parametrize(("fact", "words"), [({"size": 3}, "size is 3 there and 2 here"), ({"backend": "nccl"}, "backend is nccl there")])
def test_ranks_that_disagree_are_told_so_at_once(engine: Groups, fact: dict[str, Any], words: str) -> None:
    host, port = engine.bind("g", HERE)
    facts = {"size": 2, "backend": "gloo", **fact}

    def sender() -> Group:
        return form(Store.connect("g", host, port, 2, 2), 0, facts["size"], backend=facts["backend"], timeout_s=2, layout="native")

    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(sender)
        with pytest.raises(GroupError, match=words):
            engine.join("g", host=host, port=port, rank=1, world_size=2, timeout_s=30)
        with pytest.raises((GroupError, RuntimeError)):
            theirs.result()


def test_forming_or_leaving_a_group_ends_a_join_that_waits(engine: Groups) -> None:
    for end in (lambda: engine.leave("g"), lambda: engine.bind("g", HERE)):
        host, port = engine.bind("g", HERE)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(engine.join, "g", host=host, port=port, rank=1, world_size=2, timeout_s=60)
            time.sleep(0.1)
            end()
            with pytest.raises(GroupError, match="closed"):
                waits.result(5)
    assert meet(engine)


SENDER = """
import sys, time, torch
from rollsync.weight_sync.transports.collective import form
from rollsync.weight_sync.transports.rendezvous import Store
group = form(Store.connect("g", "127.0.0.1", int(sys.argv[1]), 2, 30), 0, 2, timeout_s=30, layout="native")
group.broadcast(torch.ones(1000, dtype=torch.uint8)).wait()
print("sent", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_that_dies_or_freezes_is_an_error_in_time(engine: Groups, fate: signal.Signals) -> None:
    host, port = engine.bind("g", HERE)
    process = subprocess.Popen([sys.executable, "-c", SENDER, str(port)], stdout=subprocess.PIPE)
    try:
        receiver = engine.join("g", host=host, port=port, rank=1, world_size=2, timeout_s=30)
        got = torch.zeros(1000, dtype=torch.uint8)
        receiver.broadcast(got).wait()
        assert got.all()
        assert process.stdout is not None and process.stdout.readline()
        operation = receiver.broadcast(got, what="bucket 1")
        process.send_signal(fate)
        began = time.monotonic()
        with pytest.raises(GroupError, match=r"'g' at 127.0.0.1:\d+ with rank 0 \(bucket 1\) failed after"):
            operation.wait(1.0)
        assert time.monotonic() - began < 5
        with pytest.raises(GroupError, match="form it anew"):
            engine.get("g")
        assert meet(engine), "it is formed anew while the old sender is still frozen"
    finally:
        process.kill()
        process.wait()


def test_closing_ends_what_waits_in_other_threads_on_both_sides(engine: Groups) -> None:
    sender, receiver = meet(engine, timeout_s=60)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(receiver.broadcast(torch.zeros(9)).wait), pool.submit(sender.recv(torch.zeros(9), 1).wait)]
        time.sleep(0.1)
        engine.leave("g")
        for wait in waits:
            with pytest.raises(GroupError, match="failed after"):
                wait.result(5)
    assert sender.closed_because and receiver.closed_because == "this side left it"


def manifest(count: int) -> Manifest:
    entries = [TensorEntry(f"t{i}", "float32", (64,), (TensorSlice(0, Box.whole((64,))),)) for i in range(count)]
    return plan(entries, 256)


def link_to(group: Group, buckets: Manifest) -> CollectiveLink:
    known = {(b.sender, b.sequence): b for b in buckets.buckets}

    def bucket(sender: int, sequence: int) -> Any:
        if (sender, sequence) not in known:
            raise ChunkError("no such chunk")
        return known[sender, sequence]

    return CollectiveLink([group], bucket)


def test_buckets_arrive_in_order_and_the_next_one_is_on_its_way(engine: Groups) -> None:
    sender, receiver = meet(engine)
    buckets = manifest(5)
    link = link_to(receiver, buckets)
    values = [torch.full((256,), i, dtype=torch.uint8) for i in range(5)]
    with pytest.raises(ChunkError, match="0 is"):
        link.view(buckets.buckets[1], {})
    operations = [sender.broadcast(v) for v in values[:2]]
    assert bytes(link.view(buckets.buckets[0], {})) == bytes(values[0].numpy())
    operations[1].wait(5)  # nobody asked for bucket 1 yet
    for v in values[2:]:
        sender.broadcast(v)
    for b, v in zip(buckets.buckets[1:], values[1:], strict=True):
        assert bytes(link.view(b, {})) == bytes(v.numpy())
    link.close()
    assert not receiver.closed_because, "a group outlives an update that went well"


def test_an_update_that_ends_early_costs_its_group_and_blocks_nobody(engine: Groups) -> None:
    _, receiver = meet(engine, timeout_s=60)
    buckets = manifest(3)
    link = link_to(receiver, buckets)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(link.view, buckets.buckets[0], {})
        time.sleep(0.1)
        link.close()
        with pytest.raises(GroupError, match="an update ended"):
            waits.result(5)
    assert link.lost()


@pytest.mark.parametrize("moment", ["before it receives", "between two receives"])
def test_an_end_that_falls_between_receives_leaves_none_to_swallow_the_next_updates_bucket(engine: Groups, moment: str) -> None:
    sender, receiver = meet(engine)
    buckets = manifest(2)
    known, ended = {(b.sender, b.sequence): b for b in buckets.buckets}, []

    def bucket(sender: int, sequence: int) -> Any:
        if sequence == 1 and not ended:
            link.close()  # the engine's thread, while the receiving one is about to begin the next
            ended.append(sequence)
        return known[sender, sequence]

    link = CollectiveLink([receiver], bucket)
    if moment == "before it receives":
        link.close()
        with pytest.raises(ChunkError, match="over"):
            link.view(buckets.buckets[0], {})
        assert not receiver.closed_because, "nothing was begun: the group is good for the next update"
        return
    sender.broadcast(torch.zeros(256, dtype=torch.uint8))
    with pytest.raises(GroupError, match="an update ended"):
        link.view(buckets.buckets[0], {})
    assert ended == [1] and receiver.closed_because


def foreign(layout: str, name: str, size: int, listening: Callable[[int], None], timeout: timedelta) -> Any:
    """The process group of a trainer that was written for another engine; it hosts the store."""
    store = torch.distributed.TCPStore(HERE, 0, size, True, timeout=timeout, wait_for_workers=False)
    listening(store.port)
    if layout == "torch":  # as torch.distributed nests its prefixes
        store = torch.distributed.PrefixStore(name, store)
        store = torch.distributed.PrefixStore("cpu/", torch.distributed.PrefixStore(f"{name}/", store))
    return torch.distributed.ProcessGroupGloo(store, 0, size, timeout)


@pytest.mark.parametrize("layout", ["plain", "torch"])
def test_trainers_of_other_engines_host_the_group_and_are_understood(engine: Groups, layout: str) -> None:
    port: list[int] = []
    told = threading.Event()

    def listening(number: int) -> None:
        port.append(number)
        told.set()

    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(foreign, layout, "g", 2, listening, timedelta(seconds=10))
        assert told.wait(10)
        receiver = engine.join("g", host=HERE, port=port[0], rank=1, world_size=2, timeout_s=10)
        trainer = theirs.result(10)
    sent, got = torch.arange(100, dtype=torch.float32), torch.zeros(400, dtype=torch.uint8)
    work = trainer.broadcast(sent.view(torch.uint8), 0)
    receiver.broadcast(got).wait()
    work.wait()
    assert torch.equal(got.view(torch.float32), sent)
