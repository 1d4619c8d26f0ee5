"""The GPU kernels without a GPU: compiled for each architecture, and run by Triton's interpreter. Both in processes of their own."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rollsync.kernels import spec

pytest.importorskip("triton", reason="Triton compiles on Linux x86_64 only")
HERE = Path(__file__).parent
ARCHES = (80, 90, 100)
INSTRUCTIONS = {80: {"mma.sync"}, 90: {"wgmma"}, 100: {"tcgen05"}}


def compile_all(env: dict[str, str], *choices: list[str]) -> list[dict[str, Any]]:
    """A row per variant and architecture of each choice, compiled side by side."""
    rows = []
    command = [sys.executable, "-m", "rollsync.kernels.gpu.compile", "--json"]
    running = [subprocess.Popen([*command, *some], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for some in choices]
    for process in running:
        out, err = process.communicate(timeout=900)
        assert process.returncode == 0, err[-3000:]
        rows += json.loads(out)
    return rows


def too_large(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    shared = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
    return [(row["variant"], row["arch"]) for row in rows if row["shared_bytes"] > shared[row["arch"]]]


@pytest.fixture(scope="module")
def compiled(environment: dict[str, str]) -> list[dict[str, Any]]:
    """One or two variants of each kernel for every architecture; all flags, shapes and dtypes of them are in `test_every_variant`."""
    return compile_all(environment, *(["--quick", "--arch", str(arch)] for arch in ARCHES))


def test_variants_compile_and_fit(compiled: list[dict[str, Any]]) -> None:
    each = [{row["variant"] for row in compiled if row["arch"] == arch} for arch in ARCHES]
    assert each[0] == each[1] == each[2] and len(each[0]) >= 20
    assert not too_large(compiled)


@pytest.mark.slow
def test_every_variant(environment: dict[str, str]) -> None:
    rows = compile_all(environment, *(["--arch", str(arch)] for arch in ARCHES))
    assert len(rows) > 150
    assert not too_large(rows)
    assert not [row for row in rows if row["main"] and row["local_bytes"]]
    assert not [row for row in rows if "/large" in row["variant"] and row["matrix"] not in INSTRUCTIONS[row["arch"]]]


def test_main_variants_do_not_spill_and_use_the_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    main = [row for row in compiled if row["main"]]
    assert len(main) >= 3 * 7
    assert not [row for row in main if row["local_bytes"]]
    assert not [row for row in main if row["matrix"] not in INSTRUCTIONS[row["arch"]]]


def test_nothing_is_fused_that_is_not_written_so(compiled: list[dict[str, Any]]) -> None:
    # Norms, rotation, parts and embedding write no fma; a compiler that contracts anyway would put some there.
    plain = [row for row in compiled if row["variant"].split("/")[0].startswith(("rmsnorm", "rope_store", "add_parts", "embed"))]
    assert len(plain) >= 6
    assert not [row for row in plain if row["fused"]]


def test_ln_has_the_specifications_constants(compiled: list[dict[str, Any]]) -> None:
    # Not as float32, which some versions of Triton make of constants in comparisons.
    bits = {struct.pack(">d", value).hex().upper() for value in (spec.SQRT2, spec.LN2)}
    rows = {row["variant"].split("/")[0]: row for row in compiled}
    found = {kind: bits <= {*row["doubles"]} for kind, row in rows.items() if kind.startswith(("sample", "logprobs_e"))}
    assert found == {"sample": True, "sample_changes_mask": True, "logprobs_entropy": True}


def test_a_norm_sums_in_one_order_wherever_it_is_used(compiled: list[dict[str, Any]]) -> None:
    # Rows, gathered rows, heads within qkv, behind a residual: a trainer calls one of them, the engine others.
    orders: dict[str, set[str]] = {}
    for row in compiled:
        kind, _, shape = row["variant"].partition("/")
        if kind.startswith("rmsnorm") and row["arch"] == 90:
            orders.setdefault(shape, set()).update(row["sums"])
    assert len(orders) >= 2
    assert all(len(layouts) == 1 for layouts in orders.values()), orders


def test_launches_are_the_variants_that_were_compiled_whatever_the_batch(environment: dict[str, str]) -> None:
    command = [sys.executable, str(HERE / "launches.py")]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr[-3000:]
    seen = json.loads(found.stdout)
    assert len(seen) >= 12
    assert not [name for name, problems in seen.items() if problems], seen


def test_ops_in_the_interpreter(interpreters: dict[str, Any]) -> None:
    out, err = interpreters["ops"].communicate(timeout=900)
    assert interpreters["ops"].returncode == 0, (out + err)[-5000:]
    assert " passed" in out
