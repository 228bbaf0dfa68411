"""Backends made for tests, installed by a changed list of entry points."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from attn_spec import _registry as registry
from doubles import Install

collect_ignore = [] if (Path(__file__).parents[3] / "noxfile.py").exists() else ["test_documents.py"]
"""An sdist has these tests, but not the documents, which lie in the repository beside the packages."""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install(name=backend, ...)`` makes these the installed backends; an exception instance fails at import with it."""

    def change(**backends: Any) -> None:
        points = []
        for name, backend in backends.items():
            module = types.ModuleType(f"backend_of_{name}")
            if isinstance(backend, Exception):
                module.__getattr__ = _raises(backend)  # type: ignore[method-assign]
            else:
                module.BACKEND = backend  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module.__name__, module)
            points.append(EntryPoint(name, f"{module.__name__}:BACKEND", registry.GROUP))
        monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])
        registry.load.cache_clear()

    yield change
    registry.load.cache_clear()


def _raises(error: Exception) -> Callable[[str], Any]:
    def getattribute(name: str) -> Any:
        raise error

    return getattribute
