"""Runs calls on one engine of one backend for a test suite: a refusal is checked, counted and never taken for a pass of the problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attn_spec._backend import Backend, Call
from attn_spec._errors import ContractViolation, UnsupportedProblem
from attn_spec._problem import Problem

__all__ = ["Evaluate", "Refused", "Runner", "Tally"]

Evaluate = Callable[[Call], dict[str, np.ndarray]]
"""Runs one call: outputs by name, and gradients under "d" + name."""


class Refused(Exception):
    """The backend refused a problem that its capabilities refuse, with exactly their reasons: the end of a check, not a failure."""

    def __init__(self, problem: Problem, reasons: tuple[str, ...]) -> None:
        self.problem, self.reasons = problem, reasons
        super().__init__(f"{problem}: {'; '.join(reasons)}")


@dataclass
class Tally:
    """Problems that one engine ran and refused, and checks that a refusal ended."""

    ran: int = 0
    refused: int = 0
    ended: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Runner:
    """One engine of one backend on one device.

    ``evaluate`` runs a call. A problem that the capabilities accept must run; one that they refuse must raise UnsupportedProblem with
    exactly their reasons, and then ends the check as ``Refused``. ``run`` calls a check and counts such an end.
    """

    backend: Backend
    engine: str
    device: str
    tally: Tally = field(default_factory=Tally, compare=False)

    @property
    def name(self) -> str:
        """Identity in reports, for example ``attn_reference:host[cpu]``."""
        return f"{self.backend.name}:{self.engine}[{self.device}]"

    def reasons(self, problem: Problem) -> tuple[str, ...]:
        """Why the engine refuses ``problem``; empty when it must run."""
        return self.backend.reasons(problem, self.engine)

    def supports(self, call: Call) -> bool:
        """Whether the engine must run ``call``."""
        return not self.reasons(call.problem(self.device))

    def evaluate(self, call: Call) -> dict[str, np.ndarray]:
        """Outputs and gradients of ``call``. Raises Refused, or ContractViolation where capabilities and behaviour disagree."""
        problem = call.problem(self.device)
        reasons = self.reasons(problem)
        if reasons:
            self._refusal(call, problem, reasons)
            raise Refused(problem, reasons)
        self.tally.ran += 1
        try:
            return self.backend.evaluate(call, device=self.device, engine=self.engine)
        except UnsupportedProblem as error:
            raise ContractViolation(f"{self.name} refuses a problem that its capabilities accept\n{error}") from error

    def attempt(self, call: Call) -> dict[str, np.ndarray]:
        """``call`` as it is, malformed calls included: the backend's own error comes through."""
        return self.backend.evaluate(call, device=self.device, engine=self.engine)

    def run(self, check: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        """``check(evaluate, ...)``; a checked refusal ends it and is counted."""
        try:
            check(self.evaluate, *arguments, **keywords)
        except Refused:
            self.tally.ended += 1

    def _refusal(self, call: Call, problem: Problem, reasons: tuple[str, ...]) -> None:
        self.tally.refused += 1
        self.tally.reasons.update(reasons)
        try:
            self.backend.evaluate(call, device=self.device, engine=self.engine)
        except UnsupportedProblem as error:
            if error.reasons != reasons:
                raise ContractViolation(f"{self.name} refused {problem} with {error.reasons}; its capabilities say {reasons}") from error
        else:
            raise ContractViolation(f"{self.name} ran {problem}, which its capabilities refuse: {'; '.join(reasons)}")
