"""What a backend can run, as data that dispatcher, tests, README table and error text all read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attn_spec._contract import CONTRACTS, contract_reasons
from attn_spec._operators import DTYPES
from attn_spec._problem import Problem

__all__ = ["Capabilities", "OperatorSupport"]


@dataclass(frozen=True)
class OperatorSupport:
    """The part of one operator that a backend runs. ``features`` lists the keywords that it honours, "gradient" included."""

    features: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = DTYPES
    max_head_dim: int | None = None

    def reasons(self, problem: Problem) -> tuple[str, ...]:
        found = []
        if problem.dtype not in self.dtypes:
            found.append(f"dtype {problem.dtype} (supported: {', '.join(self.dtypes)})")
        widest = max(problem.head_dim, problem.value_dim)
        if self.max_head_dim is not None and widest > self.max_head_dim:
            found.append(f"head_dim={widest} (supported: up to {self.max_head_dim})")
        unknown = sorted(problem.features - self.features)
        if unknown:
            found.append(f"{', '.join(unknown)} (supported: {', '.join(sorted(self.features)) or 'no options'})")
        return tuple(found)


@dataclass(frozen=True)
class Capabilities:
    """Devices, contracts and operators of one engine of a backend."""

    devices: tuple[str, ...]
    operators: Mapping[str, OperatorSupport]
    contracts: tuple[str, ...] = ("ordered-v1",)

    def reasons(self, problem: Problem) -> tuple[str, ...]:
        """Every reason why ``problem`` is refused; empty when it must run."""
        found = []
        if problem.device not in self.devices:
            found.append(f"device {problem.device} (supported: {', '.join(self.devices)})")
        found.extend(contract_reasons(problem.op, problem.contract, self.contracts))
        limits = CONTRACTS[problem.contract].limits if problem.contract in CONTRACTS else None
        if limits is not None and not found:
            found.extend(limits.reasons(problem.contract, problem.dtype, problem.head_dim, problem.value_dim, problem.features))
        if problem.config is not None:
            found.extend(problem.config.reasons(contract=problem.contract, features=problem.features))
        support = self.operators.get(problem.op)
        if support is None:
            found.append(f"operator {problem.op} (supported: {', '.join(self.operators)})")
            return tuple(found)
        return (*found, *support.reasons(problem))
