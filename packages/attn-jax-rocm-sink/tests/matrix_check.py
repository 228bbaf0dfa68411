"""The checks of one cell: every output is compared before anything returns."""

from __future__ import annotations

import numpy as np
from attn_spec._arrays import to_float32
from attn_spec.testing.asserts import assert_same
from matrix_cells import Cell
from matrix_run import Case

__all__ = ["check", "check_bytes", "check_close"]

_LIMITS = {"float32": 2.0**-16, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Largest error beside the largest value: sums in float32, then one rounding to the dtype."""


def check(cell: Cell, *, compiled: bool = True) -> None:
    """Run a cell and compare it."""
    case = Case(cell, compiled=compiled)
    found = case.run()
    check_close(case, found)
    if cell.engine == "host":
        check_bytes(case, found)
    if cell.repeated == "twice":
        assert_same(case.run(), found, f"{cell}: again")


def check_close(case: Case, found: dict[str, np.ndarray]) -> None:
    """Each result is near float64, and infinite where that is."""
    expected = case.close()
    assert set(found) == set(expected), f"results {sorted(found)}, expected {sorted(expected)}"
    for name, exact in expected.items():
        value = to_float32(found[name]).astype(np.float64)
        finite = np.isfinite(exact)
        assert value.shape == exact.shape and np.array_equal(np.isfinite(value), finite), (
            f"{case.cell}: {name} is not finite where float64 is"
        )
        assert np.array_equal(value[~finite], exact[~finite]), f"{case.cell}: {name} is not infinite as float64 is"
        limit = _LIMITS["float32" if name in ("lse", "dsinks") else case.cell.dtype] * np.abs(exact[finite]).max(initial=0.0)
        error = np.abs(value[finite] - exact[finite]).max(initial=0.0)
        assert error <= limit, f"{case.cell}: {name} is {error:.3g} from float64 (at most {limit:.3g})"


def check_bytes(case: Case, found: dict[str, np.ndarray]) -> None:
    """Each result has the bytes of the reference on the items alone."""
    expected = case.exact()
    assert_same(found, expected, str(case.cell), tuple(expected))
