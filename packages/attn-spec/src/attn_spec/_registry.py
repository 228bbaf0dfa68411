"""Discovery of installed backends over the entry-point group ``attn.backends``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from attn_spec._backend import Backend
from attn_spec._errors import BackendUnavailable, UnknownName
from attn_spec._problem import Problem

__all__ = ["GROUP", "backends", "explain", "fingerprints", "get_backend", "in_order", "installed", "parse", "runners"]

GROUP = "attn.backends"


@dataclass(frozen=True)
class Loaded:
    """An entry point that was loaded: its backend, or why it could not be."""

    backend: Backend | None
    error: str | None


def installed() -> dict[str, EntryPoint]:
    """Entry points by backend name; nothing is imported."""
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)}


@cache
def load(name: str) -> Loaded:
    """Import one backend; a failure is kept as text, so that it can be reported wherever the backend is passed over."""
    points = installed()
    if name not in points:
        raise UnknownName("backend", name, points)
    point = points[name]
    try:
        backend = point.load()
    except Exception as error:  # a third party's import may raise anything; its text becomes the reason
        distribution = point.dist.name if point.dist is not None else point.value
        return Loaded(None, f"{distribution} failed to import: {type(error).__name__}: {error}")
    if not isinstance(backend, Backend):
        return Loaded(None, f"{point.value} is a {type(backend).__name__}, not an attn_spec.Backend")
    return Loaded(backend, None)


def backends() -> dict[str, Backend]:
    """Every installed backend that imports, by name."""
    found = {name: load(name).backend for name in installed()}
    return {name: backend for name, backend in found.items() if backend is not None}


def parse(name: str) -> tuple[str, str | None]:
    """``"attn_reference:pytorch"`` to backend and engine; no colon: the default engine."""
    backend, _, engine = name.partition(":")
    return backend, engine or None


def get_backend(name: str) -> Backend:
    """The backend called ``name`` (an engine suffix is ignored). Raises UnknownName or BackendUnavailable; never falls back."""
    backend, _ = parse(name)
    loaded = load(backend)
    if loaded.backend is None:
        raise BackendUnavailable(backend, str(loaded.error))
    return loaded.backend


def in_order(device: str) -> list[str]:
    """Names of the installed backends in automatic order on ``device``; those that failed to import come first."""
    broken = [name for name in installed() if load(name).backend is None]
    ranked = sorted((backend.priority[device], name) for name, backend in backends().items() if device in backend.priority)
    return broken + [name for _, name in ranked]


def explain(problem: Problem) -> dict[str, tuple[str, ...]]:
    """For each installed backend and engine, every reason why it does not run ``problem``; empty means that it does."""
    answers: dict[str, tuple[str, ...]] = {}
    for name in installed():
        loaded = load(name)
        if loaded.backend is None:
            answers[name] = (str(loaded.error),)
            continue
        for engine in loaded.backend.engines:
            answers[f"{name}:{engine}"] = loaded.backend.reasons(problem, engine)
    return answers


def runners(problem: Problem, *, without: str | None = None) -> tuple[str, ...]:
    """Names of the backends that run ``problem`` here."""
    names = {parse(name)[0] for name, reasons in explain(problem).items() if not reasons}
    return tuple(sorted(names - {without}))


def fingerprints() -> dict[str, str]:
    """Of the build of every installed engine on each device where it is usable."""
    return {
        f"{name}:{engine} on {device}": backend.fingerprint(device, engine)
        for name, backend in backends().items()
        for engine in backend.engines
        for device in backend.capabilities(engine).devices
        if backend.unavailable(device, engine) is None
    }
