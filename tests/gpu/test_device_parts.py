"""What a GPU engine is made of, as far as a CPU can tell: columns, graph sizes, digests, and the device check as a script."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollsync.kernels.gpu.arrays import DeviceArrays
from rollsync.kernels.gpu.graphs import Graphs, graph_sizes
from rollsync.kernels.gpu.queue import HostQueue
from rollsync.kernels.step import StepLimits
from rollsync.rollout.engine.weight_digest import device_digest
from rollsync.weight_sync.boxes import Box
from rollsync.weight_sync.digest import box_digest

ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_one_copy_brings_every_column_bit_for_bit_and_tables_only_when_they_changed() -> None:
    arrays = DeviceArrays(StepLimits(tokens=8, rows=4, slots=3, table_blocks=5, banned=4), HostQueue())
    rng = np.random.default_rng(0)
    for name in arrays.on_device:
        column = arrays[name]
        column.view(np.uint8)[...] = rng.integers(0, 255, column.view(np.uint8).shape)
    arrays.num_tokens, arrays.num_rows, arrays.num_items = 5, 2, 3
    arrays.pad(8, 4, 8)
    arrays.send()
    for name, there in arrays.on_device.items():
        if not name.startswith("out_"):
            assert there.numpy().tobytes() == arrays[name].tobytes(), name
    assert arrays["token_slot"][5:].tolist() == [-1] * 3 and not arrays["items"][3:].any()
    arrays.on_device["tables"].fill_(7)
    arrays.send()
    assert (arrays.on_device["tables"] == 7).all(), "sent again though nothing changed"
    arrays["tables"][1, 2] += 1
    arrays.tables_changed = True
    arrays.send()
    assert arrays.on_device["tables"].numpy().tobytes() == arrays["tables"].tobytes()


def test_graph_sizes_cover_all_batches_and_a_size_is_recorded_once() -> None:
    assert graph_sizes(1) == (1,) and graph_sizes(3) == (1, 2, 3) and graph_sizes(256)[-2:] == (240, 256) and graph_sizes(4096)[-1] == 512
    recorded: list[int] = []

    class Graph:
        def replay(self) -> None:
            recorded.append(0)

    graphs, ran = Graphs(HostQueue(lambda work: Graph()), graph_sizes(16)), []
    assert [graphs.size_for(n) for n in (1, 3, 9, 16, 17)] == [1, 4, 16, 16, None]
    for _ in range(3):
        graphs.run(4, lambda: ran.append(1))
    graphs.release()
    graphs.run(4, lambda: ran.append(1))
    assert (len(ran), len(recorded)) == (2, 2), "warm-up, twice replayed; after a release warmed up anew"


def test_a_capture_that_fails_costs_its_graph_alone_and_after_three_none_is_tried() -> None:
    tried, ran = [], []

    def capture(work: object) -> Any:
        tried.append(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = Graphs(HostQueue(capture), graph_sizes(16))
    for _ in range(6):
        graphs.run(4, lambda: ran.append(1))
    assert (len(ran), len(tried)) == (6, 3), "every step is run, the first to warm up"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_devices_digest_is_the_digest(dtype: torch.dtype) -> None:
    whole = torch.randn(37, 301).to(dtype)
    for box in (Box((0, 0), (37, 301)), Box((3, 7), (20, 133)), Box((5, 0), (1, 300))):
        values = whole[box.slices()]
        assert device_digest(values, box, (37, 301)) == box_digest(values, box, (37, 301))
    flat, box = whole.flatten()[5:1000], Box((5,), (995,))
    assert device_digest(flat, box, (11137,)) == box_digest(flat, box, (11137,))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton here")
def test_the_device_check_runs_on_the_interpreter_and_one_broken_section_costs_no_other(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/gpu_check.py", "--dry-run", "--out", str(out), "--sections"]
    done = run([*command, "tiles,attention_bits,matmul,shards,attention,nccl"])
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    assert found["results"][0]["device"] == "cuda" and found["results"][0]["level"] == "CPU stand-in"
    assert "8 of 8 checks met in 6 sections" in found["results"][0]["what"]
    assert "linear float32: classes of M beyond one" in done.stdout
    break_one = "from rollsync.benchmarks import gpu_check, gpu_kernels as k; import sys; k.tiles = lambda c: c.add('x', 1 / 0); "
    break_all = "gpu_check.broken = lambda device: True; start, gpu_check.os.execv = gpu_check.os.execv, "
    break_all += "lambda path, argv: start(path, [*argv, '--dry-run']); "
    for more in ("", break_all):
        code = break_one + more + "sys.exit(gpu_check.main(['--dry-run', '--sections', 'tiles,shards']))"
        done = run([sys.executable, "-c", code])
        assert done.returncode == 2 and "FAILED: ZeroDivisionError" in done.stdout and "k_shards = 4" in done.stdout
        assert ("starting over with shards" in done.stderr) == bool(more)


def test_an_engine_on_the_cpu_brings_in_no_triton() -> None:
    code = "import sys, rollsync.rollout.engine.model_runner, rollsync.rollout.engine.devices; print('triton' in sys.modules)"
    assert run([sys.executable, "-c", code]).stdout.strip() == "False"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_device_the_check_says_so() -> None:
    done = run([sys.executable, "benchmarks/gpu_check.py", "--needs-device"])
    assert done.returncode == 3 and "no CUDA device here" in done.stderr
