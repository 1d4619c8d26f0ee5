import json
import random
from pathlib import Path
from typing import Any

import pytest
from rollsync.rollout.errors import BadRequest, ConfigError, UnsupportedModel
from rollsync.rollout.models.chat_template import compile_template, render
from rollsync.rollout.models.tokenizer import IncrementalDecoder, StopStringMatcher, Tokenizer

gguf = pytest.importorskip("gguf", reason="the `gguf` distribution writes the test files")

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}\n{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "The quick brown fox",
    "  leading, and   inner \n\n  spaces\t\tand tabs  ",
    "in 2024, 365 + 1.5 = 366.5; 1 2 3",
    "don't WE'LL i'm you'VE",
    "naïve café — “quoted” 日本語 한국어 🙂👩‍👩‍👧",
    "def f(x):\r\n\treturn x**2  # why?!\r\n\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<think>x</think>",
    "",
    " ",
]


def write_tokenizer(path: Path, bpe: dict[str, Any], pre: str, add_bos: bool | None = None, model: str = "gpt2") -> None:
    """A GGUF without tensors: the vocabulary of conftest after three control tokens, and <think> as a user-defined one."""
    tokens = [*SPECIALS, *sorted(bpe["vocab"], key=bpe["vocab"].__getitem__), "<think>", "[PAD500]"]
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(128)
    w.add_tokenizer_model(model)
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    w.add_token_types([3, 3, 3, *([1] * (len(tokens) - 5)), 4, 5])
    w.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    if add_bos is not None:
        w.add_add_bos_token(add_bos)
    w.add_chat_template(TEMPLATE)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()


@pytest.fixture(scope="module")
def tokenizer(bpe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "smollm.gguf"
    write_tokenizer(path, bpe, "smollm")
    return Tokenizer.from_model(path)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A Llama-2 style vocabulary: metaspace, byte fallback, the first leading space stripped."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend

    words = ["▁hello", "▁wor", "ld", "▁", "h", "e", "l", "o", "w", "r", "d"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return Tokenizer(backend)


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_gguf_vocabularies_equal_transformers_conversion(bpe: dict[str, Any], tmp_path: Path, pre: str) -> None:
    """One difference is meant. Under smollm, transformers forgets to cut out digits ("1  2", "½²"), as SmolLM's own tokenizer.json,
    llama.cpp and we do. TEXTS hold none of these."""
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path / "t.gguf", bpe, pre, add_bos=False)
    ours, theirs = Tokenizer.from_model(tmp_path / "t.gguf"), AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf")
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids) == text
    assert ours.eos_token_ids == (2,)


def test_qwen2_vocabulary_equals_the_model_class(bpe: dict[str, Any], tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    write_tokenizer(tmp_path / "t.gguf", bpe, "qwen2")
    ours = Tokenizer.from_model(tmp_path / "t.gguf")
    shifted = {token: i + len(SPECIALS) for token, i in bpe["vocab"].items()} | {token: i for i, token in enumerate(SPECIALS)}
    merges: Any = [tuple(pair) for pair in bpe["merges"]]
    theirs = Qwen2Tokenizer(vocab={**shifted, "<think>": len(shifted)}, merges=merges, additional_special_tokens=SPECIALS)
    theirs.add_tokens(["<think>"])
    for text in [*TEXTS, "e\u0301 composes"]:
        assert ours.encode(text) == theirs.encode(text), text


def test_digits_stand_alone_under_smollm(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1\n\n2345")] == ["1", "\n\n", "2", "3", "4", "5"]


def test_bos_is_added_where_the_model_has_one(bpe: dict[str, Any], tmp_path: Path) -> None:
    for pre, add_bos, expected in (("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", True, True), ("smollm", None, False)):
        path = tmp_path / f"{pre}-{add_bos}.gguf"
        write_tokenizer(path, bpe, pre, add_bos=add_bos)
        tokenizer = Tokenizer.from_model(path)
        assert (tokenizer.encode("fox", add_special_tokens=True)[0] == 1) == expected
        assert tokenizer.encode("fox")[0] != 1


def test_specials_and_padding(tokenizer: Tokenizer, bpe: dict[str, Any]) -> None:
    ids = tokenizer.encode("<|im_start|>fox<think>")
    assert (ids[0], ids[-1]) == (1, 3 + len(bpe["vocab"]))
    assert tokenizer.decode(ids) == "fox<think>"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == 4 + len(bpe["vocab"])  # the unused [PAD500] is no token
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_what_cannot_be_rebuilt_is_named(bpe: dict[str, Any], tmp_path: Path) -> None:
    for model, pre in (("llama", "default"), ("gpt2", "tekken")):
        write_tokenizer(tmp_path / "t.gguf", bpe, pre, model=model)
        with pytest.raises(UnsupportedModel, match=f"'{model}' with pre-tokenizer '{pre}' .*supported: gpt2 with smollm, llama-bpe, qwen2"):
            Tokenizer.from_model(tmp_path / "t.gguf")
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_context_length(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"no metadata tokenizer\.ggml\.tokens and tokenizer\.ggml\.merges"):
        Tokenizer.from_model(tmp_path / "t.gguf")
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        Tokenizer.from_model(folder)


@pytest.mark.parametrize("which", ["tokenizer", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False])
def test_incremental_text_adds_up_to_decode(which: str, skip: bool, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(which)
    rng = random.Random(1)
    special = tokenizer.encode("<s>") if which == "sentencepiece" else [1]
    for text in [*TEXTS, "hello world 🙂 héé"]:
        ids = special + tokenizer.encode(text) + special + tokenizer.encode(text)
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
        pieces = [decoder.push(i) for i in ids]
        assert not any("�" in piece for piece in pieces)
        assert "".join(pieces) + decoder.finish() == tokenizer.decode(ids, skip)
    if which == "tokenizer":  # any bytes at all
        for _ in range(200):
            ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(30))]
            decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
            assert "".join(map(decoder.push, ids)) + decoder.finish() == tokenizer.decode(ids, skip)


def test_an_unfinished_character_waits_and_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.backend.get_vocab()[char] for char in "ðŁĻĤ"]  # 🙂, byte by byte
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(i) for i in ids] == ["", "", "", "🙂"]
    assert decoder.push(ids[0]) == ""
    assert decoder.finish() == "�"


def test_byte_fallback_noise_is_not_held_back_for_ever(sentencepiece: Tokenizer) -> None:
    decoder = IncrementalDecoder(sentencepiece)
    byte = sentencepiece.backend.get_vocab()["<0xF0>"]
    assert "".join(decoder.push(byte) for _ in range(20)).count("�") >= 8


def matches(tokenizer: Tokenizer, text: str, *stop: str) -> tuple[str | None, int]:
    """(stop string found, tokens pushed until then)."""
    matcher = StopStringMatcher(tokenizer, stop)
    ids = tokenizer.encode(text)
    for count, token_id in enumerate(ids, 1):
        if (found := matcher.push(token_id)) is not None:
            return found, count
    return None, len(ids)


def test_stop_strings(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox jumps\n\nover"
    for start in range(0, len(text), 3):
        for end in range(start + 1, len(text) + 1):
            stop = text[start:end]
            found, count = matches(tokenizer, text, stop)
            assert found == stop
            ids = tokenizer.encode(text)
            assert stop in tokenizer.decode(ids[:count])
            assert stop not in tokenizer.decode(ids[: count - 1])  # at the first token that completes it
    assert matches(tokenizer, text, "fix", "\n\n\n")[0] is None
    assert matches(tokenizer, "a 🙂 b", "🙂")[0] == "🙂"
    assert matches(tokenizer, "hi<|im_end|>", "<|im_end|>")[0] == "<|im_end|>"
    assert matches(tokenizer, text)[0] is None


def test_of_several_stop_strings_the_first_to_end_wins(tokenizer: Tokenizer) -> None:
    assert matches(tokenizer, "The quick brown", "brown", "quick")[0] == "quick"
    assert matches(tokenizer, "The quick brown", "k", "quick")[0] == "quick"
    with pytest.raises(BadRequest, match="must not be empty"):
        StopStringMatcher(tokenizer, ("a", ""))


def test_a_stop_string_is_told_once_and_only_by_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    text = "ab" + "0123456789" * 2 + "ab"
    for stop in (("ab",), ("ab", "0123456789"), ("zzzzzzzzzzzzzzzz", "ab"), ("ab", "89ab")):
        matcher = StopStringMatcher(tokenizer, stop)
        so_far = ""
        for token in tokenizer.encode(text):
            before, so_far = so_far, so_far + tokenizer.decode([token])
            ends = [s for s in stop if any(so_far[:n].endswith(s) for n in range(len(before) + 1, len(so_far) + 1))]
            found = matcher.push(token)
            assert found in ends if ends else found is None, (stop, so_far)


def test_a_stop_string_sees_generated_text_only(tokenizer: Tokenizer) -> None:
    matcher = StopStringMatcher(tokenizer, ("ab",))
    assert [matcher.push(i) for i in tokenizer.encode("b")] == [None]
    assert matcher.push(tokenizer.encode("a")[0]) is None
    assert matcher.push(tokenizer.encode("b")[0]) == "ab"


def folder_with(tmp_path: Path, tokenizer: Tokenizer, template: Any, jinja: str | None = None) -> Path:
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
        "bos_token": "<|im_start|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    return tmp_path


RICH = """{%- set ns = namespace(last=none) -%}
{{- bos_token }}
{% for message in messages %}
    {%- if message.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.last = message.role %}
[{{ message.role | upper }}]{{ message.content | trim }}{{ message.tool_calls | tojson if message.tool_calls }}{{ eos_token }}
    {%- if message.role == 'assistant' %}{% generation %}!{% endgeneration %}{% endif %}
{% endfor %}
{{- ns.last }} {{ tools | tojson(indent=2) if tools else 'no tools' }} {{ flag }} {{ dict(a=1).a }} {{ strftime_now('%Y') | length }}
{%- if add_generation_prompt %}[ASSISTANT]{% endif %}
"""


@pytest.mark.parametrize("template", [TEMPLATE, RICH])
def test_chats_render_as_in_transformers(tokenizer: Tokenizer, tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    folder = folder_with(tmp_path, tokenizer, template)
    ours, theirs = Tokenizer.from_model(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.has_chat_template
    assert ours.eos_token_ids == (2,)
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": " what's <5 & 'ü'? "},
        {"role": "skip", "content": "x"},
        {"role": "assistant", "content": "a\nb", "tool_calls": [{"name": "f", "arguments": {"q": "é<>"}}], "name": None},
    ]
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    more: dict[str, Any] = {"tools": tools, "flag": "<on>"}
    for kwargs in ({}, more):
        for prompt in (True, False):
            want = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, **kwargs)
            assert ours.render_chat(chat, prompt, **kwargs) == want
            want_ids = theirs.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False, **kwargs)
            assert ours.apply_chat_template(chat, prompt, **kwargs) == want_ids
    for content in ("go on ", "plain"):
        chat[-1]["content"] = content
        want = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        assert ours.render_chat(chat, False, continue_final_message=True) == want


def test_named_templates_and_the_jinja_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    chat = [{"role": "user", "content": "x"}]
    ours = Tokenizer.from_model(folder_with(tmp_path, tokenizer, named))
    assert (ours.render_chat(chat), ours.render_chat(chat, tools=[{}, {}])) == ("plain", "2 tools")
    assert ours.render_chat(chat, chat_template="{{ messages[0].content }}!") == "x!"
    assert Tokenizer.from_model(folder_with(tmp_path, tokenizer, "old", jinja="new")).render_chat(chat) == "new"


def test_special_tokens_may_stand_in_a_file_of_their_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, tokenizer, "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}")
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "other", "pad_token": {"content": "<|endoftext|>"}}))
    loaded = Tokenizer.from_model(folder)
    assert loaded.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>|<|im_end|>|<|endoftext|>"
    assert loaded.eos_token_ids == (2,)


def test_bad_chats_are_the_callers_mistake(tokenizer: Tokenizer, tmp_path: Path) -> None:
    strict = "{{ raise_exception('no such role') if messages[0].role == 'bad' else 'hi ' + messages[0].content }}"
    ours = Tokenizer.from_model(folder_with(tmp_path, tokenizer, strict))
    for chat, message in (
        ([], "at least one message"),
        ([{"content": "x"}], '"role"'),
        (["hi"], '"role"'),
        ([{"role": "bad", "content": "x"}], "no such role"),
        ([{"role": "user", "content": ["x"]}], "refused"),
    ):
        with pytest.raises(BadRequest, match=message) as error:
            ours.render_chat(chat)  # type: ignore[arg-type]
        assert str(error.value.field).startswith("messages")
    bare = Tokenizer(tokenizer.backend)
    assert not bare.has_chat_template
    with pytest.raises(BadRequest, match="has no chat template"):
        bare.render_chat([{"role": "user", "content": "x"}])
    with pytest.raises(ConfigError, match="not valid Jinja"):
        bare.render_chat([{"role": "user", "content": "x"}], chat_template="{% if %}")


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "{{ messages.append(1) }}"]
)
def test_templates_run_in_a_sandbox(tokenizer: Tokenizer, source: str) -> None:
    with pytest.raises(BadRequest, match="refused"):
        tokenizer.render_chat([{"role": "user", "content": "x"}], chat_template=source)


def test_smollm2_equals_transformers(smollm: Path, smollm_reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr(gguf, "GGUFReader", lambda path: smollm_reader)
    ours, theirs = Tokenizer.from_model(smollm), AutoTokenizer.from_pretrained(smollm.parent, gguf_file=smollm.name)
    assert (ours.vocab_size, ours.eos_token_ids) == (49152, (2,))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
    # What SmolLM's own tokenizer.json and llama.cpp give where transformers' GGUF conversion does not cut out digits
    assert [ours.decode([i]) for i in ours.encode("1  2345 a")] == ["1", "  ", "2", "3", "4", "5", " a"]
    chat = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "user", "contents": "x"}, "contents"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "content": 7}, "content"),
        ({"role": "user", "content": "x", "tool_call": []}, "tool_call"),
        ({"role": "anything", "content": "x", "context": 1}, None),
        ({"role": "assistant", "content": None, "tool_calls": [], "reasoning_content": "y"}, None),
    ],
)
def test_a_message_has_content_and_no_misspelt_key(message: dict[str, Any], where: str | None) -> None:
    template = compile_template("{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}")

    def shown() -> str:
        chat = [{"role": "user", "content": "a"}, message]
        return render(template, chat, add_generation_prompt=False, continue_final_message=False, variables={})

    if where is None:
        assert message["role"] in shown()
    else:
        with pytest.raises(BadRequest) as error:
            shown()
        assert error.value.field == f"messages[1].{where}" and str(error.value).startswith(f"messages[1].{where}")
