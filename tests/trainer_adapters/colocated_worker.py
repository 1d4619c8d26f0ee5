"""One of two trainer ranks with an engine in each. Saves what it saw; started by colocated_runs.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ranks_worker
import torch
import torch.distributed as dist
from rollsync import SamplingParams
from rollsync.rollout.errors import RollsyncError
from rollsync.trainer_adapters import parity
from rollsync.trainer_adapters.colocated import ColocatedEngine
from rollsync.trainer_adapters.errors import TargetError
from rollsync.trainer_adapters.lockstep import Lockstep, ranks_here
from rollsync.weight_sync.control import UpdateError
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

OPTIONS = {"threads": 1, "memory_bytes": 16 << 20}
PARAMS = SamplingParams(n=2, max_tokens=8)


def prompts(rank: int) -> list[list[int]]:
    """Every rank serves rows of its own."""
    return [[10 + rank, 3, 5], [7] * (20 + rank)]


def phases(model: Any, trained: Any, rank: int, **options: Any) -> dict[str, Any]:
    """Three phases with training steps between. `model` is under parity; `trained` is what the engine is given."""
    equal, seen, versions, freed = [], [], [], []
    with ColocatedEngine(trained, **OPTIONS, **options) as engine:
        for step in range(3):
            with engine.generating(version=10 * step):
                outputs = engine.generate(prompts(rank), PARAMS)
            equal.append(bool(parity.check(model, outputs).equal))
            samples = [s for o in outputs for s in o.samples]
            seen.append([x for s in samples for x in s.logprobs])
            versions += [span["version"] for s in samples for span in s.weight_versions]
            assert engine.last_phase is not None
            freed.append(engine.last_phase.freed_bytes["weights"])
            inputs = ranks_worker.batch(rank)
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():  # sums that cancel have gradients that no optimizer should follow
                    parameter.mul_(0.95)
        dtype = engine.info.dtype
        shared = engine.shared_bytes
    return {"shared": shared, "equal": equal, "seen": seen, "versions": versions, "freed": freed, "dtype": dtype}


def outcome(work: Callable[[], Any]) -> str:
    """What it raised: a wait that ends by its deadline has words of its own."""
    try:
        work()
    except (UpdateError, TargetError, RollsyncError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def failures(folder: str, rank: int) -> dict[str, Any]:
    """What every rank raises when one of them fails, and whether the next phase goes on."""
    model = ranks_worker.load(folder)
    wrapped = DistributedDataParallel(model)
    found = {}
    with ColocatedEngine(wrapped, **OPTIONS) as engine:

        def sync() -> None:
            with engine.generating():
                pass

        def generate() -> None:
            with engine.generating():
                engine.generate([[10**6]] if rank == 1 else prompts(rank), PARAMS)

        def body() -> None:
            with engine.generating():
                engine.generate(prompts(rank), PARAMS)
                if rank == 1:
                    raise ZeroDivisionError("the reward function failed")
                engine.generate(prompts(rank), PARAMS)

        def uneven() -> None:
            with engine.generating():
                engine.generate([] if rank == 1 else prompts(rank), PARAMS)

        with torch.no_grad():
            kept = model.model.norm.weight.clone()
            if rank == 1:
                model.model.norm.weight.fill_(torch.inf)
            found["sync"] = outcome(sync)
            model.model.norm.weight.copy_(kept)
        found["versions"] = outcome(lambda: engine.begin(5 + rank))
        with engine.generating():  # after a commit that rank 1 alone did not make
            found["version"] = engine.version

        def restless() -> None:
            with engine.generating():
                if rank == 1:
                    engine.sleep = fail  # type: ignore[method-assign]

        def fail() -> None:
            del engine.sleep
            engine.sleep()
            raise OSError("no sleep")

        found["sleep"] = outcome(restless)
        found["generate"] = outcome(generate)
        found["body"] = outcome(body)
        found["uneven"] = outcome(uneven)
        found["awake"] = engine.awake
        found["making"] = outcome(lambda: ColocatedEngine(wrapped, memory_bytes=1 if rank == 1 else 16 << 20, threads=1))
    return found


def late(rank: int, out: Path) -> str:
    """What rank 0 raises when rank 1 does not come, but lives."""
    ranks, raised = ranks_here(timeout_s=10), out / "rank 0 has raised"
    if rank == 0:
        words = outcome(lambda: Lockstep(ranks).meet("generate"))
        raised.touch()
        return words
    end = time.monotonic() + 120
    while not raised.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return ""


def accelerated(folder: str, rank: int, mixed: str) -> dict[str, Any]:
    """A model as accelerate's FSDP2 prepares it. An Accelerator refuses FSDP on CPUs, so its own function is called as it would."""
    from types import SimpleNamespace

    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )  # fmt: skip
    if mixed != "no":
        plugin.set_mixed_precision(mixed)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision=mixed, torch_device_mesh=None, parallelism_config=None,
        device=torch.device("cpu"), is_main_process=rank == 0, process_index=rank, unwrap_model=lambda m: m, _models=[],
    )  # fmt: skip
    model = ranks_worker.load(folder)
    parity.make_parity(model)
    accelerator._models.append(fsdp2_prepare_model(accelerator, model))
    return phases(accelerator._models[0], accelerator, rank)


def main(folder: str, rank: int, store: str, out: str, which: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    if which == "accelerate":
        found = {mixed: accelerated(folder, rank, mixed) for mixed in ("no", "bf16")}
        found["late"] = late(rank, Path(out))
    else:
        model = ranks_worker.load(folder)
        parity.make_parity(model)
        wrapped = DistributedDataParallel(model)
        found["ddp"] = phases(wrapped, wrapped, rank, share=True)
        for name, options in {"fsdp": {}, "fsdp_bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}}.items():
            model = ranks_worker.load(folder)
            parity.make_parity(model)
            ranks_worker.shard(model, **options)
            found[name] = phases(model, lambda model=model: model, rank)
        found["failures"] = failures(folder, rank)
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
