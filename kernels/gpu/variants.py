"""The kernel variants that are compiled without a GPU: each op in the dtypes, shapes and flags that set its binaries apart.

Variants come from the functions that launches call, so a binary compiled here is the one that a launch of that shape runs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from . import attention, kv, linear, logprobs, rows, sampler, trainer
from .launch import Variant

BF16, F32 = torch.bfloat16, torch.float32


class Shape(NamedTuple):
    """A model, as far as its kernels can tell."""

    name: str
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


SMALL = Shape("135M", 576, 1536, 9, 3, 64, 49152)
LARGE = Shape("8B", 4096, 12288, 32, 8, 128, 151936)
WIDE = Shape("9B, capped", 3584, 14336, 16, 8, 256, 256000)
BLOCK_TOKENS = 32


def _linears(shape: Shape, dtype: torch.dtype) -> Iterator[Variant]:
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    yield linear.linear_variant(qkv, shape.width, dtype, dtype, 1, bias=True)
    yield linear.linear_variant(shape.vocab, shape.width, dtype, F32, 1)
    yield linear.linear_variant(shape.width, shape.mlp, dtype, dtype, 4, residual=True)
    yield linear.linear_variant(shape.width, shape.mlp, dtype, F32, 4, parts=True)
    yield linear.gated_variant(shape.mlp, shape.width, dtype, "silu")


def _attention(shape: Shape, dtype: torch.dtype, capped: bool = False) -> Variant:
    group = shape.heads // shape.kv_heads
    return attention.attention_variant(group, shape.kv_heads, shape.head_dim, BLOCK_TOKENS, dtype, capped)


def _rows(shape: Shape, dtype: torch.dtype) -> Iterator[Variant]:
    d = shape.width
    yield rows.norm_variant(d, dtype, one_plus=False, gather=False, add=False)
    yield rows.norm_variant(d, dtype, one_plus=False, gather=True, add=False)
    yield rows.norm_variant(d, dtype, one_plus=True, gather=False, add=True)
    heads, kv_heads, h = shape.heads, shape.kv_heads, shape.head_dim
    yield rows.norm_variant(h, dtype, one_plus=False, gather=False, add=False)
    yield rows.norm_variant(h, dtype, one_plus=False, gather=False, add=False, group=heads + kv_heads, group1=heads)
    yield rows.embed_variant(d, dtype)
    yield rows.gated_rows_variant(shape.mlp, dtype, "gelu_tanh")
    yield rows.softcap_variant(shape.vocab, dtype)
    yield kv.rope_store_variant(heads, kv_heads, h, BLOCK_TOKENS, dtype)
    yield linear.add_parts_variant(d, dtype, 4, True)
    yield attention.merge_variant(heads, h, dtype)


def main_variants() -> list[Variant]:
    """Where a step's time goes: these must not spill, and use the tensor cores."""
    return [*_linears(LARGE, BF16), _attention(SMALL, BF16), _attention(LARGE, BF16)]


def large_variants() -> list[Variant]:
    """linear.LARGE_TILES, for which the same holds."""
    n, k, mlp = LARGE.width, LARGE.width, LARGE.mlp
    return [
        linear.linear_variant(n, k, BF16, BF16, 1, large=True),
        linear.linear_variant(n, mlp, BF16, BF16, 4, residual=True, large=True),
        linear.gated_variant(mlp, k, BF16, "silu", large=True),
    ]


def quick_variants() -> list[Variant]:
    """One or two of each kernel, with what every step launches among them."""
    found = [*main_variants(), *_rows(LARGE, BF16), kv.copy_blocks_variant()]
    found += [linear.linear_variant(SMALL.width, SMALL.mlp, F32, F32, 4, residual=True), linear.gated_variant(100, 72, F32, "gelu_tanh")]
    found += [sampler.sample_variant(LARGE.vocab, BF16, changes, changes) for changes in (False, True)]
    found += [sampler.changed_logits_variant(LARGE.vocab, BF16), trainer.activation_variant(BF16, "silu")]
    found += [logprobs.logprobs_variant(LARGE.vocab, BF16, True), logprobs.logprobs_grad_variant(LARGE.vocab, BF16, True)]
    return found


def all_variants() -> list[Variant]:
    """Those, the large tiles, and what differs in a flag, a dtype or the size of a head alone."""
    found = [*quick_variants(), *large_variants(), *_linears(SMALL, F32), *_rows(SMALL, F32)]
    found += [_attention(WIDE, BF16, capped=True), _attention(SMALL, F32), attention.attention_variant(2, 2, 80, 16, BF16, False)]
    for changes, mask in ((False, False), (True, False), (False, True), (True, True)):
        found += [sampler.sample_variant(LARGE.vocab, dtype, changes, mask) for dtype in (BF16, F32)]
    found.append(sampler.changed_logits_variant(LARGE.vocab, F32))
    for dtype in (BF16, F32):
        found += [trainer.activation_variant(dtype, "silu"), trainer.activation_variant(dtype, "gelu_tanh")]
        for entropy in (False, True):
            found += [logprobs.logprobs_variant(LARGE.vocab, dtype, entropy), logprobs.logprobs_grad_variant(LARGE.vocab, dtype, entropy)]
    return list({variant.name: variant for variant in found}.values())
