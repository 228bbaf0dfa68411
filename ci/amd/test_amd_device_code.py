"""The arithmetic headers compiled by clang as HIP device code: the instructions are those of the contract. No AMD GPU is needed."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("gfx90a", "gfx942", "gfx950")
FUSED = re.compile(r"^\s+(v_(?:pk_)?fma[a-z]*_f32|v_fmac_f32|v_mac_f32|v_mad_f32)")
LABEL = re.compile(r"^([a-z_]+):")
SEPARATE = ("exponential", "logarithm", "score_gradient", "merge", "conversion", "tree", "dropout")
"""Kernels in which every product and sum is rounded by itself. IEEE division, in ``probability``, is built from fused operations."""


def compiled(target: str, *flags: str) -> str:
    """Assembly of ci/arithmetic/device.hip for one AMD GPU."""
    package = find_spec("triton")  # its wheel carries the HIP headers
    assert package is not None
    assert package.submodule_search_locations
    amd = Path(package.submodule_search_locations[0]) / "backends" / "amd"
    command = [
        "clang++-22",
        "-x",
        "hip",
        "--cuda-device-only",
        f"--offload-arch={target}",
        "-nogpulib",
        f"--rocm-path={amd}",
        "-isystem",
        f"{amd}/include",
    ]
    command += [f"-I{ROOT}/packages/attn-spec/src/attn_spec/include", "-std=c++17", "-O3", "-Wall", "-Werror", "-S", "-o", "-", *flags]
    return subprocess.run([*command, str(ROOT / "ci/arithmetic/device.hip")], check=True, capture_output=True, text=True).stdout


def fused_operations(assembly: str) -> Counter[str]:
    """Fused multiply-adds in binary32, by kernel."""
    found: Counter[str] = Counter()
    kernel = ""
    for line in assembly.splitlines():
        label = LABEL.match(line)
        kernel = label[1] if label else kernel
        found[kernel] += bool(FUSED.match(line))
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_only_the_chain_and_division_are_fused(target: str) -> None:
    fused = fused_operations(compiled(target, "-ffp-contract=off"))
    assert set(SEPARATE) <= set(fused), "a kernel is missing from the assembly"
    assert {name: fused[name] for name in SEPARATE if fused[name]} == {}
    assert fused["chain"] == 1


def test_a_contracting_build_is_noticed() -> None:
    fused = fused_operations(compiled("gfx942", "-ffp-contract=fast"))
    assert fused["exponential"] > 0
    assert fused["score_gradient"] > 0


@pytest.mark.parametrize("target", TARGETS)
def test_subnormals_are_kept(target: str) -> None:
    modes = re.findall(r"\.amdhsa_float_denorm_mode_32 (\d)", compiled(target, "-ffp-contract=off"))
    assert modes
    assert set(modes) == {"3"}


@pytest.mark.parametrize("target", TARGETS)
def test_no_atomics(target: str) -> None:
    assert not re.search(r"\b(?:global|flat|ds|buffer)_\w*(?:atomic|_add_f32|_add_rtn)", compiled(target, "-ffp-contract=off"))


def test_a_fast_math_build_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refusal:
        compiled("gfx942", "-ffast-math")
    assert "fast-math build cannot keep the bits" in refusal.value.stderr
