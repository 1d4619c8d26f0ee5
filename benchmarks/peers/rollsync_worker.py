"""Rollsync in process, as a worker (loop.py). Stage times come with every answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .loop import Job, serve


class RollsyncSide:
    """An `Engine`, its forward passes timed apart from planning, batch building and taking in results."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from rollsync import Engine

        self._engine = Engine(model, **options)
        self._native_s = 0.0
        self._time_forward_passes()
        self._before = self._stages()
        info = self._engine.info
        self.facts: dict[str, Any] = {
            name: getattr(info, name) for name in ("dtype", "kernels", "threads", "weight_bytes", "kv_bytes", "block_tokens")
        }
        self.facts["invariance"] = "always on"
        self.ops: dict[str, Callable[[Job], dict[str, Any]]] = {"sampler": self._sampler}

    def _time_forward_passes(self) -> None:
        program: Any = self._engine.runner._program  # type: ignore[attr-defined]
        run = program.run

        def timed() -> None:
            began = time.perf_counter()
            run()
            self._native_s += time.perf_counter() - began

        program.run = timed

    def _stages(self) -> dict[str, float]:
        stats = self._engine.stats()
        return {name: stats[name] for name in ("steps", "plan_s", "execute_s", "update_s", "cached_tokens")} | {"native_s": self._native_s}

    def forget(self) -> None:
        self._engine.reset_prefix_cache()

    def generate(self, job: Job) -> Any:
        from rollsync import SamplingParams

        self._before = self._stages()
        params = SamplingParams(n=job["n"], max_tokens=job["max_tokens"], seed=job.get("seed"), ignore_eos=True)
        return self._engine.generate(job["prompts"], params, include=tuple(job.get("include", ())))

    def count(self, outputs: Any) -> tuple[int, int]:
        samples = [s for o in outputs for s in o.samples]
        return sum(len(s.token_ids) for s in samples), sum(len(s.logprobs) for s in samples)

    def extra(self) -> dict[str, Any]:
        return {"stages": {name: value - self._before[name] for name, value in self._stages().items()}}

    def _sampler(self, job: Job) -> dict[str, Any]:
        """Seconds of the sampling op alone over `rows` rows of made-up logits, without and with the optional columns."""
        import numpy as np
        import torch
        from rollsync.kernels import native_lib
        from rollsync.kernels.native_ops import NativeOps
        from rollsync.kernels.reference_sampler import SamplerRows

        info, R = self._engine.info, job["rows"]
        if info.kernels == "reference":
            return {"skipped": "the reference kernels have no sampling op of their own"}
        ops = NativeOps(native_lib.load_build(info.kernels), info.threads)
        dtype = torch.float32 if info.dtype == "float32" else torch.bfloat16
        logits = torch.randn((R, info.vocab_size), generator=torch.Generator().manual_seed(0)).mul_(2.0).to(dtype)
        found: dict[str, Any] = {"rows": R}
        for name, want in (("plain_s", False), ("with_columns_s", True)):
            rows = SamplerRows(
                temperature=np.ones(R),
                top_p=np.ones(R),
                top_k=np.zeros(R, np.int64),
                min_p=np.zeros(R, np.float32),
                seed=np.arange(R, dtype=np.uint64),
                sample_index=np.zeros(R, np.uint32),
                position=np.full(R, 7, np.uint32),
                forced=np.full(R, -1, np.int64),
                banned=[()] * R,
                want_model=np.full(R, want),
                want_entropy=np.full(R, want),
                vocab_limit=info.vocab_size,
            )
            found[name] = self._median_of(lambda rows=rows: ops.sample(logits, rows), job["reps"])
        return found

    @staticmethod
    def _median_of(call: Any, reps: int) -> float:
        times = []
        for _ in range(reps + 1):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return sorted(times[1:])[reps // 2]


if __name__ == "__main__":
    serve(RollsyncSide)
