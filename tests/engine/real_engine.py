"""Runs requests through a real engine on a tiny model and gives their outputs as bits."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollsync import Engine, RolloutRequest, SampleOutput, SamplingParams

COLUMNS = ("model_logprobs", "temperature_logprobs", "entropy", "prompt_logprobs")
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 12, "min_p": 0.02},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 40},
)
Bits = tuple[Any, ...]


def prompt(seed: int, length: int, first: int = 3, last: int = 254) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randint(first, last) for _ in range(length))


def make_requests(num: int, *, max_tokens: int, shared: int = 0, shortest: int = 5, step: int = 11, n: int = 1) -> list[RolloutRequest]:
    """Requests of all kinds of sampling and growing prompts, the first `shared` tokens of which are equal."""
    opening = prompt(99, shared)
    return [
        RolloutRequest(
            request_id=f"r{i}",
            prompt_token_ids=opening + prompt(i, shortest + step * i),
            params=SamplingParams(n=n, seed=i, max_tokens=max_tokens, ignore_eos=True, **SAMPLING[i % len(SAMPLING)]),
            include=(*COLUMNS, "sampling_mask"),
        )
        for i in range(num)
    ]


def _packed(values: Sequence[float | None] | None) -> bytes | None:
    return None if values is None else b"".join(b"none" if v is None else struct.pack("<d", v) for v in values)


def bits(output: SampleOutput) -> Bits:
    """Everything about a sample that the engine promises, floats bit for bit."""
    floats = [_packed(getattr(output, name)) for name in ("logprobs", *COLUMNS)]
    top = None if output.top_token_ids is None else (str(output.top_token_ids), [_packed(row) for row in output.top_logprobs or ()])
    mask = None if output.sampling_mask is None else output.sampling_mask.to_bytes()
    return (output.finish_reason, output.stop_reason, tuple(output.token_ids), *floats, top, mask)


def finals(engine: Engine, requests: Sequence[RolloutRequest], *, alone: bool = False) -> dict[tuple[str, int], SampleOutput]:
    """Final outputs by (request, sample), the requests in flight together or one after another."""
    outputs: list[SampleOutput] = []
    for group in [[r] for r in requests] if alone else [requests]:
        for request in group:
            engine.add_request(request)
        while engine.has_work:
            outputs += engine.step()
    return {(o.request_id, o.sample_index): o for o in outputs if o.finished}


def run(model: str, requests: Sequence[RolloutRequest], *, alone: bool = False, **options: Any) -> dict[tuple[str, int], Bits]:
    """Bits of every sample from an engine of its own, on one thread and a small pool unless `options` say otherwise."""
    with Engine(model, **{"threads": 1, "num_blocks": 256, **options}) as engine:
        return {key: bits(output) for key, output in finals(engine, requests, alone=alone).items()}


def changed(request: RolloutRequest, include: tuple[str, ...] | None = None, **params: Any) -> RolloutRequest:
    """A copy with other fields: those of RolloutRequest by name, the rest of SamplingParams."""
    own = {name: params.pop(name) for name in RolloutRequest.__slots__ if name in params}
    return replace(request, params=replace(request.params, **params), include=request.include if include is None else include, **own)
