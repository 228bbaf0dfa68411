"""Fixtures: every engine of the package, and byte comparison."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from attn_reference.backend import BACKEND

torch.set_num_threads(2)


@pytest.fixture(params=BACKEND.engines)
def engine(request: pytest.FixtureRequest) -> ModuleType:
    """``attn_reference.host`` and ``attn_reference.pytorch``; where the first was not compiled, its tests fail with the reason."""
    reason = BACKEND.unavailable("cpu", request.param)
    assert reason is None, reason
    return importlib.import_module(f"attn_reference.{request.param}")
