"""The decoder's forward pass, written once: recorded as a program that the native kernels or the reference run."""

from __future__ import annotations

from typing import Any

from ...kernels.program import HeadNorm, Norm, Program
from ...kernels.weights import WeightSpec
from .config import DecoderConfig
from .params import param_specs


def weight_specs(cfg: DecoderConfig, tp_size: int = 1, tp_rank: int = 0) -> dict[str, WeightSpec]:
    """How each local parameter of a rank is laid out. A tied embedding is packed as the head it also is: one copy, two roles."""
    specs = {}
    for name, spec in param_specs(cfg, tp_size, tp_rank).items():
        n, k = spec.shape[0], spec.shape[1] if len(spec.shape) == 2 else 1
        if spec.kind == "vector":
            layout = "bias" if name.endswith("bias") else "vector"
        elif spec.kind == "embedding" and not cfg.tie_word_embeddings:
            layout = "rows"
        else:
            layout = "gate_up" if name.endswith("gate_up") else "linear"
        specs[name] = WeightSpec(n, k, layout)
    return specs


def record(program: Program, cfg: DecoderConfig, *, float32_logits: bool = False) -> None:
    """Write the forward pass of `cfg` into `program`: pre-norm blocks of rotary attention and a gated MLP.

    With `float32_logits` the head's sums are not rounded to the model's dtype.
    """
    norm = _norm(cfg)
    x = program.embed("embed", cfg.embed_scale)
    for i in range(cfg.num_layers):
        layer = f"layers.{i}."
        h = program.rmsnorm(x, layer + "attn_norm", norm)
        _add_branch(program, cfg, x, _attention(program, cfg, i, h), layer + "attn_out", layer + "attn_post_norm")
        h = program.rmsnorm(x, layer + "mlp_norm", norm)
        h = program.linear_gated(h, layer + "gate_up", cfg.activation)
        _add_branch(program, cfg, x, h, layer + "mlp_down", layer + "mlp_post_norm")
    h = program.rmsnorm(x, "final_norm", norm, logits_rows=True)
    head = "embed" if cfg.tie_word_embeddings else "head"
    program.logits_and_sample(h, head, softcap=cfg.logits_softcap, float32=float32_logits)


def _norm(cfg: DecoderConfig) -> Norm:
    return Norm(cfg.rms_norm_eps, cfg.norm_one_plus)


def _attention(program: Program, cfg: DecoderConfig, i: int, h: Any) -> Any:
    layer, window = f"layers.{i}.", cfg.windows[i] if cfg.windows else 0
    qkv = program.linear(h, layer + "qkv", layer + "qkv_bias" if cfg.qkv_bias else None)
    head_norm = HeadNorm(layer + "q_norm", layer + "k_norm", _norm(cfg)) if cfg.qk_norm else None
    program.rope_store(qkv, i, table=1 if cfg.local_rope_theta and window else 0, head_norm=head_norm)
    scale = cfg.head_dim**-0.5 if cfg.attention_scale is None else cfg.attention_scale
    return program.attention(qkv, i, scale, window=window, softcap=cfg.attention_softcap)


def _add_branch(program: Program, cfg: DecoderConfig, x: Any, branch: Any, weight: str, post_norm: str) -> None:
    """x += linear(branch), through a norm of its own where the model has one."""
    if cfg.post_norms:
        program.add_rmsnorm(x, program.linear(branch, weight, row_parallel=True), post_norm, _norm(cfg))
    else:
        program.add_linear(x, branch, weight)
