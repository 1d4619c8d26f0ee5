"""Weights from folders: what is loaded is bit for bit a fresh engine of that folder; what is not whole, or not allowed, changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollsync import Engine, RolloutRequest, SamplingParams
from rollsync.rollout.errors import BadRequest, RollsyncError, UpdateRefused
from rollsync.rollout.selftest.model import write_model
from rollsync.weight_sync.boxes import Box
from rollsync.weight_sync.checkpoint_layout import INDEX, MARKER, SINGLE
from rollsync.weight_sync.checkpoint_reader import CheckpointFolder
from rollsync.weight_sync.checkpoint_writer import write_folder
from rollsync.weight_sync.control import UpdateError
from rollsync.weight_sync.manifest import ManifestError
from rollsync.weight_sync.sources import TensorMeta, TensorSource, dtype_name
from safetensors.torch import load_file, save_file

OPTIONS: dict[str, Any] = {"block_tokens": 4, "num_blocks": 64, "max_model_len": 64, "max_batch_tokens": 16, "threads": 1}
TIED = {"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 2}
Q = "model.layers.0.self_attn.q_proj.weight"
Tensors = dict[str, torch.Tensor]


def tensors_of(folder: str | Path) -> Tensors:
    return {n: t for file in sorted(Path(folder).glob("*.safetensors")) for n, t in load_file(file).items()}


def perturbed(tensors: Tensors, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {k: (v.float() + 0.05 * torch.randn(v.shape, generator=generator)).to(v.dtype) for k, v in tensors.items()}


def sample(engine: Engine) -> tuple[list[int], list[float]]:
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    engine.add_request(RolloutRequest(request_id="r", prompt_token_ids=tuple(range(5, 30)), params=params))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs[-1].token_ids, outputs[-1].logprobs


def fresh(folder: Path, **options: Any) -> tuple[Any, dict[str, str]]:
    """What an engine started from the folder samples, and its digests."""
    with Engine(str(folder), **OPTIONS, **options) as engine:
        return sample(engine), engine.control.digests()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"untied": Path(write_model(root / "untied", "llama")), "tied": Path(write_model(root / "tied", "llama", **TIED))}


@pytest.fixture
def new(models: dict[str, Path]) -> Tensors:
    return perturbed(tensors_of(models["untied"]), 1)


@pytest.fixture
def engine(models: dict[str, Path], tmp_path: Path) -> Iterator[Engine]:
    with Engine(str(models["untied"]), weights_root=str(tmp_path), **OPTIONS) as found:
        yield found


def saved_by_others(folder: Path, tensors: Tensors, files: int = 1) -> Path:
    """As `save_pretrained` leaves it: no marker of ours."""
    folder.mkdir()
    if files == 1:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return folder
    names = list(tensors)
    groups = {f"model-{i + 1:05d}-of-{files:05d}.safetensors": names[i::files] for i in range(files)}
    for file, group in groups.items():
        save_file({n: tensors[n] for n in group}, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {n: f for f, group in groups.items() for n in group}}))
    return folder


CASES = [
    (writer, tied, apply, dtype)
    for writer in ("ours", "ours, small files", "theirs", "theirs, sharded")
    for tied, apply, dtype in (("untied", "staged", "float32"), ("tied", "in_place", "bfloat16"))
]


@pytest.mark.parametrize(("writer", "tied", "apply", "dtype"), CASES)
def test_a_folder_gives_the_bits_of_an_engine_started_from_it(
    models: dict[str, Path], tmp_path: Path, writer: str, tied: str, apply: str, dtype: str
) -> None:
    tensors = perturbed(tensors_of(models[tied]), 2)  # float32, also for the bfloat16 engine
    if writer.startswith("ours"):
        limit = 100_000 if "small" in writer else 1 << 30
        folder = write_folder(tmp_path / "new", TensorSource(tensors), version=4, shard_bytes=limit, files_from=models[tied])
        assert (folder / INDEX).exists() == ("small" in writer)
    else:
        folder = saved_by_others(tmp_path / "new", tensors, 3 if "sharded" in writer else 1)
        shutil.copy(models[tied] / "config.json", folder)
    assert {n: t.tolist() for n, t in tensors_of(folder).items()} == {n: t.tolist() for n, t in tensors.items()}
    with Engine(str(models[tied]), dtype=dtype, weights_root=str(tmp_path), **OPTIONS) as engine:
        before = sample(engine)
        assert engine.control.load_folder("new", version=4, apply=apply)["version"] == 4
        after = sample(engine), engine.control.digests()
        assert after[0] != before and after == fresh(folder, dtype=dtype)


def test_a_folder_with_some_tensors_is_a_partial_update(engine: Engine, new: Tensors, tmp_path: Path, models: dict[str, Path]) -> None:
    part = {n: t for n, t in new.items() if "q_proj" in n or "down_proj" in n}
    write_folder(tmp_path / "part", TensorSource(part))
    with pytest.raises(UpdateRefused, match=r"model\.norm\.weight \[64\] is missing"):
        engine.control.load_folder("part")
    engine.control.load_folder(str(tmp_path / "part"), mode="partial")
    whole = write_folder(tmp_path / "whole", TensorSource({**tensors_of(models["untied"]), **part}), files_from=models["untied"])
    assert (sample(engine), engine.control.digests()) == fresh(whole)


def rewritten(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The file with another header of whatever length."""
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def _as_transposed(header: dict[str, Any]) -> None:
    header[Q]["shape"] = [header[Q]["shape"][0] * 2, header[Q]["shape"][1]]


def _overlapping(header: dict[str, Any]) -> None:
    header[Q]["data_offsets"] = [n + 4 for n in header[Q]["data_offsets"]]


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda f: os.truncate(f / SINGLE, 90_000), "names .* bytes, the file has 90000"),
    "longer": (lambda f: os.truncate(f / SINGLE, 9_000_000), "the file has 9000000"),
    "cut within the header": (lambda f: os.truncate(f / SINGLE, 100), "no whole safetensors file"),
    "empty": (lambda f: os.truncate(f / SINGLE, 0), "no whole safetensors file"),
    "no file": (lambda f: (f / SINGLE).unlink(), "holds neither"),
    "shape that does not fit": (lambda f: rewritten(f / SINGLE, _as_transposed), f"{Q} .* needs 65536 bytes"),
    "gap": (lambda f: rewritten(f / SINGLE, _overlapping), "begins at byte"),
    "dtype unknown": (lambda f: rewritten(f / SINGLE, lambda h: h[Q].update(dtype="F7")), f"{Q} has the unknown dtype 'F7'"),
    "no weights' dtype": (lambda f: rewritten(f / SINGLE, lambda h: h[Q].update(dtype="I32")), f"{Q} is I32"),
    "header that is no object": (lambda f: (f / SINGLE).write_bytes(struct.pack("<Q", 2) + b"[]"), "no JSON object"),
    "index of a file that is not there": (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {Q: "a.safetensors"}})),
        r"a\.safetensors cannot be read",
    ),
    "index of a file elsewhere": (lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {Q: "../a"}})), "only files beside it"),
    "index that forgets a tensor": (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {Q: SINGLE}})),
        r"model\.norm\.weight is in model\.safetensors, .* does not name it",
    ),
    "a writer at work": (lambda f: (f / f"{MARKER}.partial").touch(), "is being written"),
    "marker of another size": (lambda f: (f / MARKER).write_text(json.dumps({"files": {SINGLE: 7}})), f"{MARKER} says 7"),
    "marker of other files": (lambda f: (f / MARKER).write_text(json.dumps({"files": {"a": 7}})), f"{MARKER} is about a"),
    "marker damaged": (lambda f: (f / MARKER).write_text("{"), f"{MARKER} is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_folder_that_is_not_whole_is_refused_before_anything_changes(engine: Engine, new: Tensors, tmp_path: Path, damage: str) -> None:
    before, act, words = sample(engine), *DAMAGE[damage]
    folder = saved_by_others(tmp_path / "new", new)
    act(folder)
    with pytest.raises(UpdateRefused, match=words):
        engine.control.load_folder("new", apply="in_place")
    assert sample(engine) == before and engine.control.lifecycle.update is None


def test_all_that_is_wrong_is_told_at_once(engine: Engine, new: Tensors, tmp_path: Path) -> None:
    wrong = {**new, "extra": torch.zeros(3), Q: new[Q][:-1].contiguous()}
    del wrong["model.norm.weight"]
    saved_by_others(tmp_path / "new", wrong, files=3)
    with pytest.raises(UpdateRefused, match=r"3 problems") as refused:
        engine.control.load_folder("new")
    assert all(f"{name} [" in str(refused.value) or f"{name} is" in str(refused.value) for name in ("extra", Q, "model.norm.weight"))
    for file in (tmp_path / "new").glob("*.safetensors"):
        os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(UpdateRefused, match=r"3 problems: .*00001-of-00003.*00002-of-00003.*00003-of-00003"):
        engine.control.load_folder("new")


@pytest.mark.parametrize("fault", ["nan", "a bit that turned on the disk", "tied head of its own"])
def test_what_was_read_is_checked_before_it_is_served(models: dict[str, Path], tmp_path: Path, fault: str) -> None:
    tied = "tied" if "tied" in fault else "untied"
    tensors = perturbed(tensors_of(models[tied]), 1)
    if fault == "nan":
        tensors[Q][1, 1] = float("nan")
    if tied == "tied":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    folder = write_folder(tmp_path / "new", TensorSource(tensors))
    if "bit" in fault:
        raw = bytearray((folder / SINGLE).read_bytes())
        raw[-1000] ^= 1
        (folder / SINGLE).write_bytes(raw)
    with Engine(str(models[tied]), weights_root=str(tmp_path), **OPTIONS) as engine:
        before = sample(engine)
        words = {"nan": f"{Q}: 1 values are not finite", "tied": "is tied to"}.get(fault.split()[0], "digest .* arrived, the sender says")
        with pytest.raises(UpdateRefused, match=words):
            engine.control.load_folder("new")
        assert sample(engine) == before
        write_folder(tmp_path / "good", TensorSource(perturbed(tensors_of(models[tied]), 3)))
        assert engine.control.load_folder("good")["changed"] and sample(engine) != before


ESCAPES = ["..", "../outside", "inside/../../outside", "link", "inside/link", "/etc", "{root}/../outside", "file", "", "no such", "a\0b", 7]


@pytest.mark.parametrize("name", ESCAPES)
def test_no_name_leads_out_of_the_root(models: dict[str, Path], new: Tensors, tmp_path: Path, name: Any) -> None:
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    outside = saved_by_others(tmp_path / "outside", new)
    (root / "link").symlink_to(outside)
    (root / "inside" / "link").symlink_to("../../outside")
    (root / "file").touch()
    with Engine(str(models["untied"]), weights_root=str(root), **OPTIONS) as engine:
        with pytest.raises(BadRequest) as refused:
            engine.control.load_folder(name.format(root=root) if isinstance(name, str) else name)
        assert refused.value.field == "transport.folder" and engine.control.lifecycle.update is None


@pytest.mark.parametrize("file", [SINGLE, INDEX, MARKER, "shard.safetensors"])
@pytest.mark.parametrize("kind", ["link out", "fifo", "folder"])
def test_no_file_of_a_folder_leads_out_or_is_a_special_one(engine: Engine, new: Tensors, tmp_path: Path, file: str, kind: str) -> None:
    root = Path(str(engine.config.weights_root))
    folder = saved_by_others(root / "new", new)
    if file == "shard.safetensors":
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(new, file)}))
    (folder / file).unlink(missing_ok=True)
    if kind == "link out":
        elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
        elsewhere.write_text("{}")
        (folder / file).symlink_to(elsewhere)
    else:
        os.mkfifo(folder / file) if kind == "fifo" else (folder / file).mkdir()
    with pytest.raises(BadRequest, match="is not inside" if kind == "link out" else "is not a regular file") as refused:
        engine.control.load_folder("new")
    assert refused.value.field == "transport.folder"


def test_links_within_the_root_are_followed(engine: Engine, new: Tensors, tmp_path: Path) -> None:
    """As in a hub cache, whose snapshots are links to blobs."""
    stored = saved_by_others(tmp_path / "blobs", new)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / SINGLE).symlink_to(f"../blobs/{SINGLE}")
    (tmp_path / "latest").symlink_to("snapshot")
    engine.control.load_folder("latest")
    stored.rename(tmp_path / "moved")
    with pytest.raises(RollsyncError):
        engine.control.load_folder("latest")


def test_without_a_root_the_transport_is_refused_by_name(models: dict[str, Path]) -> None:
    with Engine(str(models["untied"]), **OPTIONS) as engine, pytest.raises(BadRequest, match="weights_root") as refused:
        engine.control.load_folder("new")
    assert refused.value.field == "transport.name"


CHANGES: dict[str, Callable[[Path, Path], Any]] = {
    "rewritten": lambda f, other: (f / SINGLE).write_bytes((other / SINGLE).read_bytes()),
    "truncated": lambda f, other: os.truncate(f / SINGLE, 5000),
    "replaced": lambda f, other: (f.rename(f.with_name("old")), other.rename(f)),
    "removed": lambda f, other: shutil.rmtree(f),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before the first chunk", "between chunks"])
def test_a_folder_that_changes_while_it_is_read_is_not_served(
    engine: Engine, new: Tensors, tmp_path: Path, change: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sample(engine)
    folder = saved_by_others(tmp_path / "new", new)
    other = saved_by_others(tmp_path / "other", perturbed(new, 9))
    taken, chunk = 0, engine.runner.updates.chunk

    def interfering(*args: Any) -> bool:
        nonlocal taken
        if taken == (0 if when == "before the first chunk" else 3):
            CHANGES[change](folder, other)
        taken += 1
        return chunk(*args)

    monkeypatch.setattr(engine.runner.updates, "chunk", interfering)
    with pytest.raises(UpdateRefused, match="changed"):
        engine.control.load_folder("new", bucket_bytes=20_000)
    assert sample(engine) == before and engine.control.lifecycle.update is None
    monkeypatch.undo()
    write_folder(tmp_path / "good", TensorSource(new))
    assert engine.control.load_folder("good")["changed"]


class RankOf:
    """One of several trainer ranks, as threads."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    def gather(self, value: Any) -> list[Any]:
        self._shared["slots"][self.rank] = value
        self._shared["barrier"].wait(10)
        values = list(self._shared["slots"])
        self._shared["barrier"].wait(10)
        return values


class ShardSource:
    """What rank `rank` of `size` holds: of matrices its rows or columns, vectors by turns."""

    def __init__(self, tensors: Tensors, rank: int, size: int) -> None:
        self._tensors, self._rank, self._size = tensors, rank, size

    def _box(self, number: int, t: torch.Tensor) -> Box:
        if t.ndim < 2:
            return Box.whole(t.shape) if number % self._size == self._rank else Box((0,) * t.ndim, (0,) * t.ndim)
        axis = number % 2
        step = -(-t.shape[axis] // self._size)
        first = min(self._rank * step, t.shape[axis])
        count = min(step, t.shape[axis] - first)
        return Box((first, 0), (count, t.shape[1])) if axis == 0 else Box((0, first), (t.shape[0], count))

    def metadata(self) -> list[TensorMeta]:
        boxes = [self._box(i, t) for i, t in enumerate(self._tensors.values())]
        named = zip(self._tensors.items(), boxes, strict=True)
        return [TensorMeta(n, dtype_name(t.dtype), tuple(t.shape), (b,) if b.elements else ()) for (n, t), b in named]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(self._tensors.items()):
            if (box := self._box(i, tensor)).elements:
                yield name, tensor[box.slices()]


def write_with_ranks(folder: Path, tensors: Tensors, size: int, **failing: Exception) -> list[Any]:
    """Each rank's outcome."""
    shared: dict[str, Any] = {"slots": [None] * size, "barrier": threading.Barrier(size)}
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        source: Any = ShardSource(tensors, rank, size)
        if f"rank{rank}" in failing:
            source.__class__ = type("Failing", (ShardSource,), {"__iter__": lambda self: _raising(failing[f"rank{rank}"])})
        try:
            outcomes[rank] = write_folder(folder, source, ranks=RankOf(rank, size, shared), shard_bytes=100_000)
        except UpdateError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return outcomes


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_write_the_slices_they_hold_into_whole_tensors(engine: Engine, new: Tensors, tmp_path: Path, size: int) -> None:
    new = {n: t.bfloat16() if i % 3 == 0 else t for i, (n, t) in enumerate(new.items())}  # mixed dtypes in a file
    assert write_with_ranks(tmp_path / "new", new, size) == [tmp_path / "new"] * size
    found = tensors_of(tmp_path / "new")
    assert found.keys() == new.keys() and all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in new.items())
    assert engine.control.load_folder("new")["changed"], "the digests of the parts add up"


def test_a_rank_that_fails_leaves_nothing_and_all_hear_of_it(new: Tensors, tmp_path: Path) -> None:
    outcomes = write_with_ranks(tmp_path / "new", new, 2, rank1=RuntimeError("no gradient today"))
    assert all("trainer rank 1" in str(o) and "no gradient today" in str(o) for o in outcomes)
    assert os.listdir(tmp_path) == []
    (tmp_path / "new").mkdir()
    with pytest.raises(UpdateError, match="exists"):
        write_folder(tmp_path / "new", TensorSource(new))


WRITERS = """
import os, signal, sys, torch
from rollsync.weight_sync.checkpoint_writer import write_folder
from rollsync.weight_sync.manifest import ManifestError
from rollsync.weight_sync.sources import TensorSource

def write(folder, moment):
    calls = [0]
    for name in ("open", "mkdir", "pwrite", "fsync", "rename"):
        def call(*args, _real=getattr(os, name), **more):
            calls[0] += 1
            if calls[0] == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return _real(*args, **more)
        setattr(os, name, call)
    write_folder(folder, TensorSource({f"t{i}": torch.full((50,), float(i)) for i in range(3)}), shard_bytes=300)

moment = killed = 1
while killed:
    pid = os.fork()
    if not pid:
        write(os.path.join(sys.argv[1], str(moment), "new"), moment)
        os._exit(0)
    killed = os.waitpid(pid, 0)[1]
    assert killed in (0, signal.SIGKILL), killed
    moment += 1
"""


def test_a_writer_killed_at_any_system_call_leaves_no_folder_that_passes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WRITERS, str(tmp_path)], check=True, timeout=100)
    runs = sorted(tmp_path.iterdir(), key=lambda run: int(run.name))
    assert len(runs) > 30 and not (runs[0] / "new").exists() and (runs[-1] / "new").exists()
    hidden = [folder for run in runs for folder in run.iterdir() if folder.name != "new"]
    assert hidden and all(folder.name.startswith(".") for folder in hidden)
    for run in runs:
        if (run / "new").exists():  # it had its name already: then all of it is there
            with CheckpointFolder("new", root=run) as found:
                assert len(found.manifest.tensors) == len(found.digests) == 3
    for folder in hidden:  # none is taken by mistake but one that only lacked its name
        if not (folder / MARKER).exists():
            with pytest.raises(ManifestError):
                CheckpointFolder(folder, root=tmp_path)
        os.utime(folder, (0, 0))
    for run in runs[::5]:
        write_folder(run / "next", TensorSource({"t": torch.zeros(3)}))
        assert {folder.name for folder in run.iterdir()} <= {"new", "next"}, "the next writer clears up"


def test_a_writer_at_work_is_left_alone(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(TensorSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            begun.set()
            go_on.wait(10)
            return super().__iter__()

    slow = threading.Thread(target=write_folder, args=(tmp_path / "slow", Slow({"t": torch.zeros(3)})))
    slow.start()
    assert begun.wait(10)
    for hidden in tmp_path.glob(".slow*"):
        os.utime(hidden, (0, 0))
    write_folder(tmp_path / "quick", TensorSource({"t": torch.zeros(3)}))
    go_on.set()
    slow.join(10)
    assert {f.name for f in tmp_path.iterdir()} == {"slow", "quick"}


def test_every_rank_reads_what_it_keeps(models: dict[str, Path], tmp_path: Path) -> None:
    """Two processes share the model; what is refused leaves both as they were."""
    tensors = perturbed(tensors_of(models["tied"]), 2)
    folder = write_folder(tmp_path / "new", TensorSource(tensors), files_from=models["tied"])
    with Engine(str(models["tied"]), tp=2, weights_root=str(tmp_path), **OPTIONS) as engine:
        before = sample(engine)
        engine.control.load_folder("new", apply="staged")
        assert (sample(engine), engine.control.digests()) == fresh(folder)
        old = write_folder(tmp_path / "old", TensorSource(tensors_of(models["tied"])))
        os.truncate(old / SINGLE, 1000)
        with pytest.raises(UpdateRefused):
            engine.control.load_folder("old")
        write_folder(tmp_path / "again", TensorSource(tensors_of(models["tied"])))
        engine.control.load_folder("again", bucket_bytes=20_000)
        assert sample(engine) == before
