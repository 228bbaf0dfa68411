"""Errors that name what was asked, what is supported and who could run it."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["BackendUnavailable", "ContractViolation", "UnknownName", "UnsupportedProblem"]


class UnsupportedProblem(NotImplementedError):
    """A well-formed problem that this backend does not run. ``reasons`` lists every cause."""

    def __init__(self, backend: str, reasons: Iterable[str], problem: object = None, runners: Iterable[str] = ()) -> None:
        self.backend = backend
        self.reasons = tuple(reasons)
        self.problem = problem
        self.runners = tuple(runners)
        lines = [f"{backend} cannot run this problem", *(f"  - {reason}" for reason in self.reasons)]
        if problem is not None:
            lines.append(f"  problem: {problem}")
        if self.runners:
            lines.append(f"  can run it here: {', '.join(self.runners)}")
        super().__init__("\n".join(lines))


class UnknownName(LookupError):
    """A backend, operator, contract or engine name that nothing answers to."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(self.known) or 'none'}")


class BackendUnavailable(RuntimeError):
    """An installed backend that cannot run on this machine, with the reason."""

    def __init__(self, backend: str, reason: str) -> None:
        self.backend, self.reason = backend, reason
        super().__init__(f"{backend} is not usable here: {reason}")


class ContractViolation(AssertionError):
    """Bytes that a contract fixes came out different."""
