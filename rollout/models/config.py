"""What a decoder is, read from `config.json` or a GGUF header. Torch-free."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, UnsupportedModel
from .config_reader import ConfigReader, read_json
from .gemma_config import parse_gemma
from .hub import resolve_model_path
from .layer_windows import parse_windows
from .rope_config import RopeScaling, parse_rope
from .tokenizer_files import read_eos_token_ids, read_tokenizer_facts

__all__ = ["DecoderConfig", "RopeScaling", "load_decoder_config", "parse_hf_config", "resolve_model_path"]

log = logging.getLogger(__name__)

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}
_HEAD_DIM = {"qwen3": 128, "gemma2": 256, "gemma3": 256}
"""where the file gives none; in other families it is hidden_size / num_attention_heads"""
CHECKPOINT_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer: RMSNorm, rotary attention with grouped KV heads, gated MLP."""

    family: str
    """"llama", "qwen2", ...: how errors and tables call it; what is computed stands in the fields below"""
    vocab_size: int
    """rows of the embedding; may exceed the tokenizer's vocabulary"""
    num_token_ids: int = 0
    """ids the tokenizer knows (its largest + 1), at most vocab_size: the rows beyond are padding; 0: there is no tokenizer"""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = dataclasses.field(default_factory=RopeScaling)
    tie_word_embeddings: bool = False
    """the output head is the embedding matrix"""
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of every query and key head, before the rotation (Qwen3, Gemma 3)"""
    windows: tuple[int, ...] = ()
    """per layer, how many keys a token sees, itself included; 0 sees all; empty: all layers see all"""
    local_rope_theta: float = 0.0
    """rope theta, unscaled, of the layers with a window; 0: that of all layers (Gemma 3)"""
    attention_scale: float | None = None
    """factor on scores; None: head_dim ** -0.5"""
    attention_softcap: float = 0.0
    """scores become cap * tanh(score / cap); 0: they stay (Gemma 2)"""
    logits_softcap: float = 0.0
    """likewise (Gemma 2)"""
    activation: str = "silu"
    """of the MLP's gate: silu or gelu_tanh"""
    embed_scale: float = 1.0
    """factor on embeddings, itself rounded to the dtype (Gemma: hidden_size ** 0.5)"""
    norm_one_plus: bool = False
    """norms multiply by 1 + weight, in float32 before the one rounding (Gemma)"""
    post_norms: bool = False
    """what attention and MLP give goes through a norm of its own before it is added to the stream (Gemma)"""
    max_position_embeddings: int
    """context in tokens"""
    eos_token_ids: tuple[int, ...] = ()
    """ids that end a sample: those of config, generation_config and tokenizer together, ascending"""
    dtype: str = "bfloat16"
    """of the checkpoint, one of CHECKPOINT_DTYPES"""

    @property
    def q_rows(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.num_kv_heads * self.head_dim


def config_digest(config: DecoderConfig, vocab_limit: int) -> str:
    """Twelve hexadecimal digits that name a model by all but its weights and their dtype.

    Args:
        vocab_limit: ids below it may be drawn.
    """
    facts = dataclasses.asdict(config)
    for name in ("dtype", "num_token_ids"):
        del facts[name]
    return hashlib.blake2b(json.dumps([facts, vocab_limit], sort_keys=True).encode(), digest_size=6).hexdigest()


def computation(config: DecoderConfig) -> dict[str, Any]:
    """What a forward pass computes, whatever the weights and their dtype: plain values, equal for models that compute alike."""
    facts = dataclasses.asdict(config)
    for name in ("family", "dtype", "num_token_ids", "eos_token_ids", "max_position_embeddings"):
        del facts[name]
    found: dict[str, Any] = json.loads(json.dumps(facts))
    return found


def load_decoder_config(path: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None) -> DecoderConfig:
    """Read the configuration of a folder holding config.json, or of a .gguf file.

    Args:
        path: the folder or file.
        tokenizer: a folder or .gguf file whose tokenizer counts instead of the one in `path`; it must have one.

    Raises:
        ConfigError: there is no such folder, file or tokenizer, or one is damaged.
        UnsupportedModel: something in it is not computed here; the message names all of it, and what is.
    """
    path = Path(path)
    facts = read_tokenizer_facts(Path(tokenizer or path))
    if tokenizer is not None and facts is None:
        raise ConfigError(f"the tokenizer {tokenizer} holds no tokenizer.json")
    eos = facts.eos_token_ids if facts is not None else ()
    if path.suffix == ".gguf":
        from .gguf import GgufFile

        parsed, file = parse_hf_config(GgufFile(path).hf_config(), eos_token_ids=eos, where=str(path)), path
    else:
        file = path / "config.json"
        if not file.is_file():
            raise ConfigError(f"{path} holds no config.json: give a Hugging Face model folder or a .gguf file")
        parsed = parse_hf_config(read_json(file), eos_token_ids=(*eos, *read_eos_token_ids(path)), where=str(file))
    if facts is None:
        return parsed
    if facts.num_ids > parsed.vocab_size:
        log.warning("%s: %d rows, but the tokenizer knows %d ids: those beyond are refused", file, parsed.vocab_size, facts.num_ids)
    return dataclasses.replace(parsed, num_token_ids=min(facts.num_ids, parsed.vocab_size))


def parse_hf_config(raw: dict[str, Any], *, eos_token_ids: tuple[int, ...] = (), where: str = "config.json") -> DecoderConfig:
    """Turn a config.json dict, in the layout of transformers 4 or 5, into a DecoderConfig.

    A missing dtype means float32, as in transformers. EOS ids beyond the embedding's rows can never be sampled: they are left out
    with a warning.

    Args:
        raw: the parsed file.
        eos_token_ids: ids to add to the file's own.
        where: named in errors.

    Raises:
        ConfigError: values that no model can have; the message names the file, each key, what came and what is allowed.
        UnsupportedModel: what is well-formed but not computed here; names all of it and what is.
    """
    config = ConfigReader(raw, where)
    names = config.texts("architectures")
    config.check()
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        named = ", ".join(names) or "none"
        raise UnsupportedModel(f"{where}: architecture {named} is not supported (supported: {', '.join(ARCHITECTURES)})")
    architecture = names[0]
    family = ARCHITECTURES[architecture]
    dtype = (config.text("dtype") or config.text("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in CHECKPOINT_DTYPES:
        config.unsupported.append(f"dtype {dtype} (supported: {', '.join(CHECKPOINT_DTYPES)})")
    shape = _parse_shape(config, family)
    own: dict[str, Any] = {"windows": parse_windows(config, architecture, shape["num_layers"], shape["max_position_embeddings"])}
    if family in ("gemma2", "gemma3"):
        own |= parse_gemma(config, family, shape["hidden_size"])
    else:
        own["rope_scaling"], own["rope_theta"] = parse_rope(config)
        own |= {"qkv_bias": family == "qwen2", "qk_norm": family == "qwen3", "tie_word_embeddings": config.flag("tie_word_embeddings")}
        if (act := config.text("hidden_act", "silu")) not in ("silu", "swish"):
            config.unsupported.append(f"hidden_act {act!r} (supported: silu)")
    if own["rope_scaling"].kind == "dynamic" and shape["head_dim"] == 2:
        config.bad("head_dim", 2, "at least 4 for rope type 'dynamic'")
    _refuse(config, architecture)
    eos = {*config.token_ids("eos_token_id"), *eos_token_ids}
    parsed = DecoderConfig(
        family=family,
        **shape,
        **own,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        eos_token_ids=tuple(sorted(i for i in eos if 0 <= i < shape["vocab_size"])),
        dtype=dtype,
    )
    config.check()
    if len(parsed.eos_token_ids) < len(eos):
        beyond = ", ".join(str(i) for i in sorted(eos - set(parsed.eos_token_ids)))
        log.warning("%s: EOS ids beyond the model's %d embedding rows are ignored: %s", where, parsed.vocab_size, beyond)
    return parsed


def _parse_shape(config: ConfigReader, family: str) -> dict[str, Any]:
    """Sizes, by their names in DecoderConfig."""
    hidden, heads = config.size("hidden_size", most=1 << 20), config.size("num_attention_heads", most=1 << 12)
    # Where the file says nothing, Llama has as many KV heads as heads; the other families' classes have numbers of their own.
    default = heads if config.raw.get("architectures") == ["LlamaForCausalLM"] or "num_key_value_heads" in config.raw else None
    kv_heads = config.size("num_key_value_heads", default, most=1 << 12)
    head_dim = config.size("head_dim", _HEAD_DIM.get(family, max(hidden // heads, 1)), most=1 << 12)
    sizes = {
        "vocab_size": config.size("vocab_size", most=1 << 24),
        "hidden_size": hidden,
        "num_layers": config.size("num_hidden_layers", most=1 << 12),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": config.size("intermediate_size", most=1 << 24),
        "max_position_embeddings": config.size("max_position_embeddings"),
    }
    if config.malformed:  # then some of these are not the file's
        return sizes
    if heads % kv_heads:
        config.bad("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
    if not config.has("head_dim") and family not in _HEAD_DIM and hidden % heads:
        config.bad("hidden_size", hidden, f"a multiple of num_attention_heads {heads} where there is no head_dim")
    elif head_dim % 2:
        config.bad("head_dim", head_dim, "even: rotary embedding takes it in halves")
    return sizes


def _refuse(config: ConfigReader, architecture: str) -> None:
    """Note what this config asks for that is not computed here."""
    unsupported = config.unsupported
    if architecture != "Qwen2ForCausalLM" and config.flag("attention_bias"):
        unsupported.append("attention_bias (supported: no bias, or Qwen2's on q, k and v)")
    if config.flag("mlp_bias"):
        unsupported.append("mlp_bias (supported: no bias)")
    if config.raw.get("quantization_config"):
        unsupported.append("quantization_config (supported: unquantised safetensors, or GGUF)")
