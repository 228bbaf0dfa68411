"""What the compiler made of the kernels: no contraction, no flush to zero, no approximation, no atomics, little or no local memory."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import attn_spec
import pytest
import triton
from attn_cuda._extension import extension

ARCHITECTURES = ("80", "86", "89", "90a", "100", "120")
FORBIDDEN = {
    "flush to zero": r"\.ftz\b",
    "approximation": r"\b(div|rcp|sqrt|ex2|lg2)\.(approx|full)",
    "atomic": r"\b(atom|red)\.(global|shared|async|relaxed|gpu|cta)",
    "contraction": r"(?<!\{ )\b(fma|mad)\.(rn|rz|rm|rp)\.f32",
}
EXACT = "{ fma.rn.f32 "
"""How the sources write an FMA; a compiler writes none in braces."""


def violations(ptx: str) -> list[str]:
    """``"kind: line"`` for every line of PTX that could change bits."""
    return [f"{kind}: {line.strip()}" for line in ptx.splitlines() for kind, pattern in FORBIDDEN.items() if re.search(pattern, line)]


def _compiled(nvcc: str, source: Path, out: Path, architecture: str, *options: str) -> str:
    """PTX of a source file."""
    include = [f"-I{attn_spec.include_dir()}", f"-I{source.parent}"]
    command = [nvcc, "-std=c++17", "-O3", f"-arch=compute_{architecture}", "-ptx", *options, *include, str(source), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return out.read_text()


def _production(nvcc: str, source: Path, out: Path) -> tuple[str, str]:
    """PTX of a source file and its architecture: what the installed library holds, or where it was built without, compiled for 80."""
    module = extension()
    assert not isinstance(module, str), module
    held = [name for name in module.ARCHITECTURES.split(",") if not name.endswith("-real")]
    if not held:
        return _compiled(nvcc, source, out, "80", "--fmad=false"), "80"
    _, *files = _cuobjdump("-ptx").split("Fatbin ptx code:")
    found = [ptx for ptx in files if re.search(rf"\.entry \w*?\d_{source.stem}_cu_", ptx)]
    assert len(found) == len(held), f"{len(found)} PTX of {source.name} in the library for {', '.join(held)}"
    return found[-1], held[-1].removesuffix("-virtual")


KERNELS = (
    "softmax_forward",
    "softmax_backward",
    "compact_keys",
    "products",
    "attention_forward",
    "attention_decode",
    "attention_query_sums",
    "attention_key_sums",
    "attention_bias",
    "attention_plan",
)
DIVIDES = (
    "softmax_forward",
    "softmax_backward",
    "attention_forward",
    "attention_decode",
    "attention_query_sums",
    "attention_key_sums",
    "attention_bias",
)


@pytest.mark.parametrize("kernel", KERNELS)
def test_ptx_holds_only_the_stated_arithmetic(nvcc: str, package: Path, tmp_path: Path, kernel: str) -> None:
    ptx, _ = _production(nvcc, package / "csrc" / f"{kernel}.cu", tmp_path / "kernel.ptx")
    assert violations(ptx) == []
    if kernel in DIVIDES:
        assert EXACT in ptx and "mul.rn.f32" in ptx


@pytest.mark.parametrize("kernel", ("softmax_v2_forward", "softmax_v2_backward"))
def test_ordered_v2_fuses_only_what_it_states(nvcc: str, package: Path, tmp_path: Path, kernel: str) -> None:
    """Its FMAs are written as intrinsics; a compiler that may contract finds nothing to contract."""
    source = package / "csrc" / f"{kernel}.cu"
    strict, architecture = _production(nvcc, source, tmp_path / "strict.ptx")
    loose = _compiled(nvcc, source, tmp_path / "loose.ptx", architecture, "--fmad=true")
    fused = r"\bfma\.rn\.f32\b"
    assert [found for found in violations(strict) if not found.startswith("contraction")] == []
    assert len(re.findall(fused, strict)) == len(re.findall(fused, loose)) > 1000


@pytest.mark.parametrize(
    ("body", "options", "kind"),
    [
        ("x[0] = x[1] * x[2] + x[3];", (), "contraction"),
        ("x[0] = x[1] * x[2];", ("-ftz=true",), "flush to zero"),
        ("x[0] = __fmul_rn(x[1], x[2]);", ("--use_fast_math",), "flush to zero"),
        ("x[0] = x[1] / x[2];", ("-prec-div=false",), "approximation"),
        ("atomicAdd(x, 1.0f);", (), "atomic"),
    ],
)
def test_the_scan_finds(nvcc: str, tmp_path: Path, body: str, options: tuple[str, ...], kind: str) -> None:
    source = tmp_path / "control.cu"
    source.write_text(f"__global__ void control(float* x) {{ {body} }}\n")
    assert any(found.startswith(kind) for found in violations(_compiled(nvcc, source, tmp_path / "control.ptx", "80", *options)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_contract_headers_compile_for(nvcc: str, tmp_path: Path, architecture: str) -> None:
    headers = sorted(path.name for path in (attn_spec.include_dir() / "attn").glob("*.h"))
    assert "ordered.h" in headers
    source = tmp_path / "headers.cu"
    calls = "x[0] = attn::merge({x[0], x[1]}, {x[2], x[3]}).sum + attn::ln(x[4]) + attn::tree_sum(x + 256);"
    calls += "x[1] = attn::v2::tile_factor(x[5], attn::v2::merge({x[6], x[7]}, {x[8], x[9]}));"
    source.write_text("".join(f'#include "attn/{name}"\n' for name in headers) + f"__global__ void use(float* x) {{ {calls} }}\n")
    code = f"arch=compute_{architecture},code=sm_{architecture}"
    command = [nvcc, "-std=c++17", "--fmad=false", "-Werror", "all-warnings", "-gencode", code, f"-I{attn_spec.include_dir()}", "-cubin"]
    done = subprocess.run([*command, str(source), "-o", str(tmp_path / "headers.cubin")], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@cache
def _cuobjdump(*arguments: str) -> str:
    """What cuobjdump prints of the installed library."""
    module = extension()
    assert not isinstance(module, str), module
    return _dumped(*arguments, str(module.__file__))


def _dumped(*arguments: str, folder: Path | None = None) -> str:
    tool = shutil.which("cuobjdump") or str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    return subprocess.run([tool, *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


def atomics(code: str) -> list[str]:
    """Atomic instructions in SASS; a plain search first, since there are megabytes of it."""
    near = "\n".join(line for line in code.splitlines() if "ATOM" in line or "RED" in line)
    return re.findall(r"(?<![.\w])(?:ATOM|ATOMG|ATOMS|RED)\b[.\w]*", near)


STACK_LIMIT = 512
"""Bytes. The attention kernels park a few values a row outside their inner loops; the softmax kernels on Hopper park none."""


def test_kernels_keep_their_values_in_registers() -> None:
    listing = _cuobjdump("-res-usage")
    pattern = r"arch = (sm_\w+)|Function (\w+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)"
    architecture, seen = "", 0
    for arch, function, stack, local in re.findall(pattern, listing):
        architecture = arch or architecture
        if not function:
            continue
        seen += 1
        limit = 0 if "softmax" in function and architecture.startswith("sm_90") else STACK_LIMIT
        assert int(stack) <= limit and int(local) == 0, f"{function} for {architecture}: stack {stack}, local {local}"
    module = extension()
    assert not isinstance(module, str), module
    assert seen >= 40 * sum("virtual" not in name for name in module.ARCHITECTURES.split(","))


def test_atomics_in_machine_code_are_noticed() -> None:
    lines = (
        "/*0010*/ ATOMG.E.ADD.F32 PT, R1, [R2], R3 ;",
        "/*0020*/ REDUX.SUM UR4, R1 ;",
        "/*0030*/ @P0 RED.E.ADD [R2], R3 ;",
        "FADD R1, R2, R3 ;",
    )
    assert atomics("\n".join(lines)) == ["ATOMG.E.ADD.F32", "RED.E.ADD"]


COUNTER = ("attention_whole_kernel", "ATOMG.E.ADD.STRONG.GPU")
"""Integers that hand out blocks of rows to multiprocessors: which one takes a block moves no bit of it."""


def test_code_has_no_atomics(tmp_path: Path) -> None:
    """Of a kernel whose PTX the library holds, which lists every operation, that is read; of the others the machine code."""
    ptx = _cuobjdump("-ptx")
    assert re.findall(FORBIDDEN["atomic"], ptx) == []
    shown = set(re.findall(r"\.entry (\w+)", ptx))
    module = extension()
    assert not isinstance(module, str), module
    _dumped("-xelf", "all", str(module.__file__), folder=tmp_path)
    rest = [file for file in sorted(tmp_path.iterdir()) if not any(name.encode() in file.read_bytes() for name in shown)]
    code = "".join(_dumped("-sass", str(file)) for file in rest)
    assert "FADD" in code and "FFMA" in code
    functions = [(text.split(maxsplit=1)[0], atomics(text)) for text in code.split("Function :")[1:]]
    assert {name for name, _ in functions} | shown == set(re.findall(r"Function (\w+):", _cuobjdump("-res-usage")))
    found = {(name, instruction) for name, instructions in functions for instruction in instructions}
    assert {(name, instruction) for name, instruction in found if COUNTER[0] not in name or instruction != COUNTER[1]} == set()
