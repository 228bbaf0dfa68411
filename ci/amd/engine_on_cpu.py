"""An engine for AMD GPUs called by JAX on its CPU platform: production code, but for the stream and the device's name."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import jax
import jaxlib
from attn_jax_rocm_sink import _engines, _ffi

__all__ = ["engine_on_cpu"]

SOURCE = Path(__file__).parent / "cpu_platform.cc"


def _entry(name: str, library: Path) -> ctypes.CDLL:
    """cpu_platform.cc, compiled and linked to the engine's library."""
    headers, place = Path(jaxlib.__path__[0]) / "include", library.parent / "libcpu_platform.so"
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-DATTN_ENGINE={name}"]
    # The HIP runtime is the one that the process has loaded.
    subprocess.run(
        [*command, "-isystem", str(headers), str(SOURCE), str(library), "-Wl,--unresolved-symbols=ignore-in-shared-libs", "-o", str(place)],
        check=True,
    )
    return ctypes.CDLL(str(place))


@contextmanager
def engine_on_cpu(name: str, library: Path) -> Iterator[None]:
    """``engine=name`` ("hip" or "ck") runs ``library`` on CPU arrays.

    The HIP runtime that the library needs must be loaded with its symbols global, and its memory must be the host's.
    """
    handle = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    entry = _entry(name, library)
    for direction in (_ffi.FORWARD, _ffi.BACKWARD):
        capsule = jax.ffi.pycapsule(getattr(entry, f"attn_cpu_platform_{direction}"))
        jax.ffi.register_ffi_target(_ffi.target(name, direction), capsule, platform="cpu")
    load, loaded = _ffi.load, _ffi.Library(path=library, handle=handle)
    engine = _engines.ENGINES[name]
    on_cpu = dataclasses.replace(engine, capabilities=dataclasses.replace(engine.capabilities, devices=("cpu",)), unavailable=lambda: None)
    with (
        patch.object(_ffi, "load", lambda of="host": loaded if of == name else load(of)),
        patch.dict(_engines.ENGINES, {name: on_cpu}),
        patch.dict(_ffi.HANDLERS, {name: dataclasses.replace(_ffi.HANDLERS[name], platform="cpu")}),
    ):
        yield
