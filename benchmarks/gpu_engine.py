"""Sections of gpu_check.py about the whole engine: bits under every condition, decoding against the memory's bandwidth, graphs, sleep."""

from __future__ import annotations

import dataclasses
import json
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rollsync import Engine

    from .gpu_check import Context

HALF_B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": True, "dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
EIGHT_B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 5e5, "tie_word_embeddings": False, "dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 96,
}  # fmt: skip


@contextmanager
def engine(c: Context, folder: str, *, fill: bool = False, **options: Any) -> Iterator[Engine]:
    """An engine on the section's device; with `fill` its weights are random numbers made there."""
    from rollsync import Engine
    from rollsync.kernels.gpu.queue import HostQueue
    from rollsync.rollout.engine.config import make_config
    from rollsync.rollout.engine.gpu_device import GpuDevice
    from rollsync.rollout.engine.model_runner import ModelRunner

    if fill:
        options["load_format"] = "dummy"
    options = {"block_tokens": 16, **options}
    if c.tiny:
        options |= {"dtype": "float32", "num_blocks": 24, "max_model_len": 128, "max_num_seqs": 4, "max_batch_tokens": 64}
    config = make_config(folder, options)
    queue = HostQueue() if c.tiny else None
    device = GpuDevice(c.device, config.numerics.k_shards, None, graphs=config.numerics.cuda_graphs, queue=queue)
    runner: Any = ModelRunner(config, device=device)
    if fill:
        for name, tensor in runner.weights.tensors.items():
            tensor.fill_(1.0) if name.endswith("norm") else tensor.normal_(0, 0.02)
        served = dataclasses.replace(runner.info.config, load_format="random")
        runner.info = dataclasses.replace(runner.info, config=served)
    with Engine(folder, runner=runner) as opened:
        yield opened


def _folder(root: str, config: dict[str, Any]) -> str:
    Path(root, "config.json").write_text(json.dumps(config))
    return root


def _cancelling(root: str, c: Context, seed: int = 0) -> str:
    from rollsync.rollout.selftest.model import write_model

    changes = TINY if c.tiny else {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return write_model(Path(root) / f"m{seed}", "llama", seed=seed, **changes)


def _sample(opened: Engine, c: Context, *, count: int = 16, alone: bool = False) -> list[Any]:
    """Ids and bits of logprobs of a fixed workload."""
    from rollsync import SamplingParams

    count, tokens = (2, 2) if c.tiny else (count, 32)
    prompts = [[(7 * i + j) % 90 + 3 for j in range(17 + i)] for i in range(count)]
    params = SamplingParams(max_tokens=tokens, seed=5, ignore_eos=True)
    groups = [[p] for p in prompts] if alone else [prompts]
    outputs = [output for group in groups for output in opened.generate(group, params)]
    return [(s.token_ids, struct.pack(f"{len(s.logprobs)}d", *s.logprobs)) for output in outputs for s in output.samples]


def cells(c: Context) -> None:
    """The guarantee's conditions in all combinations (rollsync selftest's matrix), in both dtypes."""
    with tempfile.TemporaryDirectory() as root:
        folder = _cancelling(root, c)
        if c.tiny:
            with engine(c, folder) as opened:
                c.add("alone unlike together", int(_sample(opened, c) != _sample(opened, c, alone=True)), "== 0")
            return
        from rollsync.rollout.engine.config import EngineConfig
        from rollsync.rollout.selftest.cells import cells as all_cells
        from rollsync.rollout.selftest.matrix import Matrix

        for dtype in ("bfloat16", "float32"):
            matrix, wrong, seen = Matrix(EngineConfig(model=folder, device=str(c.device), dtype=dtype), 6, 2), [], 0
            for cell, problems in matrix.verdicts(all_cells(), lambda cell: None):
                seen += 1
                wrong += [f"{cell}: {problem}" for problem in problems]
                if c.left_s < 2:
                    break
            c.add(f"{dtype}: cells of {seen} with other bits or not tested", len(wrong), "== 0")
            for line in wrong[:4]:
                c.add(f"  {line}"[:58], 1)


def graphs(c: Context) -> None:
    """On and off: the same bits, and what they save."""
    with tempfile.TemporaryDirectory() as root:
        folder, found, took = _cancelling(root, c), {}, {}
        for on in (True, False):
            with engine(c, folder, cuda_graphs=on) as opened:
                _sample(opened, c)
                found[on] = _sample(opened, c)
                start = time.perf_counter()
                _sample(opened, c)
                took[on] = time.perf_counter() - start
        c.add("graphs change bits", int(found[True] != found[False]), "== 0")
        c.add("a tiny model's time without graphs / with", took[False] / took[True], "" if c.tiny else ">= 1")


def _update(opened: Engine, folder: str) -> float:
    """Bring a checkpoint in as a trainer does, by chunks in process; seconds of the commit."""
    from rollsync.weight_sync.boxes import Box
    from rollsync.weight_sync.manifest import TensorEntry, TensorSlice, plan
    from safetensors.torch import load_file

    tensors = load_file(Path(folder) / "model.safetensors")
    manifest = plan([TensorEntry(n, "float32", tuple(t.shape), (TensorSlice(0, Box.whole(t.shape)),)) for n, t in tensors.items()], 1 << 24)
    update = opened.control.open_update(manifest)
    for bucket in manifest.buckets:
        data = bytearray(bucket.nbytes)
        for piece in bucket.pieces:
            values = tensors[manifest.tensors[piece.tensor].name][piece.box.slices()].contiguous()
            data[piece.start : piece.start + values.nbytes] = values.view(torch.uint8).numpy().tobytes()
        opened.control.take_chunk(update.id, bucket.sender, bucket.sequence, {"data": data})
    start = time.perf_counter()
    opened.control.commit_update(update.id, None)
    return float(time.perf_counter() - start)


def updates(c: Context) -> None:
    """A staged update gives a fresh engine's bits, with graphs that were captured before it."""
    with tempfile.TemporaryDirectory() as root:
        old, new = _cancelling(root, c), _cancelling(root, c, seed=3)
        with engine(c, new) as opened:
            fresh, digests = _sample(opened, c), opened.runner.updates.digests()
        with engine(c, old) as opened:
            _sample(opened, c)
            _sample(opened, c)
            c.add("commit, ms", 1e3 * _update(opened, new))
            c.add("after an update: other bits than a fresh engine", int(_sample(opened, c) != fresh), "== 0")
            c.add("after an update: other digests", int(opened.runner.updates.digests() != digests), "== 0")


def sleep(c: Context) -> None:
    """Memory that comes back, seconds, and the same bits on new addresses."""
    with tempfile.TemporaryDirectory() as root:
        options = {"fill": True} if not c.tiny else {}
        folder = _cancelling(root, c) if c.tiny else _folder(root, HALF_B)
        with engine(c, folder, **options) as opened:
            before = _sample(opened, c)
            start = time.perf_counter()
            freed = sum(opened.control.sleep()["freed_bytes"].values())
            c.add("sleep, s", time.perf_counter() - start)
            held = opened.info.kv_bytes + opened.info.weight_bytes
            c.add("freed, of what weights and pool took", freed / held, "" if c.tiny else ">= 0.95")
            start = time.perf_counter()
            opened.control.wake()
            c.add("wake, s", time.perf_counter() - start)
            c.add("after waking: other bits", int(_sample(opened, c) != before), "== 0")


def _bandwidth(c: Context) -> float:
    """Bytes per second that a copy moves."""
    size = 1 << 16 if c.tiny else 2 << 30
    source, target = (torch.zeros(size, dtype=torch.uint8, device=c.device) for _ in range(2))
    took = c.seconds(lambda: target.copy_(source), repeat=10)
    return 2 * size / took


def decode(c: Context) -> None:
    """Tokens per second when everything decodes, against reading weights and keys once per step."""
    bandwidth = _bandwidth(c)
    c.add("memory bandwidth of a copy, TB/s", bandwidth / 1e12)
    for name, config in (("tiny", None),) if c.tiny else (("0.5B", HALF_B), ("8B", EIGHT_B)):
        with tempfile.TemporaryDirectory() as root:
            folder = _cancelling(root, c) if config is None else _folder(root, config)
            options: dict[str, Any] = {"max_batch_tokens": 8192, "max_num_seqs": 256, "max_model_len": 1024, "apply": "in_place"}
            with engine(c, folder, fill=not c.tiny, **options) as opened:
                for batch in (2,) if c.tiny else (64, 128, 256):
                    if c.left_s < 4:
                        break
                    _decode(c, opened, name, batch, bandwidth)


def _decode(c: Context, opened: Engine, name: str, batch: int, bandwidth: float) -> None:
    from rollsync import RolloutRequest, SamplingParams

    prompt, steps = (4, 2) if c.tiny else (64, 40)
    params = SamplingParams(max_tokens=steps + 12, seed=1, ignore_eos=True)
    for i in range(batch):
        ids = tuple((i * 31 + j) % 90 + 3 for j in range(prompt))
        opened.add_request(RolloutRequest(request_id=f"{name}{batch}-{i}", prompt_token_ids=ids, params=params))
    for _ in range(6):  # prefill; kernels compile; the graph is recorded
        opened.step()
    before, start = opened.stats(), time.perf_counter()
    for _ in range(steps):
        opened.step()
    step_s = (time.perf_counter() - start) / steps
    after = opened.stats()
    opened.abort(all=True)
    runner: Any = opened.runner
    weights = runner.weights
    rows = [s.n * s.k * weights.dtype.itemsize for s in weights.specs.values() if s.layout == "rows"]
    keys = batch * (prompt + 6 + steps / 2) * runner._kv.layout.block_bytes / runner._kv.layout.block_tokens
    floor_s = (weights.nbytes - sum(rows) + keys) / bandwidth
    c.add(f"{name}, {batch} sequences: tokens/s", batch / step_s)
    c.add(f"{name}, {batch} sequences: bandwidth floor / step", floor_s / step_s, "" if c.tiny else ">= 0.7")
    for part in ("plan", "execute", "update"):
        c.add(f"{name}, {batch} sequences: {part}, ms a step", 1e3 * (after[f"{part}_s"] - before[f"{part}_s"]) / steps)
