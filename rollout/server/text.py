"""Text on the front: the tokenizer, loaded once, off the event loop. No torch, no transformers."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from ..engine.config import EngineConfig
from ..errors import BadRequest, RollsyncError


class TokenizerLike(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...
    def apply_chat_template(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kw: Any) -> list[int]: ...


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
                except (RollsyncError, OSError, ValueError, ImportError) as error:
                    raise BadRequest(f"this model has no usable tokenizer, so send token_ids: {error}") from None
        return self._tokenizer

    async def encode(self, text: str) -> tuple[int, ...]:
        tokenizer = await self.tokenizer()
        return tuple(await asyncio.to_thread(tokenizer.encode, text))

    async def render(self, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """The ids of a chat. A template's error is the caller's to see."""
        tokenizer = await self.tokenizer()
        try:
            ids = await asyncio.to_thread(lambda: tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True, **kwargs}))
        except RollsyncError:
            raise
        except Exception as error:  # templates are foreign code and raise anything
            raise BadRequest(f"messages could not be rendered: {type(error).__name__}: {error}", field="messages") from None
        return tuple(ids)

    async def decode(self, ids: list[int]) -> str:
        tokenizer = await self.tokenizer()
        return await asyncio.to_thread(tokenizer.decode, ids)
