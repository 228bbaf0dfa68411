"""The training example of docs/examples: in small it learns, and its recorded five seeds say what docs/qat.md says of them."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs/examples"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = spec_from_file_location("qat_training", FOLDER / "qat_training.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["qat_training"] = module  # its dataclass looks its module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recorded() -> dict:
    return json.loads((FOLDER / "qat_training.json").read_text())


def test_a_short_run_learns_in_4_bits(example: ModuleType) -> None:
    recipe = example.Recipe(context=16, batch=4, held_out=4, warmup=0, steps=12, every=6, last_rate=1e-2)
    curves = example.run(0, recipe)
    assert [len(curves[name]) for name in (*example.ARMS, "exact")] == [3, 3, 1]
    assert curves["qat"][0] == curves["post-training"][0], "the arms begin with the same weights"
    assert curves["qat"][-1] < curves["qat"][0] - 0.5
    assert curves["qat"][1:] != curves["post-training"][1:], "and are trained with different attention"


def test_the_summary_knows_the_arms_apart(example: ModuleType) -> None:
    seeds = {str(seed): {"post-training": [3.0, 2.5 + seed / 100], "qat": [3.0, 2.4], "exact": [2.3]} for seed in range(3)}
    found = example.summary(seeds)
    assert found["gain"] == pytest.approx(0.11) and found["least gain"] == pytest.approx(0.1) and found["spread"] == pytest.approx(0.02)
    swapped = {seed: {**curves, "qat": curves["post-training"], "post-training": curves["qat"]} for seed, curves in seeds.items()}
    assert example.summary(swapped)["gain"] < 0
    assert example.drawing(seeds, 10).count("<polyline") == 9


def test_training_in_4_bits_gains_more_than_seeds_differ(example: ModuleType, recorded: dict) -> None:
    seeds, summary = recorded["seeds"], recorded["summary"]
    assert len(seeds) == 5 and example.summary(seeds) == summary
    assert recorded["environment"]["config"] == example.CONFIG.fingerprint
    assert summary["least gain"] > 0 and summary["gain"] > summary["spread"]
    lost = {name: [curves[name][-1] - curves["exact"][-1] for curves in seeds.values()] for name in example.ARMS}
    assert max(lost["qat"]) < min(lost["post-training"]), "what 4 bits cost: no seed of one arm reaches into the other's range"


def test_the_drawing_is_of_the_record(example: ModuleType, recorded: dict) -> None:
    assert (FOLDER / "qat_training.svg").read_text() == example.drawing(recorded["seeds"], recorded["recipe"]["every"])
