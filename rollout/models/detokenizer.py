"""Text from a stream of token ids: whole characters only, constant work per token, and stop strings. Torch-free."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import BadRequest

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_MAX_PENDING = 8
"""tokens held back for an unfinished character; UTF-8 needs 4 at most"""


class IncrementalDecoder:
    """Turns ids into text as they come. All texts of `push` and `finish` together are `tokenizer.decode` of all ids.

    Byte-level vocabularies decode byte by byte, and so do the byte tokens of those that fall back to bytes. Other tokens decode in the
    context of the one before, twice, and the difference is what they add.

    One exception: `tokenizer.decode` shows no character of a run of byte tokens that is not valid as a whole. Here its valid
    characters show, since they were given out before the rest was known.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace") if tokenizer.is_byte_level else None
        self._byte_tokens = {} if tokenizer.is_byte_level else tokenizer.byte_tokens
        self._run = b""
        """bytes of an unfinished character, from byte tokens"""
        self._settled: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that became complete with this token; empty while a character is unfinished."""
        if self._skip and token_id in self._tokenizer.special_ids:
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        if token_id in self._byte_tokens:
            return self._push_byte(token_id)
        if not self._tokenizer.knows(token_id):
            return ""
        broken, self._run = "�" * len(self._run), b""
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith("�") and len(self._pending) < _MAX_PENDING and not self._byte_tokens:
            return ""
        self._settled, self._pending = self._pending, []
        return broken + text

    def finish(self) -> str:
        """What is left at the end: an unfinished character, as U+FFFD."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        text = self._new_text() if self._pending else "�" * len(self._run)
        self._settled, self._pending, self._run = self._pending or self._settled, [], b""
        return text

    def _push_byte(self, token_id: int) -> str:
        """What a byte completes: characters, or U+FFFD for each byte before it that turns out to be part of none."""
        is_first, self._settled = not self._settled, [token_id]
        self._run += bytes([self._byte_tokens[token_id]])
        text = ""
        while self._run:
            try:
                text, self._run = text + self._run.decode(), b""
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                text, self._run = text + "�", self._run[1:]
        return self._tokenizer.decode([token_id]) if is_first and text == " " else text

    def _new_text(self) -> str:
        """Text of the pending tokens in the context of those before (a first token may lose its leading space)."""
        before = self._tokenizer.decode(self._settled, skip_special_tokens=False)
        return self._tokenizer.decode(self._settled + self._pending, skip_special_tokens=False)[len(before) :]


def decode_all(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """What an `IncrementalDecoder` makes of all of `ids`, in one go where that is sure to be the same."""
    if tokenizer.is_byte_level:
        hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        return b"".join([tokenizer.token_bytes(i) for i in ids if i not in hidden]).decode(errors="replace")
    if tokenizer.joins_tokens:
        text = tokenizer.decode(ids, skip_special_tokens)
        if "�" not in text:  # every run of byte tokens was whole characters
            return text
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
    return "".join(map(decoder.push, ids)) + decoder.finish()


class StopStringMatcher:
    """Finds the first stop string in generated text, token by token.

    Only generated text is searched. A stop string may span tokens and end inside one. Special tokens count as text, so a
    stop string such as "<|im_end|>" works.

    Args:
        tokenizer: of the ids pushed.
        stop: stop strings, none empty.

    Raises:
        BadRequest: an empty stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        if not all(stop):
            raise BadRequest("stop strings must not be empty", field="stop")
        self._stop = stop
        self._keep = max((len(s) for s in stop), default=1) - 1
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
        self._tail = ""

    def push(self, token_id: int) -> str | None:
        """The stop string that this token completes: of several the one that ends first, then the longest."""
        new = self._decoder.push(token_id)
        if not new:
            return None
        known = len(self._tail)
        text = self._tail + new
        self._tail = text[len(text) - self._keep :] if self._keep < len(text) else text
        # One that ended before was told then, and let pass: only what ends within the new text counts.
        found = [(at + len(s), at, s) for s in self._stop if (at := text.find(s, max(0, known - len(s) + 1))) >= 0]
        return min(found)[2] if found else None


def end_at_stop(text: str, text_before: str, stop: str, *, include: bool) -> str:
    """`text` up to the stop string that its last token completed, which is the end of it (`include`) or left out.

    Args:
        text: of all tokens.
        text_before: of all but the last; an earlier occurrence, which min_tokens let pass, is not the end.
    """
    at = text.find(stop, max(0, len(text_before) - len(stop) + 1))
    if at < 0:  # bytes of an unfinished character may show as more characters than it is in the end
        at = text.rfind(stop)
    return text if at < 0 else text[: at + len(stop) if include else at]
