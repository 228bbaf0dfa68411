"""The reference answer: the readable PyTorch definition on small problems, its compiled twin on larger ones, each call computed once."""

from __future__ import annotations

import hashlib
import math
from functools import cache

import numpy as np
from attn_spec import Call
from attn_spec._compare import digest
from attn_spec._registry import get_backend
from attn_spec.testing.runner import Evaluate

NAME = "attn_reference"
SMALL = 2_000_000
"""Multiplications of one forward pass up to which the PyTorch definition answers; it takes about a second there on two cores."""


def cached(evaluate: Evaluate) -> Evaluate:
    """``evaluate`` with the result of each distinct call kept."""
    seen: dict[str, dict[str, np.ndarray]] = {}

    def once(call: Call) -> dict[str, np.ndarray]:
        key = identity(call)
        if key not in seen:
            seen[key] = evaluate(call)
        return dict(seen[key])

    return once


@cache
def reference(*, but: str = "") -> Evaluate:
    """The answer that every backend must reproduce to the byte; ``but`` is the engine under test, which is never its own reference where
    there is another."""
    backend = get_backend(NAME)
    usable = [engine for engine in ("pytorch", "host") if engine in backend.engines and backend.unavailable("cpu", engine) is None]
    usable = [engine for engine in usable if f"{NAME}:{engine}" != but] or usable

    def evaluate(call: Call) -> dict[str, np.ndarray]:
        return backend.evaluate(call, engine=usable[0] if multiplications(call) <= SMALL else usable[-1])

    return cached(evaluate)


def multiplications(call: Call) -> int:
    """Multiplications of the products of one forward pass (of a softmax: its elements)."""
    problem = call.problem()
    pairs = problem.batch * problem.heads * problem.queries * problem.keys
    if call.op == "attention_varlen":
        pairs = problem.heads * problem.queries * problem.keys
    return pairs * math.ceil((problem.head_dim + problem.value_dim) / 2)


def identity(call: Call) -> str:
    """Hash of everything that a call holds."""
    head = (call.op, sorted(call.options.items()), call.wrt, call.contract)
    parts = [repr(head)]
    for group in (call.arrays, call.cotangents or {}):
        parts += [f"{name} {digest(array)}" for name, array in sorted(group.items())]
        parts.append("|")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
