"""Text to ids and back, and chat templates, over the `tokenizers` library. Imports neither torch nor transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadRequest, ConfigError
from .chat_template import compile_template, render
from .detokenizer import IncrementalDecoder, StopStringMatcher
from .hub import resolve_model_path
from .tokenizer_files import read_eos_token_ids, read_tokenizer_facts, read_tokenizer_settings, special_token

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer as Backend

__all__ = ["IncrementalDecoder", "StopStringMatcher", "Tokenizer"]

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer with its chat template.

    Args:
        backend: a `tokenizers.Tokenizer`; its truncation and padding are switched off.
        special_tokens: texts by name ("bos_token", …), which chat templates read.
        chat_templates: Jinja sources by name; "default" is the usual one, "tool_use" serves requests with tools.
        eos_token_ids: ids that end a sample.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = eos_token_ids
        self._templates = dict(chat_templates or {})
        self._compiled: dict[str, jinja2.Template] = {}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_model(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Load from a folder with tokenizer.json, a .gguf file, or a hub id in the local cache.

        Raises:
            ConfigError: there is no tokenizer there.
            UnsupportedModel: a GGUF tokenizer that cannot be rebuilt.
        """
        folder = resolve_model_path(os.fspath(path))
        if folder.suffix == ".gguf":
            return cls._from_gguf(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{folder} holds no tokenizer.json: name another folder, .gguf file or hub id as the tokenizer")
        from tokenizers import Tokenizer as Backend

        settings, facts = read_tokenizer_settings(folder), read_tokenizer_facts(folder)
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # tokenizers has no exception of its own to name
            raise ConfigError(f"{file} is not a tokenizer that can be loaded: {error}") from error
        return cls(
            backend,
            special_tokens=_special_tokens(settings, folder),
            chat_templates=_chat_templates(folder, settings),
            eos_token_ids=tuple(sorted({*read_eos_token_ids(folder), *(facts.eos_token_ids if facts is not None else ())})),
        )

    @classmethod
    def _from_gguf(cls, path: Path) -> Tokenizer:
        from .gguf import GgufFile
        from .gguf_tokenizer import build_tokenizer, tokenizer_config

        gguf = GgufFile(path)
        backend = build_tokenizer(gguf)
        config = tokenizer_config(gguf)
        return cls(
            backend,
            special_tokens=_special_tokens(config, path),
            chat_templates=_chat_templates(path, config),
            eos_token_ids=gguf.eos_token_ids(),
        )

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included; the model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def num_ids(self) -> int:
        """One more than the largest id; ids below it may be missing."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that decode to nothing under `skip_special_tokens`."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens spell bytes (GPT-2's alphabet), so that text is the concatenation of `token_bytes`."""
        return type(self.backend.decoder).__name__ == "ByteLevel"

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """The byte that each of the tokens <0x00> to <0xFF> stands for, where the vocabulary falls back to bytes."""
        if self.is_byte_level or "ByteFallback" not in repr(self.backend.decoder):
            return {}
        ids = {self.backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        return {token: byte for token, byte in ids.items() if token is not None}

    @cached_property
    def joins_tokens(self) -> bool:
        """Whether text is that of its tokens and of its runs of byte tokens, one after the other, less a space at its beginning."""
        if self.backend.decoder is None:
            return False
        steps = json.loads(self.backend.decoder.__getstate__()).get("decoders", [])
        while steps and steps[0]["type"] == "Replace":
            steps.pop(0)
        strips = all(step["start"] <= 1 and step["stop"] == 0 for step in steps if step["type"] == "Strip")
        return strips and [step["type"] for step in steps] in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"])

    def knows(self, token_id: int) -> bool:
        """Whether there is a token of this id; another adds nothing to a text."""
        return self.backend.id_to_token(token_id) is not None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`; special tokens written out in it are recognised. `add_special_tokens` adds BOS where the model has one."""
        # a batch of one: unlike `encode`, it lets other threads run meanwhile
        ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD, ids beyond the vocabulary nothing."""
        return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to the text of a byte-level vocabulary; empty for an id beyond it."""
        cached = self._bytes.get(token_id)
        if cached is None:
            cached = self._bytes[token_id] = _spelled_bytes(self.backend.id_to_token(token_id) or "")
        return cached

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text the chat template makes of `messages`.

        Args:
            messages: {"role", "content", …}.
            add_generation_prompt: end with the header of an assistant turn.
            continue_final_message: end inside the last message instead.
            chat_template: Jinja source to use instead of the model's.
            variables: more for the template, such as `tools`, `documents`, `enable_thinking`.

        Raises:
            BadRequest: no chat template, or it refuses the messages.
        """
        template = self._template(chat_template, bool(variables.get("tools")))
        return render(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={"tools": None, "documents": None, **self.special_tokens, **variables},
        )

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> list[int]:
        """Ids of `render_chat`'s text, without added BOS (templates write it themselves)."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **kwargs))

    def _template(self, source: str | None, with_tools: bool) -> jinja2.Template:
        if source is not None:
            return compile_template(source)
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            words = "this model has no chat template: send text or token ids instead of messages, or serve it with a tokenizer that has one"
            raise BadRequest(words, field="messages")
        if name not in self._compiled:
            self._compiled[name] = compile_template(self._templates[name])
        return self._compiled[name]


def _special_tokens(settings: dict[str, Any], folder: Path) -> dict[str, str]:
    found = {name: special_token(settings, name, folder) for name in _SPECIAL_NAMES}
    return {name: text for name, text in found.items() if text is not None}


def _chat_templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """chat_template.jinja wins over tokenizer_config.json, whose value is one source or a list of named ones."""
    value = settings.get("chat_template")
    try:
        templates = {"default": value} if isinstance(value, str) else {t["name"]: t["template"] for t in value or ()}
    except (TypeError, KeyError):
        templates = {"default": None}
    if not all(isinstance(template, str) for template in templates.values()):
        raise ConfigError(f"{path}: chat_template must be a string or a list of objects with name and template, got {value!r:.80}")
    if (path / "chat_template.jinja").is_file():
        templates["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    return templates


def _alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the others for 256, 257, … in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def _spelled_bytes(token: str) -> bytes:
    """A token with a character outside the alphabet (an added token) stands for its own text, as in the ByteLevel decoder."""
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode("utf-8")
