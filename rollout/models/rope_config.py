"""Rotary parameters of a config.json, in the layout of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

Every kind keeps `max_position_embeddings` as the context, as transformers and vLLM do: a model whose rope stretches a shorter context
states the stretched one there, and the one it was pretrained with in `original_max_position_embeddings`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .config_reader import ConfigReader

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_PRETRAINED = ("llama3", "yarn")
"""kinds that depend on the context of pretraining"""
_LARGEST_FACTOR = 2.0**20


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. The names are those of transformers' `rope_parameters`."""

    kind: str = "default"
    """one of ROPE_KINDS"""
    factor: float = 1.0
    """of the context; not for default"""
    original_max_position_embeddings: int = 0
    """context of pretraining, in tokens; llama3 and yarn"""
    low_freq_factor: float = 1.0
    """llama3 only, as is the one below"""
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    """what cos and sin are multiplied by; yarn only, as are those below"""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """round the range of blended frequencies outward to whole ones"""


def parse_rope(config: ConfigReader, default_theta: float = 10000.0) -> tuple[RopeScaling, float]:
    """(scaling, theta) of a model whose layers all rotate alike. Problems are noted in `config`.

    Where the file has both layouts they must agree: transformers would drop one of them, theta included, without a word.
    """
    theta = config.number("rope_theta", default_theta, above=1.0)
    _refuse_partial(config)
    parts = [part for key in ("rope_scaling", "rope_parameters") if (part := config.part(key)) is not None]
    meanings = [parse_rope_part(config, part, theta) for part in parts]
    if len(meanings) == 2 and meanings[0] != meanings[1] and not config.malformed and not config.unsupported:
        config.malformed.append("rope_scaling and rope_parameters say different things: keep one of them, with rope_theta in it")
    return meanings[0] if meanings else (RopeScaling(), theta)


def parse_rope_part(config: ConfigReader, rope: ConfigReader, theta: float) -> tuple[RopeScaling, float]:
    """(scaling, theta) of one `rope_scaling` or `rope_parameters` object; `theta` is for one that names none."""
    nested = sorted(key for key, value in rope.raw.items() if isinstance(value, dict))
    if nested:
        config.unsupported.append(f"rope parameters by layer type ({', '.join(nested)}; supported here: one set for all layers)")
        return RopeScaling(), theta
    theta = rope.number("rope_theta", theta, above=1.0)
    _refuse_partial(rope)
    kind = rope.text("rope_type") or rope.text("type") or "default"
    if kind not in ROPE_KINDS:
        config.unsupported.append(f"rope type {kind!r} (supported: {', '.join(ROPE_KINDS)})")
        return RopeScaling(), theta
    if kind == "default":
        return RopeScaling(), theta
    context = config.size("max_position_embeddings", 1)
    original = config.size("original_max_position_embeddings", rope.size("original_max_position_embeddings", context))
    original = original if kind in _PRETRAINED else 0
    if kind == "yarn" and "factor" in rope.raw and rope.raw["factor"] is None:
        factor = context / original  # so written by models that state both contexts
    else:
        factor = rope.number("factor", most=_LARGEST_FACTOR)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low and not rope.malformed:
            rope.bad("high_freq_factor", high, f"above low_freq_factor {low:g}")
        return RopeScaling(
            kind=kind, factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position_embeddings=original
        ), theta
    if kind == "yarn":
        return _yarn(rope, factor, original), theta
    return RopeScaling(kind=kind, factor=factor), theta


def _refuse_partial(reader: ConfigReader) -> None:
    if (part := reader.number("partial_rotary_factor", 1.0)) != 1.0:
        reader.unsupported.append(f"partial_rotary_factor {part} (supported: 1.0)")


def _yarn(rope: ConfigReader, factor: float, original: int) -> RopeScaling:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    above, below = (_optional(rope, key) for key in ("mscale", "mscale_all_dim"))
    inferred = mscale(above) / mscale(below) if above and below else mscale(1)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", inferred),
        beta_fast=_optional(rope, "beta_fast") or 32.0,
        beta_slow=_optional(rope, "beta_slow") or 1.0,
        truncate=rope.flag("truncate", "truncate" not in rope.raw),  # transformers takes null for false
    )


def _optional(rope: ConfigReader, key: str) -> Any:
    """A number, where 0 and null mean the same as absent."""
    return 0.0 if rope.raw.get(key) in (None, 0) else rope.number(key)
