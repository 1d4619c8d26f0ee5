"""Lanes: order within one, none held up by another, and few threads however many there are."""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import Any

import pytest
from rollsync.rollout.engine import lanes as lanes_module
from rollsync.rollout.engine.lanes import Lanes
from rollsync.rollout.errors import IllegalState, RollsyncError


def threads() -> int:
    return sum(t.name == "rollsync-lane" for t in threading.enumerate())


def wait_for_threads(count: int) -> None:
    end = time.monotonic() + 10
    while threads() != count and time.monotonic() < end:
        time.sleep(0.01)
    assert threads() == count


def test_work_keeps_its_order_and_a_stuck_lane_holds_up_no_other() -> None:
    lanes, done, let_go = Lanes(), queue.SimpleQueue[Any](), threading.Event()
    lanes.submit("stuck", lambda: let_go.wait(20), done.put)
    for i in range(50):
        lanes.submit("a", lambda i=i: ("a", i), done.put)
        lanes.submit("b", lambda i=i: ("b", i), done.put)
    found = [done.get(timeout=20) for _ in range(100)]
    assert all([n for lane, n in found if lane == name] == list(range(50)) for name in "ab")
    let_go.set()
    assert done.get(timeout=20) is True
    lanes.close()


def test_threads_go_from_lane_to_lane_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "IDLE_S", 0.2)
    lanes, done = Lanes(), queue.SimpleQueue[Any]()
    wait_for_threads(0)  # those of earlier tests have ended
    for i in range(200):
        lanes.submit(f"update {i}", lambda i=i: i, done.put)
        assert done.get(timeout=20) == i
        assert threads() <= 2  # one may just be on its way to being idle
    wait_for_threads(0)
    monkeypatch.setattr(lanes_module, "IDLE_S", 3600)
    lanes.submit("late", lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), done.put)
    assert done.get(timeout=20) == os.getpriority(os.PRIO_PROCESS, 0) + lanes_module.NICE
    lanes.close()
    wait_for_threads(0)
    lanes.submit("closed", lambda: None, done.put)
    assert isinstance(done.get(timeout=5), IllegalState)


def test_a_lane_without_a_thread_says_so_and_works_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lanes, done = Lanes(), queue.SimpleQueue[Any]()
    monkeypatch.setattr(threading.Thread, "start", start)
    lanes.submit("a", lambda: 1, done.put)
    assert "can't start new thread" in str(done.get(timeout=5))
    monkeypatch.undo()
    lanes.submit("a", lambda: 2, done.put)
    assert done.get(timeout=20) == 2
    lanes.close()


def test_what_work_raises_is_an_answer_and_what_a_reply_raises_ends_nothing() -> None:
    lanes, done = Lanes(), queue.SimpleQueue[Any]()

    def broken(value: Any = None) -> None:
        raise OSError("it fell over")

    lanes.submit("a", broken, done.put)
    assert isinstance(error := done.get(timeout=20), RollsyncError) and "it fell over" in str(error)
    lanes.submit("a", lambda: 1, broken)
    lanes.submit("a", lambda: 2, done.put)
    assert done.get(timeout=20) == 2
    lanes.close()
