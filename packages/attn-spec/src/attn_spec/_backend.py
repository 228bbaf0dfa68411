"""The interface that a backend implements: identity, capabilities, operators and one framework-neutral entry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from attn_spec._arrays import dtype_name
from attn_spec._capabilities import Capabilities
from attn_spec._errors import UnknownName
from attn_spec._operators import operator
from attn_spec._problem import Problem
from attn_spec._validation import ArrayInfo, describe

__all__ = ["Backend", "Call"]


@dataclass(frozen=True)
class Call:
    """One operator call on numpy data, for checks, traces and reports.

    ``arrays`` maps argument names to arrays (bfloat16 as ``attn_spec.bfloat16``); ``options`` holds keyword options. With ``cotangents``
    (by output name) the gradients of ``wrt`` are returned too, under ``"d" + name``.
    """

    op: str
    arrays: Mapping[str, np.ndarray]
    options: Mapping[str, Any] = field(default_factory=dict)
    cotangents: Mapping[str, np.ndarray] | None = None
    wrt: tuple[str, ...] = ()
    contract: str | None = None

    def __post_init__(self) -> None:
        """ValueError for gradients that the operator does not have, or of arrays that are not given."""
        for name in self.wrt:
            if name not in operator(self.op).gradients or name not in self.arrays:
                known = ", ".join(known for known in operator(self.op).gradients if known in self.arrays)
                raise ValueError(f"{self.op}: wrt must name arrays of the call that have a gradient ({known}); got {name!r}")

    def problem(self, device: str = "cpu") -> Problem:
        """What the call asks for on ``device``. Raises TypeError or ValueError when it is malformed."""
        for name, array in self.arrays.items():
            if not isinstance(array, np.ndarray):
                raise TypeError(f"{self.op}: {name} must be a numpy array; got {type(array).__name__}")
        described = {name: ArrayInfo(tuple(array.shape), dtype_name(array.dtype), device) for name, array in self.arrays.items()}
        return describe(self.op, described, self.options, contract=self.contract, gradient=bool(self.wrt))


class Backend(ABC):
    """One installed backend. The object behind an ``attn.backends`` entry point is an instance.

    ``engines`` are its interchangeable implementations, the default first. ``priority`` maps a device to the backend's place in automatic
    selection there (lower first); a device that is absent is served only when the backend is asked for by name.
    """

    name: ClassVar[str]
    framework: ClassVar[str]
    engines: ClassVar[tuple[str, ...]]
    priority: ClassVar[Mapping[str, int]] = {}

    @abstractmethod
    def capabilities(self, engine: str | None = None) -> Capabilities:
        """What the engine (default: the first) runs, as data."""

    @abstractmethod
    def unavailable(self, device: str, engine: str | None = None) -> str | None:
        """Why the engine cannot run on ``device`` on this machine, or None when it can."""

    @abstractmethod
    def operators(self, engine: str | None = None) -> Mapping[str, Callable[..., Any]]:
        """Public operator functions by name; "NAME.forward_fp32" is the same operator with a float32 result."""

    @abstractmethod
    def evaluate(self, call: Call, *, device: str = "cpu", engine: str | None = None) -> dict[str, np.ndarray]:
        """Run one call on numpy data: outputs by name, and gradients under "d" + name."""

    @abstractmethod
    def fingerprint(self, device: str, engine: str | None = None) -> str:
        """Hash of the real build that runs: sources, flags, compiler and architecture."""

    def runs_layers(self, device: str, engine: str | None = None) -> bool:
        """Whether the engine is quick enough there for whole layers of real models; definitions and interpreters answer no."""
        return True

    def engine(self, engine: str | None = None) -> str:
        """``engine`` checked, or the default."""
        if engine is None:
            return self.engines[0]
        if engine not in self.engines:
            raise UnknownName(f"engine of {self.name}", engine, self.engines)
        return engine

    def reasons(self, problem: Problem, engine: str | None = None) -> tuple[str, ...]:
        """Every reason why ``problem`` is refused: capabilities first, then the state of this machine."""
        found = self.capabilities(engine).reasons(problem)
        if found:
            return found
        reason = self.unavailable(problem.device, engine)
        return () if reason is None else (reason,)
