"""Compiles the kernels for gfx942, an AITER that calls them, and the production ck engine over it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rocm_folder
from interpreter import build as build_interpreter

from ck.sources import PACKAGE, Sources, unpack

__all__ = ["TARGET", "build"]

TARGET = "gfx942"
ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "packages" / "attn-jax-rocm-sink"
AITER = PROJECT / "tests" / "fakes" / "aiter"
"""The headers of an AITER without sinks whose HIP and CK types are the real ones."""

CLANG = "clang++-22"
HIP = ("-x", "hip", "-O3", "-fPIC", "--hip-version=7.1")
# As AITER compiles them, without its -fgpu-flush-denormals-to-zero: the interpreter keeps subnormals and has no other mode.
KERNELS = ("-std=c++17", f"--offload-arch={TARGET}", "-DCK_TILE_FMHA_FWD_FAST_EXP2=1", "-DCK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=3", "-w")
DEFINES = ("-DFAKE_AITER_OLD", "-DFAKE_AITER_OVER_CK")
CALLS = ("-std=c++20", "--offload-host-only", "-D__HIP_PLATFORM_AMD__", *DEFINES)
HEADERS_OF_HIP = {"hip_bfloat16.h": "", "hip_fp16.h": "#include <cassert>\n"}
"""Headers that CK includes and Triton's wheel lacks, with what CK takes from them."""


def _include(sources: Sources, folder: Path) -> list[str]:
    rocm, missing = rocm_folder.make(folder / "rocm"), folder / "missing" / "hip"
    missing.mkdir(parents=True, exist_ok=True)
    for name, text in HEADERS_OF_HIP.items():
        (missing / name).write_text(text)
    paths = ["-isystem", str(rocm / "include"), "-isystem", str(missing.parent), "-isystem", str(sources.ck / "include")]
    return [f"--rocm-path={rocm}", *paths, "-isystem", str(sources.example)]


def _compile(source: Path, flags: list[str], folder: Path) -> Path:
    """The object file of ``source``; one with the same source, flags and package is kept. A kernel takes up to a minute of one core."""
    calls = b"".join(header.read_bytes() for header in sorted(AITER.glob("*.h"))) if source.suffix == ".cc" else b""
    digest = hashlib.sha256(repr((PACKAGE, flags)).encode() + source.read_bytes() + calls).hexdigest()[:16]
    target = folder / f"{digest}.o"
    if not target.exists():
        unfinished = folder / f"{digest}.unfinished"
        subprocess.run([CLANG, *flags, "-c", str(source), "-o", str(unfinished)], check=True)
        unfinished.rename(target)
    return target


def _aiter(sources: Sources, runtime: Path, folder: Path, jobs: int) -> Path:
    """A folder like a checkout of AITER, with its two libraries, whose functions are those of mha_fwd.cc and mha_bwd.cc."""
    include, objects = _include(sources, folder), folder / "objects"
    objects.mkdir(exist_ok=True)
    checkout = folder / "aiter"
    for link, target in ((checkout / "csrc" / "include", AITER), (checkout / "3rdparty" / "composable_kernel", sources.ck)):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    work = []
    for direction, files in sources.generated.items():
        for file in files:  # the function that chooses among kernels holds none
            host_only = ["--offload-host-only"] if file.stem.endswith("_api") else []
            work.append((direction, file, [*HIP, *KERNELS, *host_only, "-fvisibility=hidden", *include]))
        work.append((direction, Path(__file__).parent / f"mha_{direction}.cc", [*HIP, *CALLS, *include, "-I", str(AITER)]))
    with ThreadPoolExecutor(jobs) as pool:
        made = list(pool.map(lambda one: (one[0], _compile(one[1], one[2], objects)), work))
    for direction in sources.generated:
        files = [str(path) for of, path in made if of == direction]
        library = checkout / f"libmha_{direction}.so"
        subprocess.run([CLANG, "-shared", "-Wl,--no-undefined", *files, str(runtime), "-o", str(library)], check=True)
    return checkout


def build(folder: Path, jobs: int = 2) -> Path:
    """libattn_jax_rocm_sink_ck.so, built by the package's own CMake file over these libraries, for the wheel in ``folder``."""
    runtime = build_interpreter()
    checkout = _aiter(unpack(folder), runtime, folder, jobs)
    options = {
        "ATTN_HIP_ROCM": folder / "rocm",
        "ATTN_HIP_COMPILER": f"/usr/bin/{CLANG}",
        "ATTN_HIP_RUNTIME": runtime,
        "ATTN_HIP_ARCHITECTURES": TARGET,
        "ATTN_HIP_FLAGS": ";".join(("--hip-version=7.1", "-isystem", str(folder / "missing"), *DEFINES)),
        "ATTN_CK_AITER": checkout,
        "Python_EXECUTABLE": sys.executable,
    }
    arguments = [f"-D{name}={value}" for name, value in options.items()]
    engine = folder / "engine"
    subprocess.run(["cmake", "-G", "Ninja", "-S", str(PROJECT), "-B", str(engine), *arguments], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(engine), "--target", "attn_jax_rocm_sink_ck"], check=True)
    return engine / "libattn_jax_rocm_sink_ck.so"
