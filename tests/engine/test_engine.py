"""The engine as a caller meets it: generate, add/step/abort, limits, stop rules, broken numbers. No model needed."""

import copy
import dataclasses
import pickle
import signal
import threading
from typing import Any

import pytest
from fake_runner import EMBED, EOS, VOCAB, FakeMatcher, FakeRunner, FakeTokenizer, make_info, oracle
from rollsync import Engine, EngineConfig, RolloutRequest, SampleOutput, SamplingParams
from rollsync.rollout.errors import BadRequest, ConfigError, DuplicateRequest, IllegalState, Overloaded, PromptTooLong


def make(**info: Any) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(make_info(**info))
    return Engine("fake", runner=runner, tokenizer=FakeTokenizer(), stop_matcher=FakeMatcher), runner  # type: ignore[arg-type]


def request(rid: str, prompt: list[int], include: tuple[str, ...] = (), **kw: Any) -> RolloutRequest:
    names = ("first_sample", "continue_from", "forced_token_ids", "priority", "stream", "group", "session")
    own = {name: kw.pop(name) for name in names if name in kw}
    return RolloutRequest(request_id=rid, prompt_token_ids=tuple(prompt), params=SamplingParams(**kw), include=include, **own)


def run(engine: Engine) -> list[SampleOutput]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def one(engine: Engine, req: RolloutRequest) -> SampleOutput:
    engine.add_request(req)
    (output,) = [o for o in run(engine) if o.finished]
    return output


LONG = {"max_tokens": 40, "ignore_eos": True}


# generate


def test_generate_takes_ids_text_and_messages_in_order() -> None:
    engine, _ = make()
    outs = engine.generate([[1, 2], "ab", [{"role": "a", "content": "bc"}]], SamplingParams(n=2, seed=3, max_tokens=4))
    assert [o.prompt_token_ids for o in outs] == [[1, 2], [97, 98], [ord(c) for c in "[abc]"]]
    for out in outs:
        assert [s.sample_index for s in out.samples] == [0, 1]
        for i, sample in enumerate(out.samples):
            req = request("x", out.prompt_token_ids, n=2, seed=3, max_tokens=4)
            assert sample.token_ids == oracle(req, 3, engine.info, i).token_ids
        assert out.texts == ["".join(map(chr, s.token_ids)) for s in out.samples]


def test_generate_counts_on_for_the_same_prompt_and_seed() -> None:
    engine, _ = make()
    outs = engine.generate([[1, 2], [5], [1, 2]], SamplingParams(n=2, seed=3, **LONG))
    whole = engine.generate([[1, 2]], SamplingParams(n=4, seed=3, **LONG))[0]
    assert [s.token_ids for s in outs[0].samples + outs[2].samples] == [s.token_ids for s in whole.samples]
    assert len({tuple(s.token_ids) for s in whole.samples}) == 4


@pytest.mark.parametrize("bad", [[], [EMBED], [1] * 64, [1, "x"], 7, b"ab", [1, -1]])
def test_generate_names_the_bad_prompt_and_starts_nothing(bad: Any) -> None:
    engine, runner = make()
    with pytest.raises(BadRequest, match=r"prompts\[1\]") as error:
        engine.generate([[1], bad, [2]])
    assert error.value.field == "prompts[1]" and not engine.has_work and not runner.plans


def test_generate_checks_params_and_prompts_as_lists() -> None:
    engine, _ = make()
    with pytest.raises(BadRequest, match="2 for 1"):
        engine.generate([[1]], [SamplingParams(), SamplingParams()])
    with pytest.raises(BadRequest, match="list of prompts"):
        engine.generate("hello")  # type: ignore[arg-type]
    assert engine.generate([]) == []


def test_generate_waits_for_room_in_the_queue() -> None:
    engine, _ = make(max_waiting=3, max_num_seqs=2)
    outs = engine.generate([[i] for i in range(20)], SamplingParams(n=3, max_tokens=2))
    assert [len(o.samples) for o in outs] == [3] * 20


def test_ctrl_c_ends_generate_and_leaves_the_engine_usable() -> None:
    engine, runner = make()
    runner.on_execute = lambda plan: signal.raise_signal(signal.SIGINT) if plan.step == 3 else None
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2]], SamplingParams(n=3, **LONG))
    assert not engine.has_work and engine.stats()["free_blocks"] == 64 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(engine.generate([[1, 2]], SamplingParams(max_tokens=2))) == 1


def test_progress_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    engine, _ = make()
    engine.generate([[1], [2]], SamplingParams(max_tokens=3, ignore_eos=True), progress=True)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "2/2 samples, 6 tokens" in captured.err


def test_outputs_travel_as_plain_data() -> None:
    engine, _ = make()
    read, unread = engine.generate([[1, 2], [3]], SamplingParams(n=2, seed=3, max_tokens=4))
    engine.tokenizer.cannot_travel = threading.Lock()  # type: ignore[attr-defined]
    texts = read.texts
    assert pickle.loads(pickle.dumps(read)).texts == texts == copy.deepcopy(read).texts == copy.copy(read).texts
    assert pickle.loads(pickle.dumps(read)) == read == copy.deepcopy(read)
    assert dataclasses.asdict(unread)["samples"][0]["token_ids"] == unread.samples[0].token_ids
    with pytest.raises(IllegalState, match="before it is pickled"):
        _ = pickle.loads(pickle.dumps(unread)).texts


def test_prompt_objects_have_parameters_of_their_own() -> None:
    engine, _ = make()
    params = SamplingParams(seed=9, **LONG)
    own, bare = engine.generate([{"token_ids": [1, 2], "seed": 4, "max_tokens": 3, "first_sample": None}, [1, 2]], params)
    (alone,) = engine.generate([[1, 2]], SamplingParams(seed=4, max_tokens=3, ignore_eos=True))
    assert own.samples[0].token_ids == alone.samples[0].token_ids
    assert (own.samples[0].seed, bare.samples[0].seed, len(bare.samples[0].token_ids)) == (4, 9, 40)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([""], "prompts[0]: must hold at least one token, got none"),
        ([[1, -1]], "prompts[0]: token_ids[1] must be"),
        ([{"token_ids": [1], "seed": -1}], "prompts[0]: seed must be"),
        ([{"token_ids": [1], "temperature": 1}], "give temperature in params"),
        ([{"token_ids": "ab"}], "token_ids must be a list of token ids"),
        ([{"role": "user", "content": "a"}], "put the chat into a list"),
    ],
)
def test_refusals_speak_of_what_was_given(prompts: Any, words: str) -> None:
    engine, _ = make()
    with pytest.raises(BadRequest) as error:
        engine.generate(prompts)
    assert words in str(error.value)


# Seeds


def test_unseeded_requests_differ_and_report_a_seed_that_reproduces_them() -> None:
    engine, _ = make(seed=None)
    first, second = (one(engine, request("r", [1, 2], **LONG)) for _ in range(2))
    assert first.seed != second.seed and first.token_ids != second.token_ids
    assert one(engine, request("again", [1, 2], seed=first.seed, **LONG)).token_ids == first.token_ids
    a, b = (make(seed=9)[0].generate([[1]])[0].samples[0].seed for _ in range(2))
    assert a == b


# Limits


@pytest.mark.parametrize(
    ("length", "max_tokens", "produced"),
    [(62, None, 2), (63, None, 1), (63, 0, 0), (63, 1, 1), (63, 2, 1), (64, 0, 0), (64, 1, None), (64, None, None), (65, 0, None)],
)
def test_prompts_at_the_edge_of_the_context(length: int, max_tokens: int | None, produced: int | None) -> None:
    engine, _ = make()
    req = request("r", [1] * length, max_tokens=max_tokens, ignore_eos=True)
    if produced is None:
        with pytest.raises(PromptTooLong, match="64 tokens allows at most"):
            engine.add_request(req)
        assert not engine.has_work
    else:
        output = one(engine, req)
        assert len(output.token_ids) == produced and output.finish_reason == "length"


def test_prompt_beyond_the_kv_pool_is_refused_and_output_ends_where_the_pool_does() -> None:
    engine, _ = make(num_blocks=4, block_tokens=4)
    with pytest.raises(PromptTooLong, match="KV pool of 16"):
        engine.add_request(request("r", [1] * 16))
    assert len(one(engine, request("r", [1] * 10, ignore_eos=True)).token_ids) == 6


def test_ids_are_checked_against_the_model() -> None:
    engine, _ = make()
    for field, req in {
        "prompt_token_ids": request("r", [1, EMBED]),
        "stop_token_ids": request("r", [1], stop_token_ids=(VOCAB,)),
        "forced_token_ids": request("r", [1], forced_token_ids=(1 << 30,)),
        "continue_from": request("r", [1], continue_from=(EMBED,)),
    }.items():
        with pytest.raises(BadRequest, match=field) as error:
            engine.add_request(req)
        assert error.value.field == field
    one(engine, request("r", [EMBED - 1], max_tokens=1))  # padding ids may be fed


def test_a_full_queue_and_a_repeated_id_are_refused_and_change_nothing() -> None:
    engine, _ = make(max_waiting=4)
    engine.add_request(request("a", [1], n=3, **LONG))
    with pytest.raises(DuplicateRequest, match="'a'"):
        engine.add_request(request("a", [2]))
    with pytest.raises(Overloaded, match="max_waiting = 4"):
        engine.add_request(request("b", [1], n=2))
    with pytest.raises(BadRequest, match="n must be at most"):
        engine.add_request(request("c", [1], n=5))
    assert engine.stats()["waiting"] == 3
    assert len(run(engine)) == 3
    one(engine, request("a", [1], max_tokens=1))


# How samples end


def test_every_eos_ends_and_stays_in_the_ids() -> None:
    engine, _ = make()
    seen = set()
    for seed in range(400):
        output = one(engine, request("r", [1], seed=seed))
        if output.finish_reason == "stop":
            assert output.token_ids[-1] == output.stop_reason and len(output.token_ids) == len(output.logprobs)
            seen.add(output.stop_reason)
        if seen == set(EOS):
            break
    assert seen == set(EOS)


def test_stop_string_keeps_all_tokens_and_min_tokens_holds_it_back() -> None:
    engine, _ = make()
    free = one(engine, request("r", [1], seed=1, **LONG))
    stop = "".join(map(chr, free.token_ids[4:6]))
    stopped = one(engine, request("r", [1], seed=1, stop=("none", stop), **LONG))
    assert stopped.token_ids == free.token_ids[:6] and (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    later = one(engine, request("r", [1], seed=1, stop=stop, min_tokens=7, **LONG))
    assert later.token_ids == free.token_ids


def test_min_tokens_bans_stop_ids_until_then() -> None:
    engine, runner = make()
    one(engine, request("r", [1, 2], min_tokens=5, max_tokens=9, stop_token_ids=(8,)))
    init = runner.plans[0].new_slots[0]
    assert init.banned_ids == (*EOS, 8) and init.banned_until == 7
    one(engine, request("r", [1, 2], min_tokens=5, max_tokens=9, stop_token_ids=(8,), ignore_eos=True))
    assert runner.plans[-1].new_slots == [] and runner.inits[init.slot].banned_ids == (8,)


def test_forced_tokens_are_scored_in_one_chunk_and_end_a_sample_like_drawn_ones() -> None:
    engine, runner = make()
    free = one(engine, request("r", [1, 2], seed=1, max_tokens=9, ignore_eos=True))
    steps = len(runner.plans)
    forced = one(engine, request("r", [1, 2], seed=1, max_tokens=9, ignore_eos=True, forced_token_ids=free.token_ids[:7]))
    assert (forced.token_ids, forced.logprobs) == (free.token_ids, free.logprobs) and len(runner.plans) - steps == 2
    cut = one(engine, request("r", [1, 2], max_tokens=3, forced_token_ids=(9, 10, 11, 12)))
    assert cut.token_ids == [9, 10, 11] and cut.finish_reason == "length" and len(cut.logprobs) == 3
    ended = one(engine, request("r", [1, 2], forced_token_ids=(9, EOS[1], 12)))
    assert ended.token_ids == [9, EOS[1]] and (ended.finish_reason, ended.stop_reason) == ("stop", EOS[1])
    engine.add_request(request("g", [1, 2], n=3, forced_token_ids=(9, EOS[0])))
    outs = run(engine)
    assert [o.token_ids for o in outs] == [[9, EOS[0]]] * 3 and len({tuple(o.logprobs) for o in outs}) == 1


def test_an_aborted_partial_goes_on_bit_for_bit() -> None:
    engine, _ = make()
    whole = one(engine, request("r", [1, 2], ("entropy",), seed=1, **LONG))
    engine.add_request(request("r", [1, 2], ("entropy",), seed=1, **LONG))
    for _ in range(9):
        engine.step()
    (partial,) = engine.abort("r", reason="why")
    assert partial.token_ids == whole.token_ids[:9] and (partial.finish_reason, partial.abort_reason) == ("abort", "why")
    rest = one(engine, request("r", [1, 2], ("entropy",), seed=1, continue_from=partial.token_ids, **LONG))
    assert (rest.token_ids, rest.logprobs, rest.entropy) == (whole.token_ids, whole.logprobs, whole.entropy)


def test_deltas_add_up_to_the_final_output() -> None:
    engine, _ = make(max_batch_tokens=3)
    engine.add_request(request("r", [1, 2], stream=True, seed=1, forced_token_ids=(5, 6, 8, 9, 10), **LONG))
    *deltas, final = run(engine)
    assert len(deltas) > 30 and not any(d.finished for d in deltas) and final.finish_reason == "length"
    ids = [t for d in deltas for t in d.token_ids]
    assert ids == final.token_ids[: len(ids)] and len(final.token_ids) - len(ids) == 1
    assert all(d.weight_versions == [{"version": 0, "start": 0, "end": len(d.token_ids)}] for d in deltas)


def test_versions_are_those_of_the_steps_that_made_the_tokens() -> None:
    engine, runner = make()
    engine.add_request(request("r", [1, 2], max_tokens=6, ignore_eos=True))
    engine.step()
    runner.version = 4
    assert run(engine)[0].weight_versions == [{"version": 0, "start": 0, "end": 1}, {"version": 4, "start": 1, "end": 6}]
    assert engine.stats()["weight_version"] == 4


# Abort


@pytest.mark.parametrize("state", ["waiting", "mid_chunk", "decode", "preempted", "sharing", "unforked", "instant", "queued_sibling"])
def test_abort_in_every_state_returns_all_blocks_and_frees_the_id(state: str) -> None:
    small = state in ("preempted", "queued_sibling")
    engine, _ = make(num_blocks=9, max_model_len=36, max_num_seqs=3) if small else make(max_batch_tokens=8, max_num_seqs=8)
    n = {"sharing": 3, "unforked": 3, "queued_sibling": 5}.get(state, 1)
    steps = {"waiting": 0, "instant": 0, "mid_chunk": 1, "unforked": 1, "preempted": 16}.get(state, 5)
    for rid in ("other", "mine") if state != "queued_sibling" else ("mine",):
        prompt = list(range(10, 16)) if small else list(range(10, 30))
        tokens = {"max_tokens": 0} if state == "instant" and rid == "mine" else {"max_tokens": 24, "ignore_eos": True}
        engine.add_request(request(rid, prompt, n=n, seed=1, group=rid, **tokens))
    for _ in range(steps):
        engine.step()
    if state == "preempted":
        assert engine.stats()["preemptions"] == 1
    outputs = engine.abort(group="mine")
    assert [o.sample_index for o in outputs] == list(range(n)) and {o.finish_reason for o in outputs} == {"abort"}
    assert engine.abort("mine") == []
    engine.add_request(request("mine", [1], max_tokens=1, ignore_eos=True))
    finals = run(engine)
    assert len([o for o in finals if o.request_id == "mine"]) == 1
    for output in finals:
        if output.request_id == "other":
            assert output.token_ids == oracle(
                request("other", prompt, seed=1, max_tokens=24, ignore_eos=True), 1, engine.info, output.sample_index
            ).token_ids
    assert engine.stats()["free_blocks"] == engine.info.num_blocks
    engine.scheduler.blocks.check_integrity([])


def test_abort_by_session_and_all() -> None:
    engine, _ = make()
    for i in range(4):
        engine.add_request(request(f"r{i}", [1], session=f"s{i % 2}", **LONG))
    assert [o.request_id for o in engine.abort(session="s1")] == ["r1", "r3"]
    assert [o.request_id for o in engine.abort(all=True)] == ["r0", "r2"]
    assert not engine.has_work and engine.stats()["aborted"] == 4
    with pytest.raises(BadRequest, match="abort needs"):
        engine.abort()


# Broken numbers and broken runners


@pytest.mark.parametrize("max_batch_tokens", [6, 64])
@pytest.mark.parametrize("n", [1, 3, 20])
def test_nonfinite_logits_end_that_request_alone_and_poison_no_cache(n: int, max_batch_tokens: int) -> None:
    engine, runner = make(max_batch_tokens=max_batch_tokens)
    runner.nonfinite = lambda prefix: prefix[0] == 9 and len(prefix) >= 9
    engine.add_request(request("bad", [9] * 9, n=n, seed=1, **LONG))
    engine.add_request(request("good", [1] * 9, seed=1, **LONG))
    outputs = {(o.request_id, o.sample_index): o for o in run(engine)}
    assert len(outputs) == n + 1 and outputs["good", 0].token_ids == oracle(request("g", [1] * 9, seed=1, **LONG), 1, engine.info).token_ids
    for i in range(n):
        assert outputs["bad", i].finish_reason == "error" and "NaN" in str(outputs["bad", i].error) and outputs["bad", i].token_ids == []
    assert engine.stats()["nonfinite"] == n and engine.stats()["free_blocks"] == 64
    runner.nonfinite = lambda prefix: False
    assert one(engine, request("again", [9] * 9, max_tokens=1)).cached_tokens == 0


def test_nonfinite_in_decode_keeps_the_tokens_before() -> None:
    engine, runner = make()
    runner.nonfinite = lambda prefix: len(prefix) == 7
    output = one(engine, request("r", [1, 2], **LONG))
    assert output.finish_reason == "error" and len(output.token_ids) == len(output.logprobs) == 5


def test_nonfinite_prompt_row_ends_all_samples() -> None:
    engine, runner = make(max_batch_tokens=4)
    runner.nonfinite = lambda prefix: len(prefix) == 3
    engine.add_request(request("r", [1] * 12, ("prompt_logprobs",), n=3))
    assert [o.finish_reason for o in run(engine)] == ["error"] * 3


def test_a_failed_step_comes_through_and_breaks_the_engine() -> None:
    engine, runner = make()

    def fail(plan: object) -> None:
        raise RuntimeError("device lost")

    runner.on_execute = fail
    engine.add_request(request("r", [1]))
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    for call in (engine.step, lambda: engine.add_request(request("s", [1])), lambda: engine.generate([[1]])):
        with pytest.raises(IllegalState, match="device lost"):
            call()
    with engine:
        pass
    engine.close()
    assert runner.closed
    with pytest.raises(IllegalState, match="closed"):
        engine.step()


# Options


def test_options_reach_the_configuration_by_leaf_flat_or_dotted_name() -> None:
    from rollsync.rollout.engine.config import make_config

    options = {"block_tokens": 8, "scheduler_max_num_seqs": 5, "numerics.threads": 1, "dtype": "float32"}
    config = make_config("m", options)
    assert (config.cache.block_tokens, config.scheduler.max_num_seqs, config.numerics.threads, config.dtype) == (8, 5, 1, "float32")
    assert make_config(config, {}) is config
    with pytest.raises(ConfigError, match=r"'max_num_seq' \(did you mean max_num_seqs\?\).*known: .*cache.block_tokens"):
        make_config("m", {"max_num_seq": 4})
    with pytest.raises(ConfigError, match="repeated"):
        make_config("m", {"block_tokens": 8, "cache_block_tokens": 8})
    with pytest.raises(ConfigError, match="own configuration"):
        Engine("fake", runner=FakeRunner(), block_tokens=8)
    with pytest.raises(ConfigError, match="not both"):
        make_config(EngineConfig(model="m"), {"block_tokens": 8})
