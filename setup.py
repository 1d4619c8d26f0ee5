"""Builds the CPU kernels: one source, one shared library per instruction set, all optional.

They are plain C-ABI libraries loaded by ctypes (kernels/native_lib.py). Without a compiler the package installs all the
same and runs on kernels/reference.py, slowly.
"""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

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


class BuildKernels(build_ext):  # type: ignore[misc]
    """A kernel that does not compile leaves no older one behind that would run in its place."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception:
            built = Path(self.get_ext_fullpath(ext.name))
            for stale in (built, NATIVE / built.name):
                stale.unlink(missing_ok=True)
            raise


# The script's name keeps this file out of the package, whose folder it is in.
setup(script_name="setup.py", ext_modules=extensions(), cmdclass={"build_ext": BuildKernels})
