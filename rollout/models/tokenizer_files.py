"""What an engine must know of a tokenizer, read from its files without loading it: which ids it knows, which of them end a sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .config_reader import ConfigReader, read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFacts:
    """Of one tokenizer."""

    num_ids: int
    """largest id + 1, added tokens included"""
    eos_token_ids: tuple[int, ...]
    """id of its end-of-sequence token, if it names one (GGUF: also of its end-of-turn token)"""


def read_tokenizer_facts(path: Path) -> TokenizerFacts | None:
    """Facts of the tokenizer in a model folder or .gguf file; None if there is no tokenizer that is read here.

    Raises:
        ConfigError: a file of it is damaged; names the file and the place.
    """
    if path.suffix == ".gguf":
        from .gguf import GgufFile

        gguf = GgufFile(path)
        num_ids = gguf.num_token_ids()
        return TokenizerFacts(num_ids=num_ids, eos_token_ids=gguf.eos_token_ids()) if num_ids else None
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    settings = read_tokenizer_settings(path)
    ids = _ids(read_json(file), file) | _added_ids(settings, path / "tokenizer_config.json")
    eos = special_token(settings, "eos_token", path)
    return TokenizerFacts(num_ids=max(ids.values()) + 1, eos_token_ids=(ids[eos],) if eos in ids else ())


def read_tokenizer_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, and of special_tokens_map.json what the former does not have."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings |= {key: value for key, value in read_json(folder / name).items() if value is not None}
    return settings


def special_token(settings: dict[str, Any], name: str, folder: Path) -> str | None:
    """The text of a special token such as "eos_token", which files give as a string or as an object with its content."""
    token = settings.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{folder / 'tokenizer_config.json'}: {name} must be a string, an object with content or null, got {token!r:.80}")
    return text


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """EOS ids that config.json and generation_config.json of a folder name, ascending."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            reader = ConfigReader(read_json(folder / name), str(folder / name))
            ids.update(reader.token_ids("eos_token_id"))
            reader.check()
    return tuple(sorted(ids))


def _ids(data: dict[str, Any], file: Path) -> dict[str, int]:
    """Id by token of a tokenizer.json: the model's vocabulary (by token, or a list of (token, score)) and the added tokens."""
    model = data.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    try:
        if isinstance(vocab, list):
            vocab = {token: i for i, (token, _) in enumerate(vocab)}
        ids = {**(vocab or {}), **{token["content"]: token["id"] for token in data.get("added_tokens") or ()}}
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"{file}: model.vocab and added_tokens are not those of a tokenizer ({error!r})") from error
    if not ids or not all(isinstance(i, int) and i >= 0 for i in ids.values()):
        raise ConfigError(f"{file}: model.vocab and added_tokens must give each token an id of 0 or more, and hold one at least")
    return ids


def _added_ids(settings: dict[str, Any], file: Path) -> dict[str, int]:
    """Id by token of `added_tokens_decoder`, which transformers adds to what tokenizer.json holds."""
    try:
        return {token["content"]: int(key) for key, token in (settings.get("added_tokens_decoder") or {}).items()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: added_tokens_decoder must hold objects with content by id ({error!r})") from error
