"""The engines of this package as data: what each runs, on which devices, and why it may not be usable here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
from attn_spec import Capabilities, OperatorSupport, Problem
from attn_spec._sm90 import CONTRACT as SM90

from attn_jax_rocm_sink import _cuda, _ffi

__all__ = ["ENGINES", "Engine", "handlers_of", "select"]


@dataclass(frozen=True)
class Engine:
    """One implementation. ``unavailable`` gives the reason why it does not run on this machine, or None; ``unplannable`` why a call of it
    cannot even be lowered here for a machine that has its devices, or None.

    An engine that is not ``exact`` keeps no contract: it runs only when asked for by name, and its ``capabilities`` are for that case.
    ``sm90_reasons`` gives what it lacks of contract sm90-v1 for a problem, where its capabilities have that contract, and
    ``sm90_unavailable`` what this machine lacks of it, where it has no other reason.
    """

    name: str
    capabilities: Capabilities
    unavailable: Callable[[], str | None]
    unplannable: Callable[[], str | None]
    fingerprint: Callable[[], str]
    exact: bool = True
    sm90_reasons: Callable[[Problem], tuple[str, ...]] = lambda problem: ()
    sm90_unavailable: Callable[[], str | None] = lambda: None

    def reasons(self, problem: Problem, contract: str | None) -> tuple[str, ...]:
        """Why ``problem`` is refused; ``contract`` is the one that the caller named."""
        found = self.capabilities.reasons(problem)
        if not found and problem.contract == SM90:
            found = self.sm90_reasons(problem)
        if contract is not None and not self.exact:
            return (*found, f"contract {contract} (engine {self.name} keeps none)")
        return found


def _unavailable(engine: str, platform: str) -> str | None:
    """Why the library of ``engine`` or JAX's ``platform`` is missing, or None."""
    reason = _ffi.load(engine).reason
    if reason is not None:
        return reason
    try:
        jax.local_devices(backend=platform.lower())
    except RuntimeError as error:
        return f"JAX has no {platform} platform here: {error}"
    return None


def _missing(engine: str) -> str | None:
    return _ffi.load(engine).reason


def _cuda_unavailable() -> str | None:
    return _cuda.unavailable()


def _cuda_unplannable() -> str | None:
    return _cuda.load().reason


def _cuda_sm90_unavailable() -> str | None:
    return _cuda.sm90_unavailable()


def _cuda_fingerprint() -> str:
    return f"{_ffi.load('cuda').fingerprint}+attn-cuda-{_cuda.load().fingerprint}"


def _cuda_sm90_reasons(problem: Problem) -> tuple[str, ...]:
    if problem.head_dim == 256:
        return (f"head_dim=256 with contract {SM90} (supported: 64, 128)",)
    reason = _cuda.sm90_unavailable() if _cuda.unavailable() is None else None
    return () if reason is None else (reason,)


_FEATURES = frozenset(
    {"bias", "causal", "dropout", "gradient", "k_start", "key_padding_mask", "kv_lengths", "q_start", "return_lse", "sinks", "window"}
)

_CONTRACTS = ("ordered-v1", SM90)

ENGINES: Mapping[str, Engine] = {
    "host": Engine(
        "host",
        Capabilities(devices=("cpu",), operators={"attention": OperatorSupport(_FEATURES)}, contracts=_CONTRACTS),
        partial(_unavailable, "host", "CPU"),
        partial(_missing, "host"),
        lambda: _ffi.load().fingerprint,
    ),
    "cuda": Engine(
        "cuda",
        Capabilities(
            devices=("cuda",), operators={"attention": OperatorSupport(_FEATURES - {"dropout"}, max_head_dim=256)}, contracts=_CONTRACTS
        ),
        _cuda_unavailable,
        _cuda_unplannable,
        _cuda_fingerprint,
        sm90_reasons=_cuda_sm90_reasons,
        sm90_unavailable=_cuda_sm90_unavailable,
    ),
    "hip": Engine(
        "hip",
        Capabilities(devices=("rocm",), operators={"attention": OperatorSupport(_FEATURES, max_head_dim=256)}),
        partial(_unavailable, "hip", "ROCm"),
        partial(_missing, "host"),
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
        partial(_unavailable, "ck", "ROCm"),
        partial(_missing, "ck"),
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


def handlers_of(engine: str, contract: str) -> str:
    """Name of the handlers (``_ffi.HANDLERS``) with which an engine runs a contract."""
    return f"{engine}_sm90" if contract == SM90 else engine
