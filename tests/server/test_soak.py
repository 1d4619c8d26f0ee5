"""300 updates by each transport from one trainer into one server: nothing grows on either side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollsync import RolloutClient
from rollsync.rollout.engine.lanes import IDLE_S
from rollsync.rollout.selftest.model import write_model
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow

OPTIONS = {"block_tokens": 16, "num_blocks": 64, "max_model_len": 128, "threads": 1}
FLAGS = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
SYNCS = 300
WARM = 40
GROWTH = 0.02

TRAINER = """
import json, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from safetensors.torch import load_file
from rollsync.weight_sync.sender import DistRanks, WeightSender
from rollsync.weight_sync.sources import TensorSource

rank, size, setup = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
torch.set_num_threads(1)
tensors = [load_file(path) for path in setup["files"]]
ranks = None
if size > 1:
    dist.init_process_group("gloo", init_method=f"file://{setup['meet']}", rank=rank, world_size=size)
    mesh, ranks = init_device_mesh("cpu", (size,)), DistRanks()
    tensors = [{name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in version.items()} for version in tensors]

class Source(TensorSource):
    def use(self, version):
        self._tensors = tensors[version]

source = Source(tensors[0])
options = {"folder": setup["folder"]} if setup["transport"] == "disk" else {}
with WeightSender(setup["url"], source, transport=setup["transport"], ranks=ranks, bucket_bytes=20_000, **options) as sender:
    for line in sys.stdin:
        for version in json.loads(line):
            source.use(version)
            done = sender.sync()
        print(done.version, flush=True)
"""


class Trainer:
    def __init__(self, size: int, **setup: Any) -> None:
        command = [sys.executable, "-c", TRAINER]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.ranks = [subprocess.Popen([*command, str(rank), str(size), json.dumps(setup)], **pipes) for rank in range(size)]

    def sync(self, versions: list[int]) -> int:
        """One sync of each; the version that is then current."""
        for rank in self.ranks:
            rank.stdin.write(json.dumps(versions) + "\n")  # type: ignore[union-attr]
            rank.stdin.flush()  # type: ignore[union-attr]
        (version,) = {int(rank.stdout.readline()) for rank in self.ranks}  # type: ignore[union-attr]
        return version

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


def family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def held(pids: list[int]) -> dict[str, list[int]]:
    """What each process holds of what an update could leave behind, once idle threads have ended."""
    time.sleep(IDLE_S + 1.0)
    segments = sum("rollsync" in name or "torch" in name for name in os.listdir("/dev/shm"))
    found: dict[str, list[int]] = {"rss": [], "fds": [], "threads": [], "mappings": [], "segments": [segments]}
    for pid in pids:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
        found["rss"].append(int(status["RssAnon"].split()[0]) + int(status["RssShmem"].split()[0]))
        found["threads"].append(int(status["Threads"]))
        found["fds"].append(len(os.listdir(f"/proc/{pid}/fd")))
        found["mappings"].append(Path(f"/proc/{pid}/maps").read_text().count("memfd"))
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One model, two sets of weights."""
    root = tmp_path_factory.mktemp("soak")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    found = [Path(write_model(root / f"m{i}", "llama", **heads)) / "model.safetensors" for i in range(2)]
    generator = torch.Generator().manual_seed(3)
    first = load_file(found[0])
    new = {k: (v.float() + 0.05 * torch.randn(v.shape, generator=generator)).to(v.dtype) for k, v in first.items()}
    save_file(new, found[1])
    return [str(path) for path in found]


def sample(url: str) -> tuple[list[int], list[float]]:
    with RolloutClient(url) as client:
        found = client.rollouts([list(range(3, 23))], sampling_params={"seed": 1, "max_tokens": 9}).results[0].samples[0]
    return list(found.token_ids), list(found.logprobs)


@pytest.mark.parametrize("transport", ["ipc", "collective", "disk", "http", "reshard"])
def test_hundreds_of_updates_leave_nothing_behind(serving: Any, files: list[str], transport: str, tmp_path: Path) -> None:
    ranks = 2 if transport == "reshard" else 1
    flags = [*FLAGS, "--tp", str(ranks), "--weights-root", str(tmp_path)]
    with serving(*flags, model=str(Path(files[0]).parent), factory=None) as server:
        places = {"folder": str(tmp_path / "steps"), "meet": str(tmp_path / "meet")}
        trainer = Trainer(ranks, url=server.url, transport=transport, files=files, **places)
        try:
            wanted = [sample(server.url)]
            trainer.sync([1])
            wanted.append(sample(server.url))
            assert wanted[0] != wanted[1]
            version = trainer.sync([0, 1] * (WARM // 2))
            pids = [*family(server.process.pid), *(rank.pid for rank in trainer.ranks)]
            before = held(pids)
            for _ in range(SYNCS // 20):
                version = trainer.sync([0, 1] * 9 + [0])
                assert sample(server.url) == wanted[0]
                version = trainer.sync([1])
                assert sample(server.url) == wanted[1]
            assert version == 1 + WARM + SYNCS
            after = held(pids)
            print(transport, before, after)
            assert [*family(server.process.pid), *(rank.pid for rank in trainer.ranks)] == pids
            for what, counts in before.items():
                for was, now in zip(counts, after[what], strict=True):
                    assert now <= (1 + GROWTH) * was, (what, before, after)
            assert len(list((tmp_path / "steps").glob("*"))) <= 2 if transport == "disk" else True
        finally:
            trainer.close()
