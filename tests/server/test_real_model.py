"""The server over a tiny real model: the same bits as in process, text included."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from rollsync import AsyncRolloutClient, Engine, RolloutClient, RolloutRequest, SampleOutput, SamplingParams
from rollsync.kernels.sampling_mask import SamplingMask
from rollsync.rollout.cli import main
from rollsync.rollout.errors import BadRequest
from rollsync.rollout.wire import unpack_array
from tiny_text_model import write_folder

FLAGS = ("--load-format", "random", "--num-blocks", "64", "--block-tokens", "4", "--kernels", "reference", "--threads", "1")
PARAMS = SamplingParams(n=3, seed=11, max_tokens=12, temperature=0.8)
SCORED = ("model_logprobs", "temperature_logprobs")
COLUMNS = ("model_logprobs", "temperature_logprobs", "entropy", "prompt_logprobs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def real(folder: Path, serving: Any) -> Iterator[Any]:
    with serving(*FLAGS, model=str(folder), factory=None) as server:
        yield server


@pytest.fixture(scope="module")
def in_process(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), load_format="random", num_blocks=64, block_tokens=4, kernels="reference", threads=1) as engine:
        yield engine


def plain(value: Any) -> Any:
    """msgpack's arrays as lists."""
    if isinstance(value, dict):
        return unpack_array(value) if value.keys() == {"dtype", "shape", "data"} else {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def run(engine: Engine, ids: list[int], include: tuple[str, ...] = ()) -> list[SampleOutput]:
    engine.add_request(RolloutRequest(request_id="x", prompt_token_ids=tuple(ids), params=PARAMS, include=include))
    finals: list[SampleOutput] = []
    while engine.has_work:
        finals += engine.step()
    return sorted(finals, key=lambda o: o.sample_index)


def test_http_gives_the_bits_of_the_engine(real: Any, in_process: Engine) -> None:
    wanted = run(in_process, [5, 6, 7, 8, 9], COLUMNS)
    with RolloutClient(real.url) as client:
        result = client.rollouts([[5, 6, 7, 8, 9]], sampling_params=PARAMS, include=COLUMNS)
        again = client.stream([[5, 6, 7, 8, 9]], sampling_params=PARAMS, include=COLUMNS)
        streamed = sorted((i.sample for i in again if i.sample is not None), key=lambda s: s.index)
    for samples in (result.results[0].samples, streamed):
        assert [s.index for s in samples] == [0, 1, 2]
        for sample, output in zip(samples, wanted, strict=True):
            for name in ("token_ids", "logprobs", "finish_reason", "stop_reason", "seed", "weight_versions", *COLUMNS):
                assert getattr(sample, name) == getattr(output, name), name


def test_text_and_chats(real: Any, in_process: Engine) -> None:
    tokenizer = in_process.tokenizer
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    with RolloutClient(real.url) as client:
        prompts = ["hello world", chat, chat["messages"], {"messages": [{"role": "user", "contents": "a"}]}]
        result = client.rollouts(prompts, sampling_params=PARAMS, include=["text"])
    rendered = tokenizer.encode("user:hello;a:")
    assert [r.prompt_token_ids for r in result.results[:3]] == [tokenizer.encode("hello world"), rendered, rendered]
    assert getattr(result.results[3].error, "field", None) == "prompts[3].messages[0].contents"
    for sample in result.results[0].samples:
        assert sample.text == tokenizer.decode(sample.token_ids)
    assert [s.token_ids for s in result.results[0].samples] == [o.token_ids for o in run(in_process, tokenizer.encode("hello world"))]


def test_text_deltas_add_up_to_the_text(real: Any) -> None:
    asked = {"prompts": [{"text": "hello"}], "n": 2, "sampling_params": {"seed": 5, "max_tokens": 16, "ignore_eos": True}}
    with httpx.stream("POST", f"{real.url}/v1/rollouts", json={**asked, "include": ["text"], "stream": "tokens"}) as answer:
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: ")]
    texts, finals = {0: "", 1: ""}, {}
    for event in events[1:-1]:
        sample = event["sample"]
        if event["event"] == "delta":
            texts[sample["index"]] += sample["text"]
        else:
            finals[sample["index"]] = sample["text"]
    whole = httpx.post(f"{real.url}/v1/rollouts", json={**asked, "include": ["text"]}).json()["results"][0]["samples"]
    assert texts == finals == {s["index"]: s["text"] for s in whole}


def test_a_stop_string_ends_a_sample(real: Any) -> None:
    params = {"seed": 5, "max_tokens": 30, "ignore_eos": True}
    with RolloutClient(real.url) as client:
        whole = client.rollouts(["hello"], sampling_params=params, include=["text"]).results[0].samples[0]
        word = next(c for c in whole.text or "" if c.isascii() and c.isprintable())
        both = [{**params, "stop": [word], "include_stop_str_in_output": include} for include in (False, True)]
        cut, kept = (client.rollouts(["hello"], sampling_params=p, include=["text"]).results[0].samples[0] for p in both)
    assert (cut.finish_reason, cut.stop_reason) == (kept.finish_reason, kept.stop_reason) == ("stop", word)
    assert cut.text is not None and word not in cut.text and kept.text == cut.text + word
    assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids == kept.token_ids and len(cut.token_ids) < 30


def test_changed_logits_and_reported_ids_over_both_formats(real: Any, in_process: Engine) -> None:
    params: dict[str, Any] = {
        "seed": 3, "max_tokens": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.2, "logit_bias": {9: 4.0},
        "allowed_token_ids": [9, 30, 31, 32], "top_logprobs": 6,
    }  # fmt: skip
    wanted = in_process.generate([[5, 6, 7]], {**params, "n": 2})[0].samples
    assert wanted[0].top_token_ids is not None and all(ids.count(-1) == 2 for ids in wanted[0].top_token_ids)
    with RolloutClient(real.url) as client:
        samples = client.rollouts([[5, 6, 7]], n=2, sampling_params=params).results[0].samples
        plain = client.rollouts([[5, 6, 7]], sampling_params={"max_tokens": 2}).results[0].samples[0]
    body = {"prompts": [{"token_ids": [5, 6, 7]}], "n": 2, "sampling_params": params}
    for sample, output in zip(samples, wanted, strict=True):
        for name in ("token_ids", "logprobs", "top_token_ids", "top_logprobs"):
            assert getattr(sample, name) == getattr(output, name), name
    assert plain.top_token_ids is None and plain.top_logprobs is None
    for sample, output in zip(httpx.post(f"{real.url}/v1/rollouts", json=body).json()["results"][0]["samples"], wanted, strict=True):
        assert sample["token_ids"] == output.token_ids and sample["top_token_ids"] == output.top_token_ids
        assert sample["top_logprobs"] == [[v if math.isfinite(v) else None for v in row] for row in output.top_logprobs or ()]
    with httpx.stream("POST", f"{real.url}/v1/rollouts", json={**body, "stream": "tokens"}) as answer:
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: ")]
    deltas = [e["sample"] for e in events if e["event"] == "delta"]
    for output in wanted:
        rows = [row for d in deltas if d["index"] == output.sample_index for row in d["top_token_ids"]]
        assert rows == output.top_token_ids


MASKED: list[dict[str, Any]] = [
    {"top_k": 4}, {"top_p": 0.9, "temperature": 2.0}, {"min_p": 0.1}, {"min_tokens": 3}, {"temperature": 0.0}, {},
]  # fmt: skip
"""of each form that a mask has: ids, a bit for each id, all but a few, all"""


def test_masks_over_both_formats_whole_and_streamed(real: Any, in_process: Engine) -> None:
    shared, include = {"seed": 3, "max_tokens": 6}, ["sampling_mask"]
    forms: set[str] = set()
    with RolloutClient(real.url) as client:
        for params in MASKED:
            wanted = in_process.generate([[5, 6, 7]], {**shared, **params, "n": 2}, include=("sampling_mask",))[0].samples
            body = {"prompts": [{"token_ids": [5, 6, 7]}], "n": 2, "sampling_params": {**shared, **params}, "include": include}
            whole = client.rollouts([[5, 6, 7]], n=2, sampling_params={**shared, **params}, include=include).results[0].samples
            items = list(client.stream([[5, 6, 7]], n=2, sampling_params={**shared, **params}, include=include, tokens=True))
            json_whole = httpx.post(f"{real.url}/v1/rollouts", json=body).json()["results"][0]["samples"]
            with httpx.stream("POST", f"{real.url}/v1/rollouts", json={**body, "stream": "tokens"}) as answer:
                events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: ")]
            for output in wanted:
                mask, i = output.sampling_mask, output.sample_index
                assert mask is not None and len(mask) == len(output.token_ids) and mask.vocab_size == 268
                forms |= {type(row).__name__ if not isinstance(row, dict) else next(iter(row)) for row in mask.to_json()["tokens"]}
                assert whole[i].sampling_mask == mask and whole[i].logprobs == output.logprobs
                assert SamplingMask.from_wire(json_whole[i]["sampling_mask"]) == mask
                parts = [item.delta.sampling_mask for item in items if item.delta is not None and item.delta.index == i]
                assert SamplingMask.join(part for part in parts if part is not None) == mask
                deltas = [e["sample"] for e in events if e["event"] == "delta" and e["sample"]["index"] == i]
                assert SamplingMask.join(SamplingMask.from_wire(d["sampling_mask"]) for d in deltas) == mask
        plain = client.rollouts([[5]], sampling_params={"max_tokens": 1}).results[0].samples[0]
    assert plain.sampling_mask is None and forms == {"list", "bits", "not", "NoneType"}


def test_sglangs_route_gives_masks_as_lists(real: Any, in_process: Engine) -> None:
    params = {"top_p": 0.8, "temperature": 1.5}
    output = in_process.generate([[5, 6, 7]], {**params, "seed": 3, "max_tokens": 6}, include=("sampling_mask",))[0].samples[0]
    body = {"input_ids": [5, 6, 7], "return_sampling_mask": True, "sampling_params": {**params, "sampling_seed": 3, "max_new_tokens": 6}}
    lines = httpx.post(f"{real.url}/generate", json={**body, "stream": True}).text.split("\n\n")
    for reply in (httpx.post(f"{real.url}/generate", json=body).json(), json.loads(lines[-3].removeprefix("data: "))):
        meta = reply["meta_info"]
        assert reply["output_ids"] == output.token_ids and meta["output_token_sampling_mask"] == list(output.sampling_mask or ())
        assert meta["output_token_sampling_logprobs"] == output.logprobs and meta["output_token_sampling_mask_length"] == 6


def test_where_masks_are_not_known_they_are_refused(real: Any) -> None:
    for path, body, field in (
        ("/v1/rollouts", {"prompts": [{"token_ids": [5]}], "include": ["sampling_masks"]}, "include[0]"),
        ("/v1/completions", {"model": "m", "prompt": [5], "include": ["sampling_mask"]}, "include"),
        ("/v1/logprobs", {"items": [{"prompt": {"token_ids": [5]}, "continuation": {"token_ids": [6]}}], "include": []}, "include"),
    ):
        answer = httpx.post(real.url + path, json=body)
        assert answer.status_code == 400 and field in json.dumps(answer.json()["error"]), answer.text


def test_ids_outside_the_vocabulary_fail_their_own_item(real: Any) -> None:
    for field, value in (("logit_bias", {"320": 1.0}), ("allowed_token_ids", [3, 320]), ("allowed_token_ids", [2])):
        params = {"max_tokens": 1, "min_tokens": 1, field: value}
        answer = httpx.post(f"{real.url}/v1/rollouts", json={"prompts": [{"token_ids": [5]}], "sampling_params": params})
        error = answer.json()["error"]
        assert answer.status_code == 400 and field in error["field"] and field in error["message"]


@pytest.mark.parametrize("binary", [True, False])
def test_given_continuations_get_the_bits_of_sampling(real: Any, binary: bool) -> None:
    sampled = {"temperature": 0.8, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    with RolloutClient(real.url) as client:
        rolled = client.rollouts(["hello", [7]], sampling_params=sampled, include=SCORED).results
    prompts = [{"text": "hello"}, {"token_ids": [7]}]
    good = [
        {"prompt": p, "continuation": {"token_ids": r.samples[0].token_ids}} for p, r in zip(prompts, rolled, strict=True)
    ]
    bad = [
        {"prompt": {"token_ids": [320]}, "continuation": {"token_ids": [1]}},
        {"prompt": {"token_ids": [1]}, "continuation": {"token_ids": [1, 999]}},
        {"prompt": {"token_ids": []}, "continuation": {"text": "a"}},
        {"prompt": {"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": {"messages": 1}}, "continuation": {"text": "a"}},
        {"prompt": {"token_ids": [1] * 100}, "continuation": {"token_ids": [2] * 100}},
    ]
    headers = {"Accept": "application/msgpack" if binary else "application/json"}
    answer = httpx.post(f"{real.url}/v1/logprobs", json={"items": [*good, *bad], "temperature": 0.8}, headers=headers)
    body = plain(msgpack.unpackb(answer.content)) if binary else answer.json()
    assert answer.status_code == 200
    for result, wanted in zip(body["results"], rolled, strict=False):
        (sample,) = wanted.samples
        assert result["prompt_token_ids"] == wanted.prompt_token_ids and result["token_ids"] == sample.token_ids
        assert all(result[name] == getattr(sample, name) for name in SCORED)
    fields = [r["error"].get("field") for r in body["results"][2:]]
    where = ["prompt.token_ids[0]", "continuation.token_ids[1]", "", "prompt.messages", "continuation.token_ids"]
    assert fields == [f"items[{i}].{name}".rstrip(".") for i, name in enumerate(where, 2)]
    plainly = httpx.post(f"{real.url}/v1/logprobs", json={"items": good[:1]}).json()["results"][0]
    assert "temperature_logprobs" not in plainly and plainly["model_logprobs"] == rolled[0].samples[0].model_logprobs


def test_text_to_ids_and_back(real: Any, in_process: Engine) -> None:
    tokenizer = in_process.tokenizer

    def post(path: str, body: Any) -> Any:
        return httpx.post(f"{real.url}/v1/{path}", json=body).json()

    chat = {"messages": [{"role": "user", "content": "hé"}]}
    ids = post("tokenize", {"text": "hello <s>wörld"})["token_ids"]
    assert ids == tokenizer.encode("hello <s>wörld") and 1 in ids
    assert post("detokenize", {"token_ids": ids})["text"] == "hello wörld"
    shown = {"token_ids": ids, "skip_special_tokens": False}
    assert post("detokenize", shown)["text"] == "hello <s>wörld"
    assert post("detokenize", {**shown, "spaces_between_special_tokens": True})["text"] == "hello  <s> wörld"
    rendered = {"text": "user:hé;a:", "token_ids": tokenizer.encode("user:hé;a:")}
    assert post("render", chat) == rendered and post("tokenize", chat) == {"token_ids": rendered["token_ids"]}
    both = post("detokenize", {"items": [{"token_ids": ids}, {"token_ids": [-1]}, {"token_ids": []}]})["results"]
    assert [(r["item_index"], r.get("text"), r.get("error", {}).get("field")) for r in both] == [
        (0, "hello wörld", None),
        (1, None, "items[1].token_ids[0]"),
        (2, "", None),
    ]
    assert post("render", {"items": [chat, chat]})["results"][1] == {"item_index": 1, **rendered}
    assert "exactly one" in post("tokenize", {"text": "a", **chat})["error"]["message"]
    assert "stands alone" in post("tokenize", {"text": "a", "items": [{"text": "a"}]})["error"]["message"]


def test_both_clients_score_and_turn_text_to_ids(real: Any) -> None:
    chat = [{"role": "user", "content": "hello"}]
    with RolloutClient(real.url) as client:
        good, bad, chatted = client.score([("hello", [7, 8]), ([320], "a"), (chat, [7])], temperature=2.0)
        assert (good.token_ids, len(good.model_logprobs), good.error) == ([7, 8], 2, None)
        assert good.temperature_logprobs != good.model_logprobs
        assert getattr(bad.error, "field", None) == "items[1].prompt.token_ids[0]"
        ids = client.tokenize(["hello", chat])
        texts = client.detokenize(ids, skip_special_tokens=False)
        (rendered,) = client.render([chat])
        assert texts == ["hello", rendered.text] and rendered.token_ids == ids[1] == chatted.prompt_token_ids
        with pytest.raises(BadRequest, match=r"items\[1\]\.token_ids"):
            client.detokenize([[1], [-1]])

    async def run() -> None:
        async with AsyncRolloutClient(real.url) as other:
            assert await other.score([("hello", [7, 8])], temperature=2.0) == [good]
            assert await other.tokenize(["hello", chat]) == ids and await other.detokenize(ids) == texts
            assert await other.render([chat]) == [rendered]

    asyncio.run(run())


def test_text_options_change_no_id(real: Any) -> None:
    asked = {"prompts": [{"token_ids": [5], "forced_token_ids": [260, 1, 261]}], "sampling_params": {"max_tokens": 3, "ignore_eos": True}}
    found = {}
    for skip in (True, False):
        for spaces in (True, False):
            body = {**asked, "include": ["text"], "skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
            sample = httpx.post(f"{real.url}/v1/rollouts", json=body).json()["results"][0]["samples"][0]
            assert sample["token_ids"] == [260, 1, 261]
            found[skip, spaces] = sample["text"]
    assert found[True, True] == found[True, False] and found[False, True].replace(" ", "") == found[False, False].replace(" ", "")
    assert "<s>" not in found[True, False] and "<s>" in found[False, False] and " <s> " in found[False, True]


def test_prompt_logprobs_from_an_offset(real: Any) -> None:
    prompt = {"token_ids": list(range(5, 15))}
    call = {"prompts": [{**prompt, "prompt_logprobs_start": s} for s in (0, 3, 9, 10, 11)], "include": ["prompt_logprobs"]}
    results = httpx.post(f"{real.url}/v1/rollouts", json={**call, "sampling_params": {"max_tokens": 1}}).json()["results"]
    whole = results[0]["samples"][0]["prompt_logprobs"]
    for result, start in zip(results, (0, 3, 9, 10), strict=False):
        sample = result["samples"][0]
        assert (sample["prompt_logprobs"], sample["prompt_logprobs_start"]) == (whole[start:], start)
    assert results[4]["error"]["field"] == "prompts[4].prompt_logprobs_start"


def test_the_front_holds_a_tokenizer_but_no_torch(real: Any) -> None:
    with RolloutClient(real.url) as client:
        client.rollouts(["hello"], sampling_params={"max_tokens": 2}, include=["text"])
        assert client.status()["memory_bytes"]["front"]["anonymous"] < 100 << 20
    maps = Path(f"/proc/{real.process.pid}/maps").read_text()
    assert "tokenizers" in maps and "libtorch" not in maps


def test_limits_fail_their_own_item(real: Any, until: Any) -> None:
    with RolloutClient(real.url) as client:
        result = client.rollouts([[1] * 127, [1] * 128, [1] * 300, [319], [320]], sampling_params={"max_tokens": 2})
        assert [bool(r.error) for r in result.results] == [False, True, True, False, True]
        assert result.results[0].samples[0].finish_reason == "length"
        until(lambda: real.running() == 0)
        status = client.status()
        assert status["stats"]["free_blocks"] == status["info"]["num_blocks"]


def test_an_aborted_partial_goes_on_to_the_same_end(real: Any) -> None:
    params = {"seed": 4, "max_tokens": 20, "ignore_eos": True}
    with RolloutClient(real.url) as client:
        whole = client.rollouts([[9, 8, 7]], sampling_params=params).results[0].samples[0]
        rest = client.rollouts([{"token_ids": [9, 8, 7], "continue_from": whole.token_ids[:7]}], sampling_params=params)
    assert rest.results[0].samples[0].token_ids == whole.token_ids


def test_generate_prints_text(folder: Path, in_process: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", str(folder), "--prompt", "hello", "--n", "3", "--max-tokens", "12", "--temperature", "0.8", "--sample-seed", "11"]
    assert main([*argv, *FLAGS]) == 0
    tokenizer = in_process.tokenizer
    texts = [tokenizer.decode(o.token_ids) for o in run(in_process, tokenizer.encode("hello"))]
    assert capsys.readouterr().out == "\n\n".join(texts) + "\n"
