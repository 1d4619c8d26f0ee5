"""Rotary tables, to the bit as transformers makes them.

P positions, H head size.
"""

from __future__ import annotations

import math

import torch

from .config import DecoderConfig


def inv_freq(cfg: DecoderConfig) -> torch.Tensor:
    """Rotary frequencies in radians per token, [H/2] float32.

    The operations and their order are those of transformers' `modeling_rope_utils`, since the bits depend on them.
    """
    H, scaling = cfg.head_dim, cfg.rope_scaling
    freq = 1.0 / (cfg.rope_theta ** (torch.arange(0, H, 2, dtype=torch.int64).to(torch.float) / H))
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "llama3":
        return _stretch_llama3(freq, cfg)
    return freq


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


def rope_tables(cfg: DecoderConfig, num_positions: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * frequency for positions 0 .. P-1.

    Returns:
        Two contiguous [P, H/2] tensors on the CPU, computed in float32 and rounded once to `dtype`. Column j serves
        elements j and j + H/2 of a head (rotate-half).
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inv_freq(cfg)[None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)
