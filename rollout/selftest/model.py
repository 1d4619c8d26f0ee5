"""A tiny random model whose sums cancel, so that any change of order shows in its output. Written to a folder, nothing to download.

Random weights hide such changes: most reorderings of a sum round to the same bfloat16. Here the residual stream comes in equal
pairs (channel i = channel pair(i)), and what reads it has weights of opposite sign on each pair, large beside the rest: the exact
contribution is 0, and what is left of it is rounding noise as large as a signal, layer after layer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models.config import DecoderConfig, load_decoder_config
from ..models.params import EMBED, HEAD, hf_shapes

PAIRED = 0.75
"""share of the residual stream's channels that come in pairs"""
LOUDNESS = 2.0**18
"""size of cancelling weights; times a float32's rounding error, about 0.05"""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def tiny_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config.json of two layers with grouped KV heads whose row-parallel layers have four whole shards."""
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": "gemma3_text" if family == "gemma3" else family,
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eos_token_id": 2,
        **changes,
    }


class _Weights:
    """Tensors by checkpoint name, from one seed. Pairs are made in three places: the stream, each head's values, the MLP."""

    def __init__(self, config: DecoderConfig, seed: int) -> None:
        self._rng = torch.Generator().manual_seed(seed)
        self._head_dim = config.head_dim
        self._pairs = {w: torch.randperm(int(w * PAIRED) // 2, generator=self._rng) for w in (config.hidden_size, config.head_dim)}
        self._pairs.setdefault(config.intermediate_size, torch.randperm(int(config.intermediate_size * PAIRED) // 2, generator=self._rng))

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._rng)

    def _equal(self, x: Tensor, sign: float = 1.0) -> Tensor:
        """Make the paired entries of the last dimension equal, or with sign -1 opposite."""
        pair = self._pairs[x.shape[-1]]
        half = len(pair)
        x[..., half : 2 * half] = sign * x[..., :half][..., pair]
        return x

    def _opposite(self, x: Tensor) -> Tensor:
        x[..., : 2 * len(self._pairs[x.shape[-1]])] *= LOUDNESS
        return self._equal(x, -1.0)

    def make(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return self._equal(1.0 + 0.25 * self._randn(*shape))
        if name.endswith("v_proj.bias"):
            return self._equal(0.1 * self._randn(shape[0] // self._head_dim, self._head_dim)).flatten()
        if len(shape) == 1:
            return 0.1 * self._randn(*shape)
        if name == EMBED:
            return self._equal(0.3 * self._randn(*shape))
        weight = self._randn(*shape) * (1.0 if name == HEAD else 2.0 * shape[1] ** -0.5)
        if name.endswith("o_proj.weight"):
            weight = self._opposite(weight.unflatten(1, (-1, self._head_dim))).flatten(1)
        else:
            weight = self._opposite(weight)
        # Equal rows give equal outputs, whatever they hold.
        if name.endswith("v_proj.weight"):
            return self._equal(weight.T.unflatten(1, (-1, self._head_dim))).flatten(1).T.contiguous()
        if name.endswith(("o_proj.weight", "down_proj.weight", "gate_proj.weight", "up_proj.weight")):
            return self._equal(weight.T.contiguous()).T.contiguous()
        return weight


def write_model(
    folder: str | os.PathLike[str], family: str = "llama", *, seed: int = 0, nan_token: int | None = None, **changes: Any
) -> str:
    """Write config.json and model.safetensors of a tiny model.

    Args:
        folder: made if it is not there.
        family: of ARCHITECTURES.
        seed: of the weights.
        nan_token: a token id whose embedding is NaN.
        changes: to the values of `tiny_config`.

    Returns:
        `folder`, as a string.
    """
    from safetensors.torch import save_file

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(tiny_config(family, **changes)))
    config = load_decoder_config(path)
    weights = _Weights(config, seed)
    tensors = {name: weights.make(name, shape) for name, shape in hf_shapes(config).items()}
    if nan_token is not None:
        tensors[EMBED][nan_token] = torch.nan
    save_file(tensors, path / "model.safetensors")
    return str(path)
