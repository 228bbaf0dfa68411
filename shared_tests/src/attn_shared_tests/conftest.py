"""Fixtures of the suite."""

from __future__ import annotations

import pytest
from attn_spec.testing.runner import Evaluate
from attn_spec.testing.strategies import register_profiles

from attn_shared_tests import reference as reference_module


def pytest_configure(config: pytest.Config) -> None:
    register_profiles(chosen=config.getoption("--hypothesis-profile", None))


@pytest.fixture
def reference(request: pytest.FixtureRequest) -> Evaluate:
    """The reference answer to a call, each computed once; the engine under test is not its own reference."""
    if "backend" not in request.fixturenames:
        return reference_module.reference()
    runner = request.getfixturevalue("backend")
    return reference_module.reference(but=f"{runner.backend.name}:{runner.engine}")
