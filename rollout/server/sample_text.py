"""The text of one sample as its tokens come, for every route that shows text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..models.detokenizer import IncrementalDecoder, decode_all


class SampleText:
    """Text token by token: whole characters only, and nothing that may yet have to be taken back.

    What `push` and `finish` return adds up to the same text however the tokens were dealt out, so a stream and a whole reply agree.

    Args:
        tokenizer: of the ids pushed.
        skip_special_tokens: leave special tokens out. Stop strings see them nevertheless, as in the engine.
        spaces: put a space between a special token that is shown and what stands beside it. Stop strings do not see it.
        stop: stop strings.
        stop_ids: ids that end the sample and are themselves not shown.
        include_stop: end the text after the stop string or stop id, not before it.
        with_starts: keep `starts`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_special_tokens: bool = True,
        spaces: bool = False,
        stop: tuple[str, ...] = (),
        stop_ids: frozenset[int] = frozenset(),
        include_stop: bool = False,
        with_starts: bool = False,
    ) -> None:
        self._tokenizer, self._skip, self._spaces = tokenizer, skip_special_tokens, spaces
        self._shown = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._full = IncrementalDecoder(tokenizer, False) if stop and skip_special_tokens else None
        self._stop, self._include_stop = stop, include_stop
        self._stop_ids = frozenset() if include_stop else stop_ids
        self._at_once = not (stop or spaces or with_starts)
        """whether the text can be made in one go, if no token has come before"""
        self._held: list[tuple[str, str, str]] = []
        """text per token that is not given out: (as stop strings see it, a space before it, as shown)"""
        self._last_chars = 0
        """of the last token, as stop strings see it"""
        self._last_is_special: bool | None = None
        """what the text ends with"""
        self._stop_id: int | None = None
        """an id that ends the sample unless another follows"""
        self._length = 0
        self.starts: list[int] = []
        """per token, where its text begins, in characters; if asked for"""
        self._with_starts = with_starts
        self.text = ""
        """all that was given out"""
        self.error: str | None = None
        """why there is no more text"""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens settle. The last of them may be the sample's last."""
        self._at_once = False
        self._feed(ids)
        return self._release(self._num_safe())

    def finish(self, ids: Sequence[int], stop_reason: int | str | None) -> str:
        """The rest of the text, with the sample's last tokens."""
        if self._at_once:
            hides_last = ids and ids[-1] == stop_reason and stop_reason in self._stop_ids
            self.text = decode_all(self._tokenizer, ids[:-1] if hides_last else ids, self._skip)
            return self.text
        self._feed(ids)
        if isinstance(stop_reason, str):
            end = self._stop_end(stop_reason)
            if end >= 0:
                return self._release(end if self._include_stop else end - len(stop_reason))
        if self._stop_id is not None and stop_reason != self._stop_id:  # it was drawn, but is not what ended the sample
            self._push_one(self._stop_id)
        rest = self._shown.finish()
        self._held.append((rest, "", rest))
        return self._release(sum(len(full) for full, _, _ in self._held))

    def to_reply(self) -> dict[str, str]:
        """The sample's fields that this decides."""
        failed = {} if self.error is None else {"finish_reason": "error", "error": self.error}
        return {"text": self.text, **failed}

    def _feed(self, ids: Sequence[int]) -> None:
        for token in ids:
            if self._stop_id is not None:
                self._push_one(self._stop_id)
                self._stop_id = None
            if self._with_starts:
                self.starts.append(self._length)
            if token in self._stop_ids:
                self._stop_id = token
            else:
                self._push_one(token)

    def _push_one(self, token: int) -> None:
        shown = self._shown.push(token)
        full = shown if self._full is None else self._full.push(token)
        space = self._space(token) if self._spaces and shown else ""
        self._length += len(space) + len(shown)
        self._last_chars = len(full)
        if full or shown:
            self._held.append((full, space, shown))

    def _space(self, token: int) -> str:
        before, self._last_is_special = self._last_is_special, token in self._tokenizer.special_ids
        return " " if before is not None and (before or self._last_is_special) else ""

    def _stop_end(self, stop: str) -> int:
        """Where `stop` ends within the last token's part of the held text; -1 if it does not."""
        text = "".join(full for full, _, _ in self._held)
        at = text.find(stop, max(0, len(text) - self._last_chars - len(stop) + 1))
        return at + len(stop) if at >= 0 else -1

    def _num_safe(self) -> int:
        """How many characters of the held text will stay, whatever comes."""
        text = "".join(full for full, _, _ in self._held)
        safe = len(text)
        for stop in self._stop:
            end = self._stop_end(stop)  # min_tokens may let it pass
            begun = (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n]))
            safe = min(safe, len(text) - next(begun, 0), end - len(stop) if end >= 0 else safe)
        return safe

    def _release(self, num_chars: int) -> str:
        """Give out the first characters held. A token whose text differs from what stop strings see goes whole or not at all."""
        out: list[str] = []
        kept: list[tuple[str, str, str]] = []
        for full, space, shown in self._held:
            if len(full) <= num_chars and not kept:
                num_chars -= len(full)
                out += space, shown
            elif full == shown and num_chars and not kept:
                out += space, shown[:num_chars]
                kept.append((full[num_chars:], "", shown[num_chars:]))
                num_chars = 0
            else:
                kept.append((full, space, shown))
        self._held = kept
        given = "".join(out)
        self.text += given
        return given
