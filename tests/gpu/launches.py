"""What launches would compile on a GPU, for batches of several sizes: prints, per variant, how that differs from what its `Variant` says.

Triton decides by its binder what of a call goes into a binary (an int that is 1 or a multiple of 16, an aligned pointer). The
binder needs no device, so each op is called on CPU tensors, and its launches are bound instead of run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import torch
from rollsync.kernels.gpu import attention, kv, launch, linear, logprobs, ops, rows, sampler
from rollsync.kernels.gpu.compile import source_of
from rollsync.kernels.gpu.trainer import GpuTrainerOps
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))
seen: dict[str, set[str]] = defaultdict(set)


def bind(variant: launch.Variant, grid: tuple[int, ...], *args: Any) -> None:
    fn, want = variant.fn, source_of(variant)
    binder = create_function_from_signature(fn.signature, fn.params, BACKEND)
    _, specialization, _ = binder(*args, **variant.constants, **variant.options)
    problems = seen[variant.name]
    for i, (name, (kind, special)) in enumerate(zip(fn.arg_names, specialization, strict=True)):
        expected = want.signature[name]
        if kind != expected:
            problems.add(f"{name} is {kind} for {expected}")
        aligned = "D" if (i,) in want.attrs else None
        if kind != "constexpr" and (special or None) != aligned:
            problems.add(f"{name} is specialised as {special!r} for {aligned!r}")
    if max(grid[1:], default=1) > 65535 or grid[0] >= 1 << 31:
        problems.add(f"a grid of {grid}")


def run(m: int, dtype: torch.dtype) -> None:
    x, w = torch.zeros(m, 64, dtype=dtype), torch.zeros(48, 64, dtype=dtype)
    ops.linear(x, w, w[0, :48].contiguous(), residual_MN=torch.zeros(m, 48, dtype=dtype), shards=2)
    ops.linear(x, w, float32=True)
    ops.add_parts(ops.linear_parts(x, w, torch.zeros(2, m, 48)), dtype=dtype)
    ops.linear_gated(x, w, "silu")
    ops.gated(x, x, "silu")
    ops.rmsnorm(x, w[0], 1e-5)
    ops.rmsnorm(x, w[0], 1e-5, rows=torch.zeros(m, dtype=torch.int32))
    ops.add_rmsnorm(x, x, w[0], 1e-5)
    ops.embed(torch.zeros(m, dtype=torch.int32), w)
    ops.softcap(x, 3.0)
    layout = ops.GpuKvLayout(num_blocks=m, block_tokens=16, num_layers=1, kv_heads=1, head_dim=32, dtype=dtype)
    pages, tables, ints = layout.allocate("cpu"), torch.zeros(m, m, dtype=torch.int32), torch.zeros(m, dtype=torch.int32)
    qkv, angles = torch.zeros(m, 4 * 32, dtype=dtype), torch.zeros(m, 16, dtype=dtype)
    ops.head_norm(qkv, w[0, :32].clone(), w[1, :32].clone(), 1e-5, heads=2, kv_heads=1)
    ops.rope_store(qkv, ints, ints, tables, angles, angles, pages, 0, heads=2)
    ops.copy_blocks(pages, torch.zeros(m, 2, dtype=torch.int32))
    items = torch.from_numpy(ops.attention_items([1] * m, 2, dtype, num_keys=[600] * m, places=m))
    ops.attention(qkv, ints, ints, tables, items, pages, 0, 1.0, heads=2, window=m, work=ops.attention_work(m, 600, 2, 32, "cpu"))
    logits, ids = torch.zeros(m, 64, dtype=dtype), torch.zeros(m, dtype=torch.int64)
    doubles, longs, bytes_ = torch.ones(m, dtype=torch.float64), ids, torch.zeros(m, dtype=torch.uint8)
    columns = ops.SamplerColumns(doubles, doubles, torch.zeros(m), longs, longs, ints, ints, longs, bytes_, bytes_)
    offsets = torch.zeros(m + 1, dtype=torch.int32)
    lists = torch.zeros(m, 4, dtype=torch.int32)
    changes = ops.LogitChanges(offsets, ints, offsets, lists, ints, lists, torch.zeros(m, 64))
    ops.sample(logits, columns, vocab_limit=m)
    ops.sample(logits, columns, vocab_limit=m, changes=changes, mask=torch.zeros(m, 2, dtype=torch.int32))
    found = ops.token_logprobs_and_entropy(logits.requires_grad_(), ids)
    (found[0].sum() + found[1].sum()).backward()
    GpuTrainerOps().activation(x, "silu")


if __name__ == "__main__":
    from rollsync.kernels.gpu import trainer

    for module in (attention, kv, linear, logprobs, rows, sampler, trainer):
        module.launch = bind  # type: ignore[attr-defined]
    for m in (1, 16, 17, 48):
        for dtype in (torch.bfloat16, torch.float32):
            run(m, dtype)
    print(json.dumps({name: sorted(problems) for name, problems in seen.items()}))
