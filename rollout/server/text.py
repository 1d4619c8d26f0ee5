"""Text on the front: the tokenizer, loaded once, off the event loop. No torch, no transformers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from ..engine.config import EngineConfig
from ..engine.params import SamplingParams
from ..errors import BadRequest, RollsyncError
from .sample_text import SampleText

if TYPE_CHECKING:
    from .protocol import RolloutCall

INLINE_TOKENS = 64
"""more than this many tokens are decoded in a worker thread"""


class TokenizerLike(Protocol):
    @property
    def num_ids(self) -> int: ...
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
            skip_special_tokens=call.skip_special_tokens,
            spaces=call.spaces_between_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
        )

    async def num_ids(self) -> int:
        """Ids are below it."""
        tokenizer = await self.tokenizer()
        return await asyncio.to_thread(lambda: tokenizer.num_ids)

    async def decode(self, ids: tuple[int, ...], skip_special_tokens: bool, spaces: bool) -> str:
        tokenizer = await self.tokenizer()
        text = SampleText(tokenizer, skip_special_tokens=skip_special_tokens, spaces=spaces)
        return await asyncio.to_thread(text.finish, ids, None)

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
