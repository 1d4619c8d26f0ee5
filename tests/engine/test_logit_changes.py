"""Bias, penalties, allowed ids and reported ids on a real engine: their bits, whose tokens count, and what is refused."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import torch
from fake_runner import VOCAB, FakeRunner
from real_engine import COLUMNS, Bits, bits, changed, finals, prompt, run
from rollsync import Engine, RolloutRequest, SampleOutput, SamplingParams
from rollsync.kernels.native_lib import available_builds
from rollsync.kernels.sampling_mask import SamplingMask
from rollsync.rollout.engine.adjust import Adjustments
from rollsync.rollout.engine.types import SlotInit
from rollsync.rollout.errors import BadRequest
from rollsync.rollout.models.detokenizer import end_at_stop
from rollsync.rollout.wire import pack_array, unpack_array

INF, NAN = math.inf, math.nan
Runs = dict[tuple[str, int], Bits]
FEW = tuple(range(3, 250, 16))
EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.4, "logit_bias": {3: 2.0, 19: -1.5, 40: 100.0},
    "allowed_token_ids": tuple(range(1, 256, 2)), "top_logprobs": 5, "min_tokens": 4, "stop_token_ids": (7, 9, 11),
}  # fmt: skip
KINDS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3, "top_logprobs": 3},
    {"temperature": 0.0, "frequency_penalty": 0.7, "repetition_penalty": 1.1, "top_logprobs": 20},
    {"logit_bias": {5: -3.0, 8: 4.0}, "allowed_token_ids": (*FEW, 8), "top_k": 6, "top_logprobs": 8},
    {**EVERYTHING, "top_p": 0.9, "min_p": 0.01, "temperature": 1.4},
    {},
)
REQUESTS = [
    RolloutRequest(
        request_id=f"r{i}", prompt_token_ids=prompt(99, 36) + prompt(i, 4 + 9 * i), include=(*COLUMNS[:3], "sampling_mask"),
        params=SamplingParams(seed=i, max_tokens=18, ignore_eos=True, **kind),
    )
    for i, kind in enumerate(KINDS)
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def want(cancelling: dict[str, str]) -> Runs:
    """One request at a time, prefilled whole, nothing cached."""
    return run(cancelling["llama"], REQUESTS, alone=True, dtype="bfloat16", prefix_cache=False)


def test_the_reference_gives_the_same_bits(cancelling: dict[str, str]) -> None:
    short = [changed(r, max_tokens=5, prompt_token_ids=r.prompt_token_ids[30:]) for r in REQUESTS]
    want = run(cancelling["llama"], short, dtype="bfloat16", kernels="reference")
    assert run(cancelling["llama"], short, alone=True, dtype="bfloat16") == want


def test_bits_do_not_depend_on_the_batch_the_build_or_chunks(cancelling: dict[str, str], want: Runs) -> None:
    for build, max_batch_tokens in zip(available_builds(), (512, 5, 23), strict=False):
        options: dict[str, Any] = {"dtype": "bfloat16", "kernels": build, "max_batch_tokens": max_batch_tokens, "threads": 2}
        assert run(cancelling["llama"], REQUESTS[::-1], **options) == want, build


def test_bits_do_not_depend_on_cached_prefixes_nor_on_what_streams(cancelling: dict[str, str], want: Runs) -> None:
    with Engine(cancelling["llama"], dtype="bfloat16", threads=1, num_blocks=256, block_tokens=4) as engine:
        finals(engine, REQUESTS)
        for request in REQUESTS:
            engine.add_request(changed(request, stream=True))
        parts: dict[tuple[str, int], list[SampleOutput]] = {}
        while engine.has_work:
            for output in engine.step():
                parts.setdefault((output.request_id, output.sample_index), []).append(output)
    for key, (*deltas, final) in parts.items():
        assert bits(final) == want[key] and final.cached_tokens > 30
        for name in ("token_ids", "logprobs", "entropy", "top_token_ids", "top_logprobs"):
            whole = getattr(final, name)
            assert whole is None or [v for delta in deltas for v in getattr(delta, name)] == whole[: sum(len(d.token_ids) for d in deltas)]
        masks = [d.sampling_mask for d in deltas if d.sampling_mask is not None]
        assert final.sampling_mask is not None and SamplingMask.join(masks) == final.sampling_mask[: sum(map(len, masks))]
        assert len(masks) == len(deltas) and len(final.sampling_mask) == len(final.token_ids)


def test_bits_do_not_depend_on_preemption(cancelling: dict[str, str], want: Runs) -> None:
    with Engine(cancelling["llama"], dtype="bfloat16", threads=1, num_blocks=30, block_tokens=4) as engine:
        for request in REQUESTS:
            engine.add_request(request)
        outputs = []
        while engine.has_work:
            outputs += engine.step()
            if engine.stats()["steps"] % 7 == 0:
                engine.scheduler.preempt_all()
        assert engine.stats()["preemptions"] > 5
    assert {(o.request_id, o.sample_index): bits(o) for o in outputs} == want


def test_given_tokens_count_as_the_output_they_are(cancelling: dict[str, str], want: Runs) -> None:
    """A partial goes on bit for bit, and scored tokens get the values they were sampled with."""
    for cut, max_batch_tokens in ((1, 512), (11, 7)):
        for name in ("continue_from", "forced_token_ids"):
            requests = [changed(r, **{name: want[r.request_id, 0][2][:cut]}) for r in REQUESTS]
            assert run(cancelling["llama"], requests, dtype="bfloat16", max_batch_tokens=max_batch_tokens) == want, (name, cut)
    with Engine(cancelling["llama"], dtype="bfloat16", threads=1, num_blocks=256) as engine:
        for request in REQUESTS:
            engine.add_request(request)
        for _ in range(4):
            assert not engine.step()
        partial = {output.request_id: tuple(output.token_ids) for output in engine.abort(all=True)}
        assert len(partial) == len(REQUESTS) and all(partial.values())
        outputs = finals(engine, [changed(r, continue_from=partial[r.request_id]) for r in REQUESTS])
    assert {key: bits(output) for key, output in outputs.items()} == want


def test_samples_of_a_group_are_those_sent_alone(cancelling: dict[str, str]) -> None:
    given = {"r0": (5, 5, 9), "r3": (21,)}
    requests = [changed(r, n=3, forced_token_ids=given.get(r.request_id, ())) for r in REQUESTS]
    group = run(cancelling["llama"], requests, dtype="float32", num_blocks=60, block_tokens=4)
    alone = [changed(r, n=1, first_sample=i, request_id=f"{r.request_id}.{i}") for r in requests for i in range(3)]
    got = run(cancelling["llama"], alone, dtype="float32")
    assert {(name.partition(".")[0], i): found for (name, i), found in got.items()} == group


def test_columns_have_one_length_and_hold_what_can_be_drawn(cancelling: dict[str, str]) -> None:
    with Engine(cancelling["llama"], dtype="bfloat16", threads=1, num_blocks=256) as engine:
        for request in REQUESTS:
            params = request.params
            output = finals(engine, [request])[request.request_id, 0]
            columns = [output.logprobs, output.temperature_logprobs, output.model_logprobs, output.entropy]
            tables = [output.top_token_ids, output.top_logprobs]
            assert (tables == [None, None]) == (params.top_logprobs == 0)
            assert all(column is not None and len(column) == len(output.token_ids) for column in columns + [t for t in tables if t])
            assert params.allowed_token_ids is None or set(output.token_ids) <= set(params.allowed_token_ids)
            for token, logprob, ids, values in zip(output.token_ids, output.logprobs, tables[0] or [], tables[1] or [], strict=False):
                assert len(ids) == len(values) == params.top_logprobs and values == sorted(values, reverse=True)
                drawable = [i for i in ids if i >= 0]
                assert ids == drawable + [-1] * values.count(-INF) and len(set(drawable)) == len(drawable)
                assert params.allowed_token_ids is None or set(drawable) <= set(params.allowed_token_ids)
                if params.temperature and token in drawable:
                    assert values[ids.index(token)] == logprob
                if params.top_k == 6:
                    assert len(drawable) == 6 and abs(sum(map(math.exp, values)) - 1) < 1e-5
            if params.temperature == 0.0:
                assert output.logprobs == [0.0] * 18 and output.token_ids == [ids[0] for ids in output.top_token_ids or []]


def test_the_lowest_temperatures_are_finite(cancelling: dict[str, str]) -> None:
    requests = [
        changed(REQUESTS[0], request_id=str(t), temperature=t, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        for t in (0.0, 1e-7, 1e-8)
    ]
    with Engine(cancelling["llama"], dtype="float32", threads=1, num_blocks=64) as engine:
        outputs = list(finals(engine, requests).values())
    for output in outputs:
        assert output.token_ids == outputs[0].token_ids and output.logprobs == [0.0] * 18
        values = [*(output.model_logprobs or []), *(output.temperature_logprobs or []), *(output.entropy or [])]
        assert len(values) == 54 and all(map(math.isfinite, values))


@pytest.mark.parametrize("name", ["at", "feed"])
def test_an_exception_within_one_request_ends_it_alone(
    cancelling: dict[str, str], want: Runs, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = getattr(Adjustments, name)

    def spoiled(self: Adjustments, first: int, *more: Any) -> Any:
        """`first` is the position of the token to draw, or of the first one fed."""
        if self._init.repetition_penalty == 7.0 and first + len(more) > self.first_position + 4:
            raise ZeroDivisionError("on purpose")
        return real(self, first, *more)

    monkeypatch.setattr(Adjustments, name, spoiled)
    bad = changed(REQUESTS[0], request_id="bad", repetition_penalty=7.0, n=2)
    with Engine(cancelling["llama"], dtype="bfloat16", threads=1, num_blocks=256) as engine:
        outputs = finals(engine, [bad, *REQUESTS])
        assert engine.stats()["free_blocks"] == 256
    for i in range(2):
        output = outputs.pop(("bad", i))
        assert output.finish_reason == "error" and "ZeroDivisionError" in (output.error or "")
        assert len(output.token_ids) == len(output.logprobs) == len(output.top_token_ids or []) == 5
    assert {key: bits(output) for key, output in outputs.items()} == want


def test_one_bias_serves_all_samples_of_a_group_and_no_other_request(cancelling: dict[str, str], want: Runs) -> None:
    several = [changed(REQUESTS[2], request_id=f"b{i}", n=4, logit_bias={5: -3.0, 8: 4.0 + i}, seed=i) for i in range(2)]
    alone = run(cancelling["llama"], several, alone=True, dtype="bfloat16", max_num_seqs=1)
    with Engine(cancelling["llama"], dtype="bfloat16", threads=1, num_blocks=256) as engine:
        outputs = finals(engine, [several[0], REQUESTS[0], several[1], REQUESTS[2]])
        assert len(set(map(id, engine.runner._slots.adjusting.values()))) < 9  # type: ignore[attr-defined]
    got = {key: bits(output) for key, output in outputs.items()}
    assert got == {**alone, ("r0", 0): want["r0", 0], ("r2", 0): want["r2", 0]}


def test_entries_follow_from_the_tokens_before_a_position() -> None:
    """Whatever the order and the steps in which positions are asked for."""
    tokens = tuple(random.Random(0).choices(range(9), k=40))
    init = SlotInit(
        slot=0, seed=0, sample_index=0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, prompt_tokens=6, history=tokens[:20],
        logit_bias=((2, 1.5), (70, -4.0)), repetition_penalty=1.2, presence_penalty=0.25, frequency_penalty=-0.5,
    )  # fmt: skip
    changes = Adjustments(init)
    changes.feed(3, tokens[3:18])
    changes.feed(18, tokens[18:40])
    for position in (6, 7, 19, 20, 40, 12):
        expected = {2: [1.5, 1.0, 0.0], 70: [-4.0, 1.0, 0.0]}
        for i, token in enumerate(tokens[:position]):
            entry = expected.setdefault(token, [0.0, 1.0, 0.0])
            entry[1] = 1.2
            count = tokens[6 : i + 1].count(token)
            entry[2] = -0.5 * count + 0.25 if count else 0.0
        got = {entry[0]: pytest.approx(list(entry[1:])) for entry in changes.at(position).tolist()}
        assert len(got) == len(changes.at(position)) and got == expected, position


BAD_VALUES: dict[str, list[Any]] = {
    "repetition_penalty": [0, 0.0, -1, 100.5, NAN, INF, True, "1", None, [1.0], 10**400],
    "presence_penalty": [-2.5, 2.01, NAN, -INF, False, "0", None, {}],
    "frequency_penalty": [-2.5, 2.01, NAN, INF, True, "0", None, 10**5000],
    "logit_bias": [
        [], [[1, 2.0]], "a", 3, {1: NAN}, {1: 101}, {1: -INF}, {1: "2"}, {1: None}, {1: True}, {-1: 1.0}, {"-1": 1.0}, {"x": 1.0},
        {"1.0": 1.0}, {1.0: 1.0}, {True: 1.0}, {2**31: 1.0}, {"9" * 5000: 1.0}, {"1": 0.5, 1: 0.5}, {"1": 0.5, "01": 0.5}, {"": 1.0},
        {"\u0661": 1.0}, dict.fromkeys(range(1025), 1.0),
    ],
    "stop": ["", [""], [1], ["a" * 1025], "a" * 1025, [str(i) for i in range(65)], ["a"] * 65],
    "allowed_token_ids": [[], (), "12", [-1], [2**31], [1.0], [True], ["1"], 3, [None], {}],
    "top_logprobs": [-1, 21, 1.0, True, "5", None, 2**70, NAN],
    "include_stop_str_in_output": [1, "true", None],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_are_refused_by_name(name: str) -> None:
    for value in BAD_VALUES[name]:
        with pytest.raises(BadRequest, match=name) as caught:
            SamplingParams(**{name: value})
        assert caught.value.field == name and len(str(caught.value)) < 300, str(value)[:50]


def test_good_values_survive_both_wires() -> None:
    params = SamplingParams(**EVERYTHING, include_stop_str_in_output=True)
    spelled = SamplingParams(**{**EVERYTHING, "logit_bias": {"40": 100, "19": -1.5, "3": 2}, "include_stop_str_in_output": True})
    assert params == spelled and hash(params) == hash(spelled)
    assert SamplingParams.from_wire(json.loads(json.dumps(params.to_wire()))) == params
    assert SamplingParams.from_wire(msgpack.unpackb(msgpack.packb(params.to_wire()))) == params
    assert SamplingParams(logit_bias=None, allowed_token_ids=None).to_wire() == {}  # type: ignore[arg-type]
    for edge in (
        {"repetition_penalty": 100}, {"presence_penalty": -2}, {"logit_bias": dict.fromkeys(range(1024), -100)}, {"top_logprobs": 20},
        {"stop": ["a" * 1024] * 64},
    ):  # fmt: skip
        SamplingParams(**edge)


def test_what_a_vocabulary_forbids_is_refused_and_costs_nothing() -> None:
    engine = Engine("fake", runner=FakeRunner())
    bad: tuple[tuple[dict[str, Any], str, str], ...] = (
        ({"logit_bias": {1: 0.5, VOCAB: 1.0}}, "logit_bias", f"0 to {VOCAB - 1}"),
        ({"logit_bias": {str(2**31 - 1): 1.0}}, "logit_bias", f"0 to {VOCAB - 1}"),
        ({"allowed_token_ids": (5, VOCAB)}, "allowed_token_ids", f"0 to {VOCAB - 1}"),
        ({"allowed_token_ids": (3, 4, 9), "stop_token_ids": (9,), "min_tokens": 1}, "allowed_token_ids", "min_tokens"),
        ({"allowed_token_ids": (9,), "stop_token_ids": (9,), "ignore_eos": True, "min_tokens": 2}, "allowed_token_ids", "min_tokens"),
    )
    for params, field, words in bad:
        with pytest.raises(BadRequest, match=words) as caught:
            engine.add_request(RolloutRequest(request_id="x", prompt_token_ids=(1,), params=SamplingParams(max_tokens=4, **params)))
        assert caught.value.field == field and not engine.has_work
    for params in ({"allowed_token_ids": (3,)}, {"allowed_token_ids": (3, 4), "min_tokens": 1, "ignore_eos": True}):
        engine.check_request(RolloutRequest(request_id="x", prompt_token_ids=(1,), params=SamplingParams(**params)))


@pytest.mark.parametrize("include", [False, True])
def test_the_text_ends_before_or_with_the_stop_string_and_the_ids_with_its_last_token(
    cancelling: dict[str, str], include: bool
) -> None:
    with Engine(cancelling["llama"], dtype="bfloat16", threads=1, num_blocks=64) as engine:
        free = engine.generate([prompt(1, 20)], {"seed": 5, "max_tokens": 30, "ignore_eos": True})[0]
        ids = free.samples[0].token_ids
        stop = next(s for i in range(8, 29) if (s := engine.tokenizer.decode(ids[i : i + 2])).isprintable() and s.isascii())
        params = {"seed": 5, "max_tokens": 30, "ignore_eos": True, "stop": stop, "include_stop_str_in_output": include}
        found = engine.generate([prompt(1, 20)], params)[0]
        assert found.samples[0].stop_reason == stop and found.texts[0] + ("" if include else stop) == engine.tokenizer.decode(
            found.samples[0].token_ids
        )


def test_only_the_stop_string_that_ended_a_sample_is_cut() -> None:
    cases = (("abSTOPx", "abST", "ab"), ("aSTOPbSTOPx", "aSTOPbST", "aSTOPb"), ("ab", "a", "ab"), ("\u00e9STOP", "\ufffd\ufffd", "\u00e9"))
    for text, before, cut in cases:
        assert end_at_stop(text, before, "STOP", include=False) == cut
        assert end_at_stop(text, before, "STOP", include=True) == (cut + "STOP" if "STOP" in text else text)


def test_tables_on_the_wire() -> None:
    for dtype, rows in (("<i4", [[1, -1], [3, 4], [5, 6]]), ("<f4", [[-0.5, -INF]])):
        packed = pack_array(dtype, rows)
        assert packed["shape"] == [len(rows), 2] and unpack_array(packed) == rows
    six = pack_array("<i4", [1, 2, 3, 4, 5, 6])
    for shape in ([2, 4], [-2, -3], [6, 1, 1], [2.0, 3], [True, 6], [6, 0], [10**30, 0], [[2], 3], "23", None):
        with pytest.raises(BadRequest, match="shape"):
            unpack_array({**six, "shape": shape})
    assert unpack_array({"dtype": "<i4", "shape": [0, 3], "data": b""}) == []
