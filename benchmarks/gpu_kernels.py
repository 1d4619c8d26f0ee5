"""Sections of gpu_check.py about single kernels: which tiles give equal bits, and how fast kernels are beside the vendor's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .gpu_check import Context

EIGHT_B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""(N, K) of an 8B model's layers: qkv, attention out, gate and up, MLP down"""
OTHER_TILES: tuple[dict[str, int], ...] = (
    {"m": 16}, {"m": 32}, {"m": 128, "num_warps": 8}, {"m": 128, "n": 128, "num_warps": 8},
    {"m": 128, "n": 256, "num_warps": 8, "num_stages": 3}, {"n": 128}, {"num_stages": 3}, {"num_warps": 8},
    {"k": 32}, {"k": 128, "num_stages": 3},
)  # fmt: skip
SMALL_MODEL = ((1152, 896), (896, 896), (9728, 896), (896, 4864))
"""of a 0.5B model"""


def cancelling(rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """x [rows, k] and w [n, k] whose exact product is 0: what comes out is rounding, and any other order of adding shows in it."""
    generator = torch.Generator().manual_seed(n * 31 + k)
    half = k // 2
    order = torch.randperm(half, generator=generator)
    u, v = (torch.randn(count, half, generator=generator) for count in (rows, n))
    return torch.cat([u, u[:, order]], 1).to(dtype).to(device), torch.cat([v, -v[:, order]], 1).to(dtype).to(device)


@contextmanager
def _tile(dtype: torch.dtype, **changes: int) -> Iterator[None]:
    """Linear layers with another tile for a while."""
    from rollsync.kernels.gpu import linear
    from rollsync.kernels.gpu.tiles import TILES

    before = TILES[dtype]
    TILES[dtype] = before._replace(**changes)
    linear.linear_variant.cache_clear()
    try:
        yield
    finally:
        TILES[dtype] = before
        linear.linear_variant.cache_clear()


def classes(rows_by_m: dict[int, Tensor]) -> list[list[int]]:
    """Numbers of rows, put together where the first row has the same bits."""
    found: list[list[int]] = []
    for m, row in rows_by_m.items():
        same = next((group for group in found if torch.equal(rows_by_m[group[0]], row)), None)
        found.append([m]) if same is None else same.append(m)
    return found


def tiles(c: Context) -> None:
    """Does the number of rows matter? Do other tiles give the same bits, so that large steps may take larger ones?"""
    from rollsync.kernels.gpu import ops

    sizes = (1, 2, 33) if c.tiny else (1, 2, 3, 15, 16, 17, 31, 64, 65, 127, 128, 256, 511, 512, 1024, 2048, 4096)
    shapes = ((64, 64),) if c.tiny else (*SMALL_MODEL, *EIGHT_B)
    for dtype in (torch.float32,) if c.tiny else (torch.bfloat16, torch.float32):
        bad, position = 0, 0
        for n, k in shapes if dtype == torch.bfloat16 or c.tiny else SMALL_MODEL[:2]:
            x, w = cancelling(max(sizes), n, k, dtype, c.device)
            first = {m: ops.linear(x[:m], w, shards=4 if k % 128 == 0 else 1)[0].clone() for m in sizes}
            bad += len(classes(first)) - 1
            m = max(sizes)
            moved = ops.linear(x.flip(0).contiguous(), w, shards=4 if k % 128 == 0 else 1)
            position += not torch.equal(moved[m - 1], first[m])
        c.add(f"linear {str(dtype)[6:]}: classes of M beyond one", bad, "== 0")
        c.add(f"linear {str(dtype)[6:]}: shapes where a row's place matters", position, "== 0")
    if not c.tiny:
        _large_tiles(c)
        _other_tiles(c)


def _large_tiles(c: Context) -> None:
    """May large steps take LARGE_TILES? If no call's bits differ, tiles.LARGE_FROM may be set to where they win."""
    from rollsync.kernels.gpu import ops
    from rollsync.kernels.gpu import tiles as setting

    sizes, different, took = (128, 500, 1024, 4096), 0, dict.fromkeys((None, 1), 0.0)
    for n, k in (EIGHT_B[0], EIGHT_B[3]):
        x, w = cancelling(max(sizes), n, k, torch.bfloat16, c.device)
        calls: tuple[Callable[[Tensor], Tensor], ...] = (
            partial(ops.linear, w_NK=w, float32=True),
            partial(ops.linear, w_NK=w, shards=4, float32=True),
            partial(ops.linear_gated, w_NK=w, activation="silu"),
        )
        for call in calls:
            want = call(x)
            try:
                setting.LARGE_FROM = 1
                different += sum(not torch.equal(call(x[:m]), want[:m]) for m in sizes)
                took[1] += c.seconds(partial(call, x), repeat=3)
            finally:
                setting.LARGE_FROM = None
            took[None] += c.seconds(partial(call, x), repeat=3)
    c.add("large tiles: calls whose bits differ from those of the tile in use", different)
    c.add("large tiles: time of the tile in use / theirs", took[None] / took[1])


def _other_tiles(c: Context) -> None:
    from rollsync.kernels.gpu import ops

    n, k = EIGHT_B[0]
    x, w = cancelling(512, n, k, torch.bfloat16, c.device)
    want = ops.linear(x, w)
    for changes in OTHER_TILES:
        name = ", ".join(f"{key} {value}" for key, value in changes.items())
        try:
            with _tile(torch.bfloat16, **changes):
                same = torch.equal(ops.linear(x, w), want)
                took = c.seconds(lambda: ops.linear(x, w), repeat=5)
            c.add(f"tile with {name}: the bits of the one in use", int(same))
            c.add(f"tile with {name}: microseconds at M = 512", took * 1e6)
        except Exception as error:  # one that does not fit the device
            c.add(f"tile with {name}", type(error).__name__)
        if c.left_s < 3:
            break


def matmul(c: Context) -> None:
    """Against cuBLAS."""
    from rollsync.kernels.gpu import ops

    dtype = torch.float32 if c.tiny else torch.bfloat16
    for n, k in ((64, 64),) if c.tiny else (*EIGHT_B, (151936, 896)):
        w = torch.randn(n, k, device=c.device).to(dtype) * k**-0.5
        for m in (4,) if c.tiny else (16, 128, 512, 1024, 4096):
            if c.left_s < 1 or m * n > 1 << 29:
                continue
            x, out = torch.randn(m, k, device=c.device).to(dtype), torch.empty(m, n, dtype=dtype, device=c.device)
            ours = c.seconds(partial(ops.linear, x, w, out=out), repeat=10)
            theirs = c.seconds(partial(torch.mm, x, w.T, out=out), repeat=10)
            c.add(f"matmul {m} x {n} x {k}: cuBLAS's time / ours", theirs / ours, "" if c.tiny or m < 128 else ">= 0.8")


def shards(c: Context) -> None:
    """What the tree of partial sums costs one rank."""
    from rollsync.kernels.gpu import ops

    dtype, shapes = (torch.float32, ((64, 128),) * 4) if c.tiny else (torch.bfloat16, EIGHT_B)
    weights = [torch.randn(n, k, device=c.device).to(dtype) for n, k in shapes]
    for m in (2,) if c.tiny else (64, 1024):
        inputs = [torch.randn(m, k, device=c.device).to(dtype) for _, k in shapes]
        took = {}
        for count in (1, 4, 8):

            def layer(count: int = count, inputs: Sequence[Tensor] = inputs) -> None:
                for i, (x, w) in enumerate(zip(inputs, weights, strict=True)):
                    ops.linear(x, w, shards=count if i in (1, 3) else 1)

            took[count] = c.seconds(layer, repeat=10)
        for count in (4, 8):
            name = f"k_shards = {count}: a layer's matmuls at M = {m}, times k_shards = 1"
            c.add(name, took[count] / took[1], "" if c.tiny else "<= 1.15")


class Paged:
    """Sequences in pages, for the attention op: `num_new` last tokens of each are fed."""

    def __init__(self, c: Context, lengths: Sequence[int], num_new: Sequence[int], *, block: int = 16, heads: int = 32, kv_heads: int = 8,
                 dim: int = 128, seed: int = 0) -> None:  # fmt: skip
        from rollsync.kernels.gpu import ops

        self.dtype, self.heads, self.kv_heads, self.dim = torch.float32 if c.tiny else torch.bfloat16, heads, kv_heads, dim
        counts = [-(-length // block) for length in lengths]
        layout = ops.GpuKvLayout(
            num_blocks=sum(counts) + 1, block_tokens=block, num_layers=1, kv_heads=kv_heads, head_dim=dim, dtype=self.dtype
        )
        self.kv = layout.allocate(c.device)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randperm(sum(counts), generator=generator).int() + 1
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        queries, positions, slots, at = [], [], [], 0
        for i, (length, count, new) in enumerate(zip(lengths, counts, num_new, strict=True)):
            own = torch.Generator().manual_seed(1000 + i)
            keys, values = (torch.randn(length, kv_heads, dim, generator=own).to(self.dtype) for _ in range(2))
            query = torch.randn(length, heads * dim, generator=own).to(self.dtype)
            blocks = ids[at : at + count]
            self.tables[i, :count], at = blocks, at + count
            for which, rows in enumerate((keys, values)):
                padded = torch.zeros(count * block, kv_heads, dim, dtype=self.dtype)
                padded[:length] = rows
                self.kv[blocks.long().to(c.device), 0, which] = padded.view(count, block, kv_heads, dim).transpose(1, 2).to(c.device)
            queries.append(query[length - new :])
            positions.append(torch.arange(length - new, length, dtype=torch.int32))
            slots.append(torch.full((new,), i, dtype=torch.int32))
        self.q, self.positions, self.slots = (torch.cat(parts).to(c.device) for parts in (queries, positions, slots))
        self.tables = self.tables.to(c.device)
        self._lengths, self._new, self._device = lengths, num_new, c.device
        self.out = torch.empty(len(self.q), heads * dim, dtype=self.dtype, device=c.device)
        self.plan(0)

    def plan(self, places: int) -> None:
        from rollsync.kernels.gpu import ops

        group = self.heads // self.kv_heads
        items = ops.attention_items(self._new, group, self.dtype, num_keys=self._lengths, places=places)
        self.items = torch.from_numpy(items).to(self._device)
        self.work = ops.attention_work(places, max(self._lengths), self.heads, self.dim, self._device) if places else None

    def run(self) -> Tensor:
        from rollsync.kernels.gpu import ops

        where = (self.positions, self.slots, self.tables, self.items)
        return ops.attention(self.q, *where, self.kv, 0, self.dim**-0.5, heads=self.heads, work=self.work, out=self.out)


def attention_bits(c: Context) -> None:
    """Decoded, in chunks, whole, in a batch, with splits side by side, on pages of another size: one class each."""
    small: dict[str, Any] = {"heads": 2, "kv_heads": 1, "dim": 16} if c.tiny else {}
    lengths = (5, 20) if c.tiny else (1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1500)
    want = [row.clone() for row in Paged(c, lengths, lengths, **small).run().split(list(lengths))]
    decoded = Paged(c, lengths, [1] * len(lengths), **small)
    got = decoded.run()
    c.add("attention: decoded rows unlike those of the whole prompt", _unlike(got, want), "== 0")
    decoded.plan(len(lengths))
    apart = decoded.run()
    c.add("attention: rows that splits side by side change", _unlike(apart, want), "== 0")
    chunk = [max(1, length // 3) for length in lengths]
    parts = Paged(c, lengths, chunk, **small).run().split(chunk)
    c.add("attention: chunks unlike the whole", sum(not torch.equal(p, w[-len(p) :]) for p, w in zip(parts, want, strict=True)), "== 0")
    for block in (32,) if c.tiny else (32, 128):
        other = Paged(c, lengths, [1] * len(lengths), block=block, **small).run()
        c.add(f"attention: rows that pages of {block} change", _unlike(other, want), "== 0")


def _unlike(rows: Tensor, whole: list[Tensor]) -> int:
    """How many sequences' last rows differ."""
    return sum(not torch.equal(row, all_rows[-1]) for row, all_rows in zip(rows, whole, strict=True))


def attention_speed(c: Context) -> None:
    """Against torch's scaled dot product attention (flash) on contiguous keys, which has no pages to follow."""
    import torch.nn.functional as F

    cases = (((20, 20), (20, 20)),) if c.tiny else (
        ((4096,), (4096,)), ((1024,) * 8, (1024,) * 8), ((1024,) * 64, (1,) * 64), ((4096,) * 16, (1,) * 16), ((8192,) * 2, (1,) * 2),
    )  # fmt: skip
    small: dict[str, Any] = {"heads": 2, "kv_heads": 1, "dim": 16} if c.tiny else {}
    for lengths, new in cases:
        if c.left_s < 2:
            break
        paged = Paged(c, lengths, new, **small)
        if max(new) == 1 and max(lengths) > 512:
            paged.plan(len(lengths) if len(lengths) * paged.kv_heads <= 256 else 0)
        b, length, steps = len(lengths), lengths[0], new[0]
        q = torch.randn(b, paged.heads, steps, paged.dim, device=c.device).to(paged.dtype)
        k, v = (torch.randn(b, paged.kv_heads, length, paged.dim, device=c.device).to(paged.dtype) for _ in range(2))
        theirs = c.seconds(partial(F.scaled_dot_product_attention, q, k, v, is_causal=steps > 1, enable_gqa=True))
        ours = c.seconds(paged.run)
        c.add(f"attention, {b} x {steps} of {length} keys: flash's time / ours", theirs / ours, "" if c.tiny else ">= 0.7")


def sampler(c: Context) -> None:
    """Drawing a token for each of 256 rows, against reading their logits once; and kinds of sampling against greedy."""
    from rollsync.kernels.gpu import ops

    rows, vocab = (2, 70) if c.tiny else (256, 151936)
    logits = torch.randn(rows, -(-vocab // 32) * 32, device=c.device).to(torch.float32 if c.tiny else torch.bfloat16)[:, :vocab]
    plain = {
        "temperature": torch.ones(rows, dtype=torch.float64), "top_p": torch.ones(rows, dtype=torch.float64), "min_p": torch.zeros(rows),
        "top_k": torch.zeros(rows, dtype=torch.int64), "seed": torch.arange(rows), "sample_index": torch.zeros(rows, dtype=torch.int32),
        "row_position": torch.ones(rows, dtype=torch.int32), "forced": torch.full((rows,), -1),
        "want": torch.zeros(rows, dtype=torch.uint8), "top_n": torch.zeros(rows, dtype=torch.uint8),
    }  # fmt: skip
    out = ops.SamplerOut.allocate(rows, c.device)
    read = c.seconds(lambda: logits.amax(1), repeat=10)
    kinds: dict[str, dict[str, float]] = {
        "greedy": {"temperature": 0.0}, "temperature 1": {}, "top_p 0.9": {"top_p": 0.9}, "top_k 50": {"top_k": 50},
        "all columns": {"want": 3, "top_n": 5},
    }  # fmt: skip
    for kind, changes in kinds.items():
        columns = {name: torch.full_like(t, changes[name]) if name in changes else t for name, t in plain.items()}
        there = ops.SamplerColumns(**{name: t.to(c.device) for name, t in columns.items()})
        took = c.seconds(partial(ops.sample, logits, there, vocab_limit=vocab, out=out), repeat=10)
        c.add(f"sampler, {rows} rows of {vocab}, {kind}: microseconds", took * 1e6)
        c.add(f"sampler, {rows} rows of {vocab}, {kind}: times one read of them", took / read)
