"""Calls that bring many chunks, with an engine in this process: what becomes of them when something goes wrong in the middle."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rollsync import Engine
from rollsync.rollout.errors import IllegalState
from rollsync.rollout.selftest.model import write_model
from rollsync.weight_sync.boxes import Box
from rollsync.weight_sync.control import UpdateError
from rollsync.weight_sync.digest import tensor_digest
from rollsync.weight_sync.manifest import Manifest, TensorEntry, TensorSlice, plan
from rollsync.weight_sync.sender import WeightSender
from rollsync.weight_sync.sources import TensorSource
from rollsync.weight_sync.transports.ipc import SharedBuffers
from rollsync.weight_sync.transports.notes import Notes
from safetensors.torch import load_file

BUCKET_BYTES = 20_000


class Local:
    """An engine of this process as a sender sees one. `lose`: replies of chunk calls that are lost once they are carried out."""

    def __init__(self, engine: Engine) -> None:
        self.address, self._control, self.calls, self.lose = "here", engine.control, list[int](), 0

    def look(self, timeout_s: float) -> dict[str, Any]:
        return {"version": self._control.lifecycle.version, "valid": True, "epoch": 0, "instance": "here"}

    def require(self, capabilities: Any) -> None: ...

    def release(self, update_id: str) -> None: ...

    def open(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._control.open_update(**body).status()

    def chunk(self, update_id: str, sender: int, sequence: int, count: int, **where: Any) -> dict[str, Any]:
        self.calls.append(sequence)
        try:
            reply = self._control.take_chunk(update_id, sender, sequence, where, count)
            if self.lose:
                self.lose -= 1
                reply = self._control.take_chunk(update_id, sender, sequence, where, reply["chunks"])
                assert not reply["changed"]
        except ValueError as error:
            raise UpdateError(str(error)) from None
        return reply

    def commit(self, update_id: str, digests: Any) -> dict[str, Any]:
        return self._control.commit_update(update_id, digests)

    def abort(self, update_id: str, reason: str) -> dict[str, Any]:
        return self._control.abort_update(update_id, reason)


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_model(tmp_path_factory.mktemp("runs") / "m", "llama")
    return {"folder": str(folder), "weights": load_file(Path(folder) / "model.safetensors")}


@pytest.fixture(scope="module", params=[1, 2])
def engine(tensors: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(tensors["folder"], block_tokens=4, num_blocks=64, max_model_len=64, threads=1, tp=request.param) as found:
        yield found


def others(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values + 1 for name, values in weights.items()}


def test_a_sender_that_dawdles_and_a_reply_that_is_lost(engine: Engine, tensors: dict[str, Any]) -> None:
    new = others(tensors["weights"])

    class Slow(TensorSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(super().__iter__()):
                if number == len(new) // 2:
                    time.sleep(0.5)  # longer than an engine has patience for
                yield item

    control = Local(engine)
    control.lose = 2
    with WeightSender([control], Slow(new), transport="ipc", bucket_bytes=BUCKET_BYTES) as sender:  # type: ignore[list-item]
        sender.sync()
        assert engine.control.digests() == {name: f"{tensor_digest(values):016x}" for name, values in new.items()}
        assert control.calls[0] == 0 and len(control.calls) == 2, "one call until it dawdled, one after"


class Sending:
    """The sending end by hand: every bucket in memory at once, and notes as a test writes them."""

    def __init__(self, engine: Engine, weights: dict[str, torch.Tensor]) -> None:
        entries = [TensorEntry(n, "float32", tuple(t.shape), (TensorSlice(0, Box.whole(t.shape)),)) for n, t in weights.items()]
        self.manifest: Manifest = plan(entries, BUCKET_BYTES)
        self.count = len(self.manifest.buckets)
        self.buffers, self.notes = SharedBuffers(), Notes()
        self.buffers.num_buffers = self.count
        self.buffers.prepare(max(b.nbytes for b in self.manifest.buckets))
        for index, bucket in enumerate(self.manifest.buckets):
            for piece in bucket.pieces:
                values = weights[self.manifest.tensors[piece.tensor].name][piece.box.slices()].contiguous()
                raw = values.view(-1).view(torch.uint8).numpy().tobytes()
                self.buffers.buffer(index)[piece.start : piece.start + len(raw)] = raw  # type: ignore[index]
        self.control = engine.control
        self.update = self.control.open_update(self.manifest, transport={"name": "ipc", "offers": [self.buffers.offer()]}).id

    def ready(self, *sequences: int) -> None:
        for sequence in sequences:
            self.notes.ready(sequence, self.buffers._offset(sequence))

    def call(self, first: int = 0, **notes: Any) -> dict[str, Any]:
        return self.control.take_chunk(self.update, 0, first, {"notes": {**self.notes.offer(), **notes}}, self.count - first)

    def taken(self) -> list[int]:
        return list(iter(self.notes.taken, None))  # type: ignore[arg-type]

    def close(self) -> None:
        if self.control.find_update(self.update).state == "open":
            self.control.abort_update(self.update)
        self.notes.close()
        self.buffers.close()


@pytest.fixture
def sending(engine: Engine, tensors: dict[str, Any]) -> Iterator[Sending]:
    made = Sending(engine, tensors["weights"])
    yield made
    made.close()


def test_a_bucket_that_is_refused_ends_the_call_and_may_come_again(sending: Sending) -> None:
    sending.ready(0, 1)
    sending.notes.ready(2, -1)
    sending.ready(3)
    with pytest.raises(ValueError, match=r"bytes \[-1, .*are not inside the offered"):
        sending.call()
    assert sending.taken() == [0, 1]
    with pytest.raises(ValueError, match="the sender has chunk 3 ready, but 2 has not come"):
        sending.call(2)
    sending.ready(*range(2, sending.count))
    told = sending.call()  # from the start: what has come is not waited for
    assert told["changed"] and (told["chunks"], told["missing_chunks"]) == (sending.count, 0)
    assert sending.taken() == list(range(sending.count))
    assert sending.control.commit_update(sending.update)["state"] == "committed"


def test_an_update_that_is_ended_ends_the_call_that_waits_in_it(sending: Sending) -> None:
    heard: list[BaseException] = []

    def wait() -> None:
        try:
            sending.call()
        except IllegalState as error:
            heard.append(error)

    sending.ready(0)
    thread = threading.Thread(target=wait)
    thread.start()
    until = time.monotonic() + 10
    while not sending.taken():
        assert time.monotonic() < until
        time.sleep(0.001)
    sending.control.abort_update(sending.update, "an operator says no")
    thread.join(10)
    assert [str(error) for error in heard] == [f"update {sending.update} is aborted (an operator says no): nothing more is taken in"]


def test_a_sender_that_ends_or_shows_other_pipes_is_told_so(sending: Sending) -> None:
    ready, taken = sending.notes.offer().values()
    for notes in ({"ready": [ready[0], taken[1]]}, {"taken": [sending.buffers._pool._fd, taken[1]]}, {"ready": [1 << 20, 1]}):  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="is not the pipe of this sender's notes"):
            sending.call(**notes)
    with pytest.raises(ValueError, match="notes must name ready and taken"):
        sending.call(ready="x")
    with pytest.raises(ValueError, match="chunk 0 is not ready"):
        sending.call()
    sending.ready(0)
    thread = threading.Timer(0.05, sending.notes.close)
    thread.start()
    with pytest.raises(ValueError, match="the sender ended before chunk 1"):
        sending.call()
    thread.join()
    sending.notes = Notes()


def test_transports_that_bring_one_chunk_a_call_say_so(engine: Engine, sending: Sending) -> None:
    engine.control.abort_update(sending.update)
    update = engine.control.open_update(sending.manifest).id
    with pytest.raises(ValueError, match="leave count out"):
        engine.control.take_chunk(update, 0, 0, {}, 2)
