"""The code that the compiler makes of 4-bit attention's kernels: IEEE operations and, on Hopper, tensor cores and the one stated exp2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ahead_qat import ORDERED, OWN, READ, WHOLE
from test_compiled_attention import broken
from test_compiled_sm90 import RULES

PRODUCTS = {"qat_forward": 3, "qat_row_values": 2, "qat_query_gradients": 3, "qat_key_gradients": 4}
GRADIENTS = {"qat_value_sums", "attention_query_sums", "attention_key_sums"}
HOPPER = RULES | {
    "another approximation": r"\b(?:(?:lg2|r?sqrt|sin|cos|tanh)\.approx|div\.(?:approx|full)|(?:ex2|rcp)\.approx\.(?!ftz\.f32\b))",
    "flush to zero beside ex2 and rcp": r"(?<![\w.])(?!(?:ex2|rcp)\.approx\.ftz\b)[a-z]\w*(?:\.\w+)*\.ftz\b",
}
del HOPPER["flush to zero beside ex2"], HOPPER["local memory"]
"""The estimate of a reciprocal is corrected to the IEEE one: ``test_qat_gpu.py::test_the_reciprocal_is_ieee``."""
STACK = 128
"""Bytes of stack that a thread of a kernel with two accumulators may have."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Every entry of ``ahead_qat.py``, made in a process of its own and without a cache."""
    folder = tmp_path_factory.mktemp("ahead")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    script, out = Path(__file__).with_name("ahead_qat.py"), folder / "out.json"
    done = subprocess.run([sys.executable, str(script), str(out)], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def of(compiled, arch):
    return [entry for entry in compiled if entry["arch"] == arch]


def kernel(entry):
    return entry["name"].split(", ")[1]


def offences(entry):
    """Rules of the tensor-core contract that the code of an entry breaks."""
    found = [rule for rule, pattern in HOPPER.items() if re.search(pattern, entry["assembly"])]
    return found + ([f"{entry['stack']} bytes of stack"] if entry["stack"] > STACK else [])


def test_every_kernel_is_there(compiled):
    assert {kernel(entry) for entry in of(compiled, "sm_90")} == {*PRODUCTS, "fake_quantize"}
    for arch in ORDERED:
        wanted = {"fake_quantize", "attention_row_states", "qat_outputs"} | (GRADIENTS if arch in WHOLE else set())
        assert {kernel(entry) for entry in of(compiled, arch)} == (wanted if arch in READ else {"fake_quantize"}), arch
    assert {kernel(entry) for entry in compiled} <= set(OWN)


@pytest.mark.parametrize("arch", ORDERED)
def test_ordered_kernels_keep_the_rules(compiled, arch):
    assert {entry["name"]: broken(entry) for entry in of(compiled, arch) if broken(entry)} == {}


def test_no_product_takes_a_transposed_product(compiled):
    assert {entry["name"]: entry["transposed"] for entry in compiled if entry["transposed"]} == {}
    assert {kernel(entry) for entry in compiled if entry["products"] > 1} >= set(PRODUCTS)


def test_products_of_hopper_run_on_its_tensor_cores(compiled):
    for entry in of(compiled, "sm_90"):
        assert offences(entry) == [], entry["name"]
        assert ("wgmma.mma_async" in entry["assembly"]) == (kernel(entry) in PRODUCTS), entry["name"]
        assert ("ex2.approx.ftz.f32" in entry["assembly"]) == (kernel(entry) in PRODUCTS), entry["name"]


@pytest.mark.parametrize(
    "text",
    (
        "ex2.approx.f32 %f1, %f2;",
        "rcp.approx.f32 %f1, %f2;",
        "mul.ftz.f32 %f1, %f2;",
        "div.full.f32 %f1, %f2, %f3;",
        "red.global.add.f32 [%rd1], %f1;",
    ),
)
def test_offences_are_caught(compiled, text):
    entry = of(compiled, "sm_90")[0]
    assert offences({**entry, "assembly": entry["assembly"] + text})
