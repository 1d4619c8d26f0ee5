"""What Gemma 2 and 3 (text) have of their own in config.json."""

from __future__ import annotations

from typing import Any

from .config_reader import ConfigReader
from .rope_config import RopeScaling, parse_rope, parse_rope_part

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
"""of Gemma 3, where the file says nothing"""


def parse_gemma(config: ConfigReader, family: str, hidden_size: int) -> dict[str, Any]:
    """Fields of DecoderConfig that other families leave at their defaults. Problems are noted in `config`."""
    if (act := config.text("hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        config.unsupported.append(f"hidden_activation {act!r} (supported: gelu_pytorch_tanh)")
    if config.flag("use_bidirectional_attention"):
        config.unsupported.append("use_bidirectional_attention (supported: causal attention)")
    if family == "gemma3":
        scaling, theta, local_theta = _parse_two_ropes(config)
    else:
        (scaling, theta), local_theta = parse_rope(config), 0.0
    attention_cap = _cap(config, "attn_logit_softcapping", 50.0) if family == "gemma2" else 0.0  # Gemma3Attention never reads it
    return {
        "rope_scaling": scaling,
        "rope_theta": theta,
        "local_rope_theta": local_theta,
        "attention_scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_softcap": attention_cap,
        "logits_softcap": _cap(config, "final_logit_softcapping", 30.0 if family == "gemma2" else 0.0),
        "activation": "gelu_tanh",
        "embed_scale": hidden_size**0.5,
        "norm_one_plus": True,
        "post_norms": True,
        "qk_norm": family == "gemma3",
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
    }


def _cap(config: ConfigReader, key: str, default: float) -> float:
    """0 where the file says null."""
    return config.number(key, default if key not in config.raw else 0.0)


def _parse_two_ropes(config: ConfigReader) -> tuple[RopeScaling, float, float]:
    """(scaling, theta) of the layers that see all, and the theta of those that slide, which are never stretched.

    Old layout: rope_theta and rope_scaling are of the former, rope_local_base_freq is of the latter. New: one object for each in
    rope_parameters.
    """
    theta = config.number("rope_theta", GLOBAL_THETA, above=1.0)
    local_theta = config.number("rope_local_base_freq", LOCAL_THETA, above=1.0)
    rope, old = config.part("rope_parameters"), config.part("rope_scaling")
    if rope is None:
        return *(parse_rope_part(config, old, theta) if old is not None else (RopeScaling(), theta)), local_theta
    if old is not None:
        config.malformed.append("rope_scaling and rope_parameters cannot stand together: keep one of them")
    if unknown := sorted(rope.raw.keys() - {"full_attention", "sliding_attention"}):
        rope.bad(unknown[0], rope.raw[unknown[0]], "absent: here are an object for full_attention and one for sliding_attention")
    whole, sliding = rope.part("full_attention"), rope.part("sliding_attention")
    scaling, theta = parse_rope_part(config, whole, theta) if whole is not None else (RopeScaling(), theta)
    if sliding is not None:
        local_scaling, local_theta = parse_rope_part(config, sliding, local_theta)
        if local_scaling.kind != "default":
            config.unsupported.append(f"rope type {local_scaling.kind!r} in sliding layers (supported there: default)")
    return scaling, theta, local_theta
