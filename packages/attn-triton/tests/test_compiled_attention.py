"""The code that the compiler makes of the attention kernels and the products: FMAs in the chains and in divisions, and nowhere else.

A chain is a product of blocks on NVIDIA and a loop of fused multiply-adds on AMD; in LLVM code both are explicit, one each, and no later
step may add one. Approximations, atomics, matrix instructions and spills are looked for as in the softmax kernels.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ahead import AMD, CONTROLS, NVIDIA, TARGETS
from ahead_attention import CASES
from test_compiled_code import FORBIDDEN_GCN, FORBIDDEN_PTX, GCN_FMA, GCN_METADATA, divisions

RULES = {rule: pattern for rule, pattern in FORBIDDEN_PTX.items() if rule != "contraction"}
FMA_CALL = r"call [^@\n]*?(?:<(\d+) x float>|\bfloat) @llvm\.(?:fma|fmuladd)\b"
METADATA = {name: value for name, value in GCN_METADATA.items() if name != ".sgpr_spill_count:"}
"""Scalar registers may wait in lanes of vector registers; memory is counted by the private segment."""
FMAS_OF_A_DIVISION = 5
INTEGER_DIVISION = r"\bv_(?:(?:fma|mad)(?:mk|ak|c)|mac)_f32\S* (?:.*\b0x[4c]f800000\b|v\d+, 0, v\d+)"
"""Integer divisions scale by 2^32 in floating point, or multiply that by a known 0; no kernel has such constants."""


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """What ``ahead_attention.py`` writes, made in a process of its own and without a cache."""
    folder = tmp_path_factory.mktemp("ahead")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    script, out = Path(__file__).with_name("ahead_attention.py"), folder / "out.json"
    done = subprocess.run([sys.executable, str(script), str(out)], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def compiled(document):
    """The entries by target."""
    return {arch: [entry for entry in document["entries"] if entry["arch"] == arch] for arch in TARGETS}


def stated(llir):
    """Fused multiply-adds of LLVM's code, each element of a vector one."""
    return sum(int(width or 1) for width in re.findall(FMA_CALL, llir))


def broken(entry):
    """Rules that the code of an entry breaks."""
    return _broken_gcn(entry) if entry["arch"] in AMD else _broken_ptx(entry)


def _broken_ptx(entry):
    text = entry["assembly"]
    found = [rule for rule, pattern in RULES.items() if re.search(pattern, text)]
    found += [f"{entry[name]} bytes of {name} memory" for name in ("stack", "local") if entry[name]]
    fmas = len(re.findall(FORBIDDEN_PTX["contraction"], text)) + len(re.findall(r"\bfma\.rn\.f32x2\b", text))  # a packed one counts twice
    return found + ([f"contraction: {fmas} FMAs for {stated(entry['llir'])}"] if fmas != stated(entry["llir"]) else [])


def _broken_gcn(entry):
    text = entry["assembly"]
    found = [rule for rule, pattern in FORBIDDEN_GCN.items() if re.search(pattern, text)]
    for name, value in METADATA.items():
        values = re.findall(re.escape(name) + r"\s*(\S+)", text)
        if not values or set(values) != {value}:
            found.append(f"{name} {values}")
    scalar = len(re.findall(GCN_FMA, text)) - len(re.findall(INTEGER_DIVISION, text))
    fmas = scalar + len(re.findall(r"\bv_pk_fma_f32", text))  # a packed one counts twice
    allowed = stated(entry["llir"]) + FMAS_OF_A_DIVISION * divisions(text)
    return found + ([f"contraction: {fmas} FMAs, {allowed} in chains and divisions"] if fmas != allowed else [])


@pytest.mark.parametrize("arch", TARGETS)
def test_the_kernels_keep_the_rules(compiled, arch):
    assert {entry["name"]: broken(entry) for entry in compiled[arch] if broken(entry)} == {}


@pytest.mark.parametrize("arch", TARGETS)
def test_every_kernel_has_its_chain(compiled, arch):
    names = {entry["name"] for entry in compiled[arch]}
    assert {name.split(",")[0] for name in names} == set(CASES)
    for entry in compiled[arch]:
        if "sums" in entry["name"] or "product" in entry["name"]:
            fma = r"\bfma\.rn\.f32(?:x2)?\b" if arch in NVIDIA else GCN_FMA  # Triton 3.6 pairs all of a product on sm_100 and later
            assert stated(entry["llir"]) > 0, entry["name"]
            assert re.search(fma, entry["assembly"]), entry["name"]


@pytest.mark.parametrize("arch", TARGETS)
def test_no_product_takes_a_transposed_product(compiled, arch):
    assert {entry["name"]: entry["transposed"] for entry in compiled[arch] if entry["transposed"]} == {}
    assert any(entry["products"] for entry in compiled[arch]) == (arch in NVIDIA)


def test_a_transposed_product_is_found(document):
    """Control: at once, and behind an exponential and a turn of a loop; operands from memory and stored products are none."""
    found = document["controls"]
    assert {name: len(lines) for name, lines in found.items()} == {"at once": 1, "behind a loop": 1, "of operands": 0}


@pytest.mark.parametrize("arch", NVIDIA)
def test_halves_enter_a_chain_behind_a_move(compiled, arch):
    """Whatever this compiler makes of halves: Triton 3.6 makes matrix instructions of those that ``widened`` does not hide."""
    products = [entry["llir"] for entry in compiled[arch] if entry["name"] == "products, product"]
    halves = [llir for llir in products if "bfloat" in llir]
    assert (len(products), len(halves)) == (3, 1)
    assert 'asm sideeffect "mov.b32 $0, $1;"' in halves[0]


@pytest.mark.parametrize("arch", CONTROLS)
def test_an_fma_that_no_chain_asked_for_is_caught(compiled, arch):
    """Control: one more instruction, a spill and an atomic in the code of a kernel."""
    entry = compiled[arch][0]
    more = {
        "sm_90": "\tfma.rn.f32 %f1, %f2, %f3, %f4;\n\tst.local.b32 [%r1], %r2;\n",
        "gfx942": "\tv_fmac_f32_e32 v1, v2, v3\n\tv_mfma_f32_4x4x1\n",
    }
    found = " ".join(broken({**entry, "assembly": entry["assembly"] + more[arch]}))
    assert "contraction" in found
    assert ("local memory" if arch in NVIDIA else "matrix") in found
