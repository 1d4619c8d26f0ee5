"""Requests that come, go and come again: ids used anew at once, small pools, long ones beside short ones, bad ones among good ones."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import check, expect, make, request, run
from real_engine import bits, changed, finals, make_requests, prompt
from real_engine import run as run_real
from rollsync import Engine, SamplingParams
from rollsync.rollout.engine.async_engine import AsyncEngine
from rollsync.rollout.errors import ConfigError
from rollsync.rollout.models.loader import CheckpointError
from rollsync.rollout.selftest.model import write_model

LONG: dict[str, Any] = {"ignore_eos": True}


def test_an_id_is_aborted_and_used_anew_five_hundred_times() -> None:
    """In every state there is: waiting, amid a chunk, decoding, preempted, sharing a prefix, streaming, just finished."""
    rng = random.Random(3)
    engine, _ = make(num_blocks=14, max_batch_tokens=6, max_num_seqs=4, max_model_len=40)
    shared = list(range(10, 24))
    others = {f"other{i}": request(f"other{i}", shared[: 5 + i], max_tokens=20, seed=i, **LONG) for i in range(3)}
    states = set()
    for turn in range(500):
        for rid, r in others.items():
            if rid not in engine.scheduler.requests:
                engine.add_request(r)
        mine = request(
            "mine", shared[: rng.randrange(1, 14)], n=rng.choice([1, 3]), max_tokens=rng.choice([0, 1, 15]), stream=rng.random() < 0.5,
            seed=turn, priority=rng.choice([-1, 0, 1]), **LONG,
        )  # fmt: skip
        engine.add_request(mine)
        done, streamed = set(), [0] * 3
        for _ in range(rng.choice([0, 1, 2, 3, 5, 9, 16])):
            for output in engine.step():
                if output.request_id == "mine":
                    streamed[output.sample_index] += len(output.token_ids) * (not output.finished)
                    done |= {output.sample_index} if output.finished else set()
                elif output.finished:
                    expect(output, others[output.request_id], engine)
        states |= {
            "waiting" if not seq.was_admitted else "preempted" if seq.slot < 0 else "decoding" if seq.decoding else "prefill"
            for seq in (engine.scheduler.requests["mine"].sequences.values() if "mine" in engine.scheduler.requests else ())
        }
        states |= {"finished"} if len(done) == mine.params.n else {"streaming"} if any(streamed) else set()
        ended = engine.abort("mine")
        check(engine)
        assert done | {o.sample_index for o in ended} == set(range(mine.params.n)) and len(ended) == mine.params.n - len(done)
        for output in ended:
            assert len(output.token_ids) == len(output.logprobs) >= streamed[output.sample_index]
    assert states == {"waiting", "preempted", "decoding", "prefill", "finished", "streaming"}
    engine.abort(all=True)
    assert engine.stats()["free_blocks"] == 14 and not engine.scheduler._filling


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pool_of_eight_blocks_gives_the_bits_of_a_large_one(cancelling: dict[str, str], dtype: str) -> None:
    torch.set_num_threads(1)
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.5, "top_logprobs": 2}
    requests = [
        changed(r, prompt_token_ids=prompt(i, 8), max_tokens=20, logit_bias={40 + i: 3.0}, **penalties)
        for i, r in enumerate(make_requests(4, max_tokens=20))
    ]
    want = run_real(cancelling["llama"], requests, alone=True, dtype=dtype, block_tokens=4, prefix_cache=False)
    for prefix_cache in (True, False):
        with Engine(cancelling["llama"], dtype=dtype, threads=1, block_tokens=4, num_blocks=8, prefix_cache=prefix_cache) as engine:
            outputs = finals(engine, requests)
            assert {key: bits(o) for key, o in outputs.items()} == want
            assert engine.stats()["preemptions"] >= 3 and engine.stats()["free_blocks"] == 8
            assert all(len(o.token_ids) == 20 for o in outputs.values())


def test_short_requests_come_back_while_a_long_one_runs() -> None:
    engine, _ = make(num_blocks=64, max_num_seqs=16)

    async def serve() -> list[str]:
        served = AsyncEngine(lambda: engine)
        await served.wait_ready()
        order: list[str] = []

        async def one(rid: str, tokens: int) -> None:
            await served.generate(request(rid, [1, 2, 3], seed=1, max_tokens=tokens, **LONG))
            order.append(rid)

        await asyncio.gather(one("long", 60), *(one(f"short{i}", 2) for i in range(15)))
        await served.close()
        return order

    order = asyncio.run(serve())
    assert len(order) == 16 and order[-1] == "long"


@pytest.mark.parametrize("max_tokens", [0, 1, 2, None])
def test_a_prompt_without_room_fails_alone_in_a_batch(max_tokens: int | None) -> None:
    engine, _ = make()
    params = SamplingParams(seed=1, max_tokens=max_tokens, n=2, ignore_eos=True)
    prompts: list[Any] = [[1] * 63, [1] * 64, [1] * 65, [2, 3], []]
    outs = engine.generate(prompts, params, on_error="return")
    room = [1, 0, -1, 62]
    for ids, out, left in zip(prompts, outs, room, strict=False):
        fits = left >= (max_tokens != 0)
        for i, sample in enumerate(out.samples):
            assert sample.sample_index == i and sample.finish_reason == ("length" if fits else "error")
            assert len(sample.token_ids) == (min(left, 99 if max_tokens is None else max_tokens) if fits else 0)
            if not fits:
                most = 64 if max_tokens == 0 else 63
                assert sample.error == (
                    f"the prompt has {len(ids)} tokens; the context of 64 tokens allows at most {most} "
                    f"(with {'max_tokens 0' if max_tokens == 0 else 'one new token'})"
                )
    assert [s.finish_reason for s in outs[4].samples] == ["error"] * 2 and "at least one token" in str(outs[4].samples[0].error)
    assert not engine.has_work and engine.stats()["free_blocks"] == 64


def test_requests_without_a_seed_differ_within_an_engine_and_between_two_alike() -> None:
    seen = []
    for _ in range(2):
        engine, _ = make(seed=None)
        outs = engine.generate([[1, 2]] * 8, SamplingParams(max_tokens=20, ignore_eos=True))
        seen += [tuple(out.samples[0].token_ids) for out in outs]
        again = engine.generate([[1, 2]], SamplingParams(max_tokens=20, ignore_eos=True, seed=outs[3].samples[0].seed))
        assert tuple(again[0].samples[0].token_ids) == seen[-5]
    assert len(set(seen)) == 16
    assert run(engine) == []


def test_stop_strings_without_a_tokenizer_are_refused_by_name_and_can_be_refused_alone(tmp_path: Path) -> None:
    params = [SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(max_tokens=2, stop="x")]
    with Engine(write_model(tmp_path / "model"), num_blocks=8, threads=1) as engine:
        with pytest.raises(ConfigError, match="tokenizer"):
            engine.generate([[1], [2]], params)
        assert not engine.has_work
        good, bad = engine.generate([[1], [2]], params, on_error="return")
        assert good.samples[0].finish_reason == "length" and "tokenizer" in str(bad.samples[0].error)
        assert engine.score([[2]], [[3]], params[1:])[0].finish_reason == "length"  # nothing is matched there


def test_a_checkpoint_that_does_not_load_says_so_itself(tmp_path: Path) -> None:
    """And not by what its cleaning up meets."""
    folder = Path(write_model(tmp_path / "model"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        Engine(str(folder), num_blocks=8, threads=1)
