"""`parity.check` on rollouts of real engines, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_cases import FAMILIES, Case, load
from rollsync import Engine, SamplingParams, __version__
from rollsync.rollout.results import PromptResult, RolloutResult, Sample
from rollsync.rollout.selftest.model import write_model
from rollsync.rollout.trace import read_trace
from rollsync.trainer_adapters import parity
from trl_cases import load as load_text_model
from trl_cases import write_text_model

COLUMNS = ["model_logprobs", "temperature_logprobs", "entropy"]
PARAMS = SamplingParams(n=2, max_tokens=24, temperature=0.7, top_p=0.95, top_k=60, seed=5, ignore_eos=True)


@dataclass(kw_only=True)
class Made:
    """Rollouts of an engine whose steps are short, whose prompts share a prefix, and whose pool makes it preempt; and its trace."""

    folder: str
    dtype: str
    outputs: list[Any]
    fingerprint: str
    trace: Path


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp(f"check_{request.param}")
    base, changes = FAMILIES["llama"]
    folder = write_model(root / "model", base, dtype=request.param, **changes)
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(3, 256, (33,), generator=generator).tolist()
    prompts = [shared + torch.randint(3, 256, (n,), generator=generator).tolist() for n in (1, 9, 30, 2, 17)]
    options = {"sample_padding": True, "threads": 1, "block_tokens": 4, "num_blocks": 60, "max_batch_tokens": 16}
    with Engine(folder, trace=str(root / "trace.jsonl"), **options) as engine:
        engine.generate([shared], SamplingParams(max_tokens=1, seed=1))
        outputs = engine.generate(prompts, PARAMS, include=COLUMNS)
        preempted = engine.stats()["preemptions"]
        fingerprint = engine.info.fingerprint
    assert preempted > 0 and any(s.cached_tokens for o in outputs for s in o.samples)
    return Made(folder=folder, dtype=request.param, outputs=outputs, fingerprint=fingerprint, trace=root / "trace.jsonl")


def silent(outputs: list[Any]) -> list[Any]:
    """Outputs that say nothing of their engine and parameters."""
    return [replace(output, params=None, dtype="", fingerprint="") for output in outputs]


def test_outputs_say_how_they_were_drawn_or_are_told(made: Made) -> None:
    model = load(made.folder, made.dtype)
    told = {"temperature": 0.7, "top_p": 0.95, "top_k": 60}
    for report in (parity.check(model, made.outputs), parity.check(model, silent(made.outputs), params=told)):
        assert report.all_equal and set(report.columns) == {*COLUMNS, "logprobs"} and not report.left_out, str(report)
    assert parity.check(model, made.outputs).rollout_fingerprint == made.fingerprint
    with pytest.raises(parity.ParityError, match=r"was made in .*, and this trainer computes in .*autocast"):
        parity.check(load(made.folder, "bfloat16" if made.dtype == "float32" else "float32"), made.outputs)
    with pytest.raises(parity.ParityError, match=r"rollouts must be a list of outputs, .* got RolloutOutput"):
        parity.check(model, made.outputs[0])
    with pytest.raises(parity.ParityError, match="params must be SamplingParams or a dict of its fields, got str"):
        parity.check(model, silent(made.outputs), params=["hot"] * 5)


def test_all_that_a_rollout_holds_is_equal(made: Made) -> None:
    model = load(made.folder, made.dtype)
    for padding in ("right", "left", "packed"):
        report = parity.check(model, made.outputs, params=PARAMS, padding=padding, batch_tokens=200, fingerprint=made.fingerprint)
        assert report.all_equal, str(report)
        assert report.total == 5 * 2 * 24 and set(report.columns) == {*COLUMNS, "logprobs"}
        assert report.trainer_fingerprint == report.rollout_fingerprint == made.fingerprint
    assert report.dtype == made.dtype and not report.left_out and report.max_difference == 0.0


def test_a_trace_says_itself_how_it_was_made(made: Made) -> None:
    report = parity.check(load(made.folder, made.dtype), list(read_trace(made.trace)), weight_version=0)
    assert report.all_equal and report.samples == 11, str(report)
    other = load(made.folder, made.dtype)
    with torch.no_grad():
        other.model.norm.weight[3] += 0.5
    with pytest.raises(parity.ParityError, match=r"line 1 .* was made by weights \w{16} \(version 0\), and this trainer has \w{16}"):
        parity.check(other, list(read_trace(made.trace)))
    assert not parity.check(other, made.outputs, params=PARAMS).all_equal  # these say nothing of their weights


def test_a_clients_result_is_read_as_well(made: Made) -> None:
    names = ("token_ids", "logprobs", "finish_reason", *COLUMNS)
    results = [
        PromptResult(
            prompt_index=i,
            prompt_token_ids=o.prompt_token_ids,
            samples=[Sample(index=s.sample_index, **{n: getattr(s, n) for n in names}) for s in o.samples],
        )
        for i, o in enumerate(made.outputs)
    ]
    result = RolloutResult(id="r", model="m", results=results, usage={}, fingerprint=made.fingerprint)
    report = parity.check(load(made.folder, made.dtype), result)
    assert report.all_equal and set(report.columns) == {"model_logprobs"}
    assert report.left_out == {"params were not given": 240}
    with pytest.raises(parity.ParityError, match=r"numerics v1-k1-\w+, and this trainer has v1-k4-"):
        parity.check(load(made.folder, made.dtype), replace(result, fingerprint="v1-k1-0123456789ab"))


def test_one_changed_bit_is_found_and_shown(made: Made) -> None:
    outputs = list(made.outputs)
    samples = list(outputs[2].samples)
    changed = list(samples[1].model_logprobs)
    changed[7] = float(np.nextafter(np.float32(changed[7]), np.float32(0)))
    samples[1] = replace(samples[1], model_logprobs=changed)
    outputs[2] = replace(outputs[2], samples=samples)
    report = parity.check(load(made.folder, made.dtype), outputs, params=PARAMS)
    assert (report.equal, report.total) == (239, 240) and not report.all_equal
    first = report.first_mismatch
    assert first is not None and first.where == "prompt 2, sample 1" and first.position == 7 and first.column == "model_logprobs"
    assert first.token_id == samples[1].token_ids[7]
    text = str(report)
    assert "prompt 2, sample 1, token 7" in text and text.count("(0x") == 2
    assert 0 < report.columns["model_logprobs"].max_difference < 1e-5
    assert report.to_dict()["first_mismatch"]["position"] == 7


def test_padding_that_is_never_drawn_is_told_of(tmp_path: Path) -> None:
    folder = write_text_model(tmp_path / "model", vocab_size=400)
    with Engine(folder, threads=1, num_blocks=32, max_model_len=64) as engine:
        drawable = engine.info.vocab_size
        outputs = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8, seed=1), include=["model_logprobs"])
    assert drawable < 400
    report = parity.check(load_text_model(folder), outputs)
    assert not report.all_equal and "pass vocab_limit=engine.info.vocab_size" in str(report)
    report = parity.check(load_text_model(folder), outputs, vocab_limit=drawable)
    assert report.all_equal and "vocab_limit" not in str(report)


def test_another_order_of_adding_is_found(make_case: Callable[..., Case]) -> None:
    """Here of the row-parallel layers alone; a fingerprint would refuse it, if one were given."""
    case = make_case("llama", "bfloat16")
    report = parity.check(case.model(), silent(case.outputs), k_shards=1)
    assert report.equal < report.total and report.first_mismatch is not None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "float16"}, "was made in float16, and this trainer computes in"),
    "library": ({"library_version": "9.9"}, rf"rollsync version 9\.9, and this trainer has {re.escape(__version__)}"),
    "weights": ({"weight_version": 3}, "weight version 0, and this trainer has 3"),
    "shards": ({"k_shards": 2, "fingerprint": "the engine's"}, "v1-k4-.*, and this trainer has v1-k2-"),
    "head": ({"head_dtype": "float32", "fingerprint": "the engine's"}, "and this trainer has v1-k4-head32-"),
    "padding": ({"padding": "middle"}, "padding must be one of right, left, packed, got 'middle'"),
    "batch": ({"batch_tokens": 0}, "batch_tokens must be at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_differs_is_named(case: str, made: Made) -> None:
    options, words = REFUSED[case]
    if "fingerprint" in options:
        options = {**options, "fingerprint": made.fingerprint}
    with pytest.raises(parity.ParityError, match=words):
        parity.check(load(made.folder, made.dtype), silent(made.outputs), **options)


def test_rollouts_that_cannot_be_compared_are_refused(made: Made) -> None:
    outputs = silent(made.outputs)
    model, output = load(made.folder, made.dtype), outputs[0]
    bare = replace(output, samples=[replace(s, model_logprobs=None) for s in output.samples])
    with pytest.raises(parity.ParityError, match=r"hold no model_logprobs .*params were not given"):
        parity.check(model, [bare])
    with pytest.raises(parity.ParityError, match="no rollout holds a token"):
        parity.check(model, [])
    with pytest.raises(parity.ParityError, match="holds token id 999, and this model has 256 ids"):
        parity.check(model, [replace(output, prompt_token_ids=[999])])
    with pytest.raises(parity.ParityError, match="prompt 0, sample 0 has no prompt_token_ids"):
        parity.check(model, [replace(output, prompt_token_ids=[])])
    for limit in (-1, 0, 9999, 1.5):
        with pytest.raises(parity.ParityError, match=r"vocab_limit must be a whole number in \[1, 256\]"):
            parity.check(model, outputs, vocab_limit=limit)  # type: ignore[arg-type]
    spans = [{"version": 0, "start": 0, "end": 3}, {"version": 1, "start": 3, "end": 24}]
    with pytest.raises(parity.ParityError, match="weight versions 0, 1: one forward pass has one version"):
        parity.check(model, [replace(output, samples=[replace(output.samples[0], weight_versions=spans)])])
    mixed = [{"version": 0, "start": 0, "end": 20}, {"version": 0, "start": 20, "end": 24, "mixed_kv": 1}]
    with pytest.raises(parity.ParityError, match="prompt 0, sample 0 was made in part on a KV cache of older weights"):
        parity.check(model, [replace(output, samples=[replace(output.samples[0], weight_versions=mixed)])])
    report = parity.check(model, outputs, params=replace(PARAMS, logit_bias={3: 1.0}))
    assert report.all_equal and report.left_out == {"logit_bias changed the logits": 240}


def test_tokens_that_nobody_compared_are_not_equal_ones(made: Made) -> None:
    outputs = silent(made.outputs)
    bare = [replace(o, samples=[replace(s, model_logprobs=None) for s in o.samples]) for o in outputs]
    report = parity.check(load(made.folder, made.dtype), [outputs[0], *bare[1:]])
    assert report.all_equal and (report.samples, report.equal, report.total, report.not_compared) == (2, 48, 48, 192)
    assert report.to_dict()["not_compared"] == 192 and "192 tokens were not compared" in str(report)
    assert report.left_out == {"params were not given": 240}
