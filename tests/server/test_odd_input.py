"""Input that no schema can rule out: text no wire can carry, numbers that are none, names of any length, ids no URL can end in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from rollsync import RolloutClient
from rollsync.rollout.cli import main
from rollsync.rollout.errors import BadRequest
from rollsync.rollout.wire import MSGPACK

LONE = "a\ud800"
CHATS: dict[str, Any] = {
    "/v1/rollouts": lambda chat: {"prompts": [chat]},
    "/v1/logprobs": lambda chat: {"items": [{"prompt": chat, "continuation": {"token_ids": [1]}}]},
    "/v1/render": lambda chat: chat,
    "/v1/tokenize": lambda chat: {"items": [chat]},
    "/v1/chat/completions": lambda chat: chat,
}
AHEAD = {"/v1/rollouts": "prompts[0].", "/v1/logprobs": "items[0].prompt.", "/v1/tokenize": "items[0]."}
GOOD = {"role": "user", "content": "hi"}


def call(role: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "arguments": role}}]


ODD: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{**GOOD, "content": LONE}]}, "messages[0].content"),
    ({"messages": [GOOD, {**GOOD, "role": LONE}]}, "messages[1].role"),
    ({"messages": [{**GOOD, "name": LONE}]}, "messages[0].name"),
    ({"messages": [{**GOOD, "content": [{"type": "text", "text": LONE}]}]}, "messages[0].content[0].text"),
    ({"messages": [{**GOOD, LONE: 1}]}, "messages[0]"),
    ({"messages": [{**GOOD, "weight": [1.0, 1e999]}]}, "messages[0].weight[1]"),
    ({"messages": [{**GOOD, "tool_calls": call({"x": LONE})}]}, "messages[0].tool_calls[0].function.arguments.x"),
    ({"messages": [GOOD], "chat_template_kwargs": {"x": {"y": [LONE]}}}, "chat_template_kwargs.x.y[0]"),
    ({"messages": [GOOD], "chat_template_kwargs": {"x": -1e999}}, "chat_template_kwargs.x"),
]


def refusal(url: str, path: str, body: Any, binary: bool = False) -> tuple[str, str]:
    """(field, message) of the 400 that a body gets."""
    content = msgpack.packb(body, unicode_errors="surrogatepass") if binary else json.dumps(body).replace("Infinity", "1e999").encode()
    headers = {"Content-Type": MSGPACK if binary else "application/json", "Accept": "application/json"}
    answer = httpx.post(f"{url}{path}", content=content, headers=headers, timeout=20)
    assert answer.status_code == 400, (path, body, answer.text[:300])
    error = answer.json()["error"]
    return error.get("field") or error.get("param") or "", error["message"]


@pytest.mark.parametrize("path", CHATS)
def test_what_no_text_or_number_can_be_is_refused_by_its_path_in_a_chat(short: Any, path: str) -> None:
    for chat, named in ODD:
        assert refusal(short.url, path, CHATS[path](chat))[0] == AHEAD.get(path, "") + named
    for value in (float("nan"), float("inf"), b"raw"):
        field, _ = refusal(short.url, path, CHATS[path]({"messages": [{**GOOD, "x": value}]}), binary=True)
        assert field == AHEAD.get(path, "") + "messages[0].x"


def test_what_a_model_wrote_as_arguments_is_looked_at_too(short: Any) -> None:
    for arguments in ('{"x": NaN}', '{"x": 1e999}', '{"x": "\\ud800"}'):
        body = {"messages": [GOOD, {"role": "assistant", "tool_calls": call(arguments)}]}
        assert refusal(short.url, "/v1/chat/completions", body)[0] == "messages[1].tool_calls[0].function.arguments.x"
    assert refusal(short.url, "/v1/chat/completions", {"messages": [GOOD], "tools": [{"x": LONE}]})[0] == "tools[0].x"


@pytest.mark.parametrize("path", [*CHATS, "/v1/completions", "/v1/detokenize", "/v1/engine/abort"])
def test_a_name_of_any_length_is_shortened(short: Any, path: str) -> None:
    for key in ("k" * 1_000_000, LONE * 500_000):
        for content in (json.dumps({key: 1}), f"{{{json.dumps(key)}: 1, {json.dumps(key)}: 2}}"):
            answer = httpx.post(f"{short.url}{path}", content=content, headers={"Content-Type": "application/json"}, timeout=20)
            assert answer.status_code == 400 and len(answer.content) < 4000
    deeper = {"prompts": [{"token_ids": [1], "k" * 100_000: 1}], "sampling_params": {"p" * 100_000: 1}, "messages": [{"k" * 100_000: 1}]}
    assert len("".join(refusal(short.url, path, deeper))) < 4000


def test_long_names_deeper_down_are_shortened_as_well(short: Any) -> None:
    key = "k" * 100_000
    for path, body in (
        ("/v1/rollouts", {"prompts": [{"token_ids": [1]}], "sampling_params": {key: 1}}),
        ("/v1/rollouts", {"prompts": [{"token_ids": [1], key: 1}]}),
        ("/v1/render", {"messages": [{**GOOD, key: 1e999}]}),
        ("/v1/chat/completions", {"messages": [{**GOOD, "content": [{"type": key}]}]}),
    ):
        assert len("".join(refusal(short.url, path, body))) < 4000


@pytest.mark.parametrize("shape", [[1.0], [True], [2, True], [[1]], [], [1, 1.0], None, 1])
def test_the_shape_of_an_array_is_ints(short: Any, shape: Any) -> None:
    ids = {"dtype": "<i4", "shape": shape, "data": b"\1\0\0\0"}
    assert refusal(short.url, "/v1/rollouts", {"prompts": [{"token_ids": ids}]}, binary=True)[0] == "prompts[0].token_ids.shape"


def test_a_call_can_be_reattached_by_whatever_name_it_may_have(short: Any) -> None:
    with RolloutClient(short.url) as client:
        names = ["a b", "ä/ö", "100%", "%41", "a?b#c", "../x", "/", "a/", "...", "\u2028", "💡", "+", "a\\b", "%2e%2e", ";", "k" * 1024]
        for name in names:
            made = client.rollouts([[1]], sampling_params={"max_tokens": 2}, request_id=name, detach_s=30)
            assert client.reattach(name).results == made.results and made.id == name
        for name in (".", "..", "a\nb", "\0", "\x7f", "\x85", "k" * 1025):
            with pytest.raises(BadRequest, match="request_id must be") as refused:
                client.rollouts([[1]], request_id=name, detach_s=30)
            assert refused.value.field == "request_id"


@pytest.mark.parametrize("flags", [("--max-body-bytes", "-1"), ("--max-body-bytes", "0"), ("--served-model-name", " "), ("--host", "")])
def test_a_server_does_not_start_with_nonsense(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "fake", "--port", "0", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"error: {flags[0]} must be")


@pytest.fixture(scope="module")
def broken(cancelling: dict[str, str], tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[Any]:
    """A real server whose model has NaN at id 255, and no id 256, though its tokenizer has."""
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("larger")
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<x>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes((tokenizer_folder / "tokenizer_config.json").read_bytes())
    with serving("--tokenizer", str(folder), "--num-blocks", "64", "--threads", "1", model=cancelling["nan"], factory=None) as server:
        yield server


def test_an_item_whose_scoring_meets_broken_numbers_is_an_error_and_nothing_else(broken: Any) -> None:
    bad, good = ({"prompt": {"token_ids": [i]}, "continuation": {"token_ids": [1]}} for i in (255, 5))
    answer = httpx.post(f"{broken.url}/v1/logprobs", json={"items": [bad, good]})
    first, second = answer.json()["results"]
    assert answer.status_code == 200 and second["token_ids"] == [1] and "error" not in second
    assert first.keys() == {"item_index", "error"} and first["error"]["code"] == "internal" and "NaN" in first["error"]["message"]
    answer = httpx.post(f"{broken.url}/v1/logprobs", json={"items": [bad, bad]})
    assert answer.status_code == 500 and answer.json()["error"] == first["error"]
    assert [r["error"]["code"] for r in answer.json()["results"]] == ["internal"] * 2
    with RolloutClient(broken.url) as client:
        scores = client.score([([255], [1]), ([5], [1])])
        assert "NaN" in str(scores[0].error) and scores[1].token_ids == [1]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/rollouts", {"prompts": [{"text": "ab<x>"}]}, "prompts[0].text"),
        ("/v1/rollouts", {"prompts": [{"messages": [{**GOOD, "content": "<x>"}]}]}, "prompts[0].messages"),
        ("/v1/logprobs", {"items": [{"prompt": {"text": "<x>"}, "continuation": {"text": "b"}}]}, "items[0].prompt.text"),
        ("/v1/logprobs", {"items": [{"prompt": {"text": "a"}, "continuation": {"text": "b<x>"}}]}, "items[0].continuation.text"),
        ("/v1/completions", {"prompt": "ab<x>"}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "<x>"]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": [{**GOOD, "content": "<x>"}]}, "messages"),
    ],
)
def test_a_text_whose_ids_the_model_does_not_have_is_named_as_it_was_sent(broken: Any, path: str, body: Any, named: str) -> None:
    field, message = refusal(broken.url, path, body)
    assert field == named and message.startswith(f"{named} makes token id 256, which this model does not have")
