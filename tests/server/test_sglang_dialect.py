"""SGLang's routes: what they take, reply and refuse, against an engine without a model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    """Ids only: this server has no tokenizer. Token i of sample k of a prompt p is (sum(p) + 31 k + 7 i) mod 256."""
    with httpx.Client(base_url=server.url, timeout=30) as found:
        yield found


@pytest.fixture
def texts(short: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=short.url, timeout=30) as found:
        yield found


def generate(http: httpx.Client, **body: Any) -> Any:
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    lines = http.post("/generate", json={**body, "stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_ids_come_back_with_logprobs_and_all_that_trainers_read(http: httpx.Client) -> None:
    """The bodies of slime and AReaL, field for field."""
    slime = {
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 4,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "sampling_seed": 7,
        },
        "return_logprob": True,
        "input_ids": [5, 6],
    }
    areal = {
        "input_ids": [5, 6],
        "image_data": [],
        "sampling_params": {
            "top_p": 1.0,
            "top_k": 100000000,
            "max_new_tokens": 4,
            "temperature": 1.0,
            "stop_token_ids": [1, 2],
            "ignore_eos": False,
            "skip_special_tokens": True,
            "frequency_penalty": 0.0,
        },
        "return_logprob": True,
        "stream": False,
    }
    for body in (slime, areal):
        found = generate(http, **body, rid="a")
        meta = found["meta_info"]
        assert found["output_ids"] == [11, 18, 25, 32] and "text" not in found
        assert [row[1:] for row in meta["output_token_logprobs"]] == [[t, None] for t in found["output_ids"]]
        assert [row[0] for row in meta["output_token_logprobs"]] == pytest.approx([-1 / (1 + t) for t in found["output_ids"]])
        assert (meta["id"], meta["finish_reason"]) == ("a", {"type": "length", "length": 4})
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 4, 0)
        assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 4}]


def test_prompt_logprobs_begin_where_asked_with_a_null(http: httpx.Client) -> None:
    asked = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "return_prompt_token_ids": True}
    whole = generate(http, **asked, logprob_start_len=0)
    assert whole["meta_info"]["input_token_logprobs"] == [[None, 5, None], [-0.5, 6, None], [-0.5, 7, None]]
    assert whole["prompt_token_ids"] == [5, 6, 7]
    assert generate(http, **asked)["meta_info"]["input_token_logprobs"] == []


def test_lists_of_prompts_and_samples_come_prompt_by_prompt_under_their_names(http: httpx.Client) -> None:
    sampling = [{"max_new_tokens": 1, "n": 2}, {"max_new_tokens": 2, "n": 2}]
    found = generate(http, input_ids=[[1], [2]], sampling_params=sampling, rid=["x", "y"], return_logprob=[True, False])
    assert [f["output_ids"] for f in found] == [[1], [32], [2, 9], [33, 40]]
    assert [f["meta_info"]["id"] for f in found] == ["x_0", "x_1", "y_0", "y_1"]
    assert ["output_token_logprobs" in f["meta_info"] for f in found] == [True, True, False, False]
    assert [f["meta_info"]["id"] for f in generate(http, input_ids=[[1], [2]], rid="z", sampling_params={"max_new_tokens": 1})] == [
        "z_0",
        "z_1",
    ]


def test_text_goes_in_and_out(texts: httpx.Client) -> None:
    found = generate(texts, text="abc", sampling_params={"max_new_tokens": 3}, return_logprob=True, return_text_in_logprobs=True)
    rows = found["meta_info"]["output_token_logprobs"]
    assert len(rows) == 3 and found["text"] == "".join(row[2] for row in rows)
    both = generate(texts, text=["abc", "b"], sampling_params={"max_new_tokens": 2})
    assert both[0]["text"] == found["text"][:2] and len(both) == 2


@pytest.mark.parametrize("prompts", [[5, 6], [[5, 6], [9]]])
def test_a_streams_events_are_cumulative_and_end_as_the_whole_reply(texts: httpx.Client, prompts: Any) -> None:
    asked = {"input_ids": prompts, "sampling_params": {"max_new_tokens": 12}, "return_logprob": True, "return_text_in_logprobs": True}
    whole = generate(texts, **asked)
    seen: dict[int, list[dict[str, Any]]] = {}
    for event in events(texts, **asked):
        seen.setdefault(event.get("index", 0), []).append(event)
    for place, expected in enumerate(whole if isinstance(whole, list) else [whole]):
        for before, after in zip(seen[place], seen[place][1:], strict=False):
            assert after["text"].startswith(before["text"]) and after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            rows = before["meta_info"]["output_token_logprobs"]
            assert len(rows) == len(before["output_ids"]) and after["meta_info"]["output_token_logprobs"][: len(rows)] == rows
            assert before["meta_info"]["finish_reason"] is None
        last = seen[place][-1]
        assert (last["text"], last["output_ids"]) == (expected["text"], expected["output_ids"])
        for name in ("finish_reason", "output_token_logprobs", "weight_versions", "completion_tokens"):
            assert last["meta_info"][name] == expected["meta_info"][name]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [1], "text": "a"}, "text"),
    ({"input_ids": [1, 999]}, "input_ids[1]"),
    ({"input_ids": [[1], [999]]}, "input_ids[1][0]"),
    ({"input_ids": [1], "image_data": ["x"]}, "image_data"),
    ({"input_ids": [1], "lora_path": "adapter"}, "lora_path"),
    ({"input_ids": [1], "return_routed_experts": True}, "return_routed_experts"),
    ({"input_ids": [1], "return_sampling_mask": True}, "return_sampling_mask"),
    ({"input_ids": [1], "return_sampling_mask": True, "sampling_logprobs_mode": "support"}, "sampling_logprobs_mode"),
    ({"input_ids": [1], "cache_salt": 7}, "cache_salt"),
    ({"input_ids": [1], "token_ids_logprob": [1]}, "token_ids_logprob"),
    ({"input_ids": [1], "rid": ["a", "b"]}, "rid"),
    ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid"),
    ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}, "top_logprobs_num"),
    ({"input_ids": [1], "sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
    ({"input_ids": [1], "sampling_params": {"custom_params": {"temperature": 2}}}, "sampling_params.custom_params"),
    ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
    ({"input_ids": [1], "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}, "sampling_params.min_new_tokens"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}, {"stop_token_ids": [999]}]}, "sampling_params[1].stop_token_ids[0]"),
    ({"input_ids": [1], "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
]


@pytest.mark.parametrize("body, field", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(http: httpx.Client, body: dict[str, Any], field: str) -> None:
    answer = http.post("/generate", json=body)
    assert answer.status_code == 400 and field in answer.json()["error"]["message"], answer.text


def test_aborted_requests_reply_with_what_they_have_and_names_are_whole(http: httpx.Client, server: Any, until: Any) -> None:
    """slime ends what it sampled too much of, until /v1/loads says that nothing is left."""
    found: dict[str, Any] = {}

    def run(rid: str, **body: Any) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: found.update({rid: generate(httpx.Client(base_url=server.url, timeout=60), rid=rid, **body)})
        )
        thread.start()
        return thread

    long = {"sampling_params": {"max_new_tokens": 4000}, "return_logprob": True}
    threads = [run("req-1", input_ids=[1], **long), run("req-10", input_ids=[2], **long), run("req", input_ids=[[3], [4]], **long)]
    until(lambda: server.running() == 4)
    assert http.post("/abort_request", json={"rid": "req-1"}).json()["rids"] == ["req-1"]
    threads[0].join(10)
    meta = found["req-1"]["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "aborted by request"}
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == len(found["req-1"]["output_ids"])
    until(lambda: server.running() == 3)
    assert http.post("/abort_request", json={"rid": "req"}).json()["rids"] == ["req_0", "req_1"]
    assert http.post("/abort_request", json={"abort_all": True}).json()["success"]
    for thread in threads:
        thread.join(10)
    until(lambda: http.get("/v1/loads?include=core").json()["loads"][0]["num_total_reqs"] == 0)
    assert {f["meta_info"]["finish_reason"]["type"] for f in [found["req-10"], *found["req"]]} == {"abort"}


def test_the_cache_is_flushed_once_nothing_runs(http: httpx.Client, server: Any, until: Any) -> None:
    thread = threading.Thread(
        target=lambda: httpx.post(
            f"{server.url}/generate", json={"input_ids": [9], "rid": "busy", "sampling_params": {"max_new_tokens": 4000}}
        )
    )
    thread.start()
    until(lambda: server.running() == 1)
    refused = http.get("/flush_cache")
    assert refused.status_code == 400 and not refused.json()["success"] and "1 samples are running" in refused.json()["message"]
    ended = threading.Timer(0.3, lambda: httpx.post(f"{server.url}/abort_request", json={"rid": "busy"}))
    ended.start()
    assert http.post("/flush_cache?timeout=20").json()["success"]
    thread.join(10)


def test_control_says_success_or_400_with_the_reason(http: httpx.Client) -> None:
    for path, body in (
        ("/pause_generation", {"mode": "in_place"}),
        ("/continue_generation", {}),
        ("/release_memory_occupation", {}),
        ("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}),
        ("/post_process_weights", {"restore_weights_before_load": True, "post_process_quantization": False}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 200 and answer.json()["success"] is True and answer.json()["message"], (path, answer.text)
    for path, body, word in (
        ("/pause_generation", {"mode": "soon"}, "mode"),
        ("/resume_memory_occupation", {"tags": ["kv"]}, "tags[0]"),
        ("/abort_request", {}, "rid"),
        ("/update_weight_version", {}, "new_version"),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["success"] is False and word in answer.json()["message"], (path, answer.text)


def test_a_version_is_called_what_the_trainer_calls_it(http: httpx.Client) -> None:
    assert http.post("/update_weight_version", json={"new_version": "step-7"}).json()["new_version"] == "step-7"
    for path in ("/get_weight_version", "/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        assert http.get(path).json()["weight_version"] == "step-7", path
    assert generate(http, input_ids=[1], sampling_params={"max_new_tokens": 1})["meta_info"]["weight_version"] == "step-7"
    info = http.get("/server_info").json()
    assert (info["tp_size"], info["pp_size"], info["disaggregation_mode"]) == (1, 1, "null")


def test_health_makes_a_token(http: httpx.Client, server: Any) -> None:
    before = server.running() or http.get("/v1/engine/status").json()["stats"]["steps"]
    assert http.get("/health_generate").status_code == 200 and http.get("/ready").json() == {"ready": True}
    end = time.monotonic() + 5
    while http.get("/v1/engine/status").json()["stats"]["steps"] <= before and time.monotonic() < end:
        time.sleep(0.05)
    assert http.get("/v1/engine/status").json()["stats"]["steps"] > before
