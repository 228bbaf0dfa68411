"""What of ROCm a machine has, and what ``nox -s rocm`` does about it: run on the device, build only, say that nothing is there, or fail."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RUNNERS", "Machine", "Step", "absent_rows", "decide", "detect", "find_compiler", "has_runtime", "list_gpus"]

RUNTIME = "libamdhip64.so.7"
RUNNERS = ("attn_jax_rocm_sink:hip", "attn_triton:triton", "attn_reference:pytorch")
"""What a ROCm device runs, as backend:engine."""

Run = Callable[[list[str], Mapping[str, str]], str]
"""Standard output of a command in an environment; OSError or CalledProcessError where it fails."""


@dataclass(frozen=True)
class Machine:
    """``gpus``: AMD GPUs that the kernel driver lists and a process can open. ``compiler``: the ROCm folder of a HIP compiler for AMD."""

    gpus: int
    compiler: Path | None
    runtime: bool


@dataclass(frozen=True)
class Step:
    """``build`` and ``run`` say what to do; ``error`` why that is impossible; ``text`` is what was found."""

    build: bool
    run: bool
    text: str
    error: str | None = None


def list_gpus(nodes: Path = Path("/sys/class/kfd/kfd/topology/nodes"), device: Path = Path("/dev/kfd")) -> int:
    """Nodes with shader units; a CPU node has none. 0 without the device file, through which every process reaches them."""
    if not device.exists():
        return 0
    found = (re.search(r"^simd_count (\d+)$", path.read_text(), re.MULTILINE) for path in sorted(nodes.glob("*/properties")))
    return sum(count is not None and int(count[1]) > 0 for count in found)


def _run(command: list[str], environment: Mapping[str, str]) -> str:
    return subprocess.run(command, env=dict(environment), check=True, capture_output=True, text=True).stdout


def find_compiler(environment: Mapping[str, str], run: Run = _run) -> Path | None:
    """The ROCm folder whose compiler makes AMD code: ROCM_PATH, else /opt/rocm.

    A hipcc on PATH proves nothing: beside CUDA it becomes nvcc, which is why hipconfig is asked too.
    """
    rocm = Path(environment.get("ROCM_PATH") or "/opt/rocm")
    if not any((rocm / "bin" / name).is_file() for name in ("amdclang++", "hipcc")):
        return None
    try:
        platform = run([str(rocm / "bin" / "hipconfig"), "--platform"], {**environment, "HIP_PLATFORM": "amd"})
    except (OSError, subprocess.CalledProcessError):
        return None
    return rocm if platform.strip() == "amd" else None


def has_runtime(load: Callable[[str], object] = ctypes.CDLL) -> bool:
    """Whether the loader finds the HIP runtime of ROCm 7."""
    try:
        load(RUNTIME)
    except OSError:
        return False
    return True


def detect() -> Machine:
    """Ask this machine."""
    return Machine(list_gpus(), find_compiler(os.environ), has_runtime())


def decide(machine: Machine) -> Step:
    """Nothing of HIP: neither build nor run. A part of HIP without the rest that a build needs: an error. No GPU: build only."""
    parts = {
        f"{machine.gpus} AMD GPUs": machine.gpus > 0,
        f"a HIP compiler in {machine.compiler}": machine.compiler is not None,
        RUNTIME: machine.runtime,
    }
    found = [name for name, there in parts.items() if there]
    if not found:
        return Step(
            False, False, f"no HIP detected: no AMD GPU in /sys/class/kfd, no compiler for AMD in ROCM_PATH or /opt/rocm, no {RUNTIME}"
        )
    missing = [name for name, there in (("a HIP compiler", machine.compiler is not None), (RUNTIME, machine.runtime)) if not there]
    text = f"HIP detected: {', '.join(found)}"
    if missing:
        return Step(False, False, text, f"{text}; the hip engine cannot be built without {' and '.join(missing)}")
    return Step(True, machine.gpus > 0, text)


def absent_rows(reason: str) -> list[str]:
    """One line for each engine that a ROCm device would run."""
    return [f"{runner:24}  rocm  absent: {reason}" for runner in RUNNERS]
