"""The ops of the GPU path, as a runner and a trainer call them."""

from .attention import attention, attention_items, attention_work, tokens_per_item
from .kv import GpuKvLayout, copy_blocks, rope_store
from .linear import add_parts, linear, linear_gated, linear_parts
from .logprobs import token_logprobs, token_logprobs_and_entropy
from .rows import add_rmsnorm, embed, gated, head_norm, rmsnorm, softcap
from .sampler import LogitChanges, SamplerColumns, SamplerOut, sample

__all__ = [
    "GpuKvLayout", "LogitChanges", "SamplerColumns", "SamplerOut", "add_parts", "add_rmsnorm", "attention", "attention_items",
    "attention_work", "copy_blocks", "embed", "gated", "head_norm", "linear", "linear_gated", "linear_parts", "rmsnorm", "rope_store",
    "sample", "softcap", "token_logprobs", "token_logprobs_and_entropy", "tokens_per_item",
]  # fmt: skip
