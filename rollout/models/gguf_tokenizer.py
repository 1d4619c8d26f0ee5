"""The tokenizer a GGUF file's metadata describes, as a `tokenizers.Tokenizer`. Torch-free; `tokenizers` is imported when used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, UnsupportedModel
from .gguf import CONTROL_TOKEN, NORMAL_TOKEN, UNUSED_TOKEN, USER_DEFINED_TOKEN, GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
PRE_TOKENIZERS = ("smollm", "llama-bpe", "qwen2")
"""values of `tokenizer.ggml.pre` that can be rebuilt"""

_SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(gguf: GgufFile) -> Backend:
    """Byte-level BPE with the file's vocabulary, merges and special tokens.

    Raises:
        UnsupportedModel: another tokenizer model or pre-tokenizer; names it and what is supported.
        ConfigError: the vocabulary or the merges are missing or damaged.
    """
    meta = gguf.metadata
    kind, pre = meta.get("tokenizer.ggml.model", "none"), meta.get("tokenizer.ggml.pre", "none")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        supported = f"gpt2 with {', '.join(PRE_TOKENIZERS)}"
        raise UnsupportedModel(f"{gguf.path}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported (supported: {supported})")
    if missing := [key for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges") if key not in meta]:
        raise ConfigError(f"{gguf.path} has no metadata {' and '.join(missing)}: name a folder with tokenizer.json as the tokenizer")
    try:
        return _build(gguf, meta["tokenizer.ggml.tokens"], pre)
    except Exception as error:  # tokenizers has no exception of its own to name
        raise ConfigError(f"{gguf.path}: the tokenizer in its metadata is damaged: {error!r}") from error


def _build(gguf: GgufFile, tokens: list[str], pre: str) -> Backend:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    meta = gguf.metadata
    types: list[int] = meta.get("tokenizer.ggml.token_type") or [NORMAL_TOKEN] * len(tokens)
    vocab = {token: i for i, (token, t) in enumerate(zip(tokens, types, strict=True)) if t != UNUSED_TOKEN}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in meta["tokenizer.ggml.merges"])]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    marked = [(token, t == CONTROL_TOKEN) for token, t in zip(tokens, types, strict=True) if t in (CONTROL_TOKEN, USER_DEFINED_TOKEN)]
    backend.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in marked])
    bos = gguf.token_id("bos")
    if bos is not None and meta.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        token = tokens[bos]
        backend.post_processor = processors.TemplateProcessing(
            single=[token, "$A"], pair=[token, "$A", f"{token}:1", "$B:1"], special_tokens=[(token, bos)]
        )
    return backend


def _pre_tokenizer(pre: str) -> Any:
    """How text is cut before merging, as in the models' own tokenizer.json."""
    from tokenizers import Regex, pre_tokenizers

    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    split = _QWEN2_SPLIT if pre == "qwen2" else _LLAMA3_SPLIT
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    """The tokenizer_config.json that belongs to `build_tokenizer`'s result.

    `PreTrainedTokenizerFast` makes transformers use tokenizer.json as it is, instead of a model class's own pre-tokenizer.
    """
    tokens: list[str] = gguf.metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.count("context_length"),
    }
    for name, key in _SPECIAL_KEYS.items():
        if (token_id := gguf.token_id(key)) is not None and 0 <= token_id < len(tokens):
            config[name] = tokens[token_id]
    if (template := gguf.metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config
