"""Finds, checks and calls the CPU kernel builds in `native/` (ctypes over a C ABI; see native/program.h)."""

from __future__ import annotations

import ctypes
import os
import platform
from ctypes import c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BUILDS = ("amx", "avx512", "avx2")
_NEEDS = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "amx": {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16"},
}

OP_EMBED, OP_RMSNORM, OP_LINEAR, OP_ROPE_STORE, OP_ATTENTION, OP_COPY_BLOCKS, OP_LOGITS, OP_PANELS, OP_SAMPLE = range(1, 10)
OP_ADD_PARTS, OP_LOGITS_PART, OP_SAMPLE_PARTS = range(10, 13)
OP_LINEAR_PLAIN, OP_ACTIVATION = 13, 14
EP_STORE, EP_RESIDUAL, EP_SILU_MUL, EP_GELU_MUL, EP_ROWS = range(5)

_CODES = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}


class Op(ctypes.Structure):
    """`struct Op` of native/program.h."""

    _fields_ = (
        *((n, c_int32) for n in ("kind", "dtype", "out_dtype", "w", "bias", "w2", "window", "n", "k", "shards", "epilogue")),
        *((n, c_void_p) for n in ("in_", "out", "cos", "sin")),
        *((n, c_int64) for n in ("ld_in", "ld_out")),
        *((n, c_int32) for n in ("layer", "rows_mode")),
        *((n, c_float) for n in ("eps", "scale", "softcap")),
        *((n, c_int32) for n in ("one_plus", "heads", "kv_heads", "head_dim", "packed", "parts", "first_block")),
        ("part_stride", c_int64),
    )


class Step(ctypes.Structure):
    """`struct Step` of native/program.h."""

    _fields_ = (
        *((n, c_int32) for n in ("num_tokens", "num_rows", "row_begin", "row_end")),
        *((n, c_void_p) for n in ("ids", "positions", "kv")),
        *((n, c_int64) for n in ("kv_block_bytes", "kv_layer_bytes")),
        *((n, c_int32) for n in ("block_tokens", "num_layers")),
        *((n, c_int32) for n in ("num_runs", "num_items", "num_copies", "table_stride")),
        *((n, c_void_p) for n in ("runs", "items", "num_keys", "first_key", "token_slot", "tables", "copies", "weights")),
        *((n, c_void_p) for n in ("hidden_row", "logits")),
        ("ld_logits", c_int64),
        *((n, c_int32) for n in ("piece_rows", "vocab_limit")),
        *((n, c_void_p) for n in ("temperature", "top_p", "min_p", "top_k", "seed", "sample_index", "row_position", "forced", "want")),
        *((n, c_void_p) for n in ("ban_offset", "banned", "adjust_offset", "adjust", "allowed_row", "allowed")),
        ("allowed_words", c_int64),
        ("top_n", c_void_p),
        *(
            (n, c_void_p)
            for n in ("out_token", "out_logprob", "out_temperature_logprob", "out_model_logprob", "out_entropy", "out_top_id")
        ),
        *((n, c_void_p) for n in ("out_top_logprob", "out_nonfinite", "out_mask")),
        ("mask_words", c_int64),
    )


def cpu_flags() -> set[str]:
    """Instruction-set flags of this CPU, as Linux names them; empty where they cannot be read."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()


def library_path(build: str) -> Path | None:
    """The shared library of a build, or None if it was not compiled."""
    found = sorted((Path(__file__).parent / "native").glob(f"_{build}.*.so")) + sorted(
        (Path(__file__).parent / "native").glob(f"_{build}.so")
    )
    return found[0] if found else None


def available_builds() -> list[str]:
    """Builds that are compiled and that this CPU runs, best first."""
    flags = cpu_flags()
    return [b for b in BUILDS if flags >= _NEEDS[b] and library_path(b)]


@lru_cache
def omp_parallel() -> int:
    """Address of GOMP_parallel in the OpenMP runtime this process has loaded (torch's own), 0 if there is none.

    Using torch's pool, never a second one, keeps two sets of threads from spinning against each other.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return 0
    mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")}
    for name in ("libgomp", "libiomp5", "libomp"):
        paths = {path for path in mapped if name in os.path.basename(path)}
        for path in sorted(paths):
            fn = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if fn is not None:
                return ctypes.cast(fn, c_void_p).value or 0
    return 0


class NativeLibrary:
    """One loaded build. `run` executes a program; `pack` and `unpack` move weights into and out of its layout."""

    def __init__(self, build: str) -> None:
        path = library_path(build)
        if path is None:
            raise OSError(f"the {build} kernels are not compiled (pip install with a C++ compiler builds them)")
        self.build = build
        self._lib: Any = ctypes.CDLL(str(path))
        abi = (c_int64 * 3)()
        self._lib.rs_abi(abi)
        if tuple(abi) != (ctypes.sizeof(Op), ctypes.sizeof(Step), OP_ACTIVATION):
            raise OSError(f"{path} does not match this version of rollsync (structs or ops differ): rebuild it")
        if self._lib.rs_init() != 0:
            raise OSError(f"the system refuses the {build} kernels (no permission for tile registers)")
        self._lib.rs_packed_elems.restype = c_int64
        self._lib.rs_packed_elems.argtypes = [c_int] * 4
        layout = [c_int] * 7
        self._lib.rs_pack.argtypes = [c_int, c_void_p, c_void_p, c_int64, *layout]
        self._lib.rs_unpack.argtypes = [c_int, c_void_p, c_void_p, c_int64, *layout]
        self._lib.rs_run.argtypes = [c_void_p, c_int, c_int, c_void_p, c_int, c_void_p]
        self._lib.rs_digest.argtypes = [c_int, c_void_p, c_int64, c_int64, c_int64, c_uint64, c_uint64, c_void_p]
        self._lib.rs_take.argtypes = [*[c_int] * 3, c_void_p, c_void_p, *[c_int] * 6, c_uint64, c_uint64, c_void_p]
        self._lib.rs_digest.restype = self._lib.rs_take.restype = None
        self._lib.rs_pack.restype = self._lib.rs_unpack.restype = self._lib.rs_run.restype = None

    def packed_elems(self, dtype: int, n: int, k: int, interleave: bool) -> int:
        """Elements of the packed form of an [n, k] weight (dtype 0 bfloat16, 1 float32)."""
        return int(self._lib.rs_packed_elems(dtype, n, k, interleave))

    def pack(
        self, dtype: int, dst: int, src: int, ld_src: int, n: int, k: int, interleave: bool, row0: int, rows: int, col0: int, cols: int
    ) -> None:
        """Write the slice [row0 + rows, col0 + cols] of a logical [n, k] weight from row-major memory."""
        self._lib.rs_pack(dtype, dst, src, ld_src, n, k, interleave, row0, rows, col0, cols)

    def unpack(
        self, dtype: int, src: int, dst: int, ld_dst: int, n: int, k: int, interleave: bool, row0: int, rows: int, col0: int, cols: int
    ) -> None:
        """Read a slice back, bit for bit."""
        self._lib.rs_unpack(dtype, src, dst, ld_dst, n, k, interleave, row0, rows, col0, cols)

    def digest(self, values: Tensor, first: int, width: int) -> tuple[int, int]:
        """What a piece of a tensor adds to its digest modulo 2**64 (see weight_sync/digest.py), and its elements that are not finite.

        Args:
            values: [rows, cols] bfloat16, float32 or float16; rows may be strided.
            first: row-major place of its first element in the whole tensor.
            width: places from one row to the next.
        """
        out = (c_uint64 * 2)()
        rows, cols = values.shape
        self._lib.rs_digest(_CODES[values.dtype], values.data_ptr(), values.stride(0), rows, cols, first, width, out)
        return out[0], out[1]

    def take(
        self, dtype: int, layout: int, dst: int, values: Tensor, n: int, k: int, row0: int, col0: int, first: int, width: int
    ) -> tuple[int, int]:
        """`digest` of a piece, and the piece written to (row0, col0) of a weight [n, k], in one pass over its memory.

        Args:
            dtype: of the weight, 0 bfloat16 or 1 float32.
            layout: 0 packed, 1 packed with gate beside up rows, 2 plain rows.
            values: [rows, cols], contiguous, of the weight's dtype; or float32 for a bfloat16 weight, rounded to nearest.
        """
        out = (c_uint64 * 2)()
        rows, cols = values.shape
        self._lib.rs_take(_CODES[values.dtype], dtype, layout, dst, values.data_ptr(), n, k, row0, rows, col0, cols, first, width, out)
        return out[0], out[1]

    def copy(self, target: Tensor, values: Tensor, first: int, width: int) -> tuple[int, int]:
        """Copy `values` to `target`, and `digest` what is written, in one pass over memory. It stays in the caches for its reader.

        Args:
            target, values: [rows, cols], contiguous, of equal dtype; or float32 into bfloat16, rounded to nearest.
        """
        out = (c_uint64 * 2)()
        rows, cols = values.shape
        codes = _CODES[values.dtype], _CODES[target.dtype]
        self._lib.rs_take(*codes, 3, target.data_ptr(), values.data_ptr(), rows, cols, 0, rows, 0, cols, first, width, out)
        return out[0], out[1]

    def run(self, ops: Any, begin: int, end: int, step: Step, threads: int) -> None:
        """Run ops [begin, end) on one step; the GIL is released meanwhile."""
        self._lib.rs_run(ops, begin, end, ctypes.byref(step), threads, omp_parallel() if threads > 1 else 0)


@lru_cache
def load_build(build: str) -> NativeLibrary:
    """The library of one build, loaded once per process."""
    return NativeLibrary(build)


__all__ = [
    "BUILDS",
    "NativeLibrary",
    "Op",
    "Step",
    "available_builds",
    "load_build",
    "omp_parallel",
]
