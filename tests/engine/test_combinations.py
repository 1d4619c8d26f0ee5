"""Everything a request may ask for, with everything else it may ask for, however it is served: lengths, spans, deltas and bits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from real_engine import COLUMNS, Bits, bits, prompt
from rollsync import Engine, RolloutRequest, SampleOutput, SamplingParams

PROMPT = prompt(7, 37)
LETTERS = tuple("abcdefghij")
WHAT: dict[str, tuple[Any, ...]] = {
    "n": (1, 3),
    "stop": ((), (*LETTERS, "zq")),
    "min_tokens": (0, 6),
    "include": ((), COLUMNS[:3], COLUMNS),
    "start": (0, 18, 37),
    "given": ({}, {"forced_token_ids": PROMPT[5:9]}, {"continue_from": PROMPT[5:6]}),
    "params": (
        {},
        {"temperature": 0.0, "repetition_penalty": 1.3, "top_logprobs": 3},
        {"top_p": 0.9, "logit_bias": {30: 2.5, 31: -100.0}, "presence_penalty": 0.7, "frequency_penalty": 0.2},
        {"top_k": 30, "allowed_token_ids": tuple(range(2, 220)), "top_logprobs": 2, "temperature": 1.2},
    ),
}
"""what may be asked for"""
HOW: dict[str, tuple[Any, ...]] = {
    "stream": (False, True),
    "max_batch_tokens": (3, 8, 512),
    "cached": (False, True),
    "preempted": (False, True),
}
"""how it may be served; none of it shows in a bit"""
Combination = dict[str, Any]


def combinations(table: dict[str, tuple[Any, ...]]) -> list[Combination]:
    return [dict(zip(table, values, strict=True)) for values in itertools.product(*table.values())]


ALL = [
    {**what, **how}
    for what in combinations(WHAT)
    if not (what["start"] and "prompt_logprobs" not in what["include"]) and not ("continue_from" in what["given"] and what["n"] > 1)
    for how in combinations(HOW)
]


def make_request(c: Combination, rid: str) -> RolloutRequest:
    params = SamplingParams(
        n=c["n"], seed=5, max_tokens=16, min_tokens=c["min_tokens"], stop=c["stop"], stop_token_ids=(9, 10, 11), **c["params"]
    )
    return RolloutRequest(
        request_id=rid, prompt_token_ids=PROMPT, params=params, include=c["include"], stream=c["stream"],
        prompt_logprobs_start=c["start"], **c["given"],
    )  # fmt: skip


class Engines:
    """One engine per chunk size; and the bits of plain runs: alone, prefilled whole, nothing cached, nothing streamed."""

    def __init__(self, model: str) -> None:
        options: dict[str, Any] = {"dtype": "bfloat16", "threads": 1, "block_tokens": 4}
        self._plain_engine = Engine(model, prefix_cache=False, num_blocks=200, **options)
        self.by_chunk = {size: Engine(model, max_batch_tokens=size, num_blocks=60, **options) for size in HOW["max_batch_tokens"]}
        self._plain: dict[str, list[Bits]] = {}

    def plain(self, c: Combination) -> list[Bits]:
        key = repr([c[name] for name in WHAT])
        if key not in self._plain:
            outputs = serve(self._plain_engine, [{**c, "stream": False, "cached": True, "preempted": False}])
            self._plain[key] = [bits(o) for o in sorted(outputs, key=lambda o: o.sample_index)]
        return self._plain[key]

    def close(self) -> None:
        for engine in (self._plain_engine, *self.by_chunk.values()):
            engine.close()


def serve(engine: Engine, together: list[Combination]) -> list[SampleOutput]:
    """All outputs of some combinations in flight at once."""
    if not together[0]["cached"]:
        engine.reset_prefix_cache()
    for i, c in enumerate(together):
        engine.add_request(make_request(c, str(i)))
    outputs: list[SampleOutput] = []
    for step in itertools.count():
        if not engine.has_work:
            return outputs
        outputs += engine.step()
        engine.scheduler.blocks.check_integrity([seq.blocks for seq in engine.scheduler.running])
        if together[0]["preempted"] and step % 4 == 2 and step < 60:
            engine.scheduler.preempt_all()
    raise AssertionError


def check_columns(output: SampleOutput, c: Combination) -> None:
    num = len(output.token_ids)
    columns = {name: getattr(output, name) for name in ("logprobs", *COLUMNS[:3], "top_token_ids", "top_logprobs")}
    asked = {"logprobs", *(name for name in c["include"] if name != "prompt_logprobs")}
    if "top_logprobs" in c["params"]:
        asked |= {"top_token_ids", "top_logprobs"}
    assert {name for name, column in columns.items() if column is not None} == asked
    assert all(len(columns[name]) == num for name in asked)
    ends = [0, *(span["end"] for span in output.weight_versions)]
    assert [span["start"] for span in output.weight_versions] == ends[:-1] and ends[-1] == num
    if output.finished and "prompt_logprobs" in c["include"]:
        values = output.prompt_logprobs
        assert values is not None and len(values) == len(PROMPT) - c["start"] and (None in values) == (c["start"] == 0)
    else:
        assert output.prompt_logprobs is None


def check(engines: Engines, together: list[Combination]) -> None:
    engine = engines.by_chunk[together[0]["max_batch_tokens"]]
    outputs = serve(engine, together)
    assert engine.stats()["free_blocks"] == engine.info.num_blocks
    for i, c in enumerate(together):
        for index in range(c["n"]):
            *deltas, final = [o for o in outputs if (o.request_id, o.sample_index) == (str(i), index)]
            assert final.finished and not any(d.finished for d in deltas) and bool(deltas) <= c["stream"]
            for output in (*deltas, final):
                check_columns(output, c)
            for name in ("token_ids", "logprobs", *COLUMNS[:3], "top_token_ids", "top_logprobs"):
                joined = [value for delta in deltas for value in getattr(delta, name) or ()]
                assert joined == (getattr(final, name) or [])[: len(joined)], name
            assert bits(final) == engines.plain(c)[index], c


def groups(found: list[Combination], rng: random.Random, most: int) -> Iterator[list[Combination]]:
    """Combinations by up to `most` that are served alike, in a random order."""
    rng.shuffle(found)
    found.sort(key=lambda c: (c["max_batch_tokens"], c["cached"], c["preempted"]))
    for _, alike in itertools.groupby(found, key=lambda c: (c["max_batch_tokens"], c["cached"], c["preempted"])):
        kept = list(alike)
        while kept:
            size = rng.randint(1, most)
            yield kept[:size]
            kept = kept[size:]


@pytest.fixture(scope="module")
def engines(cancelling: dict[str, str]) -> Iterator[Engines]:
    torch.set_num_threads(1)
    made = Engines(cancelling["llama"])
    yield made
    made.close()


def test_combinations_drawn_by_chance(engines: Engines) -> None:
    rng = random.Random(1)
    drawn = rng.sample(ALL, 100)
    for name, values in {**WHAT, **HOW}.items():
        assert len({repr(c[name]) for c in drawn}) == len(values)
    for together in groups(drawn, rng, 4):
        check(engines, together)


@pytest.mark.slow
def test_every_combination(engines: Engines) -> None:
    for together in groups(list(ALL), random.Random(2), 16):
        check(engines, together)
