"""Preparation of arguments that every public function shares: autocast, defaults, integer arrays and checks of values that are free to
read."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attn_spec.torch._operation import watched

__all__ = [
    "autocast",
    "check_one_device",
    "float32",
    "int64",
    "lengths",
    "offsets_of",
    "refuse_forward_mode",
    "scale_of",
    "seed_of",
    "starts",
]


_CAST = (torch.float32, torch.bfloat16, torch.float16)


def check_one_device(op: str, arrays: dict[str, Tensor | None]) -> None:
    devices = {name: tensor.device for name, tensor in arrays.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(
            f"{op}: all tensors must be on one device; got {', '.join(f'{name} on {device}' for name, device in devices.items())}"
        )


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of autocast, where it is on. Those that no operator takes (float64, float8) stay, to be refused as ever."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    if not all(isinstance(tensor, Tensor) for tensor in tensors) or tensors[0].device.type == "meta":
        return tensors
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) if tensor.dtype in _CAST else tensor for tensor in tensors)


def refuse_forward_mode(op: str, tensors: tuple[Tensor | None, ...]) -> None:
    """The kernels have no forward-mode derivative; without this check a tangent would vanish in silence."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(f"{op}: forward-mode differentiation (jvp) is not supported; use attn_reference.attention_fp32")


def scale_of(scale: float | None, q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def float32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def int64(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.int64)


def starts(start: int | Tensor | None, q: Tensor) -> Tensor | None:
    if start is None:
        return None
    if isinstance(start, Tensor):
        return start.to(torch.int64)
    return torch.full((q.shape[0],), start, dtype=torch.int64, device=q.device)


def _readable(tensor: Tensor | None) -> bool:
    """Values are checked where reading them costs no device synchronisation; kernels clamp them elsewhere. Under torch.func a tensor may
    stand for many."""
    return tensor is not None and tensor.device.type == "cpu" and not watched()


def lengths(op: str, name: str, values: Tensor | None, limit: int) -> Tensor | None:
    if values is not None and _readable(values) and values.numel() and (int(values.min()) < 0 or int(values.max()) > limit):
        raise ValueError(f"{op}: {name} must lie in [0, {limit}]; got {values.tolist()}")
    return int64(values)


def offsets_of(op: str, side: str, offsets: Tensor, used: Tensor | None, total: int) -> tuple[Tensor, Tensor | None]:
    """``cu_seqlens_<side>`` and ``seqlens_<side>`` as int64. ValueError for values outside the ``total`` packed rows, where it is free to
    read them."""
    if _readable(offsets):
        sizes = torch.diff(offsets.to(torch.int64))
        if int(offsets[0]) < 0 or (sizes < 0).any() or int(offsets[-1]) > total:
            raise ValueError(f"{op}: cu_seqlens_{side} must not decrease and must lie in [0, {total}]; got {offsets.tolist()}")
        if used is not None and _readable(used) and ((used < 0) | (used > sizes)).any():
            raise ValueError(f"{op}: seqlens_{side} must lie between 0 and the segment sizes {sizes.tolist()}; got {used.tolist()}")
    return offsets.to(torch.int64), int64(used)


def seed_of(seed: int | Tensor | None, q: Tensor) -> Tensor:
    if seed is None:
        drawn = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
        return drawn.to(q.device)
    if isinstance(seed, Tensor):
        return seed.to(device=q.device, dtype=torch.int64).reshape(())
    signed = int(seed) - 2**64 if int(seed) >= 2**63 else int(seed)
    return torch.tensor(signed, dtype=torch.int64, device=q.device)
