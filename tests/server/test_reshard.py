"""Two FSDP2 ranks to two tensor parallel ranks over gloo, with no gather anywhere: real processes on both sides."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollsync import Engine, RolloutClient, RolloutRequest, SamplingParams
from rollsync.rollout.selftest.model import write_model
from safetensors.torch import load_file, save_file

BUCKET_BYTES = 20_000
OPTIONS = {"block_tokens": 16, "num_blocks": 64, "max_model_len": 128, "threads": 1}
FLAGS = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
PROMPT = list(range(3, 23))

TRAINER = """
import json, os, signal, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from safetensors.torch import load_file
from rollsync.weight_sync import gather
from rollsync.weight_sync.control import UpdateError
from rollsync.weight_sync.sender import DistRanks, WeightSender
from rollsync.weight_sync.sources import ModuleSource, weights_from
from rollsync.weight_sync.transports.collective import Group
from rollsync.weight_sync.transports.shards import Reshard

rank, url, meet, bucket_bytes = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
sent = {}
send = Group.send
def counted(self, buffer, peer, what=""):
    sent[peer - 2] = sent.get(peer - 2, 0) + buffer.numel()
    return send(self, buffer, peer, what)
Group.send = counted
def refuse(*args, **more):
    raise AssertionError("a gather")
DTensor.full_tensor = DTensor.redistribute = gather._received = gather._received_within = refuse
transport = Reshard(timeout_s=30)

def module_of(path, add):
    root = nn.Module()
    for name, tensor in load_file(path).items():
        at = root
        *parents, last = name.split(".")
        for part in parents:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.register_parameter(last, nn.Parameter(tensor + add))
    fully_shard(root, mesh=init_device_mesh("cpu", (2,)))
    return root

class Cut(ModuleSource):
    def __iter__(self):
        for number, item in enumerate(super().__iter__()):
            if number == 5:
                raise OSError("the disk of rank 1 is gone")
            yield item

for line in sys.stdin:
    path, fault = json.loads(line)
    sent.clear()
    model = module_of(path, 0)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    source = Cut(model, rank=rank) if fault and rank == 1 else weights_from(model)
    with WeightSender(url, source, transport=transport, ranks=DistRanks(), bucket_bytes=bucket_bytes) as sender:
        sender.close = lambda: None  # its groups serve the next sender
        try:
            version = sender.sync().version
            held = sum(b.numel() for b in transport._buffers)
            print(json.dumps({"version": version, "sent": sent, "held": held}), flush=True)
        except UpdateError as error:
            print(json.dumps({"error": str(error)}), flush=True)
"""


class Trainer:
    """Two ranks, told by line what to send."""

    def __init__(self, url: str, folder: Path) -> None:
        command = [sys.executable, "-c", TRAINER]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        ranks = [[*command, str(rank), url, str(folder / "meet"), str(BUCKET_BYTES)] for rank in range(2)]
        self.processes = [subprocess.Popen(rank, **pipes) for rank in ranks]

    def sync(self, checkpoint: Path, fault: bool = False) -> list[dict[str, Any]]:
        """Each rank's report."""
        for process in self.processes:
            process.stdin.write(json.dumps([str(checkpoint), fault]) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        return [json.loads(process.stdout.readline()) for process in self.processes]  # type: ignore[union-attr]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["untied", "tied"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One model, two sets of weights; its vocabulary is uneven over two ranks."""
    root = tmp_path_factory.mktemp("reshard")
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 259, "tie_word_embeddings": request.param}
    found = [Path(write_model(root / f"m{i}", "llama", **shape)) / "model.safetensors" for i in range(2)]
    save_file({name: tensor * 1.25 for name, tensor in load_file(found[0]).items()}, found[1])
    return found


@pytest.fixture(scope="module")
def server(serving: Any, checkpoints: list[Path]) -> Iterator[Any]:
    with serving(*FLAGS, "--tp", "2", model=str(checkpoints[0].parent), factory=None) as found:
        yield found


def sample(url: str) -> tuple[list[int], list[float]]:
    with RolloutClient(url) as client:
        found = client.rollouts([PROMPT], sampling_params={"seed": 1, "max_tokens": 12}).results[0].samples[0]
    return list(found.token_ids), list(found.logprobs)


def fresh(checkpoint: Path) -> tuple[list[int], list[float]]:
    """Of an engine loaded from it, on one rank: tensor parallelism shows in no bit."""
    with Engine(str(checkpoint.parent), **OPTIONS) as engine:
        engine.add_request(RolloutRequest(request_id="r", prompt_token_ids=tuple(PROMPT), params=SamplingParams(seed=1, max_tokens=12)))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
    return outputs[-1].token_ids, outputs[-1].logprobs


def test_a_sharded_trainer_updates_a_sharded_engine(server: Any, checkpoints: list[Path], tmp_path: Path) -> None:
    trainer = Trainer(server.url, tmp_path)
    try:
        before = sample(server.url)
        assert before == fresh(checkpoints[0])
        reports = trainer.sync(checkpoints[1])
        assert sample(server.url) == fresh(checkpoints[1]) != before
        item = next(iter(load_file(checkpoints[0]).values())).itemsize
        for rank, wanted in enumerate(httpx.get(f"{server.url}/v1/weights/shards").json()["ranks"]):
            shard = sum(math.prod(length) * item for boxes in wanted.values() for _, length in boxes)
            received = sum(report["sent"][str(rank)] for report in reports)
            assert shard <= received <= 1.02 * shard
        assert all(report["held"] <= 2 * 1.02 * BUCKET_BYTES for report in reports)
        failed = trainer.sync(checkpoints[0], fault=True)
        assert all("trainer rank 1" in report["error"] and "the disk of rank 1 is gone" in report["error"] for report in failed)
        assert sample(server.url) == fresh(checkpoints[1])
        trainer.sync(checkpoints[0])
        assert sample(server.url) == before
        trainer.processes[1].kill()  # and nobody closes the group
    finally:
        trainer.close()
    (tmp_path / "again").mkdir()
    trainer = Trainer(server.url, tmp_path / "again")
    try:
        trainer.sync(checkpoints[1])
        assert sample(server.url) == fresh(checkpoints[1])
    finally:
        trainer.close()
