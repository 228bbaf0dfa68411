"""Negative controls: a check that passes on the reference must fail on a faulty backend made from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attn_spec.testing.runner import Evaluate

from attn_shared_tests.faulty import Fault

Check = Callable[..., None]


def assert_bites(check: Check, fault: Fault, reference: Evaluate, *arguments: Any, **keywords: Any) -> None:
    """``check`` passes on the reference and raises AssertionError on ``fault(reference)``."""
    check(reference, *arguments, **keywords)
    with pytest.raises(AssertionError):
        check(fault(reference), *arguments, **keywords)


def control_id(value: object) -> str | None:
    """Test id of a check or a fault."""
    return getattr(value, "__name__", None)
