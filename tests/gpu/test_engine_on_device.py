"""The engine on a GPU: what test_interpreted_engine.py asserts of indices holds for the bits of real kernels, in both dtypes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "engine"))

from live import sync
from real_engine import bits, finals, make_requests
from rollsync import Engine, RolloutRequest
from rollsync.rollout.selftest.model import write_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")]

OPTIONS: dict[str, Any] = {"device": "cuda", "num_blocks": 256, "block_tokens": 16}
REQUESTS = make_requests(12, max_tokens=24, shared=40)
DTYPES = ("bfloat16", "float32")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return [str(write_model(root / f"m{i}", "llama", seed=i, **wide)) for i in range(2)]


def engine(folder: str, dtype: str, **options: Any) -> Engine:
    return Engine(folder, dtype=dtype, **{**OPTIONS, **options})


def run(folder: str, dtype: str, requests: list[RolloutRequest] = REQUESTS, *, alone: bool = False, **options: Any) -> dict[Any, Any]:
    with engine(folder, dtype, **options) as opened:
        return {key: bits(output) for key, output in finals(opened, requests, alone=alone).items()}


@pytest.fixture(scope="module", params=DTYPES)
def baseline(request: Any, folders: list[str]) -> tuple[str, dict[Any, Any]]:
    return request.param, run(folders[0], request.param)


@pytest.mark.parametrize(
    "how",
    [
        {"alone": True},
        {"max_batch_tokens": 24},
        {"num_blocks": 24, "max_model_len": 256},
        {"prefix_cache": False},
        {"cuda_graphs": False},
        {"block_tokens": 32, "num_blocks": 128},
        {"max_num_seqs": 3},
    ],
    ids=str,
)
def test_how_requests_are_served_shows_in_no_bit(how: dict[str, Any], baseline: tuple[str, dict[Any, Any]], folders: list[str]) -> None:
    dtype, wanted = baseline
    assert run(folders[0], dtype, **how) == wanted


def test_cached_prompts_give_the_same_bits(baseline: tuple[str, dict[Any, Any]], folders: list[str]) -> None:
    dtype, wanted = baseline
    with engine(folders[0], dtype) as opened:
        for _ in range(2):
            outputs = finals(opened, REQUESTS)
            assert {key: bits(output) for key, output in outputs.items()} == wanted
        assert min(output.cached_tokens for output in outputs.values()) >= 32


def test_decoding_and_one_chunk_give_the_same_bits(baseline: tuple[str, dict[Any, Any]], folders: list[str]) -> None:
    dtype, _ = baseline
    with engine(folders[0], dtype) as opened:
        sampled = finals(opened, REQUESTS)
        again = [
            RolloutRequest(
                request_id=r.request_id, prompt_token_ids=r.prompt_token_ids, params=r.params, include=r.include,
                forced_token_ids=tuple(sampled[r.request_id, 0].token_ids),
            )
            for r in REQUESTS
        ]  # fmt: skip
        given = finals(opened, again)
    assert {key: bits(output)[2:] for key, output in given.items()} == {key: bits(output)[2:] for key, output in sampled.items()}


@pytest.mark.parametrize("graphs", [True, False])
def test_new_weights_are_a_fresh_engines(graphs: bool, folders: list[str]) -> None:
    fresh = run(folders[1], "bfloat16")
    with engine(folders[0], "bfloat16", cuda_graphs=graphs) as opened:
        finals(opened, REQUESTS)  # graphs are there before the update
        sync(opened, folders[1])
        assert {key: bits(output) for key, output in finals(opened, REQUESTS).items()} == fresh


def test_sleep_frees_memory_and_wake_brings_the_bits_back(baseline: tuple[str, dict[Any, Any]], folders: list[str]) -> None:
    dtype, wanted = baseline
    with engine(folders[0], dtype, num_blocks=4096) as opened:
        assert {key: bits(output) for key, output in finals(opened, REQUESTS).items()} == wanted
        free = torch.cuda.mem_get_info()[0]
        freed = opened.control.sleep()["freed_bytes"]
        assert freed["kv_cache"] >= opened.info.kv_bytes and torch.cuda.mem_get_info()[0] >= free + opened.info.kv_bytes
        opened.control.wake()
        assert {key: bits(output) for key, output in finals(opened, REQUESTS).items()} == wanted


def test_the_pool_takes_a_part_of_what_is_free_once_the_weights_are_there(folders: list[str]) -> None:
    with engine(folders[0], "bfloat16", num_blocks=None, memory_fraction=0.25) as opened:
        kv, free = opened.info.kv_bytes, torch.cuda.mem_get_info()[0]
        assert abs(kv - (free + kv) / 4) < 0.05 * kv


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stock_model_under_parity_has_the_engines_bits(dtype: str, folders: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    from rollsync.kernels.gpu import ops
    from rollsync.trainer_adapters.parity import rollsync_parity

    with engine(folders[0], dtype) as opened:
        sampled = [o for _, o in sorted(finals(opened, REQUESTS).items())]
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[0], dtype=getattr(torch, dtype)).cuda().eval()
    for request, output in zip(sorted(REQUESTS, key=lambda r: r.request_id), sampled, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *output.token_ids]], device="cuda")
        with torch.no_grad(), rollsync_parity(model):
            logits = model(ids).logits[0, -len(output.token_ids) - 1 : -1]
        found = ops.token_logprobs(logits.contiguous(), ids[0, -len(output.token_ids) :])
        assert found.tolist() == output.model_logprobs


def test_a_trainers_own_forms_of_the_ops_give_the_engines_bits(folders: list[str]) -> None:
    """Hidden states of the same tokens through the public ops, in another packing than the engine's."""
    from rollsync.kernels.gpu import ops

    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(300, 256, device="cuda", generator=generator).bfloat16()
    w = torch.randn(512, 256, device="cuda", generator=generator).bfloat16()
    whole = ops.linear(x, w, shards=4)
    for rows in (1, 2, 3, 17, 64, 129):
        assert torch.equal(ops.linear(x[7 : 7 + rows].contiguous(), w, shards=4), whole[7 : 7 + rows])
