"""The hip engine's library, compiled for AMD GPUs on a machine without one: what it needs, and what its code objects contain."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import hip_library
import pytest
import rocm_folder

TARGETS = tuple(rocm_folder.TARGETS)
SYSTEM = re.compile(r"(libstdc\+\+|libgcc_s|libc|libm|ld-linux-\S+)\.so\.\d+")
FUSED = re.compile(r"v_(pk_)?(fma|fmac|fmaak|fmamk|mac|mad|madmk|madak)(_mix\w*|_legacy)?_f(32|16|64)")
ATOMIC = re.compile(r"(global|flat|ds|buffer)_\w*(atomic|add|sub|inc|dec|and|or|xor|min|max|swap|cmpst|wrap)(_\w+)?_(rtn_)?[uifb]?\d\w*")
PLACES = ("__builtin_fmaf", " / ", " % ", "probability(")  # IEEE and integer divisions are built from fused operations
MATRIX = re.compile(r"v_\w*(mfma|wmma|dot)\w*")
KERNELS = {
    "attention_forward_kernel",
    "attention_query_gradient_kernel",
    "attention_key_gradient_kernel",
    "attention_bias_gradient_kernel",
    "attention_sink_gradient_kernel",
    "compact_keys_kernel",
    "empty_rows_kernel",
}


def stray(code: Path) -> set[str]:
    """Source lines without a fused operation or a division that have a fused instruction."""
    return {
        found.source
        for found in hip_library.instructions(code)
        if FUSED.match(found.name) and not any(place in found.source for place in PLACES)
    }


def test_the_library_needs_the_runtime_of_rocm_7_and_the_system() -> None:
    needed = hip_library.needed(hip_library.build())
    assert rocm_folder.RUNTIME in needed
    assert [name for name in needed - {rocm_folder.RUNTIME} if not SYSTEM.fullmatch(name)] == []


def test_the_library_takes_these_functions_of_hip_and_no_other() -> None:
    undefined = hip_library.symbols(hip_library.build(), "undefined")
    assert {name for name in undefined if "hip" in name.lower()} == set(hip_library.FUNCTIONS)
    assert {name for name in undefined if "cuda" in name.lower() or name.startswith(("Py", "attn"))} == set()


def test_only_handlers_and_build_facts_leave_the_library() -> None:
    defined = hip_library.symbols(hip_library.build(), "defined")
    handlers = {f"attn_jax_rocm_sink_hip_{name}" for name in ("forward", "backward", "plan", "supports")}
    assert defined == handlers | {f"attn_jax_rocm_sink_{name}" for name in ("ffi_version", "fingerprint", "jaxlib")}


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_is_there_and_spills_nothing_to_memory(target: str) -> None:
    private = hip_library.metadata(hip_library.code_object(target), "private_segment_fixed_size")
    assert {name for kernel in private for name in KERNELS if name in kernel} == KERNELS
    assert {kernel: size for kernel, size in private.items() if size} == {}


@pytest.mark.parametrize("target", TARGETS)
def test_no_atomics_and_no_matrix_instructions(target: str) -> None:
    names = {found.name for found in hip_library.instructions(hip_library.code_object(target))}
    assert "s_barrier" in names, "the code object was not read"
    assert {name for name in names if ATOMIC.fullmatch(name) or MATRIX.fullmatch(name) or name.startswith("scratch_")} == set()


@pytest.mark.parametrize("target", TARGETS)
def test_fused_operations_come_from_chains_and_divisions_alone(target: str) -> None:
    fused = [found for found in hip_library.instructions(hip_library.code_object(target)) if FUSED.match(found.name)]
    assert any("__builtin_fmaf" in found.source for found in fused), "no chain was found"
    assert stray(hip_library.code_object(target)) == set()


def test_a_contracting_build_is_noticed() -> None:
    code = hip_library.BUILD / "contracted.o"
    include = hip_library.ROOT / "packages/attn-spec/src/attn_spec/include"
    rocm = rocm_folder.make(hip_library.BUILD / "rocm")
    command = ["clang++-22", "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "--offload-arch=gfx942", f"--rocm-path={rocm}"]
    command += ["-isystem", f"{rocm}/include", f"-I{include}", "-std=c++17", "-O3", "-ffp-contract=fast", "-gline-tables-only"]
    subprocess.run([*command, "-c", str(hip_library.ROOT / "ci/arithmetic/device.hip"), "-o", str(code)], check=True)
    assert any("mul(p, r)" in line or "a + b" in line for line in stray(code))
