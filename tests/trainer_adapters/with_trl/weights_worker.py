"""One of two ranks that tries `weights_from` on models as trainers' own packages prepare them: DeepSpeed ZeRO-3, accelerate's FSDP2.

    python weights_worker.py RANK STORE OUT KIND...

A kind that begins with "memory+" is about the memory that reading takes, with larger parameters.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
sys.path.append(str(Path(__file__).resolve().parents[2] / "weight_sync"))

import model_cases
import model_kinds
import torch
import torch.distributed as dist
from rollsync.weight_sync.ranks import DistRanks
from rollsync.weight_sync.sources import weights_from
from torch import nn


def zero3(model: nn.Module, persistent: int = 0, **options: Any) -> nn.Module:
    """Parameters below `persistent` elements stay whole once they were gathered."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else each run would compile it first
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    stage = {"stage": 3, "stage3_param_persistence_threshold": persistent, "stage3_prefetch_bucket_size": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage, "zero_allow_untested_optimizer": True, **options}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=model_kinds.LR)
    engine: nn.Module = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    return engine


def accelerated(model: nn.Module, precision: str = "no") -> nn.Module:
    """What accelerate makes of a model for FSDP2. It cannot be brought to on the CPU as a whole, so its own function is called."""
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    if precision != "no":
        plugin.set_mixed_precision(precision)
    stand_in = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision=precision, torch_device_mesh=None, parallelism_config=None,
        device=torch.device("cpu"), is_main_process=dist.get_rank() == 0, process_index=dist.get_rank(),
    )  # fmt: skip
    prepared: nn.Module = fsdp2_prepare_model(stand_in, model)
    return prepared


model_kinds.WRAPPINGS |= {
    "zero3": zero3,
    "zero3persist": lambda m: zero3(m, persistent=100),
    "accelerate": accelerated,
    "acceleratemixed": lambda m: accelerated(m, "bf16"),
}
model_kinds.UNLIKE |= {"tied+zero3"}  # what DeepSpeed's own accessor says of the embedding is not the plain model's either


def used(field: str) -> int:
    """This process's memory in bytes: VmRSS now, VmHWM the most since it was reset."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == f"{field}:")


def check_memory(kind: str) -> None:
    """Reading takes no more than three times the largest parameter beside the model: streamed and shared out, as it is and in bfloat16."""
    small = model_kinds.V, model_kinds.D
    model_kinds.V, model_kinds.D = 16381, 512
    model = model_kinds.make(kind.removeprefix("memory+"))[0]
    largest = model_kinds.V * model_kinds.D * 4
    for dtype in (None, torch.bfloat16):
        for share in (False, True):
            weights = weights_from(model, dtype=dtype)
            source = weights.share(DistRanks()) if share else weights
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")
            before = used("VmRSS")
            for _ in source:
                pass
            assert (took := used("VmHWM") - before) < 3 * largest, f"{took / largest:.1f} times the largest, in {dtype}, shared: {share}"
    model_kinds.V, model_kinds.D = small


def check(kind: str, check: Any = model_cases.check) -> None:
    (check_memory if kind.startswith("memory+") else check)(kind)


model_cases.check = check

if __name__ == "__main__":
    model_cases.main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
