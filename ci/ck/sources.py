"""Composable Kernel's attention out of the package that AITER's authors publish: unpacked, and its generated sources written.

Nothing of it is kept in this repository. Source of the package and of the options of its generator: https://pypi.org/project/amd-aiter,
aiter_meta/3rdparty/composable_kernel/example/ck_tile/01_fmha/generate.py in it.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HEAD_DIM", "PACKAGE", "Sources", "unpack"]

_VERSION = "0.1.7.post2.dev18"
"""Its kernels have no sinks, so the ck engine rescales. It is fixed: names of generated kernels are part of the filters below."""

PACKAGE = f"amd-aiter=={_VERSION}"

HEAD_DIM = 128
_WHEEL = f"amd_aiter-{_VERSION}-py3-none-any.whl"
_CK = Path("aiter_meta", "3rdparty", "composable_kernel")
_EXAMPLE = Path("example", "ck_tile", "01_fmha")


@dataclass(frozen=True)
class Sources:
    """``ck`` is the folder of Composable Kernel, ``example`` that of its attention, ``generated`` the files to compile, by direction."""

    ck: Path
    example: Path
    generated: dict[str, list[Path]]


def unpack(folder: Path) -> Sources:
    """Unpack the wheel in ``folder`` there, and write one forward and one deterministic backward, for bfloat16 and HEAD_DIM columns.

    Both are those with a mask, which may have no bound. Forward takes multiples of 128 keys.
    """
    wheel = folder / _WHEEL
    if not wheel.is_file():
        raise FileNotFoundError(f"{wheel} is not there: pip download --no-deps {PACKAGE}")
    ck = folder / "package" / _CK
    example = ck / _EXAMPLE
    if not example.is_dir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "package", [name for name in archive.namelist() if name.startswith(str(_CK))])
    shape = f"*_d{HEAD_DIM}_bf16_*batch*"
    parts = ("*_ps", "*_ps_deterministic", "*_npad_nbias_ndbias_mask_ndropout_deterministic_*")
    kernels = {
        "fwd": f"{shape}_qr_async_vr_psddv_nlogits_nbias_mask_lse_ndropout_nskip_nsquant_*",
        "bwd": "@".join(f"{shape}{part}" for part in parts),
    }
    return Sources(ck, example, {direction: _generate(example, direction, of, folder / direction) for direction, of in kernels.items()})


def _generate(example: Path, direction: str, kernels: str, target: Path) -> list[Path]:
    """Write the kernels that the pattern names, and the function that chooses among them."""
    command = [sys.executable, "generate.py", "--api", direction, "--targets", "gfx9", "--receipt", "600", "--optdim", str(HEAD_DIM)]
    subprocess.run([*command, "--filter", kernels, "--output_dir", str(target)], cwd=example, check=True)
    written = sorted(target.glob("*.cpp"))
    if len(written) < 2:
        raise RuntimeError(f"{PACKAGE} has no {direction} kernel {kernels}")
    return written
