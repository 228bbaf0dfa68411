"""Assertions on bytes, with messages that name the first differing element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from attn_spec._arrays import to_float32
from attn_spec._compare import difference
from attn_spec._errors import ContractViolation

__all__ = ["assert_bytes", "assert_close", "assert_same", "assert_zero"]


def assert_bytes(candidate: np.ndarray, reference: np.ndarray, what: str) -> None:
    """Shape, dtype and bits are equal; NaN equals NaN, +0 is not -0. Raises ContractViolation that begins with ``what``."""
    found = difference(candidate, reference)
    if not found.equal:
        raise ContractViolation(f"{what}: {found.text()}")


def assert_same(
    candidate: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], what: str, names: Iterable[str] | None = None
) -> None:
    """Every result of ``names`` (default: both sides' names, which must agree) has equal bytes."""
    if names is None:
        if set(candidate) != set(reference):
            raise ContractViolation(f"{what}: results {sorted(candidate)} against {sorted(reference)}")
        names = reference
    for name in names:
        assert_bytes(candidate[name], reference[name], f"{what}: {name}")


def assert_close(candidate: np.ndarray, expected: np.ndarray, what: str, *, tolerance: float) -> None:
    """Each element within ``tolerance`` of ``expected`` (float64), relative to its largest magnitude; NaN and infinities agree in place."""
    got = to_float32(candidate).astype(np.float64)
    expected = np.asarray(expected, dtype=np.float64)
    if got.shape != expected.shape:
        raise ContractViolation(f"{what}: shape {list(got.shape)} against {list(expected.shape)}")
    finite = np.isfinite(expected)
    unlike = ~finite & ~((np.isnan(got) & np.isnan(expected)) | (got == expected))
    peak = float(np.abs(expected[finite]).max(initial=0.0))
    error = np.abs(np.where(finite, got, 0.0) - np.where(finite, expected, 0.0))
    bad = unlike | ~(error <= tolerance * peak)
    if bad.any():
        first = tuple(int(index) for index in np.argwhere(bad)[0])
        raise ContractViolation(
            f"{what}: {int(bad.sum())} elements off; first at {list(first)}: {got[first]!r}, expected {expected[first]!r} "
            f"(tolerance {tolerance:g} of the peak {peak:g})"
        )


def assert_zero(candidate: np.ndarray, what: str) -> None:
    """Every element is +0."""
    assert_bytes(candidate, np.zeros(candidate.shape, candidate.dtype), what)
