"""What a result was computed with: versions, processor and devices. Nothing is imported to find out."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["environment", "nvidia_devices"]

PACKAGES = ("attn-spec", "attn-reference", "attn-cuda", "attn-triton", "attn-jax-rocm-sink", "numpy", "torch", "triton", "jax", "jaxlib")


def environment() -> dict[str, Any]:
    """Versions of the packages that matter, the processor, and the NVIDIA devices with driver and compute capability."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "nvidia": nvidia_devices(),
        "executable": Path(sys.executable).name,
    }


def nvidia_devices() -> list[dict[str, str]]:
    """NVIDIA devices that the driver lists; empty without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode != 0:
        return []
    fields = ("name", "driver", "compute_capability")
    return [
        dict(zip(fields, (part.strip() for part in line.split(",")), strict=False)) for line in answer.stdout.splitlines() if line.strip()
    ]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
