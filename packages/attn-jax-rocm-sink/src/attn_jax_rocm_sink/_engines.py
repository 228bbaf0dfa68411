"""The engines of this package as data: what each runs, on which devices, and why it may not be usable here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
from attn_spec import Capabilities, OperatorSupport, Problem

from attn_jax_rocm_sink import _cuda, _ffi

__all__ = ["ENGINES", "Engine", "select"]


@dataclass(frozen=True)
class Engine:
    """One implementation. ``unavailable`` gives the reason why it does not run on this machine, or None.

    An engine that is not ``exact`` keeps no contract: it runs only when asked for by name, and its ``capabilities`` are for that case.
    """

    name: str
    capabilities: Capabilities
    unavailable: Callable[[], str | None]
    fingerprint: Callable[[], str]
    exact: bool = True

    def reasons(self, problem: Problem, contract: str | None) -> tuple[str, ...]:
        """Why ``problem`` is refused; ``contract`` is the one that the caller named."""
        found = self.capabilities.reasons(problem)
        if contract is not None and not self.exact:
            return (*found, f"contract {contract} (engine {self.name} keeps none)")
        return found


def _rocm_unavailable(engine: str) -> str | None:
    reason = _ffi.load(engine).reason
    if reason is not None:
        return reason
    try:
        jax.local_devices(backend="rocm")
    except RuntimeError as error:
        return f"JAX has no ROCm platform here: {error}"
    return None


def _host_unavailable() -> str | None:
    reason = _ffi.load().reason
    if reason is not None:
        return reason
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError as error:
        return f"JAX has no CPU platform here: {error}"
    return None


def _cuda_unavailable() -> str | None:
    return _cuda.unavailable()


def _cuda_fingerprint() -> str:
    return f"{_ffi.load('cuda').fingerprint}+attn-cuda-{_cuda.load().fingerprint}"


_FEATURES = frozenset(
    {"bias", "causal", "dropout", "gradient", "k_start", "key_padding_mask", "kv_lengths", "q_start", "return_lse", "sinks", "window"}
)

ENGINES: Mapping[str, Engine] = {
    "host": Engine(
        "host",
        Capabilities(devices=("cpu",), operators={"attention": OperatorSupport(_FEATURES)}),
        _host_unavailable,
        lambda: _ffi.load().fingerprint,
    ),
    "cuda": Engine(
        "cuda",
        Capabilities(devices=("cuda",), operators={"attention": OperatorSupport(_FEATURES - {"dropout"}, max_head_dim=256)}),
        _cuda_unavailable,
        _cuda_fingerprint,
    ),
    "hip": Engine(
        "hip",
        Capabilities(devices=("rocm",), operators={"attention": OperatorSupport(_FEATURES, max_head_dim=256)}),
        partial(_rocm_unavailable, "hip"),
        lambda: _ffi.load("hip").fingerprint,
    ),
    "ck": Engine(
        "ck",
        Capabilities(
            devices=("rocm",),
            operators={
                "attention": OperatorSupport(_FEATURES - {"k_start", "key_padding_mask"}, dtypes=("bfloat16", "float16"), max_head_dim=256)
            },
        ),
        partial(_rocm_unavailable, "ck"),
        lambda: _ffi.load("ck").fingerprint,
        exact=False,
    ),
}


def select(device: str) -> str:
    """The engine that serves ``device`` when none is named; the first one when none does, so that its reasons are reported."""
    for name, engine in ENGINES.items():
        if engine.exact and device in engine.capabilities.devices:
            return name
    return next(iter(ENGINES))
