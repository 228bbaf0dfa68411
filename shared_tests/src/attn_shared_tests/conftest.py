"""Fixtures of the suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from attn_spec.testing.runner import Evaluate
from attn_spec.testing.strategies import register_profiles

from attn_shared_tests import reference as reference_module


def pytest_configure(config: pytest.Config) -> None:
    register_profiles(chosen=config.getoption("--hypothesis-profile", None))


@pytest.fixture(autouse=True)
def poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a GPU uninitialised memory holds NaN. A CPU would have to touch gigabytes that tests never read."""
    if "torch" not in sys.modules or "backend" not in request.fixturenames or request.getfixturevalue("backend").device == "cpu":
        yield
        return
    from attn_spec.torch.poison import poisoned_memory

    with poisoned_memory("warn"):
        yield


@pytest.fixture
def reference(request: pytest.FixtureRequest) -> Evaluate:
    """The reference answer to a call, each computed once; the engine under test is not its own reference."""
    if "backend" not in request.fixturenames:
        return reference_module.reference()
    runner = request.getfixturevalue("backend")
    return reference_module.reference(but=f"{runner.backend.name}:{runner.engine}")
