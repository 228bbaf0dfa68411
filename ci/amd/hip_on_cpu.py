"""The hip engine called by JAX on its CPU platform: production code, but for the stream and the device's name."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import jax
from attn_jax_rocm_sink import _engines, _ffi

__all__ = ["hip_engine"]


@contextmanager
def hip_engine(library: Path, shim: Path) -> Iterator[None]:
    """``engine="hip"`` runs ``library`` on CPU arrays, through ``shim`` (cpu_platform.cc, linked to it).

    The HIP runtime that the library needs must be loaded or found by the loader: its memory must be the host's.
    """
    handle, entry = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL), ctypes.CDLL(str(shim))
    for direction in (_ffi.FORWARD, _ffi.BACKWARD):
        capsule = jax.ffi.pycapsule(getattr(entry, f"attn_cpu_platform_{direction}"))
        jax.ffi.register_ffi_target(_ffi.target("hip", direction), capsule, platform="cpu")
    load, loaded = _ffi.load, _ffi.Library(path=library, handle=handle)
    engine = _engines.ENGINES["hip"]
    on_cpu = dataclasses.replace(engine, capabilities=dataclasses.replace(engine.capabilities, devices=("cpu",)), unavailable=lambda: None)
    with (
        patch.object(_ffi, "load", lambda name="host": loaded if name == "hip" else load(name)),
        patch.dict(_engines.ENGINES, {"hip": on_cpu}),
    ):
        yield
