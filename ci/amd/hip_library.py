"""The production library of the hip engine, built without an AMD GPU, and what is in it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rocm_folder import TARGETS, link_stub, make

__all__ = ["FUNCTIONS", "Instruction", "build", "code_object", "instructions", "metadata", "needed", "symbols"]

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "amd"

FUNCTIONS = (
    "__hipPopCallConfiguration",
    "__hipRegisterFatBinary",
    "__hipRegisterFunction",
    "__hipUnregisterFatBinary",
    "hipGetErrorString",
    "hipLaunchKernel",
    "hipMemsetAsync",
)
"""All that the library takes from the HIP runtime."""


@cache
def build() -> Path:
    """Configure and build with the project's own CMake file, for every target; what is built and has not changed is kept.

    Takes half a minute of one core. The line tables change no instruction.
    """
    folder = BUILD / "library"
    rocm = make(BUILD / "rocm")
    runtime = link_stub(BUILD, FUNCTIONS)
    options = {
        "ATTN_HIP_ROCM": rocm,
        "ATTN_HIP_COMPILER": "/usr/bin/clang++-22",
        "ATTN_HIP_RUNTIME": runtime,
        "ATTN_HIP_ARCHITECTURES": ";".join(TARGETS),
        "ATTN_HIP_FLAGS": "-gline-tables-only;-Werror",
        "Python_EXECUTABLE": sys.executable,
    }
    arguments = [f"-D{name}={value}" for name, value in options.items()]
    project = ROOT / "packages" / "attn-jax-rocm-sink"
    subprocess.run(["cmake", "-G", "Ninja", "-S", str(project), "-B", str(folder), *arguments], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder), "--target", "attn_jax_rocm_sink_hip"], check=True)
    return folder / "libattn_jax_rocm_sink_hip.so"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed(library: Path) -> set[str]:
    """Names of the libraries that the loader must find."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", _output("readelf", "--dynamic", "--wide", str(library))))


def symbols(library: Path, kind: str) -> set[str]:
    """Dynamic symbols, ``kind`` "undefined" or "defined", without their versions."""
    text = _output("nm", "--dynamic", f"--{kind}-only", "--format=posix", str(library))
    return {line.split("@")[0].split(" ")[0] for line in text.splitlines()}


@cache
def code_object(target: str) -> Path:
    """The ELF file of one AMD GPU, taken out of the library."""
    library, bundle, path = build(), BUILD / "bundle", BUILD / f"{target}.elf"
    _output("objcopy", "--output-target=binary", "--only-section=.hip_fatbin", str(library), str(bundle))
    bundler = ["clang-offload-bundler-22", "--unbundle", "--type=o", f"--targets=hipv4-amdgcn-amd-amdhsa--{target}"]
    _output(*bundler, f"--input={bundle}", f"--output={path}")
    return path


@dataclass(frozen=True)
class Instruction:
    """One instruction of a kernel, and the source line that it comes from."""

    kernel: str
    name: str
    source: str


def instructions(code: Path) -> Iterator[Instruction]:
    """Every instruction of an ELF file that has line tables."""
    kernel, source = "", ""
    for line in _output("llvm-objdump-22", "--disassemble", "--line-numbers", "--no-show-raw-insn", str(code)).splitlines():
        if label := re.fullmatch(r"[0-9a-f]+ <(.+)>:", line):
            kernel = label[1]
        elif place := re.fullmatch(r"; (/.+|\S+):(\d+)", line):
            source = _line(place[1], int(place[2]))
        elif found := re.match(r"\s+([a-z]\w+)", line):
            yield Instruction(kernel, found[1], source)


@cache
def _text(path: str) -> Sequence[str]:
    return Path(path).read_text().splitlines()


def _line(path: str, number: int) -> str:
    return _text(path)[number - 1].strip() if number > 0 else ""


def metadata(code: Path, name: str) -> dict[str, int]:
    """A number that the metadata of an ELF file states for each kernel."""
    notes = _output("llvm-readelf-22", "--notes", str(code))
    kernels = re.findall(r"\.name:\s+(\S*_kernel\S*)", notes)
    values = re.findall(rf"\.{name}:\s+(\d+)", notes)
    if len(kernels) != len(values):
        raise ValueError(f"{name} is stated for {len(values)} of {len(kernels)} kernels")
    return dict(zip(kernels, map(int, values), strict=True))
