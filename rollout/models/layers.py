"""Rotary tables, to the bit as transformers makes them.

P positions, H head size.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from .config import DecoderConfig, RopeScaling


def inv_freq(cfg: DecoderConfig) -> torch.Tensor:
    """Rotary frequencies in radians per token, [H/2] float32.

    The operations and their order are those of transformers' `modeling_rope_utils`, since the bits depend on them.
    """
    H, scaling, theta = cfg.head_dim, cfg.rope_scaling, cfg.rope_theta
    if scaling.kind == "dynamic":
        theta = _dynamic_theta(cfg)
    steps = torch.arange(0, H, 2, dtype=torch.int64).to(torch.float) / H
    if scaling.kind == "yarn":
        return _blend_yarn(theta**steps, cfg)
    freq = 1.0 / (theta**steps)
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "llama3":
        return _stretch_llama3(freq, cfg)
    return freq


def _dynamic_theta(cfg: DecoderConfig) -> float:
    """NTK-aware theta for a sequence of `max_position_embeddings` tokens: theta itself, but for rounding.

    Sequences beyond that would stretch it further, each by its own length. There are none: max_model_len never exceeds the model's
    context. So one table serves every sequence, and a token's bits do not depend on how long its sequence becomes.
    """
    factor, context, H = cfg.rope_scaling.factor, cfg.max_position_embeddings, cfg.head_dim
    stretch: float = ((factor * context / context) - (factor - 1)) ** (H / (H - 2))
    return cfg.rope_theta * stretch


def _blend_yarn(pos_freqs: torch.Tensor, cfg: DecoderConfig) -> torch.Tensor:
    """Keep frequencies that turn often within the context of pretraining, divide slow ones by `factor`, blend between (YaRN)."""
    s, half = cfg.rope_scaling, cfg.head_dim // 2

    def dim_of(rotations: float) -> float:
        turns = s.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (cfg.head_dim * math.log(turns)) / (2 * math.log(cfg.rope_theta))

    low, high = dim_of(s.beta_fast), dim_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, cfg.head_dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - torch.clamp((torch.arange(half, dtype=torch.float32) - low) / (high - low), 0, 1)
    return 1.0 / (s.factor * pos_freqs) * (1 - kept) + 1.0 / pos_freqs * kept


def _stretch_llama3(freq: torch.Tensor, cfg: DecoderConfig) -> torch.Tensor:
    """Divide slow frequencies by `factor`, keep fast ones, blend between (Llama 3.1)."""
    s = cfg.rope_scaling
    context = s.original_max_position_embeddings
    slow, fast = context / s.low_freq_factor, context / s.high_freq_factor
    wavelength = 2 * math.pi / freq
    scaled = torch.where(wavelength > slow, freq / s.factor, freq)
    blend = (context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    smoothed = (1 - blend) * scaled / s.factor + blend * scaled
    between = ~(wavelength < fast) * ~(wavelength > slow)
    return torch.where(between, smoothed, scaled)


def all_rope_tables(
    cfg: DecoderConfig, num_positions: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`rope_tables` of the model, and behind them those of its layers with a window if they have a theta of their own."""
    tables = [rope_tables(cfg, num_positions, dtype, device)]
    if cfg.local_rope_theta:
        local = dataclasses.replace(cfg, rope_theta=cfg.local_rope_theta, rope_scaling=RopeScaling())
        tables.append(rope_tables(local, num_positions, dtype, device))
    return tables


def rope_tables(
    cfg: DecoderConfig, num_positions: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * frequency for positions 0 .. P-1.

    Returns:
        Two contiguous [P, H/2] tensors, computed in float32 (times the attention factor) and rounded once to `dtype`. Column j serves
        elements j and j + H/2 of a head (rotate-half). Cosines are those of `device`, where a trainer's model takes its own:
        devices differ in their last bits.
    """
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * inv_freq(cfg).to(device)[None, :]
    scale = cfg.rope_scaling.attention_factor
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
