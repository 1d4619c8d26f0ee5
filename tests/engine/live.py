"""A tiny model in several sets of weights, and their updates into an engine in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rollsync import Engine, RolloutRequest, SampleOutput, SamplingParams
from rollsync.rollout.selftest.model import write_model
from rollsync.weight_sync.boxes import Box
from rollsync.weight_sync.digest import tensor_digest
from rollsync.weight_sync.manifest import TensorEntry, TensorSlice, plan
from safetensors.torch import load_file, save_file

OPTIONS: dict[str, Any] = {"block_tokens": 4, "num_blocks": 64, "max_model_len": 64, "max_batch_tokens": 32, "threads": 1}
PROMPT = tuple(range(3, 23))


def write_versions(root: Path, count: int) -> list[str]:
    """Folders of one model, the first as written, the others perturbed."""
    folders = [str(write_model(root / f"m{i}", "llama")) for i in range(count)]
    first = tensors_of(folders[0])
    for i, folder in enumerate(folders[1:], 1):
        generator = torch.Generator().manual_seed(i)
        new = {k: (v.float() + 0.05 * torch.randn(v.shape, generator=generator)).to(v.dtype) for k, v in first.items()}
        save_file(new, Path(folder) / "model.safetensors")
    return folders


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def begin(engine: Engine, folder: str, **options: Any) -> str:
    """Open an update and bring all its bytes; its id, for the commit."""
    tensors = tensors_of(folder)
    entries = [TensorEntry(n, "float32", tuple(t.shape), (TensorSlice(0, Box.whole(t.shape)),)) for n, t in tensors.items()]
    manifest = plan(entries, 1 << 30)
    update = engine.control.open_update(manifest, **options)
    for bucket in manifest.buckets:
        data = bytearray(bucket.nbytes)
        for piece in bucket.pieces:
            raw = tensors[manifest.tensors[piece.tensor].name][piece.box.slices()].contiguous().view(torch.uint8).numpy().tobytes()
            data[piece.start : piece.start + len(raw)] = raw
        engine.control.take_chunk(update.id, bucket.sender, bucket.sequence, {"data": data})
    return update.id


def sync(engine: Engine, folder: str, **options: Any) -> dict[str, Any]:
    update_id = begin(engine, folder, **options)
    return engine.control.commit_update(update_id, {n: tensor_digest(t) for n, t in tensors_of(folder).items()})


def request(rid: str, prompt: tuple[int, ...] = PROMPT, **kw: Any) -> RolloutRequest:
    own = {name: kw.pop(name) for name in RolloutRequest.__slots__ if name in kw}
    params = SamplingParams(**{"seed": 1, "max_tokens": 12, "ignore_eos": True, **kw})
    return RolloutRequest(request_id=rid, prompt_token_ids=prompt, params=params, **own)


def finish(engine: Engine, outputs: list[SampleOutput] | None = None) -> dict[str, list[SampleOutput]]:
    """Step until nothing is left to do. Final samples by request; each ends once."""
    found = list(outputs or []) + engine.poll()
    while engine.has_work:
        found += engine.step()
        found += engine.poll()
    finals: dict[str, list[SampleOutput]] = {}
    for output in found:
        if output.finished:
            finals.setdefault(output.request_id, []).append(output)
    for samples in finals.values():
        samples.sort(key=lambda o: o.sample_index)
        assert len({o.sample_index for o in samples}) == len(samples)
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks or engine.scheduler.requests
    return finals


def steps(engine: Engine, count: int) -> list[SampleOutput]:
    return [output for _ in range(count) for output in engine.step()]


def versions(output: SampleOutput) -> list[tuple[int, int, int, bool]]:
    """Spans as (version, start, end, mixed)."""
    return [(s["version"], s["start"], s["end"], bool(s.get("mixed_kv"))) for s in output.weight_versions]
