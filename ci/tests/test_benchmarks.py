"""The benchmarks count work and time calls as they say."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(params=["softmax_gpu", "attention_gpu"])
def benchmark(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module(request.param)
    sys.modules.pop(request.param)


def test_only_the_call_is_timed(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is flushed before the window, and the end is waited for."""
    log: list[str] = []
    names = iter(("start", "end"))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.name = next(names)

        def record(self) -> None:
            log.append(self.name)

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 1.0

    class Buffer:
        def zero_(self) -> None:
            log.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    buffers = [Buffer()] if benchmark.__name__ == "softmax_gpu" else []
    assert benchmark.timed(lambda: log.append("call"), *buffers) == 1.0
    assert log == [*(["flush"] if buffers else []), "start", "call", "end", "wait"]


@pytest.mark.parametrize(
    ("sizes", "pairs"),
    [
        ({"queries": 4, "keys": 10, "causal": True}, 4 * 6 + 10),
        ({"queries": 4, "keys": 10}, 40),
        ({"queries": 5, "keys": 2, "causal": True}, 3),
        ({"queries": 1, "keys": 7, "causal": True}, 7),
        ({"queries": 6, "keys": 6, "causal": True, "window": (1, 0)}, 1 + 5 * 2),
    ],
)
def test_visible_pairs_are_counted_exactly(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], pairs: int) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    shape = importlib.import_module("attention_gpu").Shape(heads=3, kv_heads=3, **sizes)
    assert shape.pairs == 3 * pairs
