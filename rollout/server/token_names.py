"""What single tokens are called where logprobs show them."""

from __future__ import annotations

import re
from typing import Any

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
