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
    """``attn_reference.host`` and ``attn_reference.pytorch``; the first is skipped, with its reason, only where it is not compiled."""
    reason = BACKEND.unavailable("cpu", request.param)
    if reason is not None:
        pytest.skip(reason)
    return importlib.import_module(f"attn_reference.{request.param}")
