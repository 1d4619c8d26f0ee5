"""The promise for what only some families compute: head norms, windows that differ by layer, soft caps, norms behind branches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from real_engine import changed, make_requests, run
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
