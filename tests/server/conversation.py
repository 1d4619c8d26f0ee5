"""Trainers of SGLang's and vLLM's kind for tests to drive, and what an engine gives that was loaded from their weights."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from rollsync import Engine, RolloutRequest, SamplingParams
from rollsync.rollout.selftest.model import write_model
from safetensors.torch import load_file, save_file

OPTIONS = {"block_tokens": 16, "num_blocks": 512, "max_model_len": 1500, "threads": 1}
FLAGS = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def write_weights(root: Path, count: int) -> list[Path]:
    """Folders of one model with so many sets of weights."""
    folders = [Path(write_model(root / f"m{i}", "llama", max_position_embeddings=2048)) for i in range(count)]
    first = load_file(folders[0] / "model.safetensors")
    for i, folder in enumerate(folders[1:], 1):
        generator = torch.Generator().manual_seed(i)
        moved = {k: (v.float() + 0.05 * torch.randn(v.shape, generator=generator)).to(v.dtype) for k, v in first.items()}
        save_file(moved, folder / "model.safetensors")
    return folders


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@functools.cache
def fresh(folder: Path, prompt: tuple[int, ...], max_tokens: int, **params: Any) -> tuple[list[int], list[float]]:
    """Ids and logprobs (of temperature 1) from an engine that was loaded from these weights."""
    with Engine(str(folder), **OPTIONS) as engine:
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        engine.add_request(RolloutRequest(request_id="r", prompt_token_ids=prompt, params=sampling))
        outputs: list[Any] = []
        while engine.has_work:
            outputs += engine.step()
    return outputs[-1].token_ids, outputs[-1].logprobs


@functools.cache
def score(folder: Path, prompt: tuple[int, ...], given: tuple[int, ...]) -> list[float]:
    """Logprobs of `given` after `prompt` under these weights."""
    with Engine(str(folder), **OPTIONS) as engine:
        params = SamplingParams(max_tokens=len(given))
        engine.add_request(RolloutRequest(request_id="r", prompt_token_ids=prompt, params=params, forced_token_ids=given, score_only=True))
        outputs: list[Any] = []
        while engine.has_work:
            outputs += engine.step()
    found: list[float] = outputs[-1].logprobs
    return found


class SglangTrainer:
    """A process of its own, by commands (sglang_trainer.py)."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, str(Path(__file__).parent / "sglang_trainer.py"), url]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, name: str, **args: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": name, **args}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the trainer died in {name}"
        found: dict[str, Any] = json.loads(line)
        return found

    def done(self, name: str, **args: Any) -> dict[str, Any]:
        found = self.do(name, **args)
        assert found["status"] == 200 and found["success"], (name, found)
        return found


@contextlib.contextmanager
def ended(trainer: SglangTrainer) -> Iterator[SglangTrainer]:
    """The process ends with the block."""
    try:
        yield trainer
    finally:
        trainer.process.kill()
        trainer.process.communicate()


def announced(tensors: dict[str, torch.Tensor], **info: Any) -> dict[str, Any]:
    """An update_info."""
    return {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
        **info,
    }


class VllmTrainer:
    """It hosts the group as rank 0, announces tensors, and broadcasts them meanwhile."""

    def __init__(self, url: str, **init: Any) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)
        self.init = {"rank_offset": 1, "world_size": 2, "packed": True, "packed_num_buffers": 2, **init}
        self.aside = ThreadPoolExecutor(1)

    def join(self) -> None:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        where = {"master_address": "127.0.0.1", "master_port": store.port}
        asked = self.aside.submit(self.post, "init_weight_transfer_engine", {"init_info": {**where, **self.init}})
        self.group = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=20))
        asked.result(60)

    def post(self, path: str, body: Any = None) -> Any:
        answer = self.http.post(f"/{path}", json=body) if body is not None else self.http.post(f"/{path}")
        answer.raise_for_status()
        return answer.json()

    def messages(self, tensors: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """vLLM's cuts: a message ends with the tensor that takes it past the buffer's size."""
        flat = [t.contiguous().view(-1).view(torch.uint8) for t in tensors.values()]
        limit, waiting = self.init.get("packed_buffer_size_bytes", 1 << 30) if self.init["packed"] else -1, list[torch.Tensor]()
        for tensor in flat:
            waiting.append(tensor)
            if sum(t.numel() for t in waiting) > limit:
                yield torch.cat(waiting)
                waiting = []
        if waiting:
            yield torch.cat(waiting)

    def update(self, tensors: dict[str, torch.Tensor], **info: Any) -> httpx.Response:
        """One /update_weights."""
        return self._send(tensors, "/update_weights", {"update_info": announced(tensors, **info)})

    def update_rpc(self, tensors: dict[str, torch.Tensor], **info: Any) -> httpx.Response:
        """The same as SkyRL asks for it."""
        body = {"method": "update_weights_nccl", "kwargs": {"update_info": announced(tensors, **info)}}
        return self._send(tensors, "/collective_rpc", body)

    def _send(self, tensors: dict[str, torch.Tensor], path: str, body: Any) -> httpx.Response:
        """Announce tensors, and broadcast them meanwhile."""
        asked = self.aside.submit(self.http.post, path, json=body)
        with contextlib.suppress(RuntimeError):  # the engine's end was torn down: the reply says why
            for message in self.messages(tensors):
                self.group.broadcast([message], dist.BroadcastOptions()).wait()
        return asked.result(60)

    def sync(self, tensors: dict[str, torch.Tensor], finish: Any = None) -> Any:
        self.post("start_weight_update", {})
        self.update(tensors).raise_for_status()
        return self.post("finish_weight_update", finish)
