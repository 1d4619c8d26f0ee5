"""What the tests with OpenRLHF share: its SamplesGenerator, and engines made as its command line makes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any

STAND_INS = Path(__file__).parent / "stand_ins"
OWN = {"dtype": "float32", "threads": 1, "num_blocks": 64, "max_num_seqs": 16}
"""`--rollsync.NAME` of all engines here"""


class Prompts:
    """A prompts dataloader."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Any:
        return iter([(None, [f"prompt {i}"], [f"label {i}"], [None]) for i in range(self._count)])


def make_generator(tokenizer: Any, engines: list[Any], *, level: str = "token", sleeps: bool = False, prompts: int = 2) -> Any:
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

    args = Space(
        rollout=Space(batch_size=2, n_samples_per_prompt=2, vllm_generate_batch_size=2),
        algo=Space(dynamic_filtering_enable=False, advantage=Space(is_correction_level=level)),
        vllm=Space(enable_sleep=sleeps),
    )
    return SamplesGenerator(Space(args=args), Prompts(prompts), None, tokenizer, engines)


def start(folder: str, number: int = 1, **changes: Any) -> list[Any]:
    from openrlhf.trainer.ray import create_vllm_engines

    options: dict[str, Any] = {
        "num_engines": number, "tensor_parallel_size": 1, "pretrain": folder, "seed": 1, "full_determinism": False,
        "enable_prefix_caching": True, "enforce_eager": True, "max_model_len": 256, "gpu_memory_utilization": 0.5,
        "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    return create_vllm_engines(**(options | changes))


def stop(engines: list[Any]) -> None:
    """End engines and give Ray their cores back."""
    import ray

    for engine in engines:
        ray.kill(engine)
