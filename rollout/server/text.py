"""Text on the front: the tokenizer, loaded once, off the event loop. No torch, no transformers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from ..engine.config import EngineConfig
from ..engine.types import SamplingParams
from ..errors import BadRequest, RollsyncError
from ..models.detokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from .protocol import RolloutCall

INLINE_TOKENS = 64
"""more than this many tokens are decoded in a worker thread"""


class TokenizerLike(Protocol):
    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...
    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str: ...


def load_tokenizer(config: EngineConfig) -> TokenizerLike:
    """The model's tokenizer, or the one `config.tokenizer` names."""
    from ..models.config import resolve_model_path
    from ..models.tokenizer import Tokenizer

    tokenizer: TokenizerLike = Tokenizer.from_model(resolve_model_path(config.tokenizer or config.model))
    return tokenizer


class TextService:
    """Encodes and decodes in a worker thread. A model without a tokenizer still serves ids."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._tokenizer: TokenizerLike | None = None
        self._lock = asyncio.Lock()

    async def tokenizer(self) -> TokenizerLike:
        """Raises BadRequest if there is none."""
        async with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = await asyncio.to_thread(load_tokenizer, self._config)
                except Exception as error:  # the tokenizers library raises bare exceptions
                    raise BadRequest(f"this model has no usable tokenizer, so send token_ids: {error}") from None
        return self._tokenizer

    async def encode(self, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        tokenizer = await self.tokenizer()
        return tuple(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens))

    async def rendered(self, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> str:
        """The text of a chat. A template's error is the caller's to see."""
        tokenizer = await self.tokenizer()
        try:
            return await asyncio.to_thread(lambda: tokenizer.render_chat(messages, **{"add_generation_prompt": True, **kwargs}))
        except RollsyncError:
            raise
        except Exception as error:  # templates are foreign code and raise anything
            raise BadRequest(f"messages could not be rendered: {type(error).__name__}: {error}", field="messages") from None

    async def render(self, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """The ids of a chat."""
        return await self.encode(await self.rendered(messages, kwargs))

    async def sample_text(self, call: RolloutCall, params: SamplingParams) -> SampleText:
        """For one sample of `call`."""
        return SampleText(
            await self.tokenizer(),
            call.skip_special_tokens,
            hidden_stops=params.stop,
            include_stop=params.include_stop_str_in_output,
            spaces=call.spaces_between_special_tokens,
        )

    async def decode(self, ids: tuple[int, ...], skip_special_tokens: bool, spaces: bool) -> str:
        tokenizer = await self.tokenizer()
        return await asyncio.to_thread(lambda: SampleText(tokenizer, skip_special_tokens, spaces=spaces).finish(list(ids), None))

    async def extend(self, text: SampleText, ids: list[int], final: dict[str, Any] | None) -> str:
        """What `ids` add to a sample's text; `final` is the sample's final output if these are its last. Never raises."""

        def work() -> str:
            return text.push(ids) if final is None else text.finish(ids, final.get("stop_reason"))

        try:
            if text.error is None:
                return work() if len(ids) <= INLINE_TOKENS else await asyncio.to_thread(work)
        except Exception as error:  # a sample's text must not take its call along
            text.error = f"the text could not be made: {type(error).__name__}: {error}"
        return ""


class SampleText:
    """The text of one sample as its tokens come: whole characters only, and never the start of what `hidden_stops` will cut off.

    Args:
        tokenizer: of the ids pushed.
        skip_special_tokens: leave special tokens out of the text. They still count where stop strings are looked for.
        hidden_stops: stop strings that the text must not end with.
        spaces: put a space between a special token that is shown and what stands beside it.
        include_stop: end the text with the stop string instead, and hide only what its last token holds behind it.
    """

    def __init__(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = True,
        hidden_stops: tuple[str, ...] = (),
        include_stop: bool = False,
        spaces: bool = False,
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._shown = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._full = IncrementalDecoder(tokenizer, False) if hidden_stops else None
        self._keep = max((len(s) for s in hidden_stops), default=1) - 1
        self._include_stop = include_stop
        self._held: list[tuple[str, str]] = []
        """text per token that may yet be cut: (with special tokens, as shown)"""
        self._spaces = spaces
        self._last = ""
        """"special" or "plain": what the text ends with"""
        self._untouched = True
        self.text = ""
        """all that was given out"""
        self.error: str | None = None
        """why there is no more text"""

    def push(self, ids: list[int]) -> str:
        """The text that is settled with these tokens, which do not end the sample."""
        self._untouched = False
        if self._full is None:
            return self._out("".join([self._push(i) for i in ids]))
        self._held += [(self._full.push(i), self._push(i)) for i in ids]
        settled, behind = len(self._held), 0
        while settled and behind < self._keep:
            settled -= 1
            behind += len(self._held[settled][0])
        return self._release(settled)

    def finish(self, ids: list[int], stop_reason: int | str | None) -> str:
        """The text of the last tokens, without the stop string that ended the sample and what its last token holds behind it."""
        if self._full is None:
            if self._untouched and not self._spaces:
                return self._out(self._tokenizer.decode(ids, skip_special_tokens=self._skip))
            return self._out("".join([self._push(i) for i in ids]) + self._shown.finish())
        self._held += [(self._full.push(i), self._push(i)) for i in ids]
        rest = (self._full.finish(), self._shown.finish())
        if ids and isinstance(stop_reason, str):
            return self._cut(stop_reason)
        self._held.append(rest)
        return self._release(len(self._held))

    def _push(self, token: int) -> str:
        shown = self._shown.push(token)
        if not self._spaces or not shown:
            return shown
        before, self._last = self._last, "special" if token in self._tokenizer.special_ids else "plain"
        return f" {shown}" if before and "special" in (before, self._last) else shown

    def _release(self, count: int) -> str:
        ready, self._held = self._held[:count], self._held[count:]
        return self._out("".join(shown for _, shown in ready))

    def _cut(self, stop: str) -> str:
        """What is held up to `stop` (or its end, if it is included), which ends in the last token."""
        full = "".join(text for text, _ in self._held)
        at = full.find(stop, max(0, len(full) - len(self._held[-1][0]) - len(stop) + 1))
        if self._include_stop and at >= 0:
            at += len(stop)
        kept, end = [], 0
        for text, shown in self._held:
            start, end = end, end + len(text)
            if at < 0 or end <= at:
                kept.append(shown)
            elif shown == text:
                kept.append(shown[: max(0, at - start)])
        self._held = []
        return self._out("".join(kept))

    def to_reply(self) -> dict[str, str]:
        """The sample's fields that this decides."""
        failed = {} if self.error is None else {"finish_reason": "error", "error": self.error}
        return {"text": self.text, **failed}

    def _out(self, text: str) -> str:
        self.text += text
        return text
