"""Text of samples: nothing is shown that would have to be taken back, and a stream shows what a whole reply shows."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from rollsync.rollout.errors import DuplicateRequest, Overloaded, RollsyncError
from rollsync.rollout.models.detokenizer import decode_all
from rollsync.rollout.models.tokenizer import IncrementalDecoder, StopStringMatcher, Tokenizer
from rollsync.rollout.server.openai_errors import error_body, retry_headers
from rollsync.rollout.server.openai_protocol import parse_completion
from rollsync.rollout.server.openai_replies import Prompt, Reply
from rollsync.rollout.server.sample_text import SampleText
from rollsync.rollout.server.token_names import TokenNames
from rollsync.rollout.wire import pack_array

SPECIALS = ["<unk>", "<s>", "</s>"]
WORDS = ["▁hello", "▁", "h", "e", "l", "lo", "wor", "▁wor", "ld", "\ufffd", "▁▁"]
TEXTS = ["hello world", "naïve 日本語 👩‍👩‍👧 ok", "a\n\nb 🙂🙂 c", "  two", "é" * 5]


def _specials() -> list[Any]:
    from tokenizers import AddedToken

    return [AddedToken(t, special=True, normalized=False) for t in SPECIALS]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIALS, *alphabet, "he", "lo", "Ġwor", "âĢį", "ðŁ"]
    backend = Backend(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_specials())
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    vocab = {token: i for i, token in enumerate([*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *WORDS])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(_specials())
    return Tokenizer(backend)


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def some_ids(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Good text, noise, special tokens, ids without a token: any of it next to any other."""
    ids: list[int] = []
    for _ in range(rng.randrange(1, 6)):
        kind = rng.randrange(4)
        if kind == 0:
            ids += tokenizer.encode(rng.choice(TEXTS))
        elif kind == 1:
            ids += [rng.randrange(tokenizer.vocab_size + 4) for _ in range(rng.randrange(1, 7))]
        elif kind == 2:
            ids += [rng.randrange(3)]
        else:
            text = tokenizer.encode(rng.choice(TEXTS))
            ids += text[rng.randrange(len(text)) :]
    return ids


def ended(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...], stop_ids: frozenset[int]) -> tuple[list[int], int | str | None]:
    """The tokens the engine would have drawn, and why it stopped."""
    matcher = StopStringMatcher(tokenizer, stop)
    for count, token in enumerate(ids, 1):
        found = matcher.push(token) if stop else None
        if token in stop_ids or found is not None:
            return ids[:count], token if token in stop_ids else found
    return ids, None


def dealt(rng: random.Random, shown: SampleText, ids: list[int], reason: int | str | None) -> list[str]:
    """The pieces of one stream; as a ticket does it, the last tokens may come before it is known that they are the last."""
    cuts = sorted(rng.randrange(len(ids) + 1) for _ in range(rng.randrange(len(ids) + 1)))
    cuts += [len(ids)] * rng.randrange(2)
    pieces = [shown.push(ids[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
    return [*pieces, shown.finish(ids[cuts[-1] if cuts else 0 :], reason)]


def test_however_tokens_are_dealt_out_the_text_is_one(tokenizer: Tokenizer) -> None:
    rng = random.Random(7)
    for _ in range(250):
        skip, include = rng.random() < 0.5, rng.random() < 0.5
        source = tokenizer.decode(some_ids(rng, tokenizer), skip_special_tokens=False) or "x"
        starts = [rng.randrange(len(source)) for _ in range(rng.randrange(3))]
        stop = tuple(source[a : a + rng.randrange(1, 5)] for a in starts)
        stop_ids = frozenset({2} if rng.random() < 0.5 else ())
        ids, reason = ended(tokenizer, some_ids(rng, tokenizer) + some_ids(rng, tokenizer), stop, stop_ids)
        options: dict[str, Any] = {"skip_special_tokens": skip, "stop": stop, "stop_ids": stop_ids, "include_stop": include}
        one = SampleText(tokenizer, **options, with_starts=True)
        whole = one.finish(ids, reason)
        assert SampleText(tokenizer, **options).finish(ids, reason) == whole
        for _ in range(3):
            many = SampleText(tokenizer, **options, with_starts=True)
            assert "".join(dealt(rng, many, ids, reason)) == whole == many.text and many.starts == one.starts
        spaced = [SampleText(tokenizer, **options, spaces=True) for _ in range(2)]
        assert spaced[0].finish(ids, reason) == "".join(dealt(rng, spaced[1], ids, reason))
        assert skip or spaced[0].text.replace(" ", "") == whole.replace(" ", "")
        decoder = IncrementalDecoder(tokenizer, skip)
        kept = ids[:-1] if isinstance(reason, int) and not include else ids
        text = "".join(map(decoder.push, kept)) + decoder.finish()
        if not isinstance(reason, str):
            assert whole == text
        elif not skip:
            at = text.index(reason)
            assert whole == text[: at + len(reason) if include else at]
        if isinstance(reason, str) and not include and not skip:
            assert not any(s in whole for s in stop)


def test_a_whole_text_at_once_is_that_of_its_tokens(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(400):
        ids, skip = some_ids(rng, tokenizer), rng.random() < 0.5
        decoder = IncrementalDecoder(tokenizer, skip)
        assert decode_all(tokenizer, ids, skip) == "".join(map(decoder.push, ids)) + decoder.finish()


def test_spaces_stand_beside_shown_special_tokens_alone(byte_level: Tokenizer) -> None:
    ids = [1, *byte_level.encode("ab"), 2, 2, *byte_level.encode("c")]
    for stop, shown in (((), "<s> ab </s> </s> c"), (("c",), "<s> ab </s> </s>"), (("></s",), "<s> ab </s")):
        text = SampleText(byte_level, skip_special_tokens=False, spaces=True, stop=stop)
        taken = ids if stop != ("></s",) else ids[:5]
        assert "".join(text.push([i]) for i in taken) + text.finish([], stop[0] if stop else None) == shown
    assert SampleText(byte_level, spaces=True).finish(ids, None) == "abc"


def test_good_text_is_shown_as_it_is_decoded(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = [1, *tokenizer.encode(text), 2, *tokenizer.encode(text)]
        for skip in (True, False):
            shown = SampleText(tokenizer, skip_special_tokens=skip, stop=("never seen",))
            pieces = [shown.push([i]) for i in ids]
            assert "".join(pieces) + shown.finish([], None) == tokenizer.decode(ids, skip_special_tokens=skip)
            assert not any("\ufffd" in piece for piece in pieces)


def test_only_what_may_begin_a_stop_string_waits(byte_level: Tokenizer) -> None:
    shown = SampleText(byte_level, stop=("low", "owed"))
    given = [shown.push([token]) for token in byte_level.encode("hello ok lo")]
    assert given == ["h", "e", "", "l", "", "lo ", "", "ok", " ", "", ""]
    assert shown.finish(byte_level.encode("w!")[:1], "low") == ""


def test_noise_of_byte_tokens_is_replaced_byte_by_byte_and_keeps_its_characters(byte_fallback: Tokenizer) -> None:
    def text(raw: bytes) -> str:
        decoder = IncrementalDecoder(byte_fallback)
        return "".join(decoder.push(3 + b) for b in raw) + decoder.finish()

    assert text("é🙂".encode()) == "é🙂"
    assert text(b"\xf0\x9f") == byte_fallback.decode([3 + 0xF0, 3 + 0x9F]) == "\ufffd\ufffd"
    assert text("é".encode() + b"\xff" + "é".encode()) == "é\ufffdé"
    assert text(b"\n\xe2\x82A") == "\n\ufffd\ufffdA"


def test_names_of_tokens(tokenizer: Tokenizer) -> None:
    names = TokenNames(tokenizer, as_ids=False)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert b"".join(names(i)[1] for i in ids).decode().strip() == text.strip()
    assert names(2) == ("</s>", b"</s>") and names(10**6) == ("", b"")
    assert TokenNames(None, as_ids=True)(7) == ("token_id:7", b"token_id:7")


def sample(**more: Any) -> dict[str, Any]:
    """A finished sample as a ticket hands it out."""
    columns = {"token_ids": pack_array("<i4", [5, 6]), "logprobs": pack_array("<f4", [-0.5, -math.inf])}
    ends = {"finish_reason": "length", "stop_reason": None, "abort_reason": None, "weight_versions": [], "seed": 1, "cached_tokens": 0}
    return {"index": 0, **columns, **ends, **more}


def test_a_sample_that_failed_fails_the_call() -> None:
    request = parse_completion({"prompt": [1], "logprobs": 0, "detokenize": False, "stream": True})

    def reply() -> Reply:
        return Reply(request, [Prompt((1,), None, 0)], {"id": "x", "model": "m"}, None, (2,))

    whole = reply().whole([(0, sample())])["choices"][0]
    assert whole["logprobs"]["token_logprobs"] == [-0.5, None] and whole["logprobs"]["top_logprobs"] == [{"token_id:5": -0.5}, None]
    failed = sample(finish_reason="error", error="NaN in the logits")
    for ask in (lambda: reply().whole([(0, failed)]), lambda: list(reply().chunks(0, failed))):
        with pytest.raises(RollsyncError, match="NaN in the logits") as error:
            ask()
        assert error_body(error.value)["error"]["type"] == "server_error"


def test_what_openai_clients_repeat_by_themselves() -> None:
    for error, again in ((Overloaded, True), (RollsyncError, False), (DuplicateRequest, False)):
        assert (retry_headers(error.status) == {}) == again
