"""Manifest, bucket plan and reshard plan: pure, against brute force."""

from __future__ import annotations

import json
import random

import msgpack
import pytest
import torch
from rollsync.kernels.native_lib import available_builds, load_build
from rollsync.rollout.engine.weight_digest import fast_fill
from rollsync.weight_sync.boxes import Box, tiling_faults
from rollsync.weight_sync.digest import box_digest, combine, tensor_digest
from rollsync.weight_sync.fill import fill
from rollsync.weight_sync.manifest import ALIGN_BYTES, DTYPE_BYTES, Manifest, ManifestError, TensorEntry, TensorSlice, plan
from rollsync.weight_sync.reshard import plan_reshard


def shard0(rows: int, ranks: int) -> list[tuple[int, int]]:
    """(first row, rows) per rank as FSDP2's Shard(0) cuts: chunks of ceil(rows / ranks), the last ones short or empty."""
    size = -(-rows // ranks)
    return [(min(r * size, rows), max(0, min(size, rows - r * size))) for r in range(ranks)]


def sharded(name: str, shape: tuple[int, ...], ranks: int, dtype: str = "float32") -> TensorEntry:
    slices = [
        TensorSlice(r, Box((first, *(0,) * (len(shape) - 1)), (count, *shape[1:])))
        for r, (first, count) in enumerate(shard0(shape[0], ranks))
        if count
    ]
    return TensorEntry(name, dtype, shape, tuple(slices))


def random_tensors(rng: random.Random, ranks: int) -> list[TensorEntry]:
    shapes = [(rng.randint(1, 9), *(rng.randint(1, 7) for _ in range(rng.randint(0, 2)))) for _ in range(rng.randint(1, 6))]
    return [sharded(f"t{i}", shape, ranks, rng.choice(list(DTYPE_BYTES))) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("seed", range(40))
def test_buckets_hold_every_element_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    ranks, bucket_bytes = rng.randint(1, 5), rng.choice([1, 64, 100, 1000])
    manifest = plan(random_tensors(rng, ranks), bucket_bytes)
    seen = [torch.zeros(t.shape, dtype=torch.int32) for t in manifest.tensors]
    for sender in manifest.senders:
        buckets = manifest.buckets_of(sender)
        assert [b.sequence for b in buckets] == list(range(len(buckets)))
        for bucket in buckets:
            end = 0
            for piece in bucket.pieces:
                tensor = manifest.tensors[piece.tensor]
                assert piece.start >= end and piece.start % ALIGN_BYTES == 0
                end = piece.start + piece.box.elements * DTYPE_BYTES[tensor.dtype]
                assert any(s.sender == sender and s.box.intersect(piece.box) == piece.box for s in tensor.slices)
                seen[piece.tensor][piece.box.slices()] += 1
            assert bucket.nbytes == end
            assert end <= bucket_bytes or (len(bucket.pieces) == 1 and bucket.pieces[0].box.length[0] == 1)
    assert all((s == 1).all() for s in seen)


def test_both_sides_read_the_same_plan() -> None:
    manifest = plan(random_tensors(random.Random(3), 3), 256)
    for wire in (json.loads(json.dumps(manifest.to_wire())), msgpack.unpackb(msgpack.packb(manifest.to_wire()))):
        again = Manifest.from_wire(wire)
        assert again == manifest and again.buckets == manifest.buckets


def entry(**change: object) -> dict[str, object]:
    return {"name": "w", "dtype": "float32", "shape": [4, 2], **change}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([entry(dtype="int8")], "dtype must be one of"),
        ([entry(dtype=["float32"])], "dtype must be one of"),
        ([entry(name="w" * 10**6)], "name must be a string of 1 to 512"),
        ([entry(slices=[[1 << 40, [0, 0], [4, 2]]])], "slices must be"),
        ([entry(shape=[10**12, 64])], "makes more than 131072 chunks"),
        ([entry(name=str(i)) for i in range((1 << 17) + 1)], "tensors must be at most 131072"),
        ([entry(shape=[4, -2])], "shape must be"),
        ([entry(shape="42")], "shape must be"),
        ([entry(name="")], "name must be a string of 1"),
        ([entry(color="red")], "color is not a known field"),
        ([entry(), entry()], "w: listed more than once"),
        ([entry(slices=[[0, [0, 0], [3, 2]]])], "w: slices cover 6 of 8 elements"),
        ([entry(slices=[[0, [0, 0], [3, 2]], [1, [2, 0], [2, 2]]])], "w: slices [0:3, 0:2] and [2:4, 0:2] overlap"),
        ([entry(slices=[[0, [0, 0], [5, 2]]])], "w: slice [0:5, 0:2] is not inside [4, 2]"),
        ([entry(slices=[[0, [0], [4]]])], "is not inside"),
        ([entry(slices=[[-1, [0, 0], [4, 2]]])], "slices must be"),
        ([entry(slices="all")], "slices must be"),
        (["w"], "tensors[0] must be an object"),
    ],
)
def test_a_bad_manifest_is_refused_by_name(tensors: list[object], said: str) -> None:
    with pytest.raises(ManifestError) as refused:
        Manifest.from_wire({"tensors": tensors})
    assert said in str(refused.value)


def test_every_problem_is_listed() -> None:
    with pytest.raises(ManifestError) as refused:
        Manifest.from_wire({"tensors": [entry(dtype="int8", name="a"), entry(shape=[1.5], name="b"), entry(), entry()], "size": 1})
    assert len(refused.value.problems) == 4


@pytest.mark.parametrize("seed", range(40))
def test_tiling_faults_agree_with_counting(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(0, 3)))
    count = torch.zeros(shape, dtype=torch.int32)
    boxes = []
    for _ in range(rng.randint(1, 4)):
        offset = tuple(rng.randrange(s) for s in shape)
        box = rng.choice([Box.whole(shape), Box(offset, tuple(rng.randint(1, s - o) for s, o in zip(shape, offset, strict=True)))])
        boxes.append(box)
        count[box.slices()] += 1
    assert (tiling_faults(boxes, shape) == []) == bool((count == 1).all())


@pytest.mark.parametrize("trainers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("engines", [1, 2, 4])
def test_reshard_gives_each_rank_what_it_wants_and_nothing_else(trainers: int, engines: int) -> None:
    shapes = {"qkv": (13, 6), "out": (6, 8), "norm": (7,), "embed": (10, 4)}
    manifest = plan([sharded(name, shape, trainers) for name, shape in shapes.items()])
    full = {name: torch.arange(torch.Size(shape).numel()).view(shape) for name, shape in shapes.items()}
    wanted: list[dict[str, list[Box]]] = []
    for r in range(engines):
        q = [Box((8 // engines * r, 0), (8 // engines, 6)), Box((8 + 4 // engines * r, 0), (4 // engines, 6))]  # two fused parts
        columns = [Box((0, 8 // engines * r), (6, 8 // engines))]
        wanted.append({"qkv": q, "out": columns, "norm": [Box.whole((7,))], "embed": [Box.whole((10, 4))]})
    got = [{name: torch.full(shape, -1) for name, shape in shapes.items()} for _ in range(engines)]
    moved = [0] * engines
    for t in plan_reshard(manifest, wanted):
        name = manifest.tensors[t.tensor].name
        assert any(s.sender == t.sender and s.box.intersect(t.box) == t.box for s in manifest.tensors[t.tensor].slices)
        target = got[t.receiver][name][t.box.slices()]
        assert (target == -1).all(), "sent twice"
        got[t.receiver][name][t.box.slices()] = full[name][t.box.slices()]
        moved[t.receiver] += t.nbytes
    for r in range(engines):
        for name, boxes in wanted[r].items():
            expected = torch.full(shapes[name], -1)
            for box in boxes:
                expected[box.slices()] = full[name][box.slices()]
            assert torch.equal(got[r][name], expected)
        assert moved[r] == sum(b.elements * 4 for boxes in wanted[r].values() for b in boxes)


def documented_digest(x: torch.Tensor) -> int:
    """The sum that weight_sync/digest.py states, word by word."""

    def key(word: int) -> int:
        z = (word // 128 + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
        z = (z ^ z >> 27) * 0x94D049BB133111EB % (1 << 64)
        return pow(10829, word % 128 + 1, 1 << 14) * (z ^ z >> 31 | 1)

    raw = x.contiguous().view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes((raw[i : i + 4] + b"\0\0")[:4], "little", signed=True) for i in range(0, len(raw), 4)]
    return sum(word * key(i) for i, word in enumerate(words)) % (1 << 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [None, *available_builds()])
def test_digests_are_the_documented_sum_however_a_tensor_is_cut(dtype: torch.dtype, build: str | None) -> None:
    rng = random.Random(f"{dtype}")
    for shape in ((37, 41), (1100, 3), (3, 2051)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        row, col = rng.randrange(shape[0]), rng.randrange(shape[1])
        cuts = [Box((0, 0), (row, shape[1])), Box((row, 0), (shape[0] - row, col)), Box((row, col), (shape[0] - row, shape[1] - col))]
        assert documented_digest(x) == tensor_digest(x)
        if build is None:
            assert combine([box_digest(x[b.slices()], b, shape) for b in cuts]) == tensor_digest(x)
        else:
            x[0, :2] = torch.tensor([float("nan"), float("inf")])
            library = load_build(build)
            parts = [library.digest(x[b.slices()], b.offset[0] * shape[1] + b.offset[1], shape[1]) for b in cuts if b.elements]
            assert (combine([p[0] for p in parts]), sum(p[1] for p in parts)) == (tensor_digest(x), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_sees_what_goes_wrong_on_the_way(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 48, generator=generator).to(dtype)
    bits = x.view(torch.int16 if dtype != torch.float32 else torch.int32)
    flat = x.view(-1)
    faults = [x.flip(0), x.flip(1), x.roll(1, 0), flat.roll(1), flat.roll(256), x.t(), x.view(2, 32, 48).flip(0), torch.zeros_like(x)]
    faults.append(torch.cat([x[:40], x[:24]]))  # a piece comes twice, another not
    for i in (0, 17, 255, 3071):
        for bit in range(bits.itemsize * 8):
            changed = bits.clone().view(-1)
            changed[i] ^= 1 << bit if bit < bits.itemsize * 8 - 1 else torch.iinfo(bits.dtype).min
            faults.append(changed.view(dtype))
        for j in (1, 18, 300, 2900):
            swapped = x.clone().view(-1)
            swapped[[i, j]] = swapped[[j, i]]
            faults.append(swapped)
    found = [tensor_digest(f.contiguous()) for f in faults]
    assert tensor_digest(x) not in found and len(set(found)) == len(found)
    assert tensor_digest(x.view(6, -1)) == tensor_digest(x), "places are row-major, whatever the shape"


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (70000,), (900, 577), (3, 40, 30)])
def test_a_piece_is_copied_cast_and_digested(shape: tuple[int, ...], sent: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollsync.weight_sync.fill.BLOCK_BYTES", 4096)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    box = Box((1, *(0,) * (len(shape) - 1)), (shape[0] - 1, *shape[1:])) if shape else Box((), ())
    target = torch.empty(box.length, dtype=sent)
    for way in (fill, fast_fill()):
        digest = way(target.zero_(), x[box.slices()], box, shape)
        assert torch.equal(target, x[box.slices()].to(sent)) and digest == box_digest(target, box, shape)


def test_slices_along_any_dimension_are_checked_in_one_sweep() -> None:
    columns = [Box((0, i), (1, 1)) for i in range(20_000)]
    assert tiling_faults(columns, (1, 20_000)) == []
    assert tiling_faults([*columns[:-1], columns[0]], (1, 20_000)) == ["slices [0:1, 0:1] and [0:1, 0:1] overlap"]
