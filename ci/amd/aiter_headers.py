"""Check the types of the ck engine's calls against AITER's public headers: ``python ci/amd/aiter_headers.py CHECKOUT BUILD_FOLDER``.

clang-22 reads them as HIP host code, with the HIP headers in Triton's wheel; no AMD GPU, ROCm or build of CK is needed. Nothing of AITER is
kept. Source of the headers: github.com/ROCm/aiter, csrc/include/mha_fwd.h and mha_bwd.h.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import rocm_folder
from attn_spec import include_dir

CSRC = Path(__file__).resolve().parents[2] / "packages" / "attn-jax-rocm-sink" / "csrc"
FLAGS = ["-x", "hip", "--offload-host-only", "-nogpulib", "-nogpuinc", "-std=c++20", "-fsyntax-only", "-Wall"]
DEFINES = ["-D__HIP_PLATFORM_AMD__", "-DUSE_ROCM=1", "-DENABLE_CK=0"]
NATIVE = '#include "{csrc}/ck/arguments.h"\nstatic_assert(attn::ck::TakesSinks<aiter::mha_fwd_args>::value);\n'
WRONG = '#include "{csrc}/ck/arguments.h"\nvoid set(aiter::mha_fwd_args& to) {{ to.sink_pointer = nullptr; }}\n'


def check(checkout: Path, build: Path) -> str:
    """What was found, or RuntimeError with clang's text when the calls do not fit the headers."""
    headers = checkout / "csrc" / "include"
    for name in ("mha_fwd.h", "mha_bwd.h"):
        if not (headers / name).is_file():
            raise RuntimeError(f"{headers / name} does not exist")
    if "workspace_alloc" not in (headers / "mha_bwd.h").read_text():
        raise RuntimeError(f"the AITER in {checkout} takes no workspace from its caller: the ck engine refuses to build with it")
    rocm = rocm_folder.make(build / "rocm")
    include = ["-isystem", str(rocm / "include"), "-isystem", str(headers), "-I", str(include_dir())]

    def compile_one(source: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["clang++-22", *FLAGS, *DEFINES, *include, source], input=text, capture_output=True, text=True, check=False)

    done = compile_one(str(CSRC / "ck" / "engine.cc"))
    if done.returncode != 0:
        raise RuntimeError(f"the ck engine does not fit these headers:\n{done.stderr}")
    if compile_one("-", WRONG.format(csrc=CSRC)).returncode == 0:
        raise RuntimeError("a member that AITER does not have was accepted: this check shows nothing")
    native = compile_one("-", NATIVE.format(csrc=CSRC)).returncode == 0
    return f"mha_fwd and mha_bwd of {checkout} take the calls of the ck engine; sinks are {'native' if native else 'rescaled'}"


def main() -> int:
    checkout, build = (Path(argument).resolve() for argument in sys.argv[1:])
    build.mkdir(parents=True, exist_ok=True)
    try:
        print(check(checkout, build))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
