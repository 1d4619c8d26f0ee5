"""The promise for what only some families compute: head norms, windows that differ by layer, soft caps, norms behind branches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from real_engine import bits, changed, finals, make_requests, run
from rollsync import Engine
from rollsync.kernels.native_lib import available_builds
from rollsync.rollout.selftest.model import write_model

WINDOW = 10
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3, "sliding_window": WINDOW}
GEMMA = {**LAYERS, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {**LAYERS, "use_sliding_window": True}),
    "gemma2": ("gemma2", {**GEMMA, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3", {**GEMMA, "query_pre_attn_scalar": 20, "rope_theta": 1e6, "rope_local_base_freq": 1e4}),
}
# Longer than the window by more than a block of keys, opening alike, several samples each: pages are shared inside and outside of windows.
REQUESTS = [changed(r, n=3) for r in make_requests(3, max_tokens=6, shared=45, step=9)]
ONE = [changed(REQUESTS[2], n=1, max_tokens=3)]
OPTIONS: tuple[dict[str, Any], ...] = (
    {"block_tokens": 32, "max_batch_tokens": 17, "threads": 2},
    {"block_tokens": 4, "num_blocks": 60, "max_num_seqs": 4},
    {"block_tokens": 64, "threads": 3, "head_dtype": "float32"},
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("families")
    return {name: write_model(root / name, family, **changes) for name, (family, changes) in KINDS.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_chunks_pages_and_builds(models: dict[str, str], kind: str, dtype: str) -> None:
    torch.set_num_threads(1)
    alone: dict[str, Any] = {"alone": True, "dtype": dtype, "prefix_cache": False}
    want = {head: run(models[kind], REQUESTS, head_dtype=head, **alone) for head in (None, "float32")}
    assert run(models[kind], REQUESTS, k_shards=1, **alone) != want[None], "the model shows no change of order"
    assert run(models[kind], ONE, kernels="reference", block_tokens=4, **alone) == run(models[kind], ONE, **alone)
    for i, build in enumerate(available_builds()):
        options = OPTIONS[(i + (dtype == "float32")) % len(OPTIONS)]
        got = run(models[kind], REQUESTS, dtype=dtype, kernels=build, **options)
        assert got == want[options.get("head_dtype")], (build, options)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_aborted_goes_on_elsewhere_under_penalties_and_windows(models: dict[str, str], kind: str) -> None:
    """Aborted with more or fewer tokens, some amid prefill, and sent again with what they had, to an engine of other pages and chunks."""
    torch.set_num_threads(1)
    changes = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3, "top_logprobs": 3, "logit_bias": {30: 2.0}}
    requests = [
        changed(r, n=1, first_sample=i, max_tokens=24, min_tokens=9, stop_token_ids=(40, 41), **changes)
        for i, r in enumerate((*REQUESTS, *(changed(r, request_id=f"again{r.request_id}", priority=1) for r in REQUESTS)))
    ]
    want = run(models[kind], requests, alone=True, dtype="bfloat16", prefix_cache=False)
    with Engine(models[kind], dtype="bfloat16", threads=1, block_tokens=32, num_blocks=40, max_batch_tokens=90) as engine:
        for request in requests:
            engine.add_request(request)
        partials = {}
        for i, request in enumerate(requests):
            for _ in range(i):
                for output in engine.step():
                    partials[output.request_id] = output
            partials.update((output.request_id, output) for output in engine.abort(request.request_id))
    counts = [len(partials[r.request_id].token_ids) for r in requests]
    assert 0 in counts and len(set(counts)) >= 4, counts
    again = [changed(r, continue_from=tuple(partials[r.request_id].token_ids)) for r in requests]
    with Engine(models[kind], dtype="bfloat16", threads=1, block_tokens=4, num_blocks=70, max_batch_tokens=31) as engine:
        assert {key: bits(output) for key, output in finals(engine, again).items()} == want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", available_builds())
def test_broken_numbers_stay_with_their_sequence_where_pages_are_shared(tmp_path: Path, build: str, dtype: str) -> None:
    """What breaks opens like its neighbours, so it computes pages of theirs, leaves some to them, and stands beside them in attention."""
    family, changes = KINDS["qwen3"]
    model = write_model(tmp_path / "model", family, nan_token=255, **changes)
    healthy, opening = [changed(r, n=1 + i % 2) for i, r in enumerate(REQUESTS)], REQUESTS[0].prompt_token_ids
    broken = [
        changed(healthy[0], (), request_id=f"bad{i}", n=2, priority=-1, prompt_token_ids=(*opening[:cut], 255, *more))
        for i, (cut, more) in enumerate(((45, ()), (45, (7,)), (48, (7, 8, 9)), (33, (5,) * 20)))
    ]
    for block_tokens in (32, 4):
        options: dict[str, Any] = {"dtype": dtype, "kernels": build, "block_tokens": block_tokens, "max_batch_tokens": 70}
        want = run(model, healthy, alone=True, prefix_cache=False, **options)
        with Engine(model, threads=1, num_blocks=100, **options) as engine:
            outputs = finals(engine, [*broken[:2], *healthy, *broken[2:]])
            assert {key: bits(output) for key, output in outputs.items() if key[0][0] == "r"} == want
            assert {o.finish_reason for key, o in outputs.items() if key[0][0] == "b"} == {"error"}
            assert engine.stats()["nonfinite"] == 8 and engine.stats()["free_blocks"] == 100
