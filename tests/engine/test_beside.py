"""What runs beside the engine's thread: given up in time, and over before memory goes."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest
from live import OPTIONS, request, tensors_of, write_versions
from rollsync import Engine
from rollsync.rollout.engine import loop as loop_module
from rollsync.rollout.engine.loop import EngineLoop
from rollsync.rollout.errors import IllegalState
from rollsync.weight_sync.boxes import Box
from rollsync.weight_sync.manifest import Manifest, TensorEntry, TensorSlice, plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_versions(tmp_path_factory.mktemp("beside"), 1)[0]


def manifest_of(folder: str, bucket_bytes: int = 1 << 30) -> Manifest:
    tensors = tensors_of(folder).items()
    return plan([TensorEntry(n, "float32", tuple(t.shape), (TensorSlice(0, Box.whole(t.shape)),)) for n, t in tensors], bucket_bytes)


class Sink:
    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class Gate:
    """A loop whose steps wait."""

    def __init__(self, folder: str) -> None:
        self.gate, self.in_step = threading.Event(), threading.Event()
        self.loop = EngineLoop(lambda: self.build(folder), Sink())
        self.loop.start()
        while self.loop._control is None:
            time.sleep(0.01)

    def build(self, folder: str) -> Engine:
        engine = Engine(folder, **OPTIONS)
        step = engine.step

        def slow() -> Any:
            self.in_step.set()
            assert self.gate.wait(20)
            return step()

        engine.step = slow  # type: ignore[method-assign]
        return engine

    def open(self, folder: str) -> Any:
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.loop.aside("open", "open_manifest", {"manifest": manifest_of(folder).to_wire()}, done.put)
        return done


def test_an_open_that_was_given_up_is_not_carried_out_later(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "COMMAND_S", 0.2)
    gate = Gate(folder)
    gate.loop.submit(request("r"))
    assert gate.in_step.wait(20)
    refused = gate.open(folder).get(timeout=20)
    assert isinstance(refused, IllegalState) and "did not come to open_update within 0.2 s" in str(refused)
    gate.gate.set()
    monkeypatch.setattr(loop_module, "COMMAND_S", 20)
    assert gate.open(folder).get(timeout=20)["state"] == "open", "the first one would be in its way"
    gate.loop.close()


def test_a_chunk_being_taken_in_and_digests_are_over_before_the_weights_go(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(folder, **OPTIONS)
    manifest = manifest_of(folder)
    update = engine.control.open_update(manifest)
    updates = engine.runner.updates
    take, at_it, let_go, over = type(updates._open.target).take, threading.Event(), threading.Event(), []  # type: ignore[union-attr]

    def slow(*args: Any) -> Any:
        at_it.set()
        assert let_go.wait(20)
        over.append("taken")
        return take(*args)

    monkeypatch.setattr(type(updates._open.target), "take", slow)  # type: ignore[union-attr]
    data = bytes(manifest.buckets[0].nbytes)
    thread = threading.Thread(target=lambda: engine.control.take_chunk(update.id, 0, 0, {"data": data}))
    thread.start()
    assert at_it.wait(20)
    closing = threading.Thread(target=lambda: (engine.close(), over.append("closed")))
    closing.start()
    time.sleep(0.2)
    assert not over
    let_go.set()
    closing.join(20)
    thread.join(20)
    assert over[-1] == "closed" and "taken" in over
    with pytest.raises(ValueError, match="closing"):
        updates.digests()
