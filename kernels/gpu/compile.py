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
from .variants import all_variants, large_variants, main_variants, quick_variants

ARCHES = (80, 90, 100)
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""of shared memory that a program can have, by architecture"""
INSTRUCTIONS = (("tcgen05", "tcgen05.mma"), ("wgmma", "wgmma.mma_async"), ("mma.sync", "mma.sync"))
LINEAR_GATED = ("linear_silu", "linear_gelu_tanh")
BEGIN, END = "<!-- variants: begin -->\n", "<!-- variants: end -->\n"
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


def sum_layouts(ttgir: str) -> list[str]:
    """How the elements of each reduction lie in threads, which is what fixes its order."""
    names = dict(re.findall(r"^(#\w+) = (#ttg\.\S+<.*>)", ttgir, re.MULTILINE))
    found = re.findall(r'"tt\.reduce".*?\}\) : \((.*?)\) ->', ttgir, re.DOTALL)
    return [re.sub(r"#\w+", lambda name: names.get(name[0], name[0]), one) for one in found]


def traffic(variant: Variant) -> str:
    """What a launch must read or write of memory at least, where its constants say: nothing that rows or keys have in common."""
    c, kind = variant.constants, variant.name.split("/")[0]
    size = 4 if "/fp32/" in variant.name else 2
    if "N" in c and "K" in c:
        return f"{(1 + (kind in LINEAR_GATED)) * c['N'] * c['K'] * size} of weights"
    if "KV_HEADS" in c and "H" in c:
        return f"{2 * c['KV_HEADS'] * c['H'] * size} per key"
    width = c.get("V", c.get("D", c.get("N")))
    return "-" if width is None else f"{width * size} per row and pass"


def describe(variant: Variant, arch: int, main: bool = False) -> dict[str, Any]:
    """A row of the table; `main` says whether it must use the tensor cores and not spill."""
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
        "bytes": traffic(variant),
        "sums": sum_layouts(kernel.asm["ttgir"]),
        "doubles": sorted(set(re.findall(r"\b0d([0-9A-F]{16})\b", ptx))),
        "fused": len(re.findall(r"\bfma\.rn\.f32\b", ptx)),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    titles = ("variant", "sm", "registers", "local bytes", "shared bytes", "warps", "stages", "matrix instruction", "bytes it must move")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    names = ("variant", "arch", "registers", "local_bytes", "shared_bytes", "warps", "stages", "matrix", "bytes")
    return "\n".join([*lines, *("| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile every GPU kernel variant; no GPU is needed.")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHES), choices=ARCHES, metavar="SM", help="80, 90, 100")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="variants whose name contains one of these")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--main", action="store_true", help="only where a step's time goes")
    some.add_argument("--quick", action="store_true", help="one or two of each kernel")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into a Markdown file, between its marks")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 runs kernels in Python and compiles none: unset it")
    main = {variant.name for variant in [*main_variants(), *large_variants()]}
    variants = main_variants() if args.main else quick_variants() if args.quick else all_variants()
    chosen = [variant for variant in variants if any(text in variant.name for text in args.only)]
    rows = [describe(variant, arch, variant.name in main) for variant in chosen for arch in args.arch]
    if args.write is None:
        print(json.dumps(rows, indent=1) if args.json else table(rows))
        return
    before, _, rest = args.write.read_text(encoding="utf-8").partition(BEGIN)
    args.write.write_text(before + BEGIN + table(rows) + "\n" + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
