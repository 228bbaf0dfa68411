"""Compiles the interpreter: one shared library with the name of ROCm's runtime."""

from __future__ import annotations

import hashlib
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

__all__ = ["LIBRARY", "build"]

LIBRARY = "libamdhip64.so.7"
SOURCES = Path(__file__).parent / "src"
ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build" / "amd-interpreter"
HEADERS = ROOT / "packages" / "attn-spec" / "src" / "attn_spec" / "include"
# No flag lets the compiler change a value: contraction is off, and the last two only allow loops over lanes to be vectorised.
FLAGS = ("-std=c++20", "-march=native", "-fPIC", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing", "-ffp-contract=off")
FLAGS += ("-fno-trapping-math", "-fno-math-errno", "-D__HIP_PLATFORM_AMD__")
QUICKLY = ("code_object", "control", "disassembly", "fat_binary", "hip_device", "hip_module", "metadata", "memory", "scalar")
"""Sources whose speed matters little: most of the time goes into compiling."""


def hip_headers() -> Path:
    """The HIP headers in Triton's wheel."""
    package = find_spec("triton")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("triton is not installed: its wheel has the HIP headers")
    return Path(package.submodule_search_locations[0]) / "backends" / "amd" / "include"


def build(folder: Path = BUILD) -> Path:
    """The path of the library. What a source, a header or a flag has changed is compiled again; all of it takes about 30 s of one core."""
    flags = [*FLAGS, f"-I{HEADERS}", "-isystem", str(hip_headers())]
    shared = hashlib.sha256(repr((flags, QUICKLY)).encode())
    for header in sorted(SOURCES.glob("*.h")):
        shared.update(header.read_bytes())
    objects = {source: f"{source.stem}-{_digest(shared, source)}.o" for source in sorted(SOURCES.glob("*.cpp"))}
    place = folder / hashlib.sha256(repr(sorted(objects.values())).encode()).hexdigest()[:16]
    library = place / LIBRARY
    if library.exists():
        return library
    place.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> str:
        target = folder / objects[source]
        if not target.exists():
            unfinished = place / target.name
            level = "-O1" if source.stem in QUICKLY else "-O2"
            subprocess.run(["g++", level, *flags, "-c", str(source), "-o", str(unfinished)], check=True)
            unfinished.rename(target)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        files = list(pool.map(compiled, objects))
    unfinished = place / "unfinished.so"
    subprocess.run(["g++", "-shared", f"-Wl,-soname,{LIBRARY}", "-Wl,--no-undefined", "-o", str(unfinished), *files], check=True)
    return unfinished.rename(library)


def _digest(shared: hashlib._Hash, source: Path) -> str:
    whole = shared.copy()
    whole.update(source.read_bytes())
    return whole.hexdigest()[:16]
