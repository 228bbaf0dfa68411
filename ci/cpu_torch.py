"""Where the CPU build of torch comes from on a machine without a GPU, decided before anything is downloaded."""

from __future__ import annotations

import re
from collections.abc import Callable

DryRun = Callable[[tuple[str, ...]], tuple[bool, str]]
"""Resolve with the given extra arguments, install nothing; (whether it resolved, what the resolver printed)."""

SOURCES: dict[str, tuple[str, ...]] = {
    "the indexes and find-links as configured": (),
    "uv's --torch-backend cpu": ("--torch-backend", "cpu"),
}
REMEDY = """No CPU build of torch can be resolved, and this machine has no NVIDIA GPU, so nothing was downloaded.
{tried}
Remedy: give this machine access to PyTorch's index of CPU wheels, or put torch's CPU wheel into a folder and set UV_FIND_LINKS to it."""


class CudaTorchOnly(RuntimeError):
    """Every source resolves to a CUDA build of torch (gigabytes) or fails."""


def nvidia_packages(report: str) -> list[str]:
    """Names of the NVIDIA packages that a resolution report would install."""
    return sorted(set(re.findall(r"^\s*\+ ((?:nvidia|cuda)-[a-z0-9-]+)==", report, re.MULTILINE)))


def cpu_source(dry_run: DryRun) -> tuple[str, ...]:
    """Extra arguments under which torch resolves without NVIDIA packages. Raises CudaTorchOnly with each source's answer and the remedy."""
    tried = []
    for name, arguments in SOURCES.items():
        resolved, report = dry_run(arguments)
        found = nvidia_packages(report)
        if resolved and not found:
            return arguments
        answer = f"{len(found)} NVIDIA packages ({', '.join(found[:3])}, ...)" if resolved else report.strip().splitlines()[-1].strip()
        tried.append(f"- {name}: {answer}")
    raise CudaTorchOnly(REMEDY.format(tried="\n".join(tried)))
