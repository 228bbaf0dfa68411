"""Backends made for tests, installed by a changed list of entry points."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from attn_spec import Backend, Call, Capabilities, UnsupportedProblem
from attn_spec import _registry as registry
from attn_spec._capabilities import OperatorSupport

pytest_plugins = ("pytester",)


class Double(Backend):
    """Doubles scores; the one operator of these tests."""

    framework = "numpy"
    engines = ("plain", "other")

    def __init__(self, name: str, devices: tuple[str, ...] = ("cpu",), place: int = 0, reason: str | None = None) -> None:
        self.name = name  # type: ignore[misc]
        self.priority = {device: place for device in devices}  # type: ignore[misc]
        self.devices, self.reason = devices, reason

    def capabilities(self, engine: str | None = None) -> Capabilities:
        features = frozenset({"key_padding_mask"}) if self.engine(engine) == "plain" else frozenset()
        return Capabilities(self.devices, {"joint_attn_softmax": OperatorSupport(features, dtypes=("float32",), max_head_dim=64)})

    def unavailable(self, device: str, engine: str | None = None) -> str | None:
        return self.reason

    def operators(self, engine: str | None = None) -> Mapping[str, Callable[..., Any]]:
        return {"joint_attn_softmax": lambda scores: 2 * scores}

    def evaluate(self, call: Call, *, device: str = "cpu", engine: str | None = None) -> dict[str, np.ndarray]:
        problem = call.problem(device)
        if reasons := self.reasons(problem, engine):
            raise UnsupportedProblem(self.name, reasons, problem)
        return {"probs": 2 * call.arrays["scores"]}

    def fingerprint(self, device: str, engine: str | None = None) -> str:
        return f"{self.name} {device} {self.engine(engine)}"


Install = Callable[..., None]


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
