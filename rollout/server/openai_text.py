"""Text for OpenAI's replies: of a choice as its tokens come, and of single tokens."""

from __future__ import annotations

import re
from typing import Any

from ..models.detokenizer import IncrementalDecoder


class ShownText:
    """The text of one choice, token by token: whole characters only, and nothing that may yet have to be taken back.

    What `push` and `finish` return adds up to the same text however the tokens were dealt out, so a stream and a whole reply agree.

    Args:
        tokenizer: of the ids pushed.
        skip_special_tokens: leave special tokens out. Stop strings see them nevertheless, as in the engine.
        stop: stop strings.
        stop_ids: ids that end the choice.
        include_stop: end the text after the stop string or stop id, not before it.
    """

    def __init__(
        self, tokenizer: Any, *, skip_special_tokens: bool, stop: tuple[str, ...], stop_ids: frozenset[int], include_stop: bool
    ) -> None:
        self._shown = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._full = IncrementalDecoder(tokenizer, False) if stop and skip_special_tokens else None
        self._stop, self._stop_ids, self._include_stop = stop, stop_ids, include_stop
        self._held: list[tuple[str, str]] = []
        """text per token that is not given out: (as stop strings see it, as shown)"""
        self._last_chars = 0
        """of the last token, as stop strings see it"""
        self._stop_id: int | None = None
        """an id that ends the choice unless another follows"""
        self._length = 0
        self.starts: list[int] = []
        """per token, where its text begins, in characters"""

    def push(self, ids: list[int]) -> str:
        """The text that these tokens settle. The last of them may be the choice's last."""
        self._feed(ids)
        return self._release(self._num_safe())

    def finish(self, ids: list[int], stop_reason: int | str | None) -> str:
        """The rest of the text, with the choice's last tokens."""
        self._feed(ids)
        if isinstance(stop_reason, str):
            end = self._stop_end(stop_reason)
            if end >= 0:
                return self._release(end if self._include_stop else end - len(stop_reason))
        if self._stop_id is not None and stop_reason != self._stop_id:  # it was drawn, but is not what ended the choice
            self._push_one(self._stop_id)
        rest = self._shown.finish()
        self._held.append((rest, rest))
        return self._release(sum(len(full) for full, _ in self._held))

    def _feed(self, ids: list[int]) -> None:
        for token in ids:
            if self._stop_id is not None:
                self._push_one(self._stop_id)
                self._stop_id = None
            self.starts.append(self._length)
            if token in self._stop_ids and not self._include_stop:
                self._stop_id = token
            else:
                self._push_one(token)

    def _push_one(self, token: int) -> None:
        shown = self._shown.push(token)
        full = shown if self._full is None else self._full.push(token)
        self._length += len(shown)
        self._last_chars = len(full)
        if full or shown:
            self._held.append((full, shown))

    def _stop_end(self, stop: str) -> int:
        """Where `stop` ends within the last token's part of the held text; -1 if it does not."""
        text = "".join(full for full, _ in self._held)
        at = text.find(stop, max(0, len(text) - self._last_chars - len(stop) + 1))
        return at + len(stop) if at >= 0 else -1

    def _num_safe(self) -> int:
        """How many characters of the held text will stay, whatever comes."""
        text = "".join(full for full, _ in self._held)
        safe = len(text)
        for stop in self._stop:
            end = self._stop_end(stop)  # min_tokens may let it pass
            begun = (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n]))
            safe = min(safe, len(text) - next(begun, 0), end - len(stop) if end >= 0 else safe)
        return safe

    def _release(self, num_chars: int) -> str:
        """Give out the first characters held. A token whose text differs from what stop strings see goes whole or not at all."""
        out: list[str] = []
        kept: list[tuple[str, str]] = []
        for full, shown in self._held:
            if len(full) <= num_chars and not kept:
                num_chars -= len(full)
                out.append(shown)
            elif full == shown and num_chars and not kept:
                out.append(shown[:num_chars])
                kept.append((full[num_chars:], shown[num_chars:]))
                num_chars = 0
            else:
                kept.append((full, shown))
        self._held = kept
        return "".join(out)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenNames:
    """The text and the bytes of single tokens, as logprobs show them. Remembers what it was asked for."""

    def __init__(self, tokenizer: Any, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._cache: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """(text, bytes). The text of part of a character is U+FFFD; its bytes are exact. With ids as names, bytes are the name's."""
        found = self._cache.get(token)
        if found is None:
            found = self._cache[token] = self._find(token)
        return found

    def _find(self, token: int) -> tuple[str, bytes]:
        if self._as_ids:
            name = f"token_id:{token}"
            return name, name.encode()
        if self._tokenizer.is_byte_level:
            raw = self._tokenizer.token_bytes(token)
            return raw.decode(errors="replace"), raw
        spelled = _BYTE_TOKEN.fullmatch(self._tokenizer.backend.id_to_token(token) or "")
        if spelled:
            raw = bytes([int(spelled[1], 16)])
            return raw.decode(errors="replace"), raw
        # Behind itself, so that a decoder which strips a text's first space does not strip the token's.
        once = self._tokenizer.decode([token], skip_special_tokens=False)
        name = self._tokenizer.decode([token, token], skip_special_tokens=False)[len(once) :]
        return name, name.encode()
