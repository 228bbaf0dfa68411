"""The code that the compiler makes of contract sm90-v1's kernels for sm_90: tensor cores, the one stated approximation, nothing else."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ahead_sm90 import CASES
from test_compiled_code import FORBIDDEN_PTX

RULES = {rule: pattern for rule, pattern in FORBIDDEN_PTX.items() if rule not in ("contraction", "flush to zero", "approximation")}
RULES |= {
    "another approximation": r"\b(?:(?:lg2|rcp|r?sqrt|sin|cos|tanh)\.approx|div\.(?:approx|full)|ex2\.approx\.(?!ftz\.f32\b))",
    "flush to zero beside ex2": r"(?<![\w.])(?!ex2\.approx\.ftz\b)[a-z]\w*(?:\.\w+)*\.ftz\b",
}
PRODUCTS = {"attention_forward": 2, "attention_query_gradients": 3, "attention_key_gradients": 4, "attention_segments": 2}
"""Products of blocks in the loop of each kernel."""
WITHOUT_EX2 = ("attention_delta", "attention_sinks", "attention_plan", "key_gap")
SPILLED = {
    "D 128, attention_key_gradients": 128,
    "D 128, packed decode, attention_segments": 16,
    "D 128, joint, attention_forward": 64,
    "D 128, joint, attention_query_gradients": 32,
    "D 128, joint, attention_key_gradients": 16,
    "D 256, attention_query_gradients": 256,
    "D 256, attention_key_gradients": 384,
}
"""Bytes of stack that a thread may have: two accumulators fill the registers, beside those of a loop over text and image or D = 256."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Every entry of ``ahead_sm90.py`` by name, made in a process of its own and without a cache."""
    folder = tmp_path_factory.mktemp("ahead")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    script, out = Path(__file__).with_name("ahead_sm90.py"), folder / "out.json"
    done = subprocess.run([sys.executable, str(script), str(out)], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {entry["name"]: entry for entry in json.loads(out.read_text())}


def broken(entry):
    """Rules that the code of an entry breaks."""
    text = entry["assembly"]
    found = [
        rule for rule, pattern in RULES.items() if re.search(pattern, text) and not (rule == "local memory" and SPILLED.get(entry["name"]))
    ]
    if entry["stack"] > SPILLED.get(entry["name"], 0):
        found.append(f"{entry['stack']} bytes of stack")
    return found


def test_every_kernel_is_there(compiled):
    kernels = {name.rsplit(", ", 1)[1] for name in compiled}
    assert kernels >= {
        *PRODUCTS,
        "attention_merge",
        "attention_delta",
        "attention_sink_items",
        "attention_sinks",
        "attention_plan",
        "key_gap",
    }
    assert {name.rsplit(", ", 1)[0] for name in compiled} == set(CASES)


def test_the_rules_hold(compiled):
    assert {name: broken(entry) for name, entry in compiled.items() if broken(entry)} == {}


def test_no_product_takes_a_transposed_product(compiled):
    assert {name: entry["transposed"] for name, entry in compiled.items() if entry["transposed"]} == {}
    assert {name.rsplit(", ", 1)[1] for name, entry in compiled.items() if entry["products"] > 1} >= set(PRODUCTS)


def test_products_run_on_the_tensor_cores(compiled):
    for name, entry in compiled.items():
        kernel, text = name.rsplit(", ", 1)[1], entry["assembly"]
        tensor = len(re.findall(r"\bwgmma\.mma_async", text)) + len(re.findall(r"\bmma\.sync", text))
        assert (tensor > 0) == (kernel in PRODUCTS), name
        if kernel in PRODUCTS and "decode" not in name:
            assert "wgmma.mma_async" in text and "mma.sync" not in text, name


def test_exponentials_are_the_stated_instruction(compiled):
    for name, entry in compiled.items():
        assert ("ex2.approx.ftz.f32" in entry["assembly"]) == (not name.endswith(WITHOUT_EX2)), name


@pytest.mark.parametrize(
    ("text", "rule"),
    (
        ("ex2.approx.f32 %f1, %f2;", "another approximation"),
        ("lg2.approx.ftz.f32 %f1, %f2;", "another approximation"),
        ("mul.ftz.f32 %f1, %f2, %f3;", "flush to zero beside ex2"),
        ("add.f32 %f1, %f2, %f3;", "an operation that may be contracted"),
        ("red.global.add.f32 [%rd1], %f1;", "atomic"),
    ),
)
def test_offences_are_caught(compiled, text, rule):
    entry = compiled["D 128, attention_forward"]
    assert rule in broken({**entry, "assembly": entry["assembly"] + text})
