"""OpenAI's routes, asked by OpenAI's own client: a tiny real model for what is said, a fake engine for what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from rollsync import RolloutClient
from rollsync.rollout.wire import MSGPACK, pack_array

openai = pytest.importorskip("openai")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}|{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}{{ flag }}"
)
FLAGS = ("--load-format", "random", "--num-blocks", "64", "--block-tokens", "4", "--threads", "1")
IDS = [5, 6, 7, 8, 9]
FOREVER = {"max_tokens": 4000, "extra_body": {"detokenize": False}}
Until = Callable[..., None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer whose BOS is added to text; the weights are random, so that most of what it says is no UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(["hello world"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=specials))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def real(folder: Path, serving: Any) -> Iterator[Any]:
    with serving(*FLAGS, "--served-model-name", "nice", model=str(folder), factory=None) as server:
        yield server


@pytest.fixture(scope="module")
def ai(real: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from rollsync.rollout.models.tokenizer import Tokenizer

    return Tokenizer.from_model(folder)


@pytest.fixture
def fake(server: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(ai: Any, chat: bool, **more: Any) -> Any:
    """One question in either dialect; its prompt has the same meaning every time."""
    if chat:
        return ai.chat.completions.create(model="nice", messages=[{"role": "user", "content": "hi"}], **more)
    return ai.completions.create(model="nice", prompt=IDS, **more)


def said(choice: Any) -> str:
    return choice.message.content if hasattr(choice, "message") else choice.text


def test_completions_are_the_native_samples(real: Any, ai: Any, tokenizer: Any) -> None:
    params = {"seed": 11, "max_tokens": 12, "temperature": 0.8}
    with RolloutClient(real.url) as client:
        prompts = [{"token_ids": IDS}, {"token_ids": [7]}, {"token_ids": IDS}]
        native = [s for r in client.rollouts(prompts, n=2, sampling_params=params).results for s in r.samples]
    more = {"return_token_ids": True}
    reply = ai.completions.create(model="nice", prompt=[IDS, [7], IDS], n=2, **params, extra_body=more)
    assert [c.index for c in reply.choices] == list(range(6))
    for choice, sample in zip(reply.choices, native, strict=True):
        assert (choice.token_ids, choice.seed) == (sample.token_ids, sample.seed)
        assert choice.text == tokenizer.decode(sample.token_ids)
        assert choice.finish_reason == sample.finish_reason and choice.weight_versions == sample.weight_versions
    assert [c.prompt_token_ids for c in reply.choices[1:3]] == [IDS, [7]]
    assert reply.usage.prompt_tokens == 11 and reply.usage.completion_tokens == sum(len(s.token_ids) for s in native)
    assert reply.usage.prompt_tokens_details.cached_tokens == 8  # a whole block of each of the two equal prompts
    with RolloutClient(real.url) as client:
        assert reply.system_fingerprint == client.version()["fingerprint"]
    assert (reply.object, reply.model, reply.id[:5]) == ("text_completion", "nice", "cmpl-")


def test_prompts_of_text(ai: Any, tokenizer: Any) -> None:
    more = {"return_token_ids": True}
    reply = ai.completions.create(model="nice", prompt=["hello", " world 🙂"], echo=True, extra_body=more)
    assert [c.prompt_token_ids for c in reply.choices] == [[1, *tokenizer.encode("hello")], [1, *tokenizer.encode(" world 🙂")]]
    assert all(len(c.token_ids) == 16 or c.finish_reason == "stop" for c in reply.choices)  # OpenAI's default
    for given, choice in zip(("hello", " world 🙂"), reply.choices, strict=True):
        assert choice.text == given + tokenizer.decode(choice.token_ids)
    bare = ai.completions.create(model="nice", prompt="hello", max_tokens=0, echo=True, extra_body={**more, "add_special_tokens": False})
    assert (bare.choices[0].text, bare.choices[0].prompt_token_ids) == ("hello", tokenizer.encode("hello"))


CHATS: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([{"role": "user", "content": "hi"}], {}, "user:hi;a:"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}, "user:a\nb;a:"),
    ([{"role": "tool", "content": "5", "name": None}], {"tools": [{"f": 1}], "tool_choice": "auto"}, '[{"f": 1}]|tool:5;a:'),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"q": 1}'}}]}], {}, 'assistant:{"q": 1};a:'),
    ([{"role": "user", "content": "x"}], {"extra_body": {"chat_template_kwargs": {"flag": "F"}}}, "user:x;a:F"),
    ([{"role": "user", "content": "x"}], {"extra_body": {"add_generation_prompt": False}}, "user:x;"),
    ([{"role": "assistant", "content": "x"}], {"extra_body": {"continue_final_message": True}}, "assistant:x"),
]


@pytest.mark.parametrize("case", range(len(CHATS)))
def test_chats_reach_the_model_as_the_template_writes_them(ai: Any, tokenizer: Any, case: int) -> None:
    messages, more, text = CHATS[case]
    more = {**more, "extra_body": {**more.get("extra_body", {}), "return_token_ids": True}}
    reply = ai.chat.completions.create(model="tiny", messages=messages, max_tokens=3, response_format={"type": "text"}, **more)
    assert reply.prompt_token_ids == tokenizer.encode(text)
    assert reply.choices[0].message.role == "assistant" and len(reply.choices[0].token_ids) <= 3
    assert (reply.object, reply.model) == ("chat.completion", "tiny")


def test_a_chat_takes_the_room_that_is_left(ai: Any) -> None:
    reply = ask(ai, True, extra_body={"ignore_eos": True})
    assert reply.usage.total_tokens == 128 and reply.choices[0].finish_reason == "length"
    assert ask(ai, True, max_completion_tokens=2, extra_body={"ignore_eos": True}).usage.completion_tokens == 2


def test_turns_by_ids_are_never_tokenised_again(ai: Any) -> None:
    ids = list(IDS)
    for turn in range(3):
        choice = ai.completions.create(model="nice", prompt=ids, max_tokens=9, seed=turn, extra_body={"return_token_ids": True}).choices[0]
        assert choice.prompt_token_ids == ids and choice.token_ids
        ids = [*ids, *choice.token_ids, 7]


VARIANTS: list[dict[str, Any]] = [
    {"n": 3},
    {"stop": ["\ufffd", "e"], "extra_body": {"skip_special_tokens": False}},
    {"stop": ["b", "\ufffd\ufffd\ufffd"], "extra_body": {"include_stop_str_in_output": True, "min_tokens": 6}},
    {"logprobs": True, "extra_body": {"return_token_ids": True, "stop_token_ids": [1, 3, 65, 66]}},
    {"logprobs": True, "extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True, "detokenize": False}},
]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_a_stream_adds_up_to_the_whole_reply(ai: Any, chat: bool, variant: int) -> None:
    asked = {"seed": 3, "max_tokens": 40, "temperature": 1.0, **VARIANTS[variant]}
    if asked.get("logprobs") and chat:
        asked["top_logprobs"] = 2
    elif asked.get("logprobs"):
        asked["logprobs"] = 2
    whole = ask(ai, chat, **asked)
    chunks = list(ask(ai, chat, stream=True, stream_options={"include_usage": True}, **asked))
    assert {c.id for c in chunks} == {chunks[0].id} and [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert "".join((c.delta.content or "") if chat else c.text for c in own) == said(choice)
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert own[-1].stop_reason == choice.stop_reason and own[-1].weight_versions == choice.weight_versions
        if chat:
            assert own[0].delta.role == "assistant" and len({c.delta.role for c in own[1:]} - {None}) == 0
        if asked.get("logprobs"):
            assert [t for c in own for t in getattr(c, "token_ids", None) or []] == choice.token_ids
            for name in ("content",) if chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [v for c in own if c.logprobs for v in getattr(c.logprobs, name)] == getattr(choice.logprobs, name)
    if asked.get("extra_body", {}).get("return_token_ids"):
        first = chunks[0] if chat else chunks[0].choices[0]
        assert first.prompt_token_ids == (whole.prompt_token_ids if chat else IDS)


def test_stop_strings_and_ids_are_not_shown_unless_asked(ai: Any, tokenizer: Any) -> None:
    asked = {"seed": 3, "max_tokens": 40, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    whole = ask(ai, False, **asked).choices[0]
    word = next(whole.text[i : i + 2] for i in range(8, 40) if "\ufffd" not in whole.text[i : i + 2])
    for shown in (False, True):
        cut = ask(ai, False, stop=word, **{**asked, "extra_body": {**asked["extra_body"], "include_stop_str_in_output": shown}}).choices[0]
        end = whole.text.index(word)
        assert cut.text == whole.text[: end + 2 if shown else end]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", word) and cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    last = next(i for i, t in enumerate(whole.token_ids) if i > 8 and t > 200 and t not in whole.token_ids[:i])
    by_id = {**asked, "extra_body": {**asked["extra_body"], "stop_token_ids": [whole.token_ids[last]]}}
    cut = ask(ai, False, **by_id).choices[0]
    assert cut.token_ids == whole.token_ids[: last + 1] and cut.stop_reason == whole.token_ids[last]
    assert cut.text == tokenizer.decode(cut.token_ids[:-1])


@pytest.mark.parametrize("temperature", [0.7, 0])
def test_logprobs_line_up(real: Any, ai: Any, tokenizer: Any, temperature: float) -> None:
    asked = {"seed": 5, "max_tokens": 20, "temperature": temperature, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    choice = ask(ai, False, logprobs=3, **asked).choices[0]
    found = choice.logprobs
    offset = 0
    for i, token in enumerate(choice.token_ids):
        assert found.tokens[i] == tokenizer.token_bytes(token).decode(errors="replace")
        assert found.text_offset[i] >= offset
        offset = found.text_offset[i]
        top = found.top_logprobs[i]
        assert 1 <= len(top) <= 4 and max(top.values()) < 0 and found.tokens[i] in top
        if temperature == 0:
            assert found.token_logprobs[i] == max(top.values())
    chat = ask(ai, True, logprobs=True, top_logprobs=3, **asked).choices[0]
    raw = b"".join(bytes(entry.bytes) for entry in chat.logprobs.content)
    assert raw == b"".join(tokenizer.token_bytes(t) for t in chat.token_ids)
    assert all(len(entry.top_logprobs) == 3 for entry in chat.logprobs.content)
    with RolloutClient(real.url) as client:
        params = {"seed": 5, "max_tokens": 20, "temperature": temperature, "ignore_eos": True}
        native = client.rollouts([IDS], sampling_params=params).results[0].samples[0]
    if temperature:
        assert found.token_logprobs == native.logprobs


def test_echo_scores_the_prompt(real: Any, ai: Any, tokenizer: Any) -> None:
    asked = {"prompt": "hello w", "max_tokens": 2, "echo": True, "logprobs": 0, "seed": 1, "extra_body": {"prompt_logprobs": 0}}
    choice = ai.completions.create(model="nice", **asked).choices[0]
    ids = tokenizer.encode("hello w", add_special_tokens=True)
    with RolloutClient(real.url) as client:
        sample = client.rollouts([ids], sampling_params={"max_tokens": 2, "seed": 1}, include=["prompt_logprobs"]).results[0].samples[0]
    assert choice.logprobs.token_logprobs == [*sample.prompt_logprobs, *sample.logprobs]
    assert choice.prompt_logprobs[0] is None and choice.prompt_logprobs[1][str(ids[1])]["logprob"] == sample.prompt_logprobs[1]
    assert choice.logprobs.tokens[0] == "<s>" and choice.text.startswith("hello w")
    for name, start in zip(choice.logprobs.tokens[1 : len(ids)], choice.logprobs.text_offset[1:], strict=False):
        assert choice.text[start : start + len(name)] == name


@pytest.mark.parametrize("chat", [False, True])
def test_how_many_logprobs(ai: Any, chat: bool) -> None:
    def count(value: Any) -> Any:
        asked = {"logprobs": True, "top_logprobs": value} if chat else {"logprobs": value}
        found = ask(ai, chat, max_tokens=2, **({} if value == "absent" else asked)).choices[0].logprobs
        return found and [len(t.top_logprobs) for t in found.content] if chat else found and [len(t) for t in found.top_logprobs]

    assert count("absent") is None
    few = {None: {0}, 0: {0}, 1: {1}, 20: {20}} if chat else {None: None, 0: {1}, 1: {1, 2}, 20: set(range(5, 22))}
    for value, allowed in few.items():
        found = count(value)
        assert found is None if allowed is None else len(found) <= 2 and set(found) <= allowed
    for value in (21, 1000, -1, 1.5, "many", True):
        with pytest.raises(openai.BadRequestError) as error:
            count(value)
        assert error.value.body["param"] == ("top_logprobs" if chat else "logprobs")


def test_json_is_strict_where_few_ids_can_be_drawn(real: Any) -> None:
    def refuse(word: str) -> Any:
        pytest.fail(f"{word} is not JSON")

    more = {"max_tokens": 4, "top_k": 2, "seed": 1}
    text = httpx.post(f"{real.url}/v1/completions", json={"prompt": IDS, "logprobs": 5, **more}).text
    assert all(len(top) == 2 for top in json.loads(text, parse_constant=refuse)["choices"][0]["logprobs"]["top_logprobs"])
    asked = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 5, **more}
    text = httpx.post(f"{real.url}/v1/chat/completions", json=asked).text
    content = json.loads(text, parse_constant=refuse)["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


BAD: list[tuple[bool, dict[str, Any], str]] = [
    (False, {"prompt": []}, "prompt"),
    (False, {"prompt": [[]]}, "prompt"),
    (False, {"prompt": [[1], []]}, "prompt[1]"),
    (False, {"prompt": [[1], [320]]}, "prompt[1][0]"),
    (False, {"prompt": [1, -1]}, "prompt[1]"),
    (False, {"prompt": [1, "a"]}, "prompt[1]"),
    (False, {"prompt": [1] * 128}, "prompt"),
    (False, {"prompt": [[1], [1] * 128]}, "prompt[1]"),
    (False, {"prompt": 3}, "prompt"),
    (False, {"suffix": "x"}, "suffix"),
    (False, {"best_of": 3}, "best_of"),
    (False, {"max_tokens": -1}, "max_tokens"),
    (False, {"temperature": "hot"}, "temperature"),
    (False, {"top_p": 0}, "top_p"),
    (False, {"n": 0}, "n"),
    (False, {"seed": -1}, "seed"),
    (False, {"stop": [""]}, "stop[0]"),
    (False, {"stop": ["a"] * 100}, "stop"),
    (False, {"logit_bias": {"999": 1}}, "logit_bias"),
    (False, {"logit_bias": {"x": 1}}, "logit_bias"),
    (False, {"extra_body": {"stream": False, "stream_options": {"include_usage": True}}}, "stream_options"),
    (False, {"extra_body": {"stop_token_ids": [999]}}, "stop_token_ids[0]"),
    (False, {"extra_body": {"allowed_token_ids": [-1]}}, "allowed_token_ids"),
    (False, {"extra_body": {"use_beam_search": True}}, "use_beam_search"),
    (False, {"extra_body": {"prompt_logprobs": 3}}, "prompt_logprobs"),
    (True, {"messages": []}, "messages"),
    (True, {"messages": [{"content": "x"}]}, "messages[0]"),
    (True, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (True, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0].type"),
    (True, {"messages": [{"role": "user", "content": "x" * 200}]}, "messages"),
    (True, {"tool_choice": "required"}, "tool_choice"),
    (True, {"response_format": {"type": "json_object"}}, "response_format"),
    (True, {"top_logprobs": 2}, "top_logprobs"),
    (True, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    (True, {"extra_body": {"chat_template": "x"}}, "chat_template"),
    (True, {"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs.chat_template"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_named(ai: Any, stream: bool) -> None:
    for chat, more, param in BAD:
        given: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": [1]}
        create = ai.chat.completions.create if chat else ai.completions.create
        with pytest.raises(openai.BadRequestError) as error:
            create(model="nice", stream=stream, **{**given, **more})
            pytest.fail(f"taken: {more}")
        assert error.value.body["param"] == param, (more, error.value.body)
        assert param.split("[")[0] in error.value.body["message"] and error.value.body["type"] == "invalid_request_error"


def test_models_and_names(ai: Any, folder: Path) -> None:
    (only,) = ai.models.list().data
    assert (only.id, only.max_model_len, only.root) == ("nice", 128, str(folder))
    for name in ("nice", "tiny", str(folder)):
        assert ai.models.retrieve(name).id == "nice"
        assert ai.completions.create(model=name, prompt=[1], max_tokens=1, user="me").model == name
    for call in (lambda: ai.models.retrieve("other"), lambda: ai.completions.create(model="other", prompt=[1])):
        with pytest.raises(openai.NotFoundError, match="served: nice") as error:
            call()
        assert error.value.body["code"] == "model_not_found"


def test_a_route_that_is_not_there_is_an_openai_error(ai: Any) -> None:
    for method, path, status in (("POST", "/models", 405), ("GET", "/chat/completions", 405), ("GET", "/chat/completions/1", 404)):
        answer = httpx.request(method, f"{ai.base_url}".rstrip("/") + path)
        error = answer.json()["error"]
        assert (answer.status_code, error.keys()) == (status, {"message", "type", "param", "code"})
        assert path in error["message"] and ("allow" in answer.headers) == (status == 405)


def test_nulls_are_as_if_left_out(real: Any) -> None:
    absent = ("model", "suffix", "best_of", "logprobs", "stop", "seed", "logit_bias", "stream_options", "top_k", "prompt_logprobs", "n")
    answer = httpx.post(f"{real.url}/v1/completions", json={"prompt": [1], "max_tokens": 1, **dict.fromkeys(absent)})
    assert answer.status_code == 200 and answer.json()["choices"][0]["logprobs"] is None


def test_an_abort_is_told(until: Until, server: Any, fake: Any) -> None:
    got: list[Any] = []
    asked = {"model": "fake", "prompt": [1], "n": 2, "max_tokens": 4000, "extra_body": {"detokenize": False, "request_id": "r"}}
    whole = threading.Thread(target=lambda: got.append(fake.completions.create(**asked)))
    whole.start()
    until(lambda: server.running() == 2)
    with pytest.raises(openai.ConflictError):
        fake.completions.create(**asked)
    with RolloutClient(server.url) as client:
        client.abort(request_id="r", reason="enough")
    whole.join(20)
    assert got[0].id == "cmpl-r"
    assert {(c.finish_reason, c.abort_reason, c.text) for c in got[0].choices} == {("abort", "enough", "")}


@pytest.mark.parametrize("stream", [False, True])
def test_a_dropped_connection_frees_its_work(until: Until, server: Any, stream: bool) -> None:
    asked = {"prompt": [[1], [2]], "n": 2, "max_tokens": 4000, "detokenize": False, "stream": stream}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/v1/completions", json=asked, timeout=0.3)
    until(lambda: server.running() == 0, 20)


def test_a_model_without_tokenizer_serves_ids(fake: Any) -> None:
    more = {"detokenize": False, "return_token_ids": True}
    choice = fake.completions.create(model="fake", prompt=[249], max_tokens=3, logprobs=0, extra_body=more).choices[0]
    assert (choice.token_ids, choice.text) == ([249, 0, 7], "")
    assert choice.logprobs.tokens == ["token_id:249", "token_id:0", "token_id:7"] and choice.logprobs.token_logprobs[1] is None  # -inf
    with pytest.raises(openai.BadRequestError, match="no usable tokenizer"):
        fake.completions.create(model="fake", prompt=[249])


def test_msgpack_in_and_out(server: Any) -> None:
    ids = pack_array("<i4", [249])
    asked = {"prompt": ids, "max_tokens": 3, "detokenize": False, "return_token_ids": True}
    headers = {"Content-Type": MSGPACK}
    whole = httpx.post(f"{server.url}/v1/completions", content=msgpack.packb(asked), headers=headers)
    assert msgpack.unpackb(whole.content)["choices"][0]["token_ids"] == [249, 0, 7]
    data = httpx.post(f"{server.url}/v1/completions", content=msgpack.packb({**asked, "stream": True}), headers=headers).content
    chunks = []
    while data:
        (size,) = struct.unpack("<I", data[:4])
        chunks.append(msgpack.unpackb(data[4 : 4 + size]))
        data = data[4 + size :]
    assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == [249, 0, 7]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_keys_and_a_dead_engine(serving: Any, until: Until) -> None:
    with serving("--api-key", "secret") as server:
        asked = {"model": "fake", "prompt": [1], "extra_body": {"detokenize": False}}
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").completions.create(**asked)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as ai:
            with ai.completions.create(**{**asked, "max_tokens": 4000}, stream=True, logprobs=0) as stream:
                next(iter(stream))
                status = httpx.get(f"{server.url}/v1/engine/status", headers={"Authorization": "Bearer secret"}).json()
                os.kill(status["engine_pid"], signal.SIGKILL)
                with pytest.raises(openai.APIError, match="engine process"):
                    list(stream)
            with pytest.raises(openai.InternalServerError) as error:
                ai.completions.create(**asked)
            assert error.value.status_code == 503 and error.value.body["code"] == "engine_dead"
