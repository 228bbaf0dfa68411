"""Compiles the production kernels, and controls that break the rules, for every target without a GPU: ``python ahead.py OUT.json``.

It must run without TRITON_INTERPRET=1. Every entry of the file is one compiled kernel: what it is, its assembly and its resources.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from attn_triton import _softmax_kernel as kernel
from attn_triton import _softmax_v2_kernel as kernel_v2
from attn_triton._softmax_launch import CONFIGS, CONFIGS_V2
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

NVIDIA = {f"sm_{capability}": GPUTarget("cuda", capability, 32) for capability in (80, 90, 100, 120)}
AMD = {arch: GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942", "gfx950")}
TARGETS = NVIDIA | AMD
CONTROLS = ("sm_90", "gfx942")
"""Targets with the kernels that break rules and with every variant of the production kernels; the others have the masked bfloat16 ones."""
VARIANTS = (("fp32", False, True), ("bf16", True, False))
"""dtype, whether there is a mask, and whether the number of keys is known as a multiple of 16: the least and the most that is compiled."""
VARIANTS_V2 = {
    "masked": ("bf16", 4608, 10**5, True),
    "fp32": ("fp32", 4608, 10**5, False),
    "bf16": ("bf16", 2560, 10**5, False),
    "apart": ("bf16", 7401, 10**5, False),
    "few": ("fp32", 4608, 24, False),
}
"""Of ordered-v2: dtype, keys, rows and whether there is a mask. Rows of ``apart`` do not begin on 16 bytes."""
POINTERS = {"row_max": "*fp32", "row_sum": "*fp32", "keep": "*u8", "index": "*i32", "counts": "*i32"}


@triton.jit
def approximate(x, out, keys):
    """Everything that the contract forbids: exp2 and division as the hardware approximates them, an FMA and an atomic."""
    slot = tl.arange(0, 256)
    value = tl.load(x + slot)
    tl.store(out + slot, tl.exp2(value) / (tl.fma(value, value, 2.0)))
    tl.atomic_add(out + keys, 1.0)


@triton.jit
def one_division(x, out, keys):
    slot = tl.arange(0, 64)
    value = tl.load(x + slot)
    tl.store(out + slot, tl.div_rn(tl.load(x + slot + keys), value))


@triton.jit
def one_integer_division(x, out, keys):
    """The only other expansion with an FMA in it: the 64-bit division that finds the batch item of a row."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    tl.store(out + row // keys, tl.load(x + row))


def production_v2(function, variant, config, **options):
    """Source, compiler options and compile-time arguments of a launch of ordered-v2."""
    dtype, keys, rows, masked = VARIANTS_V2[variant]
    vector = 1 if masked or keys % 16 else 16 // {"fp32": 4, "bf16": 2}[dtype]
    constants = config.constants(rows <= config.few, keys, vector, masked)
    return production(function, dtype, masked, keys % 16 == 0, constants), config.options(constants) | options, constants


def production(function, dtype, masked, aligned, constants):
    """Source of a production launch; ``aligned`` is a number of keys that 16 divides."""
    constants = {"HAS_MASK": masked, "INTEGER_ROUNDING": False, **constants}
    if not masked:
        constants |= dict.fromkeys(("keep", "index", "counts"))
    integers = ("rows", "keys", "rows_per_batch")
    kinds = POINTERS | dict.fromkeys(integers, "i32") | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, f"*{dtype}") for name in function.arg_names}
    return ASTSource(function, signature, constants, divisible(function, signature, {"keys"} if aligned else set()))


def divisible(function, signature, more=frozenset()):
    names = enumerate(function.arg_names)
    return {(place,): [["tt.divisibility", 16]] for place, name in names if signature[name].startswith("*") or name in more}


def control(function):
    signature = {"x": "*fp32", "out": "*fp32", "keys": "i32"}
    return ASTSource(function, signature, {}, divisible(function, signature)), CONFIGS["cuda"].options


def cuobjdump(compiled, flag):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([triton.knobs.nvidia.cuobjdump.path, flag, file.name], capture_output=True, text=True, check=True).stdout


def assembled_without_division(ptx):
    """sm_90 SASS of the PTX with every division replaced by one addition, so that no division expansion is left in it."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(ptx.replace("div.rn.f32", "add.rn.f32"))
        subprocess.run([get_ptxas(90).path, "--gpu-name=sm_90a", str(source), "-o", str(cubin)], check=True, capture_output=True)
        return subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout


def entry(name, kind, arch, source, options, **facts):
    compiled = triton.compile(source, target=TARGETS[arch], options=options)
    found = {"name": name, "kind": kind, "arch": arch, "shared": compiled.metadata.shared, **facts}
    if arch in AMD:
        return found | {"assembly": compiled.asm["amdgcn"], "llir": compiled.asm["llir"]}
    usage = cuobjdump(compiled, "-res-usage")
    found |= {"assembly": compiled.asm["ptx"], "registers": int(re.search(r"REG:(\d+)", usage)[1])}
    found |= {"stack": int(re.search(r"STACK:(\d+)", usage)[1]), "local": int(re.search(r"LOCAL:(\d+)", usage)[1])}
    return found


def entries():
    functions = {"forward": kernel.softmax_forward, "backward": kernel.softmax_backward}
    for arch in TARGETS:
        config = CONFIGS["rocm" if arch in AMD else "cuda"]
        variants = VARIANTS if arch in CONTROLS else VARIANTS[1:]
        for name, function in functions.items():
            for dtype, masked, aligned in variants:
                source = production(function, dtype, masked, aligned, {"ROWS": config.rows})
                yield entry(f"{name}-{dtype}", "production", arch, source, config.options, masked=masked)
        config_v2 = CONFIGS_V2["rocm" if arch in AMD else "cuda"]
        functions_v2 = {"forward": kernel_v2.softmax_forward, "backward": kernel_v2.softmax_backward}
        for name, function in functions_v2.items():
            for variant in VARIANTS_V2 if arch in CONTROLS else ("masked", "bf16"):
                source, options, constants = production_v2(function, variant, config_v2)
                facts = {"masked": VARIANTS_V2[variant][3], "backward": name == "backward", "constants": constants}
                yield entry(f"v2-{name}-{variant}", "production", arch, source, options, **facts)
        if arch in CONTROLS:
            source = production(functions["forward"], "fp32", False, True, {"ROWS": config.rows})
            yield entry("fused", "control", arch, source, config.options | {"enable_fp_fusion": True}, masked=False)
            source, options, constants = production_v2(functions_v2["backward"], "fp32", config_v2, enable_fp_fusion=True)
            yield entry("v2-fused", "control", arch, source, options, masked=False, backward=True, constants=constants)
        for function in ((approximate,) if arch in CONTROLS else ()) + ((one_division, one_integer_division) if arch in AMD else ()):
            yield entry(function.__name__, "control", arch, *control(function), masked=False)


def main(path):
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("ahead.py: TRITON_INTERPRET must not be 1")
    found = list(entries())
    for item in found:
        if item["arch"] == "sm_90" and not item["name"].startswith("v2-"):  # those have FMAs of their own
            item["sass"] = assembled_without_division(item["assembly"])
    Path(path).write_text(json.dumps({"triton": triton.__version__, "entries": found}))


if __name__ == "__main__":
    main(sys.argv[1])
