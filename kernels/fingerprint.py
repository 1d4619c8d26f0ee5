"""The numerics fingerprint: what a build computes on fixed inputs, as one short string. Equal fingerprints promise equal bits.

The specification (docs/numerics.md) fixes every op's result, so every build and the reference have the same digests, and those are
written down here: a build that miscompiles shows when it is loaded. Inputs are made of integers, never by a library's random or
transcendental functions. Rotary tables are torch's business and no part of this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import reference as ref
from .native_lib import NativeLibrary
from .native_ops import NativeOps
from .reference_sampler import SampleResult, SamplerRows
from .spec import SPEC_VERSION

EXPECTED = {
    "linear/bfloat16": "7c2b4a7860ff",
    "linear/float32": "45221fa5796a",
    "linear_shards/bfloat16": "ab9b1cd890e1",
    "linear_shards/float32": "79599aaeac64",
    "linear_f32/bfloat16": "1d3ef8f3dd52",
    "linear_f32/float32": "a17f77766c38",
    "silu_mul/bfloat16": "452824380737",
    "silu_mul/float32": "895b7ea3ca2e",
    "gelu_mul/bfloat16": "288c68f61cb3",
    "gelu_mul/float32": "d35fca1327fa",
    "softcap/bfloat16": "7e86d2dc36fe",
    "softcap/float32": "23a4d87cec02",
    "rmsnorm/bfloat16": "39c6f96b4029",
    "rmsnorm/float32": "33b0e5b27ca2",
    "rmsnorm_one_plus/bfloat16": "07e3d363cbc7",
    "rmsnorm_one_plus/float32": "1685dce28fef",
    "rope/bfloat16": "d74426f7aa10",
    "rope/float32": "16bc52157e42",
    "rope_norm/bfloat16": "04fbddebcc7f",
    "rope_norm/float32": "03df38c2e351",
    "attention/bfloat16": "04399c658d03",
    "attention/float32": "248ecb783dfb",
    "attention_window/bfloat16": "6860e6202ce2",
    "attention_window/float32": "a70a9088b941",
    "attention_softcap/bfloat16": "a7944ed955d2",
    "attention_softcap/float32": "d43573b02109",
    "sample/bfloat16": "e27bc76453c4",
    "sample/float32": "b266772062df",
    "sample_changed/bfloat16": "f9cb463363c0",
    "sample_changed/float32": "719afa6d2c6b",
}
"""of specification version 1; a change of any digest is a new version"""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHARDS = (1, 2, 4, 8, 16)


class _Numbers:
    """Reproducible values from splitmix64 (Steele, Lea and Flood 2014)."""

    def __init__(self, seed: int) -> None:
        self._state = seed << 32

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(self._state)) * np.uint64(0x9E3779B97F4A7C15)
        self._state += count
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    def values(self, *shape: int, binades: int = 3) -> Tensor:
        """Float32 with full mantissas, both signs, and magnitudes from 2**-binades to 2."""
        z = self.words(int(np.prod(shape)))
        mantissa = (z >> np.uint64(41)).astype(np.float64) * 2.0**-23 + 1.0
        exponent = ((z >> np.uint64(8)) % np.uint64(binades + 1)).astype(np.int64)
        signed = np.ldexp(mantissa, -exponent) * np.where(z & np.uint64(1), -1.0, 1.0)
        return torch.from_numpy(signed.astype(np.float32)).view(*shape)

    def cancelling(self, rows: int, width: int, sign: float, dtype: torch.dtype) -> Tensor:
        """Rows [u, sign * reversed u] and a last entry of their own: against rows of the other sign they sum to that entry's product."""
        half = self.values(rows, (width - 1) // 2)
        own = self.values(rows, width - 2 * half.shape[1]) * 2.0**-20
        return torch.cat([half, sign * half.flip(1), own], dim=1).to(dtype)


class _Native:
    """Ops of a build on plain weights."""

    def __init__(self, library: NativeLibrary) -> None:
        self._ops = NativeOps(library)
        self.rmsnorm, self.rope, self.sample = self._ops.rmsnorm, self._ops.rope, self._ops.sample

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None, shards: int) -> Tensor:
        return self._ops.linear(x, self._ops.pack_linear(w, bias, shards))

    def linear_f32(self, x: Tensor, w: Tensor) -> Tensor:
        return self._ops.linear_f32(x, self._ops.pack_linear(w))

    def linear_residual(self, x: Tensor, w: Tensor, residual: Tensor, shards: int) -> Tensor:
        return self._ops.linear(x, self._ops.pack_linear(w, shards=shards), residual_TN=residual)

    def linear_silu_mul(self, x: Tensor, w: Tensor) -> Tensor:
        return self._ops.linear_silu_mul(x, self._ops.pack_linear(w, gate_up=True))

    def linear_gelu_mul(self, x: Tensor, w: Tensor) -> Tensor:
        return self._ops.linear_gelu_mul(x, self._ops.pack_linear(w, gate_up=True))

    def linear_softcap(self, x: Tensor, w: Tensor, cap: float) -> Tensor:
        return self._ops.linear_softcap(x, self._ops.pack_linear(w), cap)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, num_keys: Tensor, block_tokens: int, *options: Any) -> Tensor:
        return self._ops.attention(q, k, v, num_keys, q.shape[2] ** -0.5, *options, block_tokens=block_tokens)


class _Reference:
    """The same of the specification."""

    def __init__(self) -> None:
        self.rmsnorm, self.rope, self.sample, self.linear_f32 = ref.rmsnorm, ref.rope, ref.sample, ref.linear_f32

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None, shards: int) -> Tensor:
        return ref.linear(x, w, bias, shards)

    def linear_residual(self, x: Tensor, w: Tensor, residual: Tensor, shards: int) -> Tensor:
        return ref.linear_residual(x, w, residual, shards)

    def linear_silu_mul(self, x: Tensor, w: Tensor) -> Tensor:
        gate, up = ref.linear(x, w).chunk(2, dim=1)
        return ref.silu_mul(gate, up)

    def linear_gelu_mul(self, x: Tensor, w: Tensor) -> Tensor:
        gate, up = ref.linear(x, w).chunk(2, dim=1)
        return ref.gelu_mul(gate, up)

    def linear_softcap(self, x: Tensor, w: Tensor, cap: float) -> Tensor:
        return ref.softcap(ref.linear(x, w), cap)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, num_keys: Tensor, block_tokens: int, *options: Any) -> Tensor:
        return ref.attention(q, k, v, num_keys, q.shape[2] ** -0.5, *options)


_Ops = _Native | _Reference


def _linear(ops: _Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    numbers = _Numbers(1)
    x, w = numbers.cancelling(33, 97, 1.0, dtype), numbers.cancelling(40, 97, -1.0, dtype)
    yield ops.linear(x, w, None, 1)
    yield ops.linear(x[:1], w, numbers.values(40).to(dtype), 1)


def _linear_shards(ops: _Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    numbers = _Numbers(2)
    x, w = numbers.cancelling(3, 512, 1.0, dtype), numbers.cancelling(8, 512, -1.0, dtype)
    residual = (numbers.values(3, 8) * 2.0**-20).to(dtype)
    for shards in SHARDS:
        yield ops.linear_residual(x, w, residual, shards)


def _linear_f32(ops: _Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    numbers = _Numbers(9)
    yield ops.linear_f32(numbers.cancelling(33, 97, 1.0, dtype), numbers.cancelling(40, 97, -1.0, dtype))


def _silu(ops: _Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    numbers = _Numbers(3)
    yield ops.linear_silu_mul(numbers.values(5, 32).to(dtype), numbers.values(96, 32).to(dtype))
    yield ops.linear_silu_mul((numbers.values(2, 3) * 8).to(dtype), (numbers.values(64, 3) * 8).to(dtype))


def _gelu(ops: _Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    numbers = _Numbers(10)
    yield ops.linear_gelu_mul(numbers.values(5, 3).to(dtype), numbers.values(96, 3).to(dtype))


def _softcap(ops: _Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    numbers = _Numbers(11)
    yield ops.linear_softcap(numbers.values(5, 3, binades=6).to(dtype), numbers.values(96, 3).to(dtype), 1.7)


def _rmsnorm(ops: _Ops, dtype: torch.dtype, *options: Any) -> Iterator[Tensor]:
    numbers = _Numbers(4)
    for width in (100, 192):
        yield ops.rmsnorm(numbers.values(3, width, binades=12).to(dtype), numbers.values(width).to(dtype), 1e-5, *options)


def _rmsnorm_one_plus(ops: _Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    yield from _rmsnorm(ops, dtype, True)


def _rope(ops: _Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    numbers = _Numbers(5)
    yield ops.rope(numbers.values(3, 4, 32).to(dtype), (numbers.values(3, 16) / 2).to(dtype), (numbers.values(3, 16) / 2).to(dtype))


def _rope_norm(ops: _Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    numbers = _Numbers(8)
    x, norm = numbers.values(3, 4, 80, binades=12).to(dtype), numbers.values(80).to(dtype)
    cos, sin = (numbers.values(3, 40) / 2).to(dtype), (numbers.values(3, 40) / 2).to(dtype)
    yield ops.rope(x, cos, sin, norm, 1e-6)


def _attention(ops: _Ops, dtype: torch.dtype, *options: Any) -> Iterator[Tensor]:
    numbers = _Numbers(6)
    q, k = numbers.cancelling(5 * 4, 48, 1.0, dtype).view(5, 4, 48), numbers.cancelling(75 * 2, 48, -1.0, dtype).view(75, 2, 48)
    k[::7] = (numbers.values(11, 2, 48) / 2).to(dtype)  # some scores that differ
    v = numbers.values(75, 2, 48)
    v[40:75] = -v[5:40]
    for block_tokens in (32, 4):
        yield ops.attention(q, k, v.to(dtype), torch.tensor([1, 33, 64, 74, 75]), block_tokens, *options)


def _attention_window(ops: _Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    yield from _attention(ops, dtype, 37)


def _attention_softcap(ops: _Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    yield from _attention(ops, dtype, None, 0.3)


def _sample(ops: _Ops, dtype: torch.dtype, **changes: Any) -> Iterator[SampleResult]:
    numbers = _Numbers(7)
    logits = (numbers.values(8, 300, binades=6) * 4).to(dtype)
    every = np.ones(8, np.bool_)
    yield ops.sample(
        logits,
        SamplerRows(
            temperature=np.array([0, 1, 1, 0.7, 1.3, 1, 0.6, 2.0]),
            top_p=np.array([1, 1, 0.8, 1, 0.9, 1, 0.95, 1.0]),
            top_k=np.array([0, 0, 0, 20, 50, 0, 0, 3]),
            min_p=np.array([0, 0, 0, 0, 0.01, 0.1, 0, 0], np.float32),
            seed=numbers.words(8),
            sample_index=np.arange(8, dtype=np.uint32),
            position=np.arange(100, 108, dtype=np.uint32),
            forced=np.array([-1, -1, -1, -1, -1, -1, 11, -1]),
            want_model=every,
            want_entropy=every,
            banned=[[], [], [3, 4], [], [], [], [], []],
            vocab_limit=290,
            **changes,
        ),
    )


def _sample_changed(ops: _Ops, dtype: torch.dtype) -> Iterator[SampleResult]:
    values = (_Numbers(9).values(3, 100).double() * 2).tolist()
    entries = [(i * 3, b, 1.0 + abs(r), s) for i, (b, r, s) in enumerate(zip(*values, strict=True))]
    allowed = [None, range(0, 290, 7), None, range(40), None, None, [3, 11, 150], None]
    yield from _sample(ops, dtype, adjust=[entries, entries, []] * 2 + [entries] * 2, allowed=allowed, top_n=np.array([20, 5, 0, 3] * 2))


_PROBES: dict[str, Any] = {
    "linear": _linear, "linear_shards": _linear_shards, "linear_f32": _linear_f32, "silu_mul": _silu, "gelu_mul": _gelu,
    "softcap": _softcap, "rmsnorm": _rmsnorm, "rmsnorm_one_plus": _rmsnorm_one_plus, "rope": _rope, "rope_norm": _rope_norm,
    "attention": _attention, "attention_window": _attention_window, "attention_softcap": _attention_softcap, "sample": _sample,
    "sample_changed": _sample_changed,
}  # fmt: skip


def _bytes(result: Tensor | SampleResult) -> bytes:
    if isinstance(result, SampleResult):
        return b"".join(getattr(result, name).tobytes() for name in SampleResult.__slots__)
    kind = torch.int16 if result.dtype == torch.bfloat16 else torch.int32
    return result.contiguous().view(kind).numpy().tobytes()


@lru_cache
def probe_digests(library: NativeLibrary | None) -> dict[str, str]:
    """Digests of what a build (None: the reference) computes, by "op/dtype". Some tens of milliseconds; once per process."""
    ops: _Ops = _Reference() if library is None else _Native(library)
    digests = {}
    with torch.inference_mode():
        for name, probe in _PROBES.items():
            for dtype_name, dtype in DTYPES.items():
                hashed = hashlib.blake2b(digest_size=6)
                for result in probe(ops, dtype):
                    hashed.update(_bytes(result))
                digests[f"{name}/{dtype_name}"] = hashed.hexdigest()
    return digests


def failed_probes(library: NativeLibrary | None) -> list[str]:
    """Which ops, as "op/dtype", of a build (None: the reference) give other bits than the specification."""
    return [name for name, digest in probe_digests(library).items() if digest != EXPECTED.get(name)]


def numerics_fingerprint(library: NativeLibrary | None, k_shards: int, head_dtype: str | None = None) -> str:
    """Fingerprint of a build (None: the reference): specification version, shards, head, probe outputs.

    E.g. "v1-k4-5f3a9c0b12de", or "v1-k4-head32-5f3a9c0b12de" where `head_dtype` is "float32".
    """
    text = repr((SPEC_VERSION, k_shards, sorted(probe_digests(library).items())))
    head = "" if head_dtype is None else "-head32"
    return f"v{SPEC_VERSION}-k{k_shards}{head}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
