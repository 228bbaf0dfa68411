"""numpy to torch and back, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from attn_spec._arrays import bfloat16
from attn_spec._validation import ArrayInfo

__all__ = ["dtype_name", "from_numpy", "info", "platform", "to_numpy"]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` to ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def platform(device: torch.device) -> str:
    """Device name in problems: "cpu", "cuda" or, for a ROCm build of torch, "rocm"."""
    if device.type == "cuda" and torch.version.hip is not None:
        return "rocm"
    return device.type


def info(op: str, name: str, tensor: torch.Tensor | None) -> ArrayInfo | None:
    """Shape, dtype and device of the argument ``name`` of ``op``, for validation."""
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor; got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(f"{op}: {name} must be a dense tensor; got layout {'nested' if tensor.is_nested else tensor.layout}")
    return ArrayInfo(tuple(tensor.shape), dtype_name(tensor.dtype), platform(tensor.device))


def from_numpy(array: np.ndarray, device: str | torch.device = "cpu") -> torch.Tensor:
    """A tensor with the bits of ``array`` (``attn_spec.bfloat16`` becomes torch.bfloat16)."""
    if array.dtype == bfloat16:
        bits = torch.from_numpy(np.ascontiguousarray(array)["bfloat16"].view(np.int16).copy())
        return bits.view(torch.bfloat16).to(device)
    return torch.from_numpy(np.array(array, copy=True, order="C")).to(device)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """An array with the bits of ``tensor``."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(np.uint16).view(bfloat16)
    return host.numpy()
