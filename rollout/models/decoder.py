"""The decoder's forward pass, written once: recorded as a program that the native kernels or the reference run."""

from __future__ import annotations

from ...kernels.program import HeadNorm, Program
from ...kernels.weights import WeightSpec
from .config import DecoderConfig
from .params import param_specs


def weight_specs(cfg: DecoderConfig) -> dict[str, WeightSpec]:
    """How each local parameter is laid out. A tied embedding is packed as the head it also is: one copy, two roles."""
    specs = {}
    for name, spec in param_specs(cfg).items():
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
    """Write the forward pass of `cfg` into `program`: pre-norm blocks, rotary attention, SiLU-gated MLP.

    With `float32_logits` the head's sums are not rounded to the model's dtype.
    """
    scale, eps = cfg.head_dim**-0.5, cfg.rms_norm_eps
    x = program.embed("embed")
    for i in range(cfg.num_layers):
        layer = f"layers.{i}."
        h = program.rmsnorm(x, layer + "attn_norm", eps)
        qkv = program.linear(h, layer + "qkv", layer + "qkv_bias" if cfg.qkv_bias else None)
        program.rope_store(qkv, i, norm=HeadNorm(layer + "q_norm", layer + "k_norm", eps) if cfg.qk_norm else None)
        attended = program.attention(qkv, i, scale, window=cfg.windows[i] if cfg.windows else 0)
        program.add_linear(x, attended, layer + "attn_out")
        h = program.rmsnorm(x, layer + "mlp_norm", eps)
        program.add_linear(x, program.linear_silu_mul(h, layer + "gate_up"), layer + "mlp_down")
    h = program.rmsnorm(x, "final_norm", eps, logits_rows=True)
    program.logits_and_sample(h, "embed" if cfg.tie_word_embeddings else "head", float32=float32_logits)
