"""What the scheduler feeds, and to whom: order, budgets, sharing, preemption. Random walks against the oracle."""

import random
from dataclasses import asdict
from typing import Any

import msgpack
import pytest
from fake_runner import VOCAB, oracle
from harness import check, expect, make, request, run
from rollsync import RolloutRequest, SampleOutput
from rollsync.rollout.engine.types import StepPlan


def random_request(rng: random.Random, rid: str, shared: list[int]) -> RolloutRequest:
    """Anything a request may ask for; prompts share prefixes."""
    prompt = shared[: rng.randrange(1, len(shared))] + [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 4))]
    max_tokens = rng.choice([None, 0, 1, 2, 5, 12, 25])
    given: dict[str, Any] = {}
    n = rng.choice([1, 1, 2, 3, 7])
    if rng.random() < 0.3:
        given = {rng.choice(["continue_from", "forced_token_ids"]): [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]}
        n = 1 if "continue_from" in given else n
    include = tuple(name for name in ("model_logprobs", "temperature_logprobs", "entropy", "prompt_logprobs") if rng.random() < 0.25)
    return request(
        rid, prompt, include, n=n, max_tokens=max_tokens, seed=rng.randrange(5), temperature=rng.choice([0.0, 1.0]),
        ignore_eos=rng.random() < 0.5, min_tokens=rng.choice([0, 0, min(3, max_tokens or 0)]), priority=rng.choice([0, 0, 1]),
        stop_token_ids=(7,) if rng.random() < 0.3 else (), stop=("A", "BC") if rng.random() < 0.3 else (),
        first_sample=rng.randrange(3), stream=rng.random() < 0.3, **given,
        prompt_logprobs_start=rng.choice([0, 0, rng.randint(0, len(prompt))]) if "prompt_logprobs" in include else 0,
    )  # fmt: skip


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 3, 5, 8, 17, 64])
@pytest.mark.parametrize(("num_blocks", "max_num_seqs", "prefix_cache"), [(200, 64, True), (16, 8, True), (16, 8, False), (9, 3, True)])
def test_outputs_do_not_depend_on_how_they_are_scheduled(
    max_batch_tokens: int, num_blocks: int, max_num_seqs: int, prefix_cache: bool
) -> None:
    rng = random.Random(max_batch_tokens * 1000 + num_blocks)
    engine, _ = make(
        num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs, prefix_cache=prefix_cache, max_model_len=36
    )
    shared = [rng.randrange(VOCAB) for _ in range(16)]
    requests = {f"r{i}": random_request(rng, f"r{i}", shared) for i in range(14)}
    for r in requests.values():
        engine.add_request(r)
    outputs = run(engine)
    assert sorted((o.request_id, o.sample_index) for o in outputs) == sorted(
        (rid, r.first_sample + i) for rid, r in requests.items() for i in range(r.params.n)
    )
    for output in outputs:
        expect(output, requests[output.request_id], engine)
    assert engine.scheduler.blocks.num_free == num_blocks and engine.stats()["waiting"] == 0
    if num_blocks == 9 and max_batch_tokens > 8:
        assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("seed", range(6))
def test_random_walk_of_submits_aborts_commits_and_steps(seed: int) -> None:
    rng = random.Random(seed)
    engine, runner = make(
        num_blocks=rng.choice([9, 14, 40]), max_batch_tokens=rng.choice([3, 9, 30]), max_num_seqs=rng.choice([3, 8]),
        max_model_len=30, prefix_cache=seed != 3,
    )  # fmt: skip
    shared = [rng.randrange(VOCAB) for _ in range(12)]
    inflight: dict[str, tuple[RolloutRequest, int]] = {}
    tainted: set[str] = set()
    owed: dict[str, int] = {}

    def settle(outputs: list[SampleOutput]) -> None:
        for output in outputs:
            if not output.finished:
                continue
            req, _ = inflight[output.request_id]
            owed[req.request_id] -= 1
            assert owed[req.request_id] >= 0
            if output.finish_reason != "abort":
                if req.request_id not in tainted:
                    expect(output, req, engine, runner.weights)
            else:
                whole = oracle(req, output.seed, engine.info, output.sample_index - req.first_sample, runner.weights)
                if req.request_id not in tainted:
                    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
                assert len(output.token_ids) == len(output.logprobs)
            if owed[req.request_id] == 0:
                del inflight[req.request_id], owed[req.request_id]
                tainted.discard(req.request_id)

    for move in range(2500):
        dice = rng.random()
        if dice < 0.25 and len(inflight) < 12:
            rid = f"id{rng.randrange(20)}"
            if rid not in inflight:
                req = random_request(rng, rid, shared)
                inflight[rid], owed[rid] = (req, 0), req.params.n
                engine.add_request(req)
        elif dice < 0.33 and inflight:
            settle(engine.abort(rng.choice(sorted(inflight))))
        elif dice < 0.34:
            # New weights: tokens already sampled stay, all KV is computed anew, nothing cached before is hit.
            tainted |= set(inflight)
            runner.weights = runner.version = runner.version + 1
            engine.scheduler.new_epoch(move)
        elif engine.has_work:
            settle(engine.step())
        check(engine)
    settle(engine.abort(all=True))
    assert not inflight and not engine.has_work
    assert engine.scheduler.blocks.num_free == engine.info.num_blocks
    check(engine)


def test_waiting_order_is_priority_then_arrival_and_nobody_overtakes() -> None:
    engine, _ = make(num_blocks=64, max_num_seqs=1)
    for rid, priority in (("low", 5), ("a", 0), ("b", 0), ("urgent", -1)):
        engine.add_request(request(rid, [1, 2], max_tokens=2, priority=priority, ignore_eos=True))
    assert [o.request_id for o in run(engine)] == ["urgent", "a", "b", "low"]
    # The big one at the head does not fit beside the running one; the small one behind it must not pass.
    engine, _ = make(num_blocks=8, max_num_seqs=8, max_model_len=32)
    engine.add_request(request("first", [1] * 9, max_tokens=6, ignore_eos=True))
    engine.step()
    engine.add_request(request("big", [2] * 20, max_tokens=1, ignore_eos=True))
    engine.add_request(request("small", [3], max_tokens=1, ignore_eos=True))
    assert [o.request_id for o in run(engine)] == ["first", "big", "small"]


def test_lowest_priority_latest_arrival_is_preempted() -> None:
    engine, _ = make(num_blocks=9, max_model_len=36, max_batch_tokens=32)
    for i, (rid, priority) in enumerate([("x", 1), ("y", 0), ("z", 0)]):
        engine.add_request(request(rid, [i + 1] * 4, max_tokens=20, ignore_eos=True, priority=priority))
    order = [o.request_id for o in run(engine)]
    assert engine.stats()["preemptions"] > 0 and order == ["y", "z", "x"]


def test_decodes_go_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    engine, runner = make(max_batch_tokens=8)
    engine.add_request(request("d", [1, 2], max_tokens=30, ignore_eos=True))
    engine.step()
    engine.add_request(request("p", list(range(20, 40)), max_tokens=2, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert [plan.counts for plan in runner.plans] == [[2], [1, 7], [1, 7], [1, 6]]
    assert runner.plans[1].row_entry == [0] and runner.plans[3].row_entry == [0, 1]


def test_siblings_share_one_prefill_and_copy_only_the_partial_block() -> None:
    engine, runner = make(num_blocks=64, prefix_cache=False)
    engine.add_request(request("g", [1, 2, 3, 5, 6, 7], n=4, max_tokens=5, ignore_eos=True))
    outputs = run(engine)
    assert runner.plans[0].counts == [6] and runner.plans[0].row_offset == [5] * 4 and runner.plans[0].row_entry == [0] * 4
    assert len(set(runner.plans[0].row_slot)) == 4
    assert [len(plan.copies) for plan in runner.plans] == [0, 3, 0, 0, 0]
    assert len({tuple(o.token_ids) for o in outputs}) == 4


def test_siblings_beyond_the_slots_follow_on_cached_blocks() -> None:
    engine, runner = make(num_blocks=64, max_num_seqs=2)
    r = request("g", list(range(10, 19)), n=5, max_tokens=3, seed=1, ignore_eos=True)
    engine.add_request(r)
    outputs = run(engine)
    for output in outputs:
        expect(output, r, engine)
    assert len(outputs) == 5 and [o.cached_tokens for o in sorted(outputs, key=lambda o: o.sample_index)] == [0, 0, 8, 8, 8]
    assert sum(plan.num_tokens for plan in runner.plans) == 9 + 3 * 1 + 5 * 2


def test_repeated_prompt_hits_all_full_blocks_but_feeds_one_token() -> None:
    engine, _ = make()
    prompt = list(range(10, 18))
    for i in range(2):
        r = request(f"r{i}", prompt, max_tokens=1, seed=1)
        engine.add_request(r)
        (output,) = run(engine)
        expect(output, r, engine)
        assert output.cached_tokens == (4 if i else 0)
    # Rows are needed from the first prompt token on, so nothing may come from the cache.
    engine.add_request(request("lp", prompt, ("prompt_logprobs",), max_tokens=1))
    assert run(engine)[0].cached_tokens == 0


def test_equal_prompts_sent_apart_are_prefilled_once() -> None:
    engine, runner = make(max_num_seqs=8, max_batch_tokens=16)
    reqs = [request(f"r{i}", list(range(10, 50)), seed=i, max_tokens=2, ignore_eos=True) for i in range(5)]
    other = request("other", [1, 2, 3], seed=1, max_tokens=2, ignore_eos=True)
    for r in (*reqs, other):
        engine.add_request(r)
    outputs = {o.request_id: o for o in run(engine)}
    for r in (*reqs, other):
        expect(outputs[r.request_id], r, engine)
    assert [outputs[r.request_id].cached_tokens for r in reqs] == [0, 36, 36, 36, 36]
    assert sum(plan.num_tokens for plan in runner.plans) == (40 + 1) + 4 * (4 + 1) + (3 + 1)
    assert 3 in runner.plans[2].counts  # who does not share it need not wait for it


def test_waiting_for_a_prefill_ends_when_that_is_aborted() -> None:
    engine, _ = make(max_batch_tokens=4)
    for rid in ("a", "b", "c"):
        engine.add_request(request(rid, list(range(10, 30)), seed=1, max_tokens=2))
    engine.step()
    engine.abort("a")
    assert [o.cached_tokens for o in run(engine)] == [4, 16]


def test_scored_rows_are_bounded_per_step() -> None:
    engine, runner = make(num_blocks=300, max_model_len=1000, max_batch_tokens=1000)
    r = request("lp", [i % VOCAB for i in range(700)], ("prompt_logprobs",), max_tokens=0)
    engine.add_request(r)
    (output,) = run(engine)
    expect(output, r, engine)
    assert [plan.counts for plan in runner.plans] == [[256], [256], [187]] and output.token_ids == []


def test_block_updates_and_slot_setup_are_sent_only_on_change() -> None:
    engine, runner = make(block_tokens=4)
    engine.add_request(request("a", [1, 2, 3], max_tokens=9, ignore_eos=True))
    run(engine)
    assert [len(plan.new_slots) for plan in runner.plans] == [1] + [0] * 8
    assert [len(plan.block_updates) for plan in runner.plans] == [1, 0, 1, 0, 0, 0, 1, 0, 0]


def test_forked_siblings_report_the_cached_tokens_of_the_first() -> None:
    engine, runner = make()
    for rid, cached in (("a", 0), ("b", 8)):
        engine.add_request(request(rid, list(range(10, 20)), n=3, max_tokens=4, seed=1))
        assert [o.cached_tokens for o in run(engine)] == [cached] * 3
    for plan in runner.plans:
        assert StepPlan(**msgpack.unpackb(msgpack.packb(asdict(plan)))).token_ids == plan.token_ids


def test_new_epoch_with_kept_kv_marks_later_tokens_and_caches_nothing_mixed() -> None:
    engine, runner = make()
    engine.add_request(request("a", [1, 2, 3, 5, 6], max_tokens=12, ignore_eos=True))
    for _ in range(4):
        engine.step()
    runner.version = 7
    assert engine.scheduler.new_epoch(1, keep_kv=True) == 0
    (output,) = run(engine)
    assert output.weight_versions == [{"version": 0, "start": 0, "end": 4}, {"version": 7, "start": 4, "end": 12, "mixed_kv": 1}]
    engine.add_request(request("b", [1, 2, 3, 5, 6], max_tokens=1))
    assert run(engine)[0].cached_tokens == 0


def test_new_epoch_recomputes_running_requests_and_says_how_much() -> None:
    engine, runner = make()
    engine.add_request(request("a", [1, 2, 3, 5, 6], max_tokens=12, ignore_eos=True))
    for _ in range(4):
        engine.step()
    runner.version, runner.weights = 7, 7
    assert engine.scheduler.new_epoch(1) == 8
    check(engine)
    (output,) = run(engine)
    assert runner.plans[4].counts == [9] and output.weight_versions[1] == {"version": 7, "start": 4, "end": 12}
