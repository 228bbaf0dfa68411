"""Composable Kernel's attention out of the package that AITER's authors publish: unpacked, and its generated sources written.

Nothing of it is kept in this repository. Source of the package and of the options of its generator: https://pypi.org/project/amd-aiter,
aiter_meta/3rdparty/composable_kernel/example/ck_tile/01_fmha/generate.py in it.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

__all__ = ["HEAD_DIM", "PACKAGE", "Sources", "unpack"]

PACKAGE = "amd-aiter==0.1.7.post2.dev18"
"""Its kernels have no sinks, so the ck engine rescales. The version is fixed: names of generated kernels are part of the filters below."""

HEAD_DIM = 128
_WHEEL = "amd_aiter-0.1.7.post2.dev18-py3-none-any.whl"
_CK = Path("aiter_meta", "3rdparty", "composable_kernel")
_EXAMPLE = _CK / "example" / "ck_tile" / "01_fmha"


class Sources:
    """``ck`` is the folder of Composable Kernel, ``example`` that of its attention, ``generated`` the files to compile, by direction."""

    def __init__(self, folder: Path) -> None:
        self.ck = folder / _CK
        self.example = folder / _EXAMPLE
        self.generated: dict[str, list[Path]] = {"fwd": [], "bwd": []}

    def generate(self, direction: str, kernels: str, target: Path) -> None:
        """Write the kernels that the pattern names, and the function that chooses among them."""
        command = [sys.executable, "generate.py", "--api", direction, "--targets", "gfx9", "--receipt", "600", "--optdim"]
        subprocess.run([*command, str(HEAD_DIM), "--filter", kernels, "--output_dir", str(target)], cwd=self.example, check=True)
        self.generated[direction] = sorted(target.glob("*.cpp"))
        if len(self.generated[direction]) < 2:
            raise RuntimeError(f"{PACKAGE} has no {direction} kernel {kernels}")


def unpack(folder: Path) -> Sources:
    """Unpack the wheel in ``folder`` there, and write one forward and one deterministic backward, for bfloat16 and HEAD_DIM columns.

    Both are those with a mask, which may have no bound. Forward takes multiples of 128 keys.
    """
    wheel = folder / _WHEEL
    if not wheel.is_file():
        raise FileNotFoundError(f"{wheel} is not there: pip download --no-deps {PACKAGE}")
    place = folder / "package"
    sources = Sources(place)
    if not sources.example.is_dir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place, [name for name in archive.namelist() if name.startswith(str(_CK))])
    shape = f"*_d{HEAD_DIM}_bf16_*batch*"
    sources.generate("fwd", f"{shape}_qr_async_vr_psddv_nlogits_nbias_mask_lse_ndropout_nskip_nsquant_*", folder / "fwd")
    parts = ("*_ps", "*_ps_deterministic", "*_npad_nbias_ndbias_mask_ndropout_deterministic_*")
    sources.generate("bwd", "@".join(f"{shape}{part}" for part in parts), folder / "bwd")
    return sources
