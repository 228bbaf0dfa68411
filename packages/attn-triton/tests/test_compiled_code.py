"""The code that the compiler makes of the production kernels: no contraction, no approximation, no atomics, no spills, on every target.

On NVIDIA the rules are read off the PTX, where no later step may contract an operation with an explicit ``.rn``; SASS is read as well, with
the divisions taken out, since their IEEE expansion holds FMAs. On AMD the FMAs are counted: each IEEE division has the same number, and so
has the integer division that finds a row's batch item.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ahead import AMD, CONTROLS, NVIDIA, TARGETS, VARIANTS, VARIANTS_V2

FORBIDDEN_PTX = {
    "contraction": r"\b(?:fma|mad)\.(?:\w+\.)*(?:bf16|f16|f32|f64)(?:x2)?\b",
    "an operation that may be contracted": r"\b(?:add|sub|mul)\.(?!rn\.)(?:\w+\.)*f32(?:x2)?\b",
    "approximation": r"\b(?:ex2|lg2|rcp|sqrt|rsqrt|sin|cos|tanh|div)\.(?:approx|full)\b",
    "flush to zero": r"\.ftz\b",
    "another rounding": r"\b(?:add|sub|mul|div|cvt)\.r[zmp]\.",
    "atomic": r"\b(?:atom|red)\.",
    "local memory": r"\b(?:ld|st)\.local\b",
}
FORBIDDEN_GCN = {
    "approximation": r"\bv_(?:exp|log|sqrt|rsq|sin|cos)_f\w+",
    "atomic": r"\b\w+_atomic_\w+",
    "scratch": r"\b(?:scratch_(?:load|store)|buffer_(?:load|store)\S* \S+ off, s\[0:3\])",
    "matrix": r"\bv_(?:mfma|dot)\w*",
}
GCN_METADATA = {
    ".private_segment_fixed_size:": "0",
    ".vgpr_spill_count:": "0",
    ".sgpr_spill_count:": "0",
    ".amdhsa_float_denorm_mode_32": "3",
    ".amdhsa_float_round_mode_32": "0",
}
GCN_FMA = r"\bv_(?:pk_)?(?:fma|mac|mad)(?:c|ak|mk|_mix\w*|_legacy)?_f\w+"


def broken_ptx(item):
    """Rules that PTX and resources break."""
    found = [rule for rule, pattern in FORBIDDEN_PTX.items() if re.search(pattern, item["assembly"])]
    found += [f"{item[name]} bytes of {name} memory" for name in ("stack", "local") if item[name]]
    if re.search(r"\bFFMA|\bHFMA2(?!\.MMA)|\bATOM|\bRED\.", item.get("sass", "")):
        found.append("contraction or atomic in SASS")
    return found


def broken_gcn(item, allowed):
    """Rules that AMD code breaks; ``allowed`` is the number of FMAs that its divisions expand to."""
    text = item["assembly"]
    found = [rule for rule, pattern in FORBIDDEN_GCN.items() if re.search(pattern, text)]
    for name, value in GCN_METADATA.items():
        stated = re.findall(re.escape(name) + r"\s*(\S+)", text)
        if not stated or set(stated) != {value}:
            found.append(f"{name} {stated}")
    fmas = fma_count(text)
    if fmas != allowed:
        found.append(f"contraction: {fmas} FMAs, {allowed} in divisions")
    if re.search(r"= f\w+ (?:fast|contract|afn|arcp|reassoc|nsz|nnan|ninf)\b|@llvm\.(?:fma|fmuladd|exp|exp2)\b", item["llir"]):
        found.append("a floating-point operation that the compiler may change")
    return found


def fma_count(text):
    return len(re.findall(GCN_FMA, text))


def divisions(text):
    return len(re.findall(r"\bv_div_fixup_f32", text))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Every entry of ``ahead.py``, by (arch, name), made in a process of its own and without a cache."""
    folder = tmp_path_factory.mktemp("ahead")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    script, out = Path(__file__).with_name("ahead.py"), folder / "out.json"
    done = subprocess.run([sys.executable, str(script), str(out)], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {(item["arch"], item["name"]): item for item in json.loads(out.read_text())["entries"]}


def kernels_v2():
    kinds = {arch: VARIANTS_V2 if arch in CONTROLS else ("masked", "bf16") for arch in TARGETS}
    return [(arch, f"v2-{name}-{variant}") for arch in TARGETS for name in ("forward", "backward") for variant in kinds[arch]]


def kernels():
    """(target, kernel) of every production kernel that is compiled."""
    kinds = {arch: VARIANTS if arch in CONTROLS else VARIANTS[1:] for arch in TARGETS}
    return [(arch, f"{name}-{dtype}") for arch in TARGETS for name in ("forward", "backward") for dtype, *_ in kinds[arch]]


def broken(compiled, arch, name):
    item = compiled[arch, name]
    if arch in NVIDIA:
        return broken_ptx(item)
    division = compiled[arch, "one_division"]["assembly"]
    assert divisions(division) == 1
    allowed = divisions(item["assembly"]) * fma_count(division)
    if item["masked"]:
        allowed += fma_count(compiled[arch, "one_integer_division"]["assembly"])
    return broken_gcn(item, allowed)


@pytest.mark.parametrize(("arch", "name"), kernels())
def test_production_kernels_keep_the_rules(compiled, arch, name):
    assert broken(compiled, arch, name) == []


def stated_fmas(item, lanes):
    """FMAs of ordered-v2 in one thread, nine an exponential: of its part of each tile, of factors, and of merges, the first of which needs
    none where it is known to be the first."""
    constants = item["constants"]
    group, kept = constants["GROUP"], constants["FULL"] + (constants["TAIL"] > 0)
    loops = 1 if kept and not item["backward"] else 2
    slots = constants["FULL"] * 1024 + constants["TAIL"] + loops * 1024
    factors = kept + (2 if item["backward"] else 1)
    merges = 0 if item["backward"] else kept * group - 1 if kept else group
    return 9 * (slots // lanes + factors + merges)


def broken_v2(compiled, arch, name):
    """Rules that a kernel of ordered-v2 breaks; its FMAs are counted, since a contraction is one more. Packed ones count twice."""
    item = compiled[arch, name]
    text = item["assembly"]
    if arch in NVIDIA:
        fused = r"\bfma\.rn\.f32(x2)?\b"
        count, stated = sum(2 if packed else 1 for packed in re.findall(fused, text)), stated_fmas(item, 32)
        rest = {**item, "assembly": re.sub(fused, "", text), "sass": ""}
        return broken_ptx(rest) + ([] if count == stated else [f"contraction: {count} FMAs, {stated} stated"])
    stated = stated_fmas(item, 64) + divisions(text) * fma_count(compiled[arch, "one_division"]["assembly"])
    if item["masked"]:
        stated += fma_count(compiled[arch, "one_integer_division"]["assembly"])
    count = fma_count(text) + len(re.findall(r"\bv_pk_(?:fma|mac|mad)", text))
    found = [rule for rule, pattern in FORBIDDEN_GCN.items() if re.search(pattern, text)]
    if re.search(r"= f\w+ (?:fast|contract|afn|arcp|reassoc|nsz|nnan|ninf)\b|@llvm\.(?:fmuladd|exp|exp2)\b", item["llir"]):
        found.append("a floating-point operation that the compiler may change")
    return found if count == stated else [*found, f"contraction: {count} FMAs, {stated} stated"]


@pytest.mark.parametrize(("arch", "name"), kernels_v2())
def test_kernels_of_ordered_v2_fuse_only_what_it_states(compiled, arch, name):
    assert broken_v2(compiled, arch, name) == []


@pytest.mark.parametrize("arch", CONTROLS)
def test_fusion_in_ordered_v2_is_caught(compiled, arch):
    """Control: the production kernel, compiled without enable_fp_fusion=False."""
    assert any("contraction" in rule for rule in broken_v2(compiled, arch, "v2-fused"))


@pytest.mark.parametrize("arch", TARGETS)
def test_the_divisions_are_there(compiled, arch):
    for name in ("forward-bf16", "backward-bf16"):
        text = compiled[arch, name]["assembly"]
        assert divisions(text) > 0 if arch in AMD else "div.rn.f32" in text


@pytest.mark.parametrize("arch", CONTROLS)
def test_fusion_is_caught(compiled, arch):
    """Control: the production kernel, compiled without enable_fp_fusion=False."""
    assert any("contraction" in rule for rule in broken(compiled, arch, "fused"))


@pytest.mark.parametrize("arch", CONTROLS)
def test_other_offences_are_caught(compiled, arch):
    found = " ".join(broken(compiled, arch, "approximate"))
    for rule in ("approximation", "atomic", "contraction"):
        assert rule in found


def test_fusion_is_caught_in_sass(compiled):
    assert "FFMA" in compiled["sm_90", "fused"]["sass"]
    assert "FADD" in compiled["sm_90", "forward-fp32"]["sass"]


@pytest.mark.parametrize("arch", NVIDIA)
def test_rounding_to_bfloat16_is_one_instruction(compiled, arch):
    assert re.search(r"cvt\.rn\.bf16(?:x2)?\.f32", compiled[arch, "forward-bf16"]["assembly"])
