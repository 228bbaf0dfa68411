"""The kernels of attn-cuda, found beside this package and bound to the cuda engine without importing attn_cuda, which imports torch."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import runpy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attn_jax_rocm_sink import _ffi

__all__ = ["Kernels", "bind", "bind_sm90", "load", "sm90_unavailable", "unavailable"]

_ENTRY, _SM90_ENTRY = "attn_cuda_interface_v1", "attn_cuda_sm90_interface_v1"


@dataclass(frozen=True)
class Kernels:
    """The table of functions that the compiled module of attn-cuda exports, or the reason why there is none."""

    table: int = 0
    fingerprint: str = ""
    reason: str | None = None


def load() -> Kernels:
    """Find the compiled module of attn-cuda and hand its table to the cuda engine. Never raises: a failure becomes ``reason``."""
    return _load()


def unavailable() -> str | None:
    """Why attention does not run on JAX's CUDA devices here, or None. Each device is probed once."""
    return _unavailable()


def sm90_unavailable() -> str | None:
    """Why contract sm90-v1 does not run on JAX's CUDA devices, where ``unavailable`` gives no reason; or None."""
    return _sm90_unavailable()


@cache
def _load() -> Kernels:
    library = _ffi.load("cuda")
    if library.reason is not None or library.handle is None:
        return Kernels(reason=library.reason)
    module, reason = _find()
    if module is None:
        return Kernels(reason=reason)
    try:
        entry = getattr(ctypes.CDLL(str(module)), _ENTRY)
    except OSError as error:
        return Kernels(reason=f"the compiled module of attn-cuda does not load: {error}")
    except AttributeError:
        return Kernels(reason=f"the installed attn-cuda does not export {_ENTRY}; install both packages in one version")
    entry.restype = ctypes.c_void_p
    return bind(library.handle, entry())


def bind_sm90(library: ctypes.CDLL, table: int | None) -> str:
    """Hand the table of contract sm90-v1 to the engine of ``library``; the reason why it is refused, or empty."""
    return _question(library, "sm90_bind", ctypes.c_void_p(table))


def bind(library: ctypes.CDLL, table: int) -> Kernels:
    """Hand a table to the engine of ``library``."""
    refused = _question(library, "bind", table)
    if refused:
        return Kernels(reason=refused)
    return Kernels(table, _question(library, "fingerprint", table))


@cache
def _unavailable() -> str | None:
    found = load()
    if found.reason is not None:
        return found.reason
    try:
        indices = _ffi.HANDLERS["cuda"].devices()
    except RuntimeError as error:
        return f"JAX has no CUDA platform here: {error}"
    library: Any = _ffi.load("cuda").handle
    reasons = (_question(library, "probe", found.table, ctypes.c_int64(index)) for index in indices)
    return next((reason for reason in reasons if reason), None)


@cache
def _sm90_unavailable() -> str | None:
    library, (module, reason) = _ffi.load("cuda_sm90").handle, _find()
    if library is None or module is None:
        return reason or _ffi.load("cuda_sm90").reason
    try:
        entry = getattr(ctypes.CDLL(str(module)), _SM90_ENTRY)
    except AttributeError:
        return f"the installed attn-cuda does not export {_SM90_ENTRY}; install both packages in one version"
    entry.restype = ctypes.c_void_p
    refused = bind_sm90(library, entry())
    if refused:
        return refused
    indices = _ffi.HANDLERS["cuda_sm90"].devices()
    reasons = (_question(library, "sm90_probe", ctypes.c_int64(index)) for index in indices)
    return next((found for found in reasons if found), None)


def _find() -> tuple[Path | None, str]:
    spec = importlib.util.find_spec("attn_cuda")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    if not folders:
        return None, "attn-cuda is not installed; its kernels run this engine"
    for folder in folders:
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            if (folder / f"_cuda{suffix}").is_file():
                return folder / f"_cuda{suffix}", ""
    for folder in folders:
        if (folder / "_build.py").is_file():
            missing = runpy.run_path(str(folder / "_build.py")).get("MISSING")
            return None, f"{missing or 'attn-cuda holds no compiled module'}; install a CUDA toolkit and reinstall attn-cuda"
    return None, "attn-cuda runs from a source tree that was not built; install it with pip"


def _question(library: ctypes.CDLL, name: str, *arguments: Any) -> str:
    function = getattr(library, f"attn_jax_rocm_sink_cuda_{name}")
    function.restype = ctypes.c_char_p
    return str(function(*(ctypes.c_void_p(value) if isinstance(value, int) else value for value in arguments)).decode())
