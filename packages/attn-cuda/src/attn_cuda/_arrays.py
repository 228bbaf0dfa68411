"""Tensors as the kernels of products and attention take them: addresses, dtype codes and strides."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from attn_spec import UnsupportedProblem
from torch import Tensor

from attn_cuda._extension import build_reason, device_reason, extension

__all__ = ["Array", "address", "array", "dtype_code", "module_for", "place"]

Array = tuple[int, ...]
"""Address, dtype code and four element strides over [B, H, S, D]."""


def module_for(first: Tensor, *others: Tensor | None) -> ModuleType:
    """The compiled module, once all tensors are known to lie on one CUDA device that it has code for."""
    module, reason = extension(), build_reason()
    if reason is not None or isinstance(module, str):
        raise UnsupportedProblem("attn_cuda", [str(reason)])
    device = first.device
    for tensor in others:
        if tensor is not None and tensor.device != device:
            raise ValueError(f"attn_cuda: all tensors must be on one device; got {device} and {tensor.device}")
    if device.type != "cuda":
        raise UnsupportedProblem("attn_cuda", [f"device {device} (supported: cuda)"])
    reason = device_reason(device.index)
    if reason is not None:
        raise UnsupportedProblem("attn_cuda", [reason])
    return module


def dtype_code(module: ModuleType, dtype: torch.dtype) -> int:
    code = _codes(module).get(dtype)
    if code is None:
        raise TypeError(f"attn_cuda: dtype {dtype}; supported: float32, bfloat16, float16")
    return code


@cache
def _codes(module: ModuleType) -> dict[torch.dtype, int]:
    return {torch.float32: module.FLOAT32, torch.bfloat16: module.BFLOAT16, torch.float16: module.FLOAT16}


def place(tensor: Tensor) -> tuple[int, int]:
    """Device index and current stream of that device (torch.cuda.current_stream makes an object of it, which costs 2 us)."""
    index = tensor.device.index
    return index, torch._C._cuda_getCurrentRawStream(index)


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def array(module: ModuleType, tensor: Tensor) -> Array:
    """Of [B, H, S, D], or packed [total, H, D]; an axis of size 1 has stride 0, since torch leaves its stride open."""
    shape, strides = tensor.shape, tensor.stride()
    if 1 in shape:
        strides = tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
        if shape[-1] == 1:
            strides = (*strides[:-1], 1)
    if len(shape) == 3:
        strides = (0, strides[1], strides[0], strides[2])
    return tensor.data_ptr(), dtype_code(module, tensor.dtype), *strides
