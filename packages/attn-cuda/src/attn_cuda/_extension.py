"""The compiled module, or why it cannot be used: not built, built with flags or a tile that change bits, no device, or no code for it."""

from __future__ import annotations

import importlib
import re
from functools import cache
from types import ModuleType

import torch
from attn_spec._contract import contract

__all__ = ["architecture_reason", "build_reason", "device_reason", "extension", "flag_reason", "tile_reason", "unavailable"]

_BAD_FLAGS = re.compile(r"use_fast_math|ftz[= ]+(true|1)|prec-div[= ]+(false|0)")


@cache
def extension() -> ModuleType | str:
    """The module ``attn_cuda._cuda``, or the reason why there is none."""
    try:
        missing: str | None = importlib.import_module("attn_cuda._build").MISSING
    except ModuleNotFoundError:
        return "attn-cuda runs from a source tree that was not built; install it with pip"
    if missing is not None:
        return f"{missing}; install a CUDA toolkit and reinstall attn-cuda"
    try:
        return importlib.import_module("attn_cuda._cuda")
    except ImportError as error:
        return f"the compiled module of attn-cuda does not load: {error}"


def flag_reason(flags: str) -> str | None:
    """Why a build with these nvcc flags is refused, or None."""
    found = _BAD_FLAGS.search(flags)
    if found is None:
        return None
    return (
        f"attn-cuda was built with '{found.group()}', which changes the bits that the contract fixes; rebuild without it (flags: {flags})"
    )


def tile_reason(tile: int) -> str | None:
    """Why a build whose joint softmax has this tile is refused, or None."""
    needed = contract("ordered-v1").tile
    if tile == needed:
        return None
    return f"attn-cuda was built with softmax tile {tile} and contract ordered-v1 needs {needed}; rebuild without ATTN_CUDA_SOFTMAX_TILE"


@cache
def build_reason() -> str | None:
    """Why this build keeps no contract on any device, or None."""
    module = extension()
    if isinstance(module, str):
        return module
    return flag_reason(module.FLAGS) or tile_reason(module.SOFTMAX_TILE)


def architecture_reason(built: str, capability: int) -> str | None:
    """Why code for ``built`` ("80-real,90a-real,120-virtual") does not run on a device of ``capability`` (10 * major + minor), or None."""
    for name in built.split(","):
        match = re.fullmatch(r"(\d+)([af]?)(?:-(real|virtual))?", name)
        if match is None:
            continue
        number, suffix, kind = int(match.group(1)), match.group(2), match.group(3)
        if number == capability:
            return None
        if suffix == "" and kind != "virtual" and number // 10 == capability // 10 and number <= capability:
            return None
        if suffix == "" and kind != "real" and number <= capability:
            return None
    return f"attn-cuda holds code for {built} and the device has compute capability {capability // 10}.{capability % 10}; rebuild for it"


@cache
def device_reason(device: int) -> str | None:
    """Why the kernels cannot run on the device of this index, or None. Each GPU is probed once."""
    module = extension()
    if isinstance(module, str):
        return module
    try:
        reason = architecture_reason(module.ARCHITECTURES, module.capability(device))
        failed = 0 if reason is not None else module.probe(device)
    except RuntimeError as error:
        return f"attn-cuda cannot run on device {device}: {error}"
    if reason is not None:
        return reason
    if failed:
        names = [name for bit, name in enumerate(module.PROBE_NAMES.split(",")) if failed >> bit & 1]
        return f"this build of attn-cuda does not compute IEEE arithmetic on device {device}: {', '.join(names)}"
    return None


@torch.compiler.assume_constant_result
def unavailable(device: str) -> str | None:
    """Why the kernels cannot run on ``device`` here, or None."""
    reason = build_reason()
    if reason is not None:
        return reason
    if device != "cuda":
        return f"attn-cuda runs on NVIDIA GPUs, not on {device}"
    if torch.version.cuda is None:
        return f"this build of torch ({torch.__version__}) has no CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return device_reason(torch.cuda.current_device())
