"""Fixtures of the suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from attn_spec.testing.runner import Evaluate
from attn_spec.testing.strategies import register_profiles

from attn_shared_tests import reference as reference_module


def pytest_configure(config: pytest.Config) -> None:
    register_profiles(chosen=config.getoption("--hypothesis-profile", None))


@pytest.fixture(autouse=True)
def poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a GPU, memory that torch hands out uninitialised holds NaN, so that an element which no kernel writes shows.

    Torch does so in its deterministic mode alone, which only warns here. A CPU would have to touch gigabytes that tests never read.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or "backend" not in request.fixturenames or request.getfixturevalue("backend").device == "cpu":
        yield
        return
    settings = torch.utils.deterministic
    mode, fills = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    settings.fill_uninitialized_memory = True
    yield
    settings.fill_uninitialized_memory = fills
    torch.set_deterministic_debug_mode(mode)


@pytest.fixture
def reference(request: pytest.FixtureRequest) -> Evaluate:
    """The reference answer to a call, each computed once; the engine under test is not its own reference."""
    if "backend" not in request.fixturenames:
        return reference_module.reference()
    runner = request.getfixturevalue("backend")
    return reference_module.reference(but=f"{runner.backend.name}:{runner.engine}")
