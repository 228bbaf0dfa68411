"""Small kernels for the tests of the interpreter, compiled by clang without ROCm: assembly, or HIP with nothing but builtins."""

from __future__ import annotations

import subprocess
from pathlib import Path

from interpreter.build import hip_headers

__all__ = ["TARGETS", "assembled", "compiled", "compiled_with_headers"]

TARGETS = ("gfx90a", "gfx942", "gfx950")
ROOT = Path(__file__).resolve().parents[2]
CLANG = "clang++-22"
DEVICE = ("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-O3", "-std=c++17", "-ffp-contract=off")

PRELUDE = """
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define THREAD __builtin_amdgcn_workitem_id_x()
#define BLOCK __builtin_amdgcn_workgroup_id_x()
#define BARRIER __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); __builtin_amdgcn_s_barrier(); \\
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup")
"""

KERNEL = """
.globl {name}
.p2align 8
.type {name},@function
{name}:
{body}
  s_endpgm
.section .rodata,"a",@progbits
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_kernarg_size 16
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_group_segment_fixed_size 1024
  .amdhsa_next_free_vgpr 64
  .amdhsa_next_free_sgpr 64
  .amdhsa_accum_offset 64
  .amdhsa_ieee_mode 1
  .amdhsa_float_denorm_mode_32 3
  .amdhsa_float_denorm_mode_16_64 3
.end_amdhsa_kernel
.text
"""

FILE = """
.amdgcn_target "amdgcn-amd-amdhsa--{target}"
.text
{kernels}
.amdgpu_metadata
amdhsa.version: [1, 2]
amdhsa.kernels:{metadata}
.end_amdgpu_metadata
"""

METADATA = """
  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: 16
    .kernarg_segment_align: 8
    .group_segment_fixed_size: 1024
    .private_segment_fixed_size: 0
    .wavefront_size: 64
    .sgpr_count: 64
    .vgpr_count: 64
    .max_flat_workgroup_size: 1024
    .args:
      - {{.offset: 0, .size: 8, .value_kind: global_buffer, .address_space: global}}
      - {{.offset: 8, .size: 8, .value_kind: global_buffer, .address_space: global}}"""


def assembled(bodies: dict[str, str], target: str, output: Path) -> bytes:
    """A code object with one kernel a body. A kernel gets two pointers, at s[0:1], and its thread number in v0."""
    kernels = "".join(KERNEL.format(name=name, body=body) for name, body in bodies.items())
    metadata = "".join(METADATA.format(name=name) for name in bodies)
    text = FILE.format(target=target, kernels=kernels, metadata=metadata)
    command = [CLANG, "-x", "assembler", "--target=amdgcn-amd-amdhsa", f"-mcpu={target}", "-mcode-object-version=5", "-", "-o", str(output)]
    subprocess.run(command, input=text, text=True, check=True)
    return output.read_bytes()


def compiled(source: str, target: str, output: Path, *flags: str) -> bytes:
    """A code object of HIP source that uses the macros above, and nothing of ROCm."""
    command = [CLANG, *DEVICE, "-nogpuinc", f"--offload-arch={target}", *flags, "-", "-o", str(output)]
    subprocess.run(command, input=PRELUDE + source, text=True, check=True)
    return output.read_bytes()


def compiled_with_headers(source: Path, target: str, output: Path) -> bytes:
    """A code object of a HIP file that includes HIP's headers and those of attn-spec."""
    headers = hip_headers()
    command = [CLANG, *DEVICE, f"--offload-arch={target}", "-isystem", str(headers), f"--rocm-path={headers.parent}"]
    command += ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", str(headers.parent / "lib" / "ockl.bc")]  # the thread number
    command += [f"-I{ROOT}/packages/attn-spec/src/attn_spec/include", str(source), "-o", str(output)]
    subprocess.run(command, check=True)
    return output.read_bytes()
