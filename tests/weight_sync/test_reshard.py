"""From a sharded trainer to a sharded engine: the plan against brute force, and once for real."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from rollsync.rollout.engine.weight_target import wanted_boxes
from rollsync.rollout.models.config import load_decoder_config
from rollsync.rollout.models.params import hf_shapes
from rollsync.rollout.models.params import plan as writes_of
from rollsync.rollout.selftest.model import write_model
from rollsync.weight_sync.boxes import Box
from rollsync.weight_sync.manifest import ALIGN_BYTES, DTYPE_BYTES, Manifest, TensorEntry, TensorSlice, plan
from rollsync.weight_sync.reshard import plan_rounds, received_by


def shard0(name: str, shape: tuple[int, ...], ranks: int, dtype: str) -> TensorEntry:
    """As FSDP2's Shard(0) cuts: chunks of ceil(rows / ranks), the last ones short or empty."""
    size = -(-shape[0] // ranks)
    cuts = [(r, min(r * size, shape[0]), max(0, min(size, shape[0] - r * size))) for r in range(ranks)]
    rest = (0,) * (len(shape) - 1)
    slices = tuple(TensorSlice(r, Box((first, *rest), (count, *shape[1:]))) for r, first, count in cuts if count)
    return TensorEntry(name, dtype, shape, slices)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> object:
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": request.param}
    return load_decoder_config(write_model(tmp_path_factory.mktemp("m") / "m", "llama", **shape))


@pytest.mark.parametrize("engines", [1, 2, 4])
@pytest.mark.parametrize("trainers", [1, 2, 3, 5, 8, 16])
def test_every_rank_of_a_model_gets_its_shard_once_and_nothing_else(config: object, trainers: int, engines: int) -> None:
    """Fused qkv and gate/up parts, column and row shards, the vocabulary and replicated norms, from uneven FSDP2 shards of any mesh."""
    rng = random.Random(trainers * 10 + engines)
    entries = [shard0(name, shape, trainers, rng.choice(list(DTYPE_BYTES))) for name, shape in hf_shapes(config).items()]
    manifest = plan(entries, rng.choice([500, 4000, 1 << 20]))
    wanted = [wanted_boxes(config, rank, engines) for rank in range(engines)]
    rounds = plan_rounds(Manifest.from_wire(manifest.to_wire()), wanted)
    for rank in range(engines):
        got = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in hf_shapes(config).items()}
        buckets = received_by(manifest, wanted, rank).buckets
        for bucket in buckets:
            end = 0
            for piece in bucket.pieces:
                tensor = manifest.tensors[piece.tensor]
                assert piece.start >= end and piece.start % ALIGN_BYTES == 0
                end = piece.start + piece.box.elements * DTYPE_BYTES[tensor.dtype]
                assert any(s.sender == bucket.sender and s.box.intersect(piece.box) == piece.box for s in tensor.slices)
                got[tensor.name][piece.box.slices()] += 1
            assert bucket.nbytes == end
        shard = 0
        for tensor in manifest.tensors:
            count = torch.zeros(tensor.shape, dtype=torch.int32)
            for w in writes_of(config, tensor.name, rank, engines):
                box = Box((w.src_row,), (w.rows,)) if len(tensor.shape) == 1 else Box((w.src_row, w.src_col), (w.rows, w.cols))
                count[box.slices()] = 1
            assert torch.equal(got[tensor.name], count), tensor.name
            shard += int(count.sum()) * DTYPE_BYTES[tensor.dtype]
        assert shard <= sum(b.nbytes for b in buckets) <= shard + ALIGN_BYTES * sum(len(b.pieces) for b in buckets)
        assert {(b.sender, b.sequence) for b in buckets} == {(s, i) for s, made in rounds.items() for i in range(len(made))}


@pytest.mark.parametrize("seed", range(20))
def test_a_round_is_one_buffer_read_in_the_order_of_the_shards(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 40), rng.randint(1, 9)) for _ in range(5)]
    manifest = plan([shard0(f"t{i}", s, 3, "float32") for i, s in enumerate(shapes)], 1000)
    halves = {f"t{i}": [Box((0, 0), (s[0] - s[0] // 2, s[1]))] for i, s in enumerate(shapes)}
    wanted = [halves, {f"t{i}": [Box.whole(s)] for i, s in enumerate(shapes)}]
    for sender, rounds in plan_rounds(manifest, wanted).items():
        order = [piece.tensor for r in rounds for _, piece in r.reads]
        assert order == sorted(order)
        for r in rounds:
            assert r.nbytes <= 1000 + ALIGN_BYTES * len(wanted)
            taken = [(start, start + b.nbytes) for start, b in zip(r.starts, r.buckets, strict=True)]
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken)) and taken[-1][1] <= r.nbytes
            assert all(b.sender == sender for b in r.buckets)
