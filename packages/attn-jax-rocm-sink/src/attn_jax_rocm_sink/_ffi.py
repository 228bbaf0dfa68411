"""The compiled engines: found, checked against the running jaxlib, registered with XLA, planned and called with named operands."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attn_spec import UnsupportedProblem
from attn_spec._sm90 import ex2_table
from jaxlib import version as jaxlib_version

import attn_jax_rocm_sink
from attn_jax_rocm_sink._config import Config, config_of, on_device
from attn_jax_rocm_sink._versions import release

__all__ = ["BACKWARD", "FORWARD", "HANDLERS", "Handlers", "Library", "NoPlan", "Part", "call", "load", "ordered_sum", "plan", "supports"]

FORWARD, BACKWARD = "forward", "backward"
_PASS = {FORWARD: 0, BACKWARD: 1}
_ORDERED_SUM = "attn_jax_rocm_sink_ordered_sum"


class NoPlan(RuntimeError):
    """The workspace of a call cannot be sized: the library that is asked, or the device whose size matters, is not here."""


@dataclass(frozen=True)
class Handlers:
    """Where the handlers of an engine are: the library, the file that says why it was not built, and the platform of XLA that runs it.

    ``kept`` names the results of forward that backward needs besides its inputs; ``devices`` gives the indices of the devices that a
    traced call may run on, where the workspace depends on the device. ``on_host`` engines convert small operands themselves; the others get
    those named in ``as_float32`` converted. ``static_alignment`` engines take no q_start, but know top-left from bottom-right alignment.
    ``partial_dropout`` engines draw the dropout of a part of a batch, which begins at a batch item and head of the whole. ``planner`` names
    handlers whose library answers for these where their own is not here: a plan needs neither device nor kernels.
    """

    file: str
    missing: str
    platform: str
    kept: tuple[str, ...]
    devices: Callable[[], tuple[int, ...]] = lambda: (0,)
    on_host: bool = False
    as_float32: tuple[str, ...] = ("sinks", "bias")
    static_alignment: bool = False
    partial_dropout: bool = True
    planner: str | None = None


def _cuda_devices() -> tuple[int, ...]:
    """All of this process; the first where JAX has none, for a call that is lowered for another machine."""
    try:
        return tuple(device.local_hardware_id for device in jax.local_devices(backend="cuda"))
    except RuntimeError:
        return (0,)


_ROW_STATE, _OUTPUTS = ("row_max", "row_sum"), ("out", "lse")
HANDLERS: dict[str, Handlers] = {
    "host": Handlers("libattn_jax_rocm_sink.so", "missing.txt", "cpu", _ROW_STATE, on_host=True),
    "ck": Handlers(
        "libattn_jax_rocm_sink_ck.so",
        "missing-ck.txt",
        "ROCM",
        _OUTPUTS,
        as_float32=("sinks",),
        static_alignment=True,
        partial_dropout=False,
    ),
    "cuda": Handlers("libattn_jax_rocm_sink.so", "missing.txt", "CUDA", _ROW_STATE, _cuda_devices),
    "host_sm90": Handlers("libattn_jax_rocm_sink.so", "missing.txt", "cpu", _OUTPUTS, on_host=True),
    "cuda_sm90": Handlers("libattn_jax_rocm_sink.so", "missing.txt", "CUDA", _OUTPUTS, _cuda_devices),
    "hip": Handlers("libattn_jax_rocm_sink_hip.so", "missing-hip.txt", "ROCM", _ROW_STATE, planner="host"),
}


@dataclass(frozen=True)
class Part:
    """A named part of a workspace, in bytes."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Library:
    """The loaded library, or the reason why there is none."""

    path: Path | None = None
    jaxlib: str = ""
    ffi_version: str = ""
    fingerprint: str = ""
    reason: str | None = None
    handle: ctypes.CDLL | None = None


@cache
def load(engine: str = "host") -> Library:
    """Load the handlers of an engine and register them with XLA, once a process. Never raises: a failure becomes ``reason``."""
    handlers = HANDLERS[engine]
    path = _find(handlers.file)
    if path is None:
        note = _find(handlers.missing)
        return Library(reason=note.read_text().strip() if note else f"{handlers.file} is not installed beside the package")
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return Library(reason=f"{handlers.file} does not load: {error}")
    return register(engine, path, handle)


def register(engine: str, path: Path, handle: ctypes.CDLL) -> Library:
    """Register the handlers of a loaded library, unless it is too new for the running jaxlib."""
    built = Library(
        path,
        _text(handle, "attn_jax_rocm_sink_jaxlib"),
        _text(handle, "attn_jax_rocm_sink_ffi_version"),
        _text(handle, "attn_jax_rocm_sink_fingerprint"),
        too_old(_text(handle, "attn_jax_rocm_sink_jaxlib"), jaxlib_version.__version__),
        handle,
    )
    if built.reason is None:
        for direction in (FORWARD, BACKWARD):
            capsule = jax.ffi.pycapsule(getattr(handle, symbol(engine, direction)))
            jax.ffi.register_ffi_target(target(engine, direction), capsule, platform=HANDLERS[engine].platform)
        if engine == "host_sm90":
            getattr(handle, symbol(engine, "bind"))(ctypes.c_void_p(ex2_table().ctypes.data))
        if engine == "host":
            jax.ffi.register_ffi_target(_ORDERED_SUM, jax.ffi.pycapsule(getattr(handle, _ORDERED_SUM)), platform="cpu")
    return built


def symbol(engine: str, name: str) -> str:
    """A handler or a question in the library of an engine."""
    return f"attn_jax_rocm_sink_{engine}_{name}"


def target(engine: str, direction: str) -> str:
    """Name of a handler for XLA."""
    return symbol(engine, direction)


def too_old(built: str, running: str) -> str | None:
    """Why handlers built against jaxlib ``built`` cannot be registered with jaxlib ``running``.

    XLA runs a handler of its own or an older FFI version; registering a newer one breaks every later use of its platform.
    """
    if release(running) < release(built):
        return f"built against jaxlib {built}, newer than the installed jaxlib {running}; upgrade jaxlib or rebuild the package"
    return None


def supports(engine: str, direction: str, config: Config) -> str:
    """Why the engine does not run ``config``, its reasons joined by "; "; empty when it does."""
    return _ask(engine, "supports", direction, config)


def plan(engine: str, direction: str, config: Config) -> tuple[int, tuple[Part, ...]]:
    """Bytes of the workspace and its parts. Raises UnsupportedProblem for a configuration that the engine does not run, or NoPlan."""
    reasons = supports(engine, direction, config)
    if reasons:
        raise UnsupportedProblem(f"attn_jax_rocm_sink:{engine}", [f"{direction}: {reason}" for reason in reasons.split("; ")])
    text = _ask(engine, "plan", direction, config)
    if text.startswith("! "):
        raise NoPlan(text[2:])
    *parts, total = text.splitlines()
    return int(total), tuple(Part(name, int(offset), int(size)) for name, offset, size in (part.split(" ") for part in parts))


def workspace_bytes(engine: str, direction: str, config: Config) -> int:
    """Bytes that the call needs on any device of this process, since a traced call may run on each."""
    sizes = []
    for index in HANDLERS[engine].devices():
        config.device = index
        sizes.append(plan(engine, direction, config)[0])
    config.device = 0
    return max(sizes)


def call(
    direction: str, operands: Mapping[str, jax.Array], results: Mapping[str, jax.ShapeDtypeStruct], attributes: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Run ``attributes["engine"]``. Operands and results travel with their names, so that an absent one is a missing name.

    The workspace is one more result, of the size that the engine plans while the call is traced.
    """
    engine = attributes["engine"]
    returned = dict(results)
    if not HANDLERS[engine].on_host:
        operands = on_device(operands, HANDLERS[engine].as_float32)
        returned |= {name: jax.ShapeDtypeStruct(results[name].shape, jnp.float32) for name in ("dsinks", "dbias") if name in results}
    config = config_of(operands, results, {name: value for name, value in attributes.items() if name != "engine"})
    load(engine)
    workspace = workspace_bytes(engine, direction, config)
    returned["workspace"] = jax.ShapeDtypeStruct((workspace,), jnp.uint8)
    function = jax.ffi.ffi_call(target(engine, direction), list(returned.values()))
    names = {"operands": " ".join(operands), "results": " ".join(returned), "config": config.words()}
    found = dict(zip(results, function(*operands.values(), **names)[:-1], strict=True))
    return {name: array.astype(results[name].dtype) for name, array in found.items()}


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


def _ask(engine: str, question: str, direction: str, config: Config) -> str:
    library, planner = load(engine), HANDLERS[engine].planner
    if library.handle is None and planner is not None:
        library = load(planner)
    if library.handle is None:
        raise NoPlan(library.reason)
    function = getattr(library.handle, symbol(engine, question))
    function.restype = ctypes.c_char_p
    function.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    words = np.ascontiguousarray(config.words())
    return str(function(_PASS[direction], words.ctypes.data, words.size).decode())
