"""The promise, on real engines: whatever else happens, a sample's bits depend on weights, prompt, parameters and seed alone.

The models are made so that any other order of a sum changes their output (rollsync.rollout.selftest.model).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from real_engine import Bits, bits, changed, finals, make_requests, prompt, run
from rollsync import Engine, RolloutRequest, SamplingParams
from rollsync.kernels.native_lib import BUILDS, available_builds
from rollsync.rollout.selftest.model import write_model

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
MODELS = pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen2", "qwen2_tied"])
BLOCKS = (4, 16, 32, 64)
Runs = dict[tuple[str, int], Bits]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def baseline(cancelling: dict[str, str]) -> Any:
    """Runs of `REQUESTS` one at a time, prefilled whole, nothing cached; computed once per model and dtype."""
    made: dict[tuple[str, str], Runs] = {}

    def get(kind: str, dtype: str) -> Runs:
        if (kind, dtype) not in made:
            made[kind, dtype] = run(cancelling[kind], REQUESTS, alone=True, dtype=dtype, prefix_cache=False)
        return made[kind, dtype]

    return get


REQUESTS = make_requests(5, max_tokens=20, shared=36)
SHORT = make_requests(4, max_tokens=5, shared=8, step=9)


@DTYPES
@MODELS
def test_every_build_and_block_size_gives_the_bits_of_the_reference(cancelling: dict[str, str], kind: str, dtype: str) -> None:
    want = run(cancelling[kind], SHORT, dtype=dtype, kernels="reference", block_tokens=4)
    for build in available_builds():
        for block_tokens in BLOCKS:
            got = run(cancelling[kind], SHORT, dtype=dtype, kernels=build, block_tokens=block_tokens)
            assert got == want, (build, block_tokens)


@pytest.mark.parametrize("build", BUILDS)
@MODELS
def test_builds_agree_on_longer_runs(cancelling: dict[str, str], baseline: Any, kind: str, build: str) -> None:
    if build not in available_builds():
        pytest.skip(f"no {build} here")
    for dtype in ("float32", "bfloat16"):
        assert run(cancelling[kind], REQUESTS, dtype=dtype, kernels=build, threads=2) == baseline(kind, dtype)


@DTYPES
@MODELS
def test_alone_in_a_batch_and_in_any_order(cancelling: dict[str, str], baseline: Any, kind: str, dtype: str) -> None:
    want = baseline(kind, dtype)
    assert run(cancelling[kind], REQUESTS, dtype=dtype) == want
    assert run(cancelling[kind], REQUESTS[::-1], dtype=dtype, block_tokens=16) == want
    with Engine(cancelling[kind], dtype=dtype, threads=1, num_blocks=256) as engine:  # each arrives while others decode
        outputs = []
        for request in [*REQUESTS[2:], *REQUESTS[:2]]:
            engine.add_request(request)
            outputs += [output for _ in range(3) for output in engine.step()]
        while engine.has_work:
            outputs += engine.step()
    assert {(o.request_id, o.sample_index): bits(o) for o in outputs} == want


@DTYPES
@pytest.mark.parametrize("max_batch_tokens", [1, 5, 16, 512])
def test_chunks_of_a_prefill(cancelling: dict[str, str], baseline: Any, max_batch_tokens: int, dtype: str) -> None:
    for kind, block_tokens in (("llama", 32), ("qwen2", 4), ("llama_tied", 64)):
        got = run(cancelling[kind], REQUESTS, dtype=dtype, max_batch_tokens=max_batch_tokens, block_tokens=block_tokens)
        assert got == baseline(kind, dtype), (kind, block_tokens)


@DTYPES
@pytest.mark.parametrize("block_tokens", BLOCKS)
def test_cached_prefixes(cancelling: dict[str, str], baseline: Any, block_tokens: int, dtype: str) -> None:
    # Without prompt_logprobs, which ask for a row at every position and so find nothing cached.
    requests = [changed(r, ("model_logprobs", "temperature_logprobs", "entropy")) for r in make_requests(5, max_tokens=20, shared=68)]
    want = run(cancelling["llama"], requests, alone=True, dtype=dtype, prefix_cache=False)
    with Engine(cancelling["llama"], dtype=dtype, threads=1, num_blocks=256, block_tokens=block_tokens) as engine:
        cold, warm = finals(engine, requests, alone=True), finals(engine, requests)
        assert engine.reset_prefix_cache() > 0
        reset = finals(engine, requests)
    for outputs in (cold, warm, reset):
        assert {key: bits(output) for key, output in outputs.items()} == want
    assert cold["r0", 0].cached_tokens == 0 and all(output.cached_tokens >= 64 for output in warm.values())


@DTYPES
@pytest.mark.parametrize(("block_tokens", "num_blocks"), [(4, 30), (16, 9), (32, 5)])
def test_preempted(cancelling: dict[str, str], baseline: Any, block_tokens: int, num_blocks: int, dtype: str) -> None:
    for prefix_cache in (True, False):
        options: dict[str, Any] = {"block_tokens": block_tokens, "num_blocks": num_blocks, "prefix_cache": prefix_cache}
        with Engine(cancelling["llama"], dtype=dtype, threads=1, **options) as engine:
            outputs = finals(engine, [*REQUESTS[1:], REQUESTS[0]])
            first = engine.stats()["preemptions"]
            engine.reset_prefix_cache()
            for request in REQUESTS:
                engine.add_request(request)
            forced = []
            while engine.has_work:  # and all of them at once, now and then
                forced += engine.step()
                if engine.stats()["steps"] % 7 == 0:
                    engine.scheduler.preempt_all()
            assert first > 0 and engine.stats()["preemptions"] > first
        assert {key: bits(output) for key, output in outputs.items()} == baseline("llama", dtype)
        assert {(o.request_id, o.sample_index): bits(o) for o in forced} == baseline("llama", dtype)


@DTYPES
def test_samples_of_a_group_are_those_sent_alone(cancelling: dict[str, str], dtype: str) -> None:
    for block_tokens, num_blocks in ((32, 256), (4, 40)):
        options: dict[str, Any] = {"dtype": dtype, "block_tokens": block_tokens, "num_blocks": num_blocks}
        requests = [changed(r, request_id=f"g{i}", n=8, prompt_token_ids=r.prompt_token_ids[:50]) for i, r in enumerate(REQUESTS)]
        group = run(cancelling["llama"], requests, **options)
        alone = [changed(r, n=1, first_sample=i, request_id=f"{r.request_id}.{i}") for r in requests for i in range(8)]
        for (name, index), found in run(cancelling["llama"], alone, **options).items():
            assert found == group[name.partition(".")[0], index], (name, block_tokens)
        assert len({found[2] for (name, _), found in group.items() if name == "g1"}) == 8, "eight samples of one seed are eight"


@DTYPES
def test_forced_and_continued_tokens_get_the_values_they_were_sampled_with(
    cancelling: dict[str, str], baseline: Any, dtype: str
) -> None:
    want = baseline("llama", dtype)
    for max_batch_tokens in (512, 7):
        for cut in (1, 7, 19, 20):
            given = [(r, want[r.request_id, 0][2][:cut]) for r in REQUESTS]
            for name in ("forced_token_ids", "continue_from"):
                requests = [changed(r, **{name: ids}) for r, ids in given]
                assert run(cancelling["llama"], requests, dtype=dtype, max_batch_tokens=max_batch_tokens) == want, (name, cut)


@DTYPES
def test_prompt_logprobs_are_the_logprobs_of_sampling(cancelling: dict[str, str], dtype: str) -> None:
    requests = [changed(r, ("model_logprobs", "prompt_logprobs")) for r in REQUESTS]
    with Engine(cancelling["llama"], dtype=dtype, threads=1, num_blocks=256) as engine:
        outputs = finals(engine, requests)
        joined = [
            RolloutRequest(
                request_id=r.request_id, prompt_token_ids=r.prompt_token_ids + tuple(outputs[r.request_id, 0].token_ids),
                params=SamplingParams(max_tokens=0), include=("prompt_logprobs",),
            )
            for r in requests
        ]  # fmt: skip
        for key, scored in finals(engine, joined).items():
            output = outputs[key]
            assert output.prompt_logprobs is not None and output.model_logprobs is not None
            assert scored.prompt_logprobs == output.prompt_logprobs + output.model_logprobs
            assert scored.token_ids == [] and scored.finish_reason == "length"


@DTYPES
def test_threads(cancelling: dict[str, str], baseline: Any, dtype: str) -> None:
    for threads in (1, 2, 3, 8):
        assert run(cancelling["qwen2"], REQUESTS, dtype=dtype, threads=threads) == baseline("qwen2", dtype), threads


@DTYPES
def test_each_number_of_shards_is_a_specification_of_its_own(cancelling: dict[str, str], baseline: Any, dtype: str) -> None:
    four, one = baseline("llama", dtype), run(cancelling["llama"], REQUESTS, alone=True, dtype=dtype, k_shards=1)
    assert all(one[key] != four[key] for key in one), "the model does not show a change of order"
    for build in available_builds():
        got = run(cancelling["llama"], REQUESTS, dtype=dtype, k_shards=1, kernels=build, max_batch_tokens=16, threads=2)
        assert got == one, build


@pytest.mark.parametrize("seed", range(6))
def test_any_requests_on_any_engine(cancelling: dict[str, str], seed: int) -> None:
    rng = random.Random(seed)
    kind, dtype = rng.choice(["llama", "llama_tied", "qwen2", "qwen2_tied"]), rng.choice(["float32", "bfloat16"])
    opening = prompt(seed, 40)
    requests = []
    for i in range(12):
        columns = tuple(name for name in ("model_logprobs", "temperature_logprobs", "entropy", "prompt_logprobs") if rng.random() < 0.3)
        given = {rng.choice(["forced_token_ids", "continue_from"]): prompt(i, rng.randint(1, 9))} if rng.random() < 0.4 else {}
        params = SamplingParams(
            n=1 if "continue_from" in given else rng.choice([1, 1, 2, 5]), seed=rng.randrange(4), max_tokens=rng.choice([1, 3, 12, 24]),
            min_tokens=rng.choice([0, 1]), temperature=rng.choice([0.0, 0.7, 1.0]), top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]), min_p=rng.choice([0.0, 0.05]), stop_token_ids=tuple(range(3, 3 + rng.choice([0, 9]))),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]), frequency_penalty=rng.choice([0.0, 0.0, -0.4]),
            logit_bias=rng.choice([{}, {}, {7: 3.0}]), top_logprobs=rng.choice([0, 0, 3]),
            allowed_token_ids=rng.choice([None, None, tuple(range(0, 256, 3))]),
        )  # fmt: skip
        ids = opening[: rng.randrange(40)] + prompt(rng.randrange(3), rng.randint(1, 60))
        requests.append(RolloutRequest(request_id=f"q{i}", prompt_token_ids=ids, params=params, include=columns, **given))
    want = run(cancelling[kind], requests, alone=True, dtype=dtype, prefix_cache=False, num_blocks=512)
    for _ in range(3):
        block_tokens = rng.choice(BLOCKS)
        options: dict[str, Any] = {
            "kernels": rng.choice(available_builds() or ["reference"]), "threads": rng.choice([1, 2, 3]), "block_tokens": block_tokens,
            "max_batch_tokens": rng.choice([5, 17, 64, 512]), "max_num_seqs": rng.choice([2, 7, 64]),
            "num_blocks": rng.choice([140, 200, 512]) // block_tokens + 1,
        }  # fmt: skip
        rng.shuffle(requests)
        assert run(cancelling[kind], requests, dtype=dtype, **options) == want, options


def test_thousands_of_keys(tmp_path: Path) -> None:
    """Where attention cuts its work otherwise, with a head size and a group that fill no tile."""
    heads = {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 40, "hidden_size": 72, "intermediate_size": 132}
    model = write_model(tmp_path / "model", max_position_embeddings=8192, **heads)
    opening = prompt(5, 4085)
    requests = [changed(r, ("entropy",), prompt_token_ids=opening + r.prompt_token_ids[: 5 + 17 * i], n=4) for i, r in enumerate(SHORT)]
    want = run(model, requests, alone=True, dtype="bfloat16", num_blocks=600, prefix_cache=False, max_batch_tokens=8192)
    for block_tokens, max_batch_tokens in ((32, 300), (128, 8192), (16, 77)):
        options = {"block_tokens": block_tokens, "num_blocks": 20000 // block_tokens, "max_batch_tokens": max_batch_tokens}
        assert run(model, requests, dtype="bfloat16", threads=2, **options) == want, options
