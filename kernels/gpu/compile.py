"""`python -m rollsync.kernels.gpu.compile`: build every kernel variant without a GPU, and say what the assembler made of it.

What is printed are properties of binaries (registers, shared memory, spills, the matrix instruction), never speeds.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .launch import Variant
from .variants import all_variants, main_variants

ARCHES = (80, 90, 100)
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""of shared memory that a program can have, by architecture"""
INSTRUCTIONS = (("tcgen05", "tcgen05.mma"), ("wgmma", "wgmma.mma_async"), ("mma.sync", "mma.sync"))
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def source_of(variant: Variant) -> Any:
    """What a launch of `variant` hands to the compiler."""
    names = variant.fn.arg_names
    unknown = set(names) ^ {*variant.types, *variant.constants}
    assert not unknown, f"{variant.name}: {sorted(unknown)} are not both in the kernel and in its variant"
    return ASTSource(
        fn=variant.fn,
        signature={name: variant.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned},
    )


def build(variant: Variant, arch: int) -> Any:
    """The compiled kernel."""
    return triton.compile(source_of(variant), target=GPUTarget("cuda", arch, 32), options=variant.options)


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of local memory per thread: what did not fit into them)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(_TOOLS / "cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {text!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def describe(variant: Variant, arch: int, main: bool = False) -> dict[str, Any]:
    """A row of the table; `main` says whether it is one of `main_variants`."""
    kernel = build(variant, arch)
    ptx = kernel.asm["ptx"]
    registers, local = resources(kernel.asm["cubin"])
    return {
        "variant": variant.name,
        "arch": arch,
        "registers": registers,
        "local_bytes": local,
        "shared_bytes": kernel.metadata.shared,
        "warps": variant.num_warps,
        "stages": variant.num_stages,
        "matrix": next((name for name, text in INSTRUCTIONS if text in ptx), "-"),
        "main": main,
        "fused": len(re.findall(r"\bfma\.rn\.f32\b", ptx)),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    titles = ("variant", "sm", "registers", "local bytes", "shared bytes", "warps", "stages", "matrix instruction")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    names = ("variant", "arch", "registers", "local_bytes", "shared_bytes", "warps", "stages", "matrix")
    return "\n".join([*lines, *("| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile every GPU kernel variant; no GPU is needed.")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHES), choices=ARCHES, metavar="SM", help="80, 90, 100")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--main", action="store_true", help="only where a step's time goes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 runs kernels in Python and compiles none: unset it")
    main = {variant.name for variant in main_variants()}
    chosen = [variant for variant in (main_variants() if args.main else all_variants()) if args.only in variant.name]
    rows = [describe(variant, arch, variant.name in main) for variant in chosen for arch in args.arch]
    print(json.dumps(rows, indent=1) if args.json else table(rows))


if __name__ == "__main__":
    main()
