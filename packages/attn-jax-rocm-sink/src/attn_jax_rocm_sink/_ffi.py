"""The compiled handlers: found, checked against the running jaxlib, registered with XLA, called with named operands."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jaxlib import version as jaxlib_version

import attn_jax_rocm_sink
from attn_jax_rocm_sink._versions import release

__all__ = ["BACKWARD", "FORWARD", "Library", "call", "load", "ordered_sum"]

FORWARD = "attn_jax_rocm_sink_attention_forward"
BACKWARD = "attn_jax_rocm_sink_attention_backward"
_ORDERED_SUM = "attn_jax_rocm_sink_ordered_sum"

_NAME = "libattn_jax_rocm_sink.so"
_MISSING = "missing.txt"


@dataclass(frozen=True)
class Library:
    """The loaded library, or the reason why there is none."""

    path: Path | None = None
    jaxlib: str = ""
    ffi_version: str = ""
    fingerprint: str = ""
    reason: str | None = None


@cache
def load() -> Library:
    """Load the handlers and register them for XLA's CPU platform, once a process. Never raises: a failure becomes ``reason``."""
    path = _find(_NAME)
    if path is None:
        note = _find(_MISSING)
        return Library(reason=note.read_text().strip() if note else f"{_NAME} is not installed beside the package")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return Library(reason=f"{_NAME} does not load: {error}")
    built = Library(
        path,
        _text(library, "attn_jax_rocm_sink_jaxlib"),
        _text(library, "attn_jax_rocm_sink_ffi_version"),
        _text(library, "attn_jax_rocm_sink_fingerprint"),
        too_old(_text(library, "attn_jax_rocm_sink_jaxlib"), jaxlib_version.__version__),
    )
    if built.reason is None:
        for target in (FORWARD, BACKWARD, _ORDERED_SUM):
            capsule = jax.ffi.pycapsule(getattr(library, target))
            jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    return built


def too_old(built: str, running: str) -> str | None:
    """Why handlers built against jaxlib ``built`` cannot be registered with jaxlib ``running``.

    XLA runs a handler of its own or an older FFI version; registering a newer one breaks every later use of the CPU platform.
    """
    if release(running) < release(built):
        return f"built against jaxlib {built}, newer than the installed jaxlib {running}; upgrade jaxlib or rebuild the package"
    return None


def call(
    target: str, operands: Mapping[str, jax.Array], results: Mapping[str, jax.ShapeDtypeStruct], attributes: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Call a handler. Operands and results travel with their names, so that an absent one is a missing name."""
    function = jax.ffi.ffi_call(target, list(results.values()))
    names = {"operands": " ".join(operands), "results": " ".join(results)}
    return dict(zip(results, function(*operands.values(), **names, **attributes), strict=True))


def ordered_sum(rows: jax.Array, dtype: Any) -> jax.Array:
    """Sum of float32 [N, C] over axis 0 in ascending order from +0, rounded to ``dtype``. CPU only."""
    result = jax.ShapeDtypeStruct(rows.shape[1:], dtype)
    return jax.ffi.ffi_call(_ORDERED_SUM, result, vmap_method="sequential")(rows)


def _find(name: str) -> Path | None:
    for folder in attn_jax_rocm_sink.__path__:
        path = Path(folder) / name
        if path.is_file():
            return path
    return None


def _text(library: ctypes.CDLL, name: str) -> str:
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    return str(function().decode())
