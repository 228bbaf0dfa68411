"""The engines for GPUs over recording fakes of the libraries that they call, compiled once a session and run on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attn_spec
import jax
import jaxlib
import numpy as np
from attn_jax_rocm_sink import _ffi
from attn_jax_rocm_sink._config import Config
from jaxlib import version as jaxlib_version

TESTS = Path(__file__).parent
CSRC = TESTS.parent / "csrc"
CMAKE = Path(attn_spec.include_dir()).parent / "cmake"
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-Wall", "-Wextra"]
SOURCES = {
    CMAKE / "host_variant.cpp": ["-DATTN_HOST_VARIANT=baseline"],
    CMAKE / "host_dispatch.cpp": ["-DATTN_HOST_HAS_baseline", '-DATTN_HOST_FINGERPRINT="fake"'],
    CSRC / "host/engine.cc": [],
    CSRC / "cuda/engine.cc": [],
    CSRC / "cuda/sm90_engine.cc": [],
    CSRC / "cuda/questions.cc": [],
    CSRC / "xla/build.cc": [f'-DATTN_BUILD_JAXLIB="{jaxlib_version.__version__}"'],
    TESTS / "fakes/attn_cuda.cc": [],
    TESTS / "fakes/attn_cuda_sm90.cc": [],
    TESTS / "fakes/engines.cc": [],
    TESTS / "fakes/ck_runtime.cc": [],
}
OF_AITER = (CSRC / "ck/engine.cc", TESTS / "fakes/aiter.cc")
"""Compiled twice: with an AITER that takes sinks, and with an old one that does not."""
PASS = {"forward": 0, "backward": 1}
_INSTALLED: dict[str, Path] = {}


def build(folder: Path) -> tuple[Path, Path]:
    """The library of the fakes, and the same over an old AITER; compiled unless the folder has them."""
    libraries = (folder / "libengine_fakes.so", folder / "libengine_fakes_old.so")
    if all(library.exists() for library in libraries):
        return libraries
    include = [f"-I{attn_spec.include_dir()}", f"-I{TESTS / 'fakes/aiter'}", "-isystem", str(Path(jaxlib.__file__).parent / "include")]

    def compile_one(source: Path, options: list[str], suffix: str = "") -> str:
        target = folder / f"{source.parent.name}_{source.name}{suffix}.o"
        subprocess.run(["g++", *FLAGS, *options, *include, "-c", str(source), "-o", str(target)], check=True)
        return str(target)

    def link(library: Path, objects: list[str]) -> None:
        subprocess.run(["g++", "-shared", "-Wl,-Bsymbolic", *objects, "-lpthread", "-o", str(library)], check=True)

    with ThreadPoolExecutor(2) as pool:
        shared = [pool.submit(compile_one, source, options) for source, options in SOURCES.items()]
        new = [pool.submit(compile_one, source, []) for source in OF_AITER]
        old = [pool.submit(compile_one, source, ["-DFAKE_AITER_OLD"], "_old") for source in OF_AITER]
        for library, own in zip(libraries, (new, old), strict=True):
            link(library, [compiled.result() for compiled in (*shared, *own)])
    return libraries


class Fakes:
    """The compiled library: questions, direct runs on numpy memory, and the log of what the fakes were given."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle = ctypes.CDLL(str(path))
        for name in ("fake_take_log", "fake_run", "fake_buffers"):
            getattr(self.handle, name).restype = ctypes.c_char_p
        for name in ("attn_cuda_interface_v1", "fake_table_of_version", "fake_table_of_size", "fake_sm90_table"):
            getattr(self.handle, name).restype = ctypes.c_void_p

    def sm90_table(self, *, version: int = 1, results_bytes: int = 2 * ctypes.sizeof(ctypes.c_void_p)) -> int:
        """Address of the table of contract sm90-v1."""
        return int(self.handle.fake_sm90_table(ctypes.c_int64(version), ctypes.c_int64(results_bytes)))

    def set_aiter(self, *, has_kernel: bool = True, more_bytes: int = 0, gpu: str = "gfx942") -> None:
        """What the fake AITER does: whether it has a kernel, bytes that it asks for beyond its need, and the GPU that it sees."""
        self.handle.fake_aiter_set(int(has_kernel), ctypes.c_int64(more_bytes))
        self.handle.fake_gpu_set(gpu.encode())

    def take_log(self) -> list[dict[str, str]]:
        """One dict a call of a fake since the last time, its name under "call"."""
        lines = self.handle.fake_take_log().decode().splitlines()
        found = []
        for line in lines:
            name, *pieces = line.split(" ")
            values: dict[str, str] = {"call": name}
            key = ""
            for piece in pieces:
                left, _, right = piece.partition("=")
                key = left or key
                values[key] = values[key] + "," + right if not left else right
            found.append(values)
        return found

    def ask(self, engine: str, question: str, direction: str, config: Config) -> str:
        function = getattr(self.handle, f"attn_jax_rocm_sink_{engine}_{question}")
        function.restype = ctypes.c_char_p
        words = config.words()
        return str(function(ctypes.c_int64(PASS[direction]), ctypes.c_void_p(words.ctypes.data), ctypes.c_int64(words.size)).decode())

    def plan(self, engine: str, direction: str, config: Config) -> dict[str, tuple[int, int]]:
        """Parts as (offset, bytes), and all bytes under ""."""
        text = self.ask(engine, "plan", direction, config)
        if text.startswith("! "):
            raise ValueError(text[2:])
        *parts, total = text.splitlines()
        found = {name: (int(offset), int(size)) for name, offset, size in (part.split(" ") for part in parts)}
        return found | {"": (0, int(total))}

    def buffers(self, engine: str, direction: str, config: Config) -> tuple[list[str], list[str]]:
        """Names of the operands and results that the configuration has."""
        words = config.words()
        text = self.handle.fake_buffers(
            engine.encode(), ctypes.c_int64(PASS[direction]), ctypes.c_void_p(words.ctypes.data), ctypes.c_int64(words.size)
        )
        operands, _, results = text.decode().partition("|")
        return operands.split(), results.split()

    def run(
        self,
        engine: str,
        direction: str,
        config: Config,
        arrays: Mapping[str, np.ndarray | None],
        workspace: np.ndarray,
        used: int | None = None,
    ) -> str:
        """Run on numpy memory; None is a null pointer. The refusal's text, or empty."""
        words = config.words()
        pointers = (ctypes.c_void_p * len(arrays))(*(None if array is None else array.ctypes.data for array in arrays.values()))
        done = self.handle.fake_run(
            engine.encode(),
            ctypes.c_int64(PASS[direction]),
            ctypes.c_void_p(words.ctypes.data),
            ctypes.c_int64(words.size),
            " ".join(arrays).encode(),
            pointers,
            ctypes.c_void_p(workspace.ctypes.data),
            ctypes.c_int64(workspace.size if used is None else used),
        )
        return str(done.decode())


def installed(fakes: Fakes, engine: str, monkeypatch: Any) -> Iterator[None]:
    """Put the fakes' handlers in the place of an engine's, on XLA's CPU platform, with the checks of its devices left out.

    XLA keeps a handler under its name for the life of the process, so each library has names of its own there; compiled calls of another
    library are forgotten.
    """
    from attn_jax_rocm_sink import _engines

    if _INSTALLED.get(engine) != fakes.path:
        jax.clear_caches()
    _INSTALLED[engine] = fakes.path
    target = _ffi.target
    monkeypatch.setattr(_ffi, "target", lambda name, direction: target(name, direction) + (fakes.path.stem if name == engine else ""))

    handlers = dataclasses.replace(_ffi.HANDLERS[engine], platform="cpu", devices=lambda: (0, 1))
    monkeypatch.setitem(_ffi.HANDLERS, engine, handlers)
    library = _ffi.register(engine, fakes.path, fakes.handle)
    load = _ffi.load
    monkeypatch.setattr(_ffi, "load", lambda name="host": library if name == engine else load(name))
    public = engine.removesuffix("_sm90")
    usable = dataclasses.replace(_engines.ENGINES[public], unavailable=lambda: None, unplannable=lambda: None)
    if public != engine:
        usable = dataclasses.replace(usable, sm90_reasons=lambda problem: (), sm90_unavailable=lambda: None)
    monkeypatch.setitem(_engines.ENGINES, public, usable)
    yield
