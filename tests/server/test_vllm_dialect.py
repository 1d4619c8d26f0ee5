"""vLLM's routes: replies have the fields that vLLM 0.32's clients read, what cannot be honoured is refused by name."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollsync import RolloutClient
from rollsync.rollout.selftest.model import write_model

REPLY = {
    "request_id", "model", "created", "usage", "prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders",
    "metrics", "kv_transfer_params", "ec_transfer_params", "output_mode", "choices",
}  # fmt: skip
CHOICE = {"index", "finish_reason", "stop_reason", "token_ids", "routed_experts", "sampling_mask", "weight_versions", "logprobs"}
GENERATE = "/inference/v1/generate"
SAMPLING = {"max_tokens": 20, "seed": 3, "logprobs": 1, "n": 2}
OPTIONS = {"block_tokens": 16, "num_blocks": 256, "max_model_len": 1000, "threads": 1}
FLAGS = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
PROMPT = list(range(3, 23))
LONG = {"max_tokens": 400, "ignore_eos": True, "n": 16}
"""lasts long enough for what is published of the engine to show it"""


def events(text: str) -> list[Any]:
    """The chunks of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# Generation


def test_generate_gives_what_rollouts_give_in_vllms_fields(server: Any, client: RolloutClient) -> None:
    ours = client.rollouts([[5, 6, 7]], n=2, sampling_params={"max_tokens": 20, "seed": 3}).results[0].samples
    body = {"token_ids": [5, 6, 7], "sampling_params": SAMPLING, "return_token_ids": True, "request_id": "mine", "model": "fake"}
    answer = httpx.post(server.url + GENERATE, json=body).json()
    assert answer.keys() == REPLY and answer["request_id"] == "generate-tokens-mine" and answer["prompt_token_ids"] == [5, 6, 7]
    assert answer["usage"]["completion_tokens"] == 40 and answer["output_mode"] == "tokens"
    for index, (choice, sample) in enumerate(zip(answer["choices"], ours, strict=True)):
        assert choice.keys() == CHOICE and choice["index"] == index and choice["finish_reason"] == "length"
        assert choice["token_ids"] == list(sample.token_ids)
        content = choice["logprobs"]["content"]
        assert [c["token_id"] for c in content] == choice["token_ids"]
        assert [c["logprob"] for c in content] == [max(v, -9999.0) for v in sample.logprobs]
        for entry in content:
            assert entry.keys() == {"token_id", "logprob", "rank", "top_logprobs"}
            assert entry["top_logprobs"][0]["token_id"] == entry["token_id"]
        spans = [(span["start"], span["end"]) for span in sample.weight_versions]  # (versions have names that other tests gave)
        assert [(span["start"], span["end"]) for span in choice["weight_versions"]] == spans


def test_a_stream_adds_up_to_the_reply(server: Any) -> None:
    body = {"token_ids": [5, 6, 7], "sampling_params": SAMPLING, "return_token_ids": True}
    whole = httpx.post(server.url + GENERATE, json=body).json()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(httpx.post(server.url + GENERATE, json=asked).text)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert [c for c in chunks if "prompt_token_ids" in c] == chunks[:1] and chunks[0]["prompt_token_ids"] == [5, 6, 7]
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert [t for m in mine for t in m["token_ids"]] == choice["token_ids"] and len(mine) > 2
        assert [e for m in mine for e in m["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [m["finish_reason"] for m in mine] == [None] * (len(mine) - 1) + ["length"]
        assert [m["weight_versions"] for m in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["weight_versions"] == choice["weight_versions"]


def test_text_mode_adds_text_and_names_tokens_by_it(short: Any) -> None:
    body = {"token_ids": [65, 66], "sampling_params": {"max_tokens": 5, "seed": 1, "logprobs": 0}, "output_mode": "text"}
    choice = httpx.post(short.url + GENERATE, json=body).json()["choices"][0]
    assert choice.keys() == {*CHOICE, "text"}
    assert "".join(c["token"] for c in choice["logprobs"]["content"]) == choice["text"] != ""
    assert httpx.post(f"{short.url}/detokenize", json={"tokens": choice["token_ids"]}).json() == {"prompt": choice["text"]}


def test_tokens_of_text_and_chat(short: Any) -> None:
    def ids(**body: Any) -> Any:
        return httpx.post(f"{short.url}/tokenize", json=body).json()

    found = ids(prompt="ab", return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == 2 and found["max_model_len"] == 24 and found["token_strs"] == ["a", "b"]
    chat = ids(messages=[{"role": "user", "content": "ab"}])
    assert httpx.post(f"{short.url}/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"] == "user:ab;"


REFUSED: list[tuple[str, Any, str, int]] = [
    (GENERATE, {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "a"}}}, "sampling_params.structured_outputs", 400),
    (GENERATE, {"token_ids": [1], "sampling_params": {"bad_words": ["x"]}}, "sampling_params.bad_words", 400),
    (GENERATE, {"token_ids": [1], "sampling_params": {"top_p": 0}}, "sampling_params.top_p", 400),
    (GENERATE, {"token_ids": [1], "sampling_params": {"allowed_token_ids": [999]}}, "sampling_params.allowed_token_ids[0]", 400),
    (GENERATE, {"token_ids": [1, 999], "sampling_params": {}}, "token_ids[1]", 400),
    (GENERATE, {"token_ids": [], "sampling_params": {}}, "token_ids", 400),
    (GENERATE, {"token_ids": [1] * 5000, "sampling_params": {}}, "token_ids", 400),
    (GENERATE, {"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {}}}, "features", 400),
    (GENERATE, {"token_ids": [1], "sampling_params": {}, "kv_transfer_params": {"a": 1}}, "kv_transfer_params", 400),
    (GENERATE, {"token_ids": [1], "sampling_params": {}, "cache_salt": ""}, "cache_salt", 400),
    (GENERATE, {"token_ids": [1], "sampling_params": {}, "model": "other"}, "model", 404),
    ("/pause?mode=stop", None, "mode", 400),
    ("/pause?modus=keep", None, "modus", 400),
    ("/pause", {"mode": "keep"}, "mode", 400),
    ("/pause?clear_cache=perhaps", None, "clear_cache", 400),
    ("/sleep?level=3", None, "level", 400),
    ("/wake_up?tags=weights&tags=cuda_graph", None, "tags[1]", 400),
    ("/inference/v1/abort_requests", {}, "request_ids", 400),
    ("/abort_requests", {"request_ids": "a"}, "request_ids", 400),
    ("/tokenize", {"prompt": "a", "messages": []}, "messages", 400),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]", 400),
]


@pytest.mark.parametrize("path, body, field, status", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name_in_vllms_shape(
    server: Any, short: Any, path: str, body: Any, field: str, status: int
) -> None:
    url = short.url if "token" in path else server.url
    answer = httpx.post(url + path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, status, field), error
    assert error.keys() == {"message", "type", "param", "code"} and field.split("[")[0] in error["message"]


def test_aborts_take_the_id_that_was_given_and_the_one_that_replies_show(server: Any, until: Any) -> None:
    body = {"token_ids": [5], "sampling_params": {"seed": 1}}
    for given, path in (("a", "/abort_requests"), ("generate-tokens-a", "/inference/v1/abort_requests"), (None, "/abort_requests")):
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(httpx.post(server.url + GENERATE, json=body, headers={"X-Request-Id": "a"})))  # noqa: B023
        thread.start()
        until(lambda: server.running() == 1)
        ended = httpx.post(server.url + path, json={} if given is None else {"request_ids": [given, "never"]}).json()
        thread.join(10)
        assert ended["aborted"] == 1 and got[0].json()["choices"][0]["finish_reason"] == "abort"


# A real engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("vllm")
    return [Path(write_model(root / f"m{i}", "llama", max_position_embeddings=1024, seed=i)) for i in range(2)]


@pytest.fixture(scope="module")
def live(serving: Any, folders: list[Path]) -> Iterator[Any]:
    with serving(*FLAGS, model=str(folders[0]), factory=None) as found:
        yield found


@pytest.fixture
def http(live: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=60) as found:
        yield found


def sampled(http: httpx.Client, **sampling: Any) -> Any:
    body = {"token_ids": PROMPT, "sampling_params": {"seed": 1, "max_tokens": 8, "logprobs": 0, **sampling}}
    answer = http.post(GENERATE, json=body)
    return answer.json()["choices"][0] if answer.status_code == 200 else answer


def during(http: httpx.Client, until: Any, act: Callable[[], None]) -> Any:
    """What a long call gives while `act` happens."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(sampled(http, **LONG)))
    thread.start()
    until(lambda: http.get("/v1/engine/status").json()["stats"]["running"] > 0)
    act()
    thread.join(60)
    return got[0]


@pytest.mark.parametrize("query, mode", [("mode=keep", "recompute"), ("mode=keep&clear_cache=False", "keep"), ("mode=wait", "drain")])
def test_a_pause_lasts_until_resumed_and_loses_nothing(http: httpx.Client, until: Any, query: str, mode: str) -> None:
    alone = sampled(http, **LONG)

    def act() -> None:
        found = http.post(f"/pause?{query}").json()
        assert found["status"] == "paused" and found["mode"] == mode
        assert http.get("/is_paused").json() == {"is_paused": True} and http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.get("/ping").status_code == http.get("/health").status_code == 200, "a trainer that paused it must not take it for dead"
        http.post("/v1/engine/pause", json={"owner": "somebody else"})
        assert http.post("/resume").json()["status"] == "paused", "another's lease survives"
        http.post("/v1/engine/resume", json={"owner": "somebody else"})
        assert http.get("/is_paused").json() == {"is_paused": False}

    assert during(http, until, act) == alone


def test_the_default_pause_aborts(http: httpx.Client, until: Any) -> None:
    partial = during(http, until, lambda: http.post("/pause").raise_for_status())
    assert partial["finish_reason"] == "abort" and len(partial["token_ids"]) < 400
    assert http.post("/resume").json()["status"] == "resumed"


def test_sleep_and_wake_by_level_and_tag(http: httpx.Client) -> None:
    before = sampled(http)
    slept = http.post("/sleep?level=1").json()
    assert slept["status"] == "sleeping" and slept["freed_bytes"].keys() == {"weights", "kv_cache"}
    http.post("/pause?mode=keep")
    assert http.post("/wake_up?tags=weights").json() == {"status": "sleeping", "tags": ["weights"], "asleep": ["kv_cache"]}
    assert http.post("/wake_up").json() == {"status": "awake", "tags": None, "asleep": []}
    assert http.get("/is_paused").json() == {"is_paused": True}, "a pause taken apart survives the waking"
    http.post("/resume")
    assert sampled(http) == before
    http.post("/sleep?level=0&mode=keep")
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    http.post("/wake_up?tags=scheduling")
    assert http.post("/release_kv_cache_memory").json()["freed_bytes"].keys() == {"kv_cache"}
    http.post("/wake_up?tags=kv_cache")
    assert http.get("/is_sleeping").json() == {"is_sleeping": False} and sampled(http) == before
    assert http.post("/reset_prefix_cache?reset_running_requests=True").json() == {"success": True} and sampled(http) == before


def test_clients_find_the_facts_they_ask_for(http: httpx.Client) -> None:
    assert http.get("/get_world_size").json() == {"world_size": 1}
    config = http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "nccl"} and config["lora_config"] is None
    assert config["model_config"]["dtype"] == "torch.float32" and config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert isinstance(http.get("/server_info?config_format=text").json()["vllm_config"], str)
    assert http.get("/load").json() == {"server_load": 0} and http.get("/ping").status_code == 200
