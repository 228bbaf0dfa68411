"""A backend made for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from attn_spec import Backend, Call, Capabilities, OperatorSupport, UnsupportedProblem

Install = Callable[..., None]
"""The ``install`` fixture: ``install(name=backend, ...)``."""


class Double(Backend):
    """Doubles scores; the one operator of these tests."""

    framework = "numpy"
    engines = ("plain", "other")

    def __init__(self, name: str, devices: tuple[str, ...] = ("cpu",), place: int = 0, reason: str | None = None) -> None:
        self.name = name  # type: ignore[misc]
        self.priority = dict.fromkeys(devices, place)  # type: ignore[misc]
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
