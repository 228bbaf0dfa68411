"""A ROCm folder that clang compiles HIP with, made of the HIP headers and device libraries in Triton's wheel. No AMD GPU is needed.

The wheel has the headers, ``ocml.bc`` and ``ockl.bc``. The small libraries that hold one constant each (``oclc_*.bc``, which clang links by
name) are compiled here, with the constants that ocml and ockl declare:
https://github.com/ROCm/llvm-project/blob/amd-staging/amd/device-libs/README.md
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

__all__ = ["RUNTIME", "TARGETS", "link_stub", "make"]

TARGETS: Mapping[str, int] = {"gfx90a": 9010, "gfx942": 9402, "gfx950": 9500, "gfx1100": 11000}
"""AMD GPUs that the HIP kernels are compiled for, with the ISA version that the device libraries read."""

RUNTIME = "libamdhip64.so.7"
"""The runtime library of ROCm 7, by the name that programs are linked to."""

_SWITCHES = ("finite_only", "unsafe_math", "correctly_rounded_sqrt", "wavefrontsize64", "daz_opt")
_SYMBOLS = {"finite_only": "finite_only_opt", "unsafe_math": "unsafe_math_opt", "correctly_rounded_sqrt": "correctly_rounded_sqrt32"}


def _wheel() -> Path:
    package = find_spec("triton")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("triton is not installed: its wheel has the HIP headers and device libraries")
    return Path(package.submodule_search_locations[0]) / "backends" / "amd"


def _library(folder: Path, name: str, constant: str = "") -> None:
    command = ["clang-22", "--target=amdgcn-amd-amdhsa", "-nogpulib", "-x", "c", "-emit-llvm", "-c", "-", "-o", str(folder / f"{name}.bc")]
    subprocess.run(command, input=f"{constant}\n", text=True, check=True)


def _constant(symbol: str, kind: str, value: int) -> str:
    return f"const __attribute__((address_space(4))) {kind} __oclc_{symbol} = {value};"


def make(folder: Path) -> Path:
    """Write the folder and return it; what is there is replaced. Takes about a second.

    Raises:
        RuntimeError: Triton is not installed. FileNotFoundError, CalledProcessError: clang-22 is missing or fails.
    """
    wheel, bitcode = _wheel(), folder / "amdgcn" / "bitcode"
    shutil.rmtree(folder, ignore_errors=True)
    bitcode.mkdir(parents=True)
    (folder / "include").symlink_to(wheel / "include")
    for library in ("ocml", "ockl"):
        (bitcode / f"{library}.bc").symlink_to(wheel / "lib" / f"{library}.bc")
    _library(bitcode, "opencl")
    for switch in _SWITCHES:
        for value, name in enumerate(("off", "on")):
            _library(bitcode, f"oclc_{switch}_{name}", _constant(_SYMBOLS.get(switch, switch), "char", value))
    for abi in (500, 600):
        _library(bitcode, f"oclc_abi_version_{abi}", _constant("ABI_version", "int", abi))
    for target, version in TARGETS.items():
        _library(bitcode, f"oclc_isa_version_{target.removeprefix('gfx')}", _constant("ISA_version", "int", version))
    return folder


def link_stub(folder: Path, functions: tuple[str, ...]) -> Path:
    """A library named like the HIP runtime that defines ``functions``, to link with and never to run. Returns its path."""
    source = "".join(f"void {name}(void) {{}}\n" for name in functions)
    library = folder / "libamdhip64.so"
    command = ["clang-22", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{RUNTIME}", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    return library
