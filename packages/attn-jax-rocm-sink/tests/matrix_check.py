"""The checks of one cell: every output is compared before anything returns."""

from __future__ import annotations

import numpy as np
from attn_spec import UnsupportedProblem
from attn_spec._arrays import to_float32
from attn_spec.testing.asserts import assert_same
from matrix_cells import Cell
from matrix_ck import refusals
from matrix_run import Case

__all__ = ["check", "check_bytes", "check_close"]

_LIMITS = {"float32": 2.0**-16, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Largest error beside the largest value: sums in float32, then one rounding to the dtype."""
_LIMITS_OF_CK = {"float32": 2.0**-16, "bfloat16": 2.0**-6, "float16": 2.0**-9}
"""Its gradients, that of the sinks among them, come of an output that is rounded, and are rounded before they are summed over groups."""
_OF_DELTA = 2.0
"""How much larger the limit of ck's dq, dk, dbias and dsinks is under dropout: each holds differences from delta, the sum of dO times that
output, whose terms dropout makes larger than the results. In float16 these errors are an eighth of those in bfloat16."""


def check(cell: Cell, *, compiled: bool = True) -> None:
    """Run a cell and compare it; one that the ck engine must refuse is refused, for the reasons that are listed and no others."""
    case = Case(cell, compiled=compiled)
    expected = refusals(cell) if cell.engine == "ck" else ()
    try:
        found = case.run()
    except UnsupportedProblem as error:
        listed = [[text for text in expected if text in reason] for reason in error.reasons]
        assert expected and sorted(listed) == sorted([text] for text in expected), f"{cell}: refused for {error.reasons}"
        return
    assert not expected, f"{cell}: runs, and should be refused for {expected}"
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
        ck = case.cell.engine == "ck"
        kind = "float32" if name == "lse" or (name == "dsinks" and not ck) else case.cell.dtype
        limit = (_LIMITS_OF_CK if ck else _LIMITS)[kind] * np.abs(exact[finite]).max(initial=0.0)
        if ck and case.cell.dropout == "dropout" and name in ("dq", "dk", "dbias", "dsinks"):
            limit *= _OF_DELTA
        error = np.abs(value[finite] - exact[finite]).max(initial=0.0)
        assert error <= limit, f"{case.cell}: {name} is {error:.3g} from float64 (at most {limit:.3g})"


def check_bytes(case: Case, found: dict[str, np.ndarray]) -> None:
    """Each result has the bytes of the reference on the items alone."""
    expected = case.exact()
    assert_same(found, expected, str(case.cell), tuple(expected))
