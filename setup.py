"""Builds the CPU kernels: one source, one shared library per instruction set, all optional.

They are plain C-ABI libraries loaded by ctypes (kernels/native_lib.py). Without a compiler the package installs all the
same and runs on kernels/reference.py, slowly.
"""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

COMMON = ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-g0", "-w"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
AMX = [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]
BUILDS = {"avx2": AVX2, "avx512": AVX512, "amx": AMX}
NATIVE = Path("kernels/native")
SHARED = [*map(str, sorted(NATIVE.glob("*.h"))), str(NATIVE / "native.cpp")]


def extensions() -> list[Extension]:
    if platform.machine().lower() not in ("x86_64", "amd64") or sys.platform not in ("linux", "darwin"):
        return []
    return [
        Extension(
            f"rollsync.kernels.native._{name}",
            sources=[str(NATIVE / f"{name}.cpp")],
            depends=SHARED,
            extra_compile_args=COMMON + flags,
            language="c++",
            optional=True,
        )
        for name, flags in BUILDS.items()
    ]


setup(script_name="setup.py", ext_modules=extensions())  # the name keeps this file out of the package, whose folder it is in
