"""The device forms of exp, division and maximum against the contract's headers, on the GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import attn_spec
import torch


def test_device_forms_equal_the_headers(cuda: torch.device, nvcc: str, package: Path, tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability(cuda)
    program = tmp_path / "exhaustive"
    include = [f"-I{attn_spec.include_dir()}", f"-I{package / 'csrc'}"]
    build = [
        nvcc,
        "-std=c++17",
        "-O3",
        "--fmad=false",
        f"-arch=sm_{major}{minor}",
        *include,
        str(package / "tests" / "exhaustive.cu"),
        "-o",
        str(program),
    ]
    subprocess.run(build, check=True)
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
